"""ScienceQA: school questions with and without an image.

LLaVA answers all 4,241 test questions and prints the accuracy over those with an image (SQA-I).

Source: Lu et al., "Learn to Explain" (arXiv:2209.09513); LLaVA llava/eval/eval_science_qa.py; the
sub-scores are as in the paper's tables. lmms-eval: lmms_eval/tasks/scienceqa/utils.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import Question, ScoredItem, Settings, group_by_table, pick, to_percent
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.files import Table
from coat_eval.letter_choices import ROTATION, LetterBenchmark, ask_llava, ask_vlmeval

LETTERS = "ABCDE"
SUBJECTS = {"natural science": "NAT", "social science": "SOC", "language science": "LAN"}
_YOUNGER = frozenset(f"grade{number}" for number in range(1, 7))
_STATED = re.compile("The answer is ([A-Z]).")
_FULL_HUB = 4241
"""Rows of the Hub's test file with all questions."""


class ScienceQa(LetterBenchmark):
    """Accuracy over questions with an image and over all; by subject, context and grade."""

    name = "scienceqa"
    source = "haotian-liu/LLaVA llava/eval/eval_science_qa.py @32cebc38"
    headline = ("image", "overall")
    profiles = (*LetterBenchmark.profiles, "lmms")
    constants = tuple(LETTERS)
    sizes: ClassVar[Mapping[str, int]] = {
        "test": 4241,
        "test with image": 2017,
        "val with image": 2097,
    }
    variants: ClassVar[Mapping[str, str]] = {"vlmeval": "VLMEvalKit's prompt"}
    layouts: ClassVar[Layouts] = {
        "test": (
            ("problems.json", "pid_splits.json"),
            ("ScienceQA_TEST.tsv",),
            ("test-*.parquet",),
            ("*.parquet",),
        ),
        "val": (("ScienceQA_VAL.tsv",), ("validation-*.parquet",)),
    }

    def is_reference(self, table: Table) -> bool:
        """problems.json, pid_splits.json, VLMEvalKit's table (skills) or lmms-lab/ScienceQA."""
        if _is_splits(table) or (table.has("question", "choices", "answer", "hint")):
            return True
        last = str(table.rows[-1].get("index")) if table.has("index", "answer", "category") else ""
        skill = str(table.rows[0].get("category")) if table.rows else ""
        return last.isdecimal() and int(last) < ROTATION and skill[:1].isupper()

    def pairs(self, folder: DataFolder) -> Iterator[tuple[Question, Row]]:
        """Yield the questions; from problems.json only the split test."""
        listed = [row for table in folder.tables if _is_splits(table) for row in table.rows]
        test = {str(one) for row in listed if row["question_id"] == "test" for one in row["value"]}
        tables = [table for table in folder.tables if not _is_splits(table)]
        for one, row in super().pairs(DataFolder(folder.path, tables)):
            yield replace(one, counted=one.question_id in test) if test else one, row

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row of any of the files; Parquet rows all have an image."""
        if "choices" not in row or not isinstance(row["choices"], list):
            found = super().question(row, table, where)
            return replace(found, details={**found.details, "kind": "image"})
        if len(table.rows) == _FULL_HUB and "question_id" not in row:
            problem = (
                "is one of 4,241 questions of which some have an image, which is not read here"
            )
            remedy = "give the test file of ScienceQA-IMG, or problems.json"
            raise DataError(where, problem, remedy)
        with_image = bool(row.get("image", "question_id" not in row))
        values = {**row, "index": row.get("question_id", row["index"])}
        found = super().question(values, table, where)
        hint = found.details["hint"]
        contexts = [name for name, own in (("text", hint), ("image", with_image)) if own]
        grade = str(row.get("grade") or "")
        tables = {
            "subject": SUBJECTS.get(str(row.get("subject")), ""),
            "grade": grade and ("G1-6" if grade in _YOUNGER else "G7-12"),
            "context": " and ".join(contexts) or "none",
        }
        return replace(
            found,
            answer=LETTERS[pick(row, ("answer",), where)],
            tables={name: value for name, value in tables.items() if value},
            details={**found.details, "kind": "image" if with_image else "text"},
            counted=row.get("split") in (None, "test"),
            cluster="",
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return LLaVA's prompt, which is also lmms-eval's; vlmeval: VLMEvalKit's."""
        if variant == "vlmeval":
            return ask_vlmeval(question)
        hint = question.details["hint"]
        details = {**question.details, "hint": hint and f"Context: {hint}"}
        return ask_llava(replace(question, details=details))

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image if there is one; of problems.json ``images/test/PID/image.png``."""
        if "choices" not in row.values or row.in_parquet:
            return super().media(question, row)
        name = row.values.get("image")
        folders = ("images/test", "test", "images", ".")
        return (row.folder.file(f"{question.question_id}/{name}", folders),) if name else ()

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the letter of LLaVA's rule on the raw text, or None."""
        if settings.profile == "lmms":
            text = text.strip()
            return text[0] if text[:1].isupper() and text[1:2] == "." else text.upper() or None
        if settings.profile != "official":
            return super().extract(text, question, settings)
        if text and text in tuple(LETTERS):
            return text
        if text[:1] in tuple(LETTERS) and text[1:3] == ". ":
            return text[0]
        stated = _STATED.findall(text)
        return stated[0] if len(stated) == 1 else None

    def counts(self, metric: str, item: Mapping[str, Any]) -> bool:
        """Select the questions with an image."""
        return metric == "overall" or item["kind"] == metric

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Add ``image`` (SQA-I) and ``modality.{TXT,IMG,NO}``; TXT and IMG overlap."""
        metrics = super().aggregate(scored, settings)
        shown = [one for one in scored if one.question.details["kind"] == "image"]
        parts = {"image": shown}
        if any("context" in one.question.tables for one in scored):
            parts["modality.TXT"] = [one for one in scored if one.question.details["hint"]]
            parts["modality.IMG"] = shown
            parts["modality.NO"] = group_by_table(scored).get("context.none", [])
        for name, part in parts.items():
            if part:
                metrics[name] = to_percent([one.score for one in part])
        return metrics


def _is_splits(table: Table) -> bool:
    """Return whether a file lists problem ids by split."""
    return (
        table.form == "mapping" and table.has("value") and isinstance(table.rows[0]["value"], list)
    )
