"""MM-Vet and MM-Vet v2: open questions, answered in free text and graded from 0 to 1 by GPT-4.

Saved grades (``MODEL_gpt-4-grade-Nruns.json``) are aggregated as the official script does it; every
answer without a grade needs a judge.

Source: Yu et al., "MM-Vet: Evaluating Large Multimodal Models for Integrated Capabilities";
yuweihao/MM-Vet mm-vet_evaluator.py.
"""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import (
    Benchmark,
    Prediction,
    Question,
    ScoredItem,
    Settings,
    UnusableVerdictError,
    pick,
    to_table_percents,
)
from coat_eval.data_folder import Layouts, MediaFile, Row
from coat_eval.files import PlacedRow, Table, Tables

_REASONING = (
    "First please perform reasoning, and think step by step to provide best answer to the "
    "following question: \n\n"
)
"""Beginning of lmms-eval's prompts."""
_IMAGE = re.compile(r"<IMG>\s*<?(image_\d+|[^<>\s]+\.(?:jpe?g|png))>?\s*(?:<IMG>)?")
"""An image in a question of MM-Vet v2: its file, on the Hub its column."""


class MmVet(Benchmark):
    """Mean grade over all questions, the mean and the standard deviation over runs of the judge."""

    name = "mmvet"
    source = "yuweihao/MM-Vet mm-vet_evaluator.py @7d717c2"
    headline = ("total", "std")
    sizes: ClassVar[Mapping[str, int]] = {"all": 218}
    text_fields = ("prediction", "text", "value")
    carries_answers = True
    judged = True
    layouts: ClassVar[Layouts] = {"test": (("mm-vet.json",), ("test-*.parquet",), ("*.parquet",))}
    variants: ClassVar[Mapping[str, str]] = {"lmms": "lmms-eval's, which asks for reasoning first"}

    def is_reference(self, table: Table) -> bool:
        """mm-vet.json, or rows of lmms-lab/MMVet; grades carry the list of questions."""
        return table.has("question", "answer", "capability") or _has_grades(table)

    def is_predictions(self, table: Table) -> bool:
        """The official answers by id, the official grades, or rows by id."""
        return _has_grades(table) or super().is_predictions(table)

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; a question may need several capabilities."""
        named = row.get("capability") or ()
        parts = named.split(",") if isinstance(named, str) else named
        return Question(
            question_id=str(pick(row, self.id_fields, where)),
            answer=str(row.get("answer") or ""),
            labels=tuple(f"capability.{part.strip()}" for part in dict.fromkeys(parts)),
            text=str(row.get("question") or ""),
            cluster=str(row.get("imagename") or row.get("image_source") or ""),
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return only the question, as LLaVA and VLMEvalKit ask it, or lmms-eval's prompt."""
        return f"{_REASONING if variant else ''}{question.text}"

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image, in a folder or in Parquet."""
        return (row.image(str(row.values.get("imagename")), ("images", ".")),)

    def all_predictions(self, tables: Tables, questions: Sequence[Question]) -> list[Prediction]:
        """Return the answers; the judge's words if only grades are given."""
        answers = [table for table in tables if not _has_grades(table)]
        return super().all_predictions(answers or tables, questions)

    def prediction_rows(self, table: Table, questions: Sequence[Question]) -> Iterator[PlacedRow]:
        """Yield rows; of the official grades with what the judge wrote as text."""
        for row, where in super().prediction_rows(table, questions):
            if _has_grades(table):
                content = ", ".join(map(str, row.get("content") or row["score"]))
                row = {**row, "prediction": content}
            yield row, where

    def saved_verdicts(self, tables: Tables) -> dict[tuple[str, str], Any]:
        """Return the saved grades, one per run of the judge."""
        found: dict[tuple[str, str], Any] = {}
        runs = 0
        for table in filter(_has_grades, tables):
            for index, row in enumerate(table.rows):
                key, grades = ("", str(row["question_id"])), row.get("score")
                count = len(grades) if isinstance(grades, list) and _are_grades(grades) else 0
                runs = runs or count
                if not count or count != runs or key in found:
                    problem = "repeated" if key in found else f"{grades!r}"
                    remedy = f"give one grade from 0 to 1 for each of {runs or 1} runs"
                    raise DataError(table.where(index), f"the grades are {problem}", remedy)
                found[key] = grades
        return found

    def extract(self, text: str, question: Question, settings: Settings) -> None:
        """Return None: no rule grades an answer."""

    def needs_judge(
        self, extracted: Any, text: str, question: Question, settings: Settings
    ) -> bool:
        """Every answer needs a judge, also an empty one."""
        return True

    def ask_judge(self, question: Question, text: str) -> str:
        """Ask for a grade from 0.0 to 1.0 in steps of 0.1."""
        return (
            "Grade a model's answer to a question about an image against the reference from 0.0 "
            "(entirely wrong) to 1.0 (entirely right) in steps of 0.1. Where the reference has "
            "<AND>, the answer must contain all parts and gets a share for some; where it has "
            "<OR>, one of the parts is enough. Reply with the number alone.\n\n"
            f"Question: {question.text}\nReference: {question.answer}\nAnswer: {text}\n"
            "Grade:"
        )

    def read_verdict(self, verdict: Any, question: Question) -> list[float]:
        """Return the grades of all runs; a judge's text must begin with a number from 0 to 1."""
        if isinstance(verdict, str):
            try:
                verdict = [float(verdict.split()[0])]
            except (ValueError, IndexError):
                verdict = None
        if not _are_grades(verdict):
            raise UnusableVerdictError(f"{verdict!r} is not a grade from 0 to 1")
        return verdict

    def score(self, extracted: list[float], question: Question, settings: Settings) -> float:
        """Return the mean grade over the runs."""
        return statistics.fmean(extracted)

    def counts(self, metric: str, item: Mapping[str, Any]) -> bool:
        """The standard deviation is not a mean."""
        return metric == "total"

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute ``total`` and ``std`` over the runs, ``run.<number>``, ``capability.<name>``."""
        graded = {len(one.extracted): one.question.where for one in scored if one.extracted}
        if len(graded) > 1:
            numbers = " and ".join(map(str, sorted(graded)))
            problem = f"the questions have grades of {numbers} runs"
            raise DataError(graded[min(graded)], problem, "complete the grades, or drop --judge")
        runs = max(graded, default=0)
        totals = [
            100 * math.fsum(one.extracted[run] for one in scored if one.extracted) / len(scored)
            for run in range(runs)
        ]
        return {
            "total": statistics.fmean(totals) if totals else 0.0,
            "std": statistics.pstdev(totals) if totals else 0.0,
            **{f"run.{run}": total for run, total in enumerate(totals, start=1)},
            **dict(sorted(to_table_percents(scored).items())),
        }


class MmVetV2(MmVet):
    """MM-Vet's metrics over 517 questions with sequences of images and texts (arXiv:2408.00765)."""

    name = "mmvetv2"
    source = "yuweihao/MM-Vet v2/mm-vet-v2_evaluator.py, v2/inference/gpt4.py @dc73d64"
    rule_only = True
    sizes: ClassVar[Mapping[str, int]] = {"all": 517}
    id_fields = ("question_id", "id")
    layouts: ClassVar[Layouts] = {"test": (("mm-vet-v2.json",), ("test-*.parquet",))}
    variants: ClassVar[Mapping[str, str]] = {}

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; ``<image>`` is the place of an image in the text."""
        question = super().question(row, table, where)
        pieces = [piece.strip() for piece in _IMAGE.split(question.text)]
        details = {"texts": pieces[::2], "images": pieces[1::2]}
        text, cluster = "<image>".join(pieces[::2]), " ".join(pieces[1::2])
        return replace(question, text=text, cluster=cluster, details=details)

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the images in their order."""
        return [row.image(i, ("images", "."), column=i) for i in question.details["images"]]


def _has_grades(table: Table) -> bool:
    return table.form == "mapping" and table.has("score", "model")


def _are_grades(grades: Any) -> bool:
    numbers = isinstance(grades, list) and all(type(one) in (int, float) for one in grades)
    return numbers and bool(grades) and all(0 <= one <= 1 for one in grades)
