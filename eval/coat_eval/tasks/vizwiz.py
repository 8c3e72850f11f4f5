"""VizWiz-VQA: questions of blind people; many have no answer in the picture.

Source: Gurari et al., "VizWiz Grand Challenge"; vqaEval.py of the VizWiz API, which compares the
normalized prediction with the raw answers of the annotators, and whose leave-one-out leaves
nothing out; LLaVA scripts/convert_vizwiz_for_submission.py, which prepares the predictions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from coat_eval import vqa_text
from coat_eval.benchmark import (
    SHORT_ANSWER,
    UNANSWERABLE,
    Benchmark,
    Prediction,
    Question,
    ScoredItem,
    Settings,
    pick,
)
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.files import Table, Tables
from coat_eval.tasks.vqav2 import clean_answer

ANSWER_TYPES = ("unanswerable", "other", "yes/no", "number")
_TEXTS = frozenset({"prediction", "prompt"})
_SUFFIX = re.compile(r"\.(?:jpe?g|png)$", re.IGNORECASE)


class VizWiz(Benchmark):
    """min(matches / 3, 1) overall and by type of answer, and the rate of "unanswerable"."""

    name = "vizwiz"
    source = (
        "VizWiz API vqaEval.py (copied in atharva-naik/MMML-TermProject-VizWiz-VQA-Challenge "
        "@06e4901); LLaVA scripts/convert_vizwiz_for_submission.py @c121f04"
    )
    headline = ("overall", *(f"answer_type.{kind}" for kind in ANSWER_TYPES), "unanswerable_rate")
    profiles = ("official", "lmms")
    sizes: ClassVar[Mapping[str, int]] = {"val": 4319, "test": 8000}
    prompt_end = f"{UNANSWERABLE}\n{SHORT_ANSWER}"
    id_fields = ("question_id", "image")
    text_fields = ("prediction", "text", "answer")
    layouts: ClassVar[Layouts] = {
        "val": (("val.json",), ("val-*.parquet",)),
        "test": (("test.json",), ("test-*.parquet",)),
    }

    def is_reference(self, table: Table) -> bool:
        """The official list, LLaVA's question file, or rows of lmms-lab/VizWiz-VQA."""
        row = table.rows[0] if table.rows else {}
        if _TEXTS & set(row):
            return False
        named = any("VizWiz_" in str(row.get(name)) for name in ("image", "question_id"))
        asked = table.has("question") or table.has("text")
        return (named and (asked or table.has("answers"))) or table.has("image", "answers")

    def is_predictions(self, table: Table) -> bool:
        """Return whether rows have an id or, as in submissions, an image."""
        return super().is_predictions(table) and not table.has("answers")

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Return one question per image; LLaVA's question file adds the ids of its answers."""
        images: dict[str, Question] = {}
        repeated: list[Question] = []
        tables = sorted(references, key=lambda table: table.has("text"))
        for question, row in self.pairs(DataFolder(Path(), tables)):
            known = images.setdefault(question.question_id, question)
            if "text" in row.values:
                details = {**known.details, **question.details}
                images[question.question_id] = replace(known, details=details)
            elif known is not question:
                repeated.append(question)
        return [*images.values(), *repeated]

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; the id is the name of the image, with or without suffix."""
        image = row.get("image") if isinstance(row.get("image"), str) else None
        name = image or str(pick(row, ("question_id", "image"), where))
        answers = [
            pick(one, ("answer",), where) if isinstance(one, dict) else one
            for one in row.get("answers") or ()
        ]
        kind = row.get("answer_type") or row.get("category")
        return Question(
            question_id=_strip_suffix(name),
            answer=answers or None,
            tables={"answer_type": kind} if kind in ANSWER_TYPES else {},
            details={
                "image": name if _SUFFIX.search(name) else f"{name}.jpg",
                **({"alias": str(row["question_id"])} if "question_id" in row else {}),
            },
            text=str(row.get("question") or ""),
            cluster=_strip_suffix(name),
            where=where,
        )

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image, in a folder or in Parquet."""
        name = question.details["image"]
        split = name.split("_")[1] if name.count("_") == 2 else "val"
        return (row.image(name, (split, "images", f"images/{split}", ".")),)

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """Return predictions by image, with or without suffix, or by LLaVA's question ids."""
        names = {one.question_id: one.question_id for one in questions}
        names |= {
            one.details["alias"]: one.question_id for one in questions if "alias" in one.details
        }
        predictions = super().predictions(table, questions)
        for index, one in enumerate(predictions):
            stem = _strip_suffix(one.question_id)
            # LLaVA's ids are unknown without its question file; then use the image.
            image = _strip_suffix(str(table.rows[index].get("image")))
            known = names.get(one.question_id) or names.get(stem) or names.get(image)
            predictions[index] = replace(one, question_id=known or stem)
        return predictions

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Apply EvalAIAnswerProcessor (not with ``raw``), then the API's normalization."""
        if settings.profile == "lmms":
            return vqa_text.process_answer(text)
        if not settings.raw:
            text = vqa_text.process_answer(text)
        return vqa_text.normalize_vizwiz(text)

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return min(matches / 3, 1) with raw answers; lmms: leave-one-out, processed answers."""
        if settings.profile == "lmms":
            answers = [vqa_text.process_answer(answer) for answer in question.answer]
            return vqa_text.score_leave_one_out(extracted, answers)
        return vqa_text.score_all_ten(extracted, question.answer)

    def rate_item(self, metric: str, item: Mapping[str, Any], profile: str) -> tuple[float, float]:
        """Return the score, or whether the answer is "unanswerable"."""
        if metric != "unanswerable_rate":
            return super().rate_item(metric, item, profile)
        return float(item["extracted"] == "unanswerable"), 1.0

    def submission(self, scored: Sequence[ScoredItem], settings: Settings) -> list[dict[str, Any]]:
        """Return EvalAI's list of {image, answer}."""
        return [
            {"image": one.question.details["image"], "answer": clean_answer(one.text, settings)}
            for one in scored
        ]


def _strip_suffix(name: str) -> str:
    return _SUFFIX.sub("", name)
