"""MME: two yes/no questions about each image, in ten tasks of perception and four of cognition.

Source: Fu et al., "MME: A Comprehensive Evaluation Benchmark for Multimodal Large Language Models";
its eval_tool/calculation.py. A task's score is 100 times the accuracy plus 100 times accuracy+, the
share of images with both questions right, so the sums are at most 2000 and 800.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import (
    SHORT_ANSWER,
    Benchmark,
    Question,
    ScoredItem,
    Settings,
    get_table,
    group_by_table,
    pick,
    to_percent,
)
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.extract import extract_yes_no_word
from coat_eval.files import PlacedRow, Table, Tables
from coat_eval.uncertainty import Term

PARTS = {
    "perception": (
        "existence", "count", "position", "color", "posters",
        "celebrity", "scene", "landmark", "artwork", "OCR",
    ),
    "cognition": (
        "commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning",
    ),
}  # fmt: skip
"""Tasks by part; VLMEvalKit calls the second part reasoning."""
_PART = {task: part for part, tasks in PARTS.items() for task in tasks}
_INSTRUCTION = " Please answer yes or no."
"""End of MME's own questions, which LLaVA and lmms-eval replace."""


class Mme(Benchmark):
    """Perception and cognition as sums over their tasks; score, accuracy, accuracy+ per task."""

    name = "mme"
    source = "MME eval_tool/calculation.py (copy: zjunlp/Deco @a3ccc15)"
    headline = ("perception", "cognition")
    profiles = ("official", "lmms", "vlmeval", "vlmeval@c03bc048")
    sizes: ClassVar[Mapping[str, int]] = {"all": 2374}
    unit = "pairs of questions"
    averages: ClassVar[Mapping[str, str]] = dict.fromkeys(PARTS, "task")
    constants = ("yes", "no")
    text_fields = (*Benchmark.text_fields, "column_4")
    carries_answers = True
    result_files = "*.txt"
    layouts: ClassVar[Layouts] = {"test": (("test-*.parquet",), ("*.parquet",))}
    variants: ClassVar[Mapping[str, str]] = {
        "vlmeval": "MME's own questions unchanged, as VLMEvalKit @d21c5e9 asks them"
    }

    def is_reference(self, table: Table) -> bool:
        """Official results of one task, rows of lmms-lab/MME, or VLMEvalKit's table."""
        if table.has("column_4"):
            return table.path.name.split(".")[0] in _PART
        named = table.has("question_id") or table.has("image_path")
        return (
            named
            and table.has("category", "question", "answer")
            and table.rows[0]["category"] in _PART
        )

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Return the questions, two per image."""
        folder = DataFolder(Path(), references or predictions)
        questions = [one for one, _ in self.pairs(folder)]
        seen = Counter(one.question_id for one in questions)
        for one in questions:
            if seen[one.question_id] != 2:
                raise DataError(
                    one.where,
                    f"{one.question_id} has {seen[one.question_id]} questions; MME asks two about "
                    "each image",
                    "give every task's file once and unchanged",
                )
        return questions

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; the id, which both questions share, is task and image."""
        if table.has("column_4"):
            task, image = table.path.name.split(".")[0], row["column_1"]
            text, answer = row["column_2"], row["column_3"]
        else:
            task, text, answer = (str(row[key]) for key in ("category", "question", "answer"))
            image = str(pick(row, ("question_id", "image_path"), where)).rpartition("/")[2]
        answer = answer.strip().lower().rstrip(".")
        if task not in _PART or answer not in self.constants:
            problem = f"task {task!r} with the answer {answer!r}"
            raise DataError(where, problem, f"answers are yes or no, tasks {', '.join(_PART)}")
        question_id = f"{task}/{image}"
        return Question(
            question_id=question_id,
            answer=answer,
            tables={"part": _PART[task], "task": task},
            text=text,
            cluster=question_id,
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return LLaVA's prompt (llava_mme.jsonl), or MME's own for the variant ``vlmeval``."""
        if variant == "vlmeval":
            return question.text
        return f"{question.text.strip().replace(_INSTRUCTION, '')}\n{SHORT_ANSWER}"

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image, in a folder or in a table."""
        return (row.image(str(pick(row.values, ("question_id",), row.where)), ("images", ".")),)

    def prediction_rows(self, table: Table, questions: Sequence[Question]) -> Iterator[PlacedRow]:
        """Yield rows; official results have the columns image, question, gold and prediction."""
        task = table.path.name.split(".")[0]
        for row, where in super().prediction_rows(table, questions):
            if table.has("column_4"):
                question_id = f"{task}/{row['column_1']}"
                row = {**row, "question_id": question_id, "prompt": row["column_2"]}
            yield row, where

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return ``yes``, ``no`` or None; official: the first in the first four characters."""
        if settings.profile.startswith("vlmeval"):
            return extract_yes_no_word(text)
        text = text.lower()
        if settings.profile == "lmms":
            text = text.strip().replace(".", "")
            if text in ("y", "n"):
                return "yes" if text == "y" else "no"
        return next((word for word in ("yes", "no") if word in text[:4]), None)

    def terms(self, metric: str, items: Sequence[Mapping[str, Any]], profile: str) -> list[Term]:
        """Add to each item's score whether both of its image are right."""
        wrong = {item["unit"] for item in items if item["score"] < 1}
        return [
            replace(one, numerator=(one.numerator + (one.unit not in wrong)) / 2)
            for one in super().terms(metric, items, profile)
        ]

    def counts(self, metric: str, item: Mapping[str, Any]) -> bool:
        """Select perception or cognition."""
        return get_table(item, "part") == metric

    def get_maximum(self, metric: str, terms: int) -> float:
        """Return 200 for each task."""
        return 200.0 * len(PARTS[metric])

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute each task's figures, and the two sums if no task is missing."""
        tables = group_by_table(scored)
        metrics: dict[str, float] = {}
        for task in (task for task in _PART if f"task.{task}" in tables):
            rows = tables[f"task.{task}"]
            images: dict[str, list[float]] = {}
            for one in rows:
                images.setdefault(one.question.question_id, []).append(one.score)
            accuracy = to_percent([one.score for one in rows])
            plus = to_percent([float(min(scores) == 1) for scores in images.values()])
            metrics |= {f"score.{task}": accuracy + plus, f"acc.{task}": accuracy}
            metrics[f"acc_plus.{task}"] = plus
        sums = {
            part: sum(metrics[f"score.{task}"] for task in tasks)
            for part, tasks in PARTS.items()
            if all(f"score.{task}" in metrics for task in tasks)
        }
        return sums | metrics
