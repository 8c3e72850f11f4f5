"""SEED-Bench (v1): four-way choices about images (types 1 to 9) and videos (10 to 12).

The model gets the middle frame of each video.

Source: Li et al., "SEED-Bench: Benchmarking Multimodal LLMs with Generative Comprehension";
AILab-CVC/SEED-Bench eval.py (likelihood ranking) and LLaVA scripts/convert_seed_for_submission.py.
Papers print the accuracy over questions; the leaderboard's task average is ``macro``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import (
    LETTER_ANSWER,
    Benchmark,
    Prediction,
    Question,
    ScoredItem,
    Settings,
    pick,
    to_table_percents,
)
from coat_eval.data_folder import Layouts, MediaFile, Row, VideoFrame
from coat_eval.extract import LETTER_RULES, select_lowest_loss
from coat_eval.files import Table

TYPES = (
    *("Scene Understanding", "Instance Identity", "Instance Attributes", "Instance Location"),
    *("Instances Counting", "Spatial Relation", "Instance Interaction", "Visual Reasoning"),
    *("Text Understanding", "Action Recognition", "Action Prediction", "Procedure Understanding"),
)
"""Names of ``question_type_id`` from 1 on (SEED-Bench DATASET.md), for files without names."""
LETTERS = "ABCD"


class SeedBench(Benchmark):
    """Accuracy over image, video and all questions, per type, and the mean over types."""

    name = "seedbench"
    source = (
        "AILab-CVC/SEED-Bench eval.py @991e849; "
        "LLaVA scripts/convert_seed_for_submission.py @c121f04"
    )
    headline = ("image", "video", "all", "macro")
    profiles = ("official", "lmms", *LETTER_RULES)
    sizes: ClassVar[Mapping[str, int]] = {"all": 19242, "image": 14233, "video": 5009}
    unit = "images or videos"
    averages: ClassVar[Mapping[str, str]] = {"macro": "type"}
    constants = tuple(LETTERS)
    text_fields = ("prediction", "text", "losses")
    shares_repeated = True
    variants: ClassVar[Mapping[str, str]] = {
        "likelihood": "the choice whose text has the lowest mean loss per token"
    }
    layouts: ClassVar[Layouts] = {
        "test": (("SEED-Bench.json",), ("test-*.parquet",), ("*.parquet",))
    }

    def is_reference(self, table: Table) -> bool:
        """SEED-Bench.json, or rows of lmms-lab/SEED-Bench."""
        return table.has("question_id", "question_type_id")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; the file may contain the names of types, and an id may repeat (49914)."""
        types = table.head.get("question_type") or {}
        number = int(pick(row, ("question_type_id",), where))
        names = [str(name) for name, own in types.items() if int(own) == number]
        known = TYPES[number - 1] if 0 < number <= len(TYPES) else f"type {number}"
        choices = {letter: str(row.get(f"choice_{letter.lower()}") or letter) for letter in LETTERS}
        return Question(
            question_id=str(pick(row, ("question_id",), where)),
            answer=row.get("answer") or None,
            tables={"type": (names[-1] if names else "") or known},
            details={
                "kind": row.get("data_type") or ("image" if number <= 9 else "video"),
                "choices": choices,
            },
            text=str(row.get("question") or ""),
            cluster=str(row.get("data_id") or ""),
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return LLaVA's prompt for a letter; the question if its choices are ranked."""
        lines = [f"{letter}. {text}" for letter, text in question.details["choices"].items()]
        ranked = variant == "likelihood"
        return question.text if ranked else "\n".join((question.text, *lines, LETTER_ANSWER))

    def ranked_choices(self, question: Question, variant: str) -> Sequence[str]:
        """Return the choices of ``likelihood`` (loss: SEED-Bench-2/model/llava_v2_interface.py)."""
        return tuple(question.details["choices"].values()) if variant == "likelihood" else ()

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image, or the middle frame of the video or of its part."""
        is_video = row.values.get("data_type") == "video"
        name = question.cluster
        if row.in_parquet or not is_video:
            # The names of CC3M's images have no suffix.
            suffixes, pick_of = ("", ".jpg", ".png"), "middle" if is_video else "first"
            return (row.image(name, ("SEED-Bench-image", "images", "."), suffixes, pick=pick_of),)
        # LLaVA's extract_video_frames.py writes one image per question.
        suffixes = (".png", ".jpg")
        frame = row.folder.file(question.question_id, ("SEED-Bench-video-image",), suffixes)
        if Path(frame.path).is_file():
            return (frame,)
        suffixes = ("", ".mp4", ".webm", ".avi")
        video = row.folder.file(name, ("SEED-Bench-video", "videos", "."), suffixes)
        start, end = row.values.get("segment") or (None, None)
        return (VideoFrame(video.path, start=start and float(start), end=end and float(end)),)

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """Return the predictions; four ``losses`` become the letter of the lowest one."""
        predictions = super().predictions(table, questions)
        for index, one in enumerate(predictions):
            if isinstance(losses := one.text, list):
                numbers = all(type(loss) in (int, float) for loss in losses)
                if len(losses) != len(LETTERS) or not numbers:
                    problem = f"losses are {losses!r}"
                    raise DataError(one.where, problem, "give one number per choice, A to D")
                if not any(math.isnan(loss) for loss in losses):  # else it remains a list, no text
                    predictions[index] = replace(one, text=select_lowest_loss(losses))
        return predictions

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the stripped text (``raw``: the text itself), which must equal the letter."""
        if settings.profile == "lmms":
            return text.strip()[:1].upper()
        if rule := LETTER_RULES.get(settings.profile):
            return rule(text, question.details["choices"])
        return text if settings.raw else text.strip()

    def is_parsed(self, extracted: str | None, text: str) -> bool:
        """Return whether one of the four letters was extracted."""
        return extracted in tuple(LETTERS)

    def counts(self, metric: str, item: Mapping[str, Any]) -> bool:
        """Select images or videos."""
        return metric in ("all", "macro", item["kind"])

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute ``image``, ``video``, ``all``, ``macro`` over types (also per kind), ``type``."""
        metrics = self.compute_headline(scored, settings)
        for kind in ("image", "video"):
            part = [one for one in scored if one.question.details["kind"] == kind]
            if part:
                metrics[f"macro_{kind}"] = self.compute_headline(part, settings)["macro"]
        return metrics | to_table_percents(scored)
