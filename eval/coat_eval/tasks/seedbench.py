"""SEED-Bench (v1): four-way choices about images (types 1 to 9) and videos (10 to 12).

A video is shown as its middle frame.

Source: Li et al., "SEED-Bench: Benchmarking Multimodal LLMs with Generative Comprehension";
AILab-CVC/SEED-Bench eval.py (likelihood ranking) and LLaVA scripts/convert_seed_for_submission.py
(the generated letter must equal the answer). Papers print the accuracy over questions; the
leaderboard's task average is ``macro``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import (
    LETTER_ANSWER,
    Asking,
    Benchmark,
    Choices,
    Prediction,
    Prompt,
    Question,
    Scored,
    Settings,
    percent,
    pick,
    table_percents,
)
from coat_eval.data_folder import DataFolder, Layouts, Row, Shown, ShownFile, ShownFrame
from coat_eval.extract import inferred_letter, lettered, lowest_loss
from coat_eval.files import Table

TYPES = {
    1: "Scene Understanding",
    2: "Instance Identity",
    3: "Instance Attributes",
    4: "Instance Location",
    5: "Instances Counting",
    6: "Spatial Relation",
    7: "Instance Interaction",
    8: "Visual Reasoning",
    9: "Text Understanding",
    10: "Action Recognition",
    11: "Action Prediction",
    12: "Procedure Understanding",
}
"""Names by ``question_type_id`` (SEED-Bench DATASET.md), for files that do not carry them."""
LETTERS = "ABCD"


class SeedBench(Benchmark):
    """Accuracy over image, video and all questions, per type, and the mean over types."""

    name = "seedbench"
    source = "AILab-CVC/SEED-Bench eval.py; LLaVA scripts/convert_seed_for_submission.py"
    headline = ("image", "video", "all", "macro")
    profiles = ("official", "lmms", "vlmeval")
    text_fields = ("prediction", "text", "losses")
    id_pattern = re.compile(r"v\d+")
    shares_repeated = True
    variants: ClassVar[Mapping[str, str]] = {
        "likelihood": "the choice whose text has the lowest mean loss per token",
        "likelihood_sum": "the choice whose text has the lowest loss, short ones preferred",
    }
    layouts: ClassVar[Layouts] = {
        "test": (("SEED-Bench.json",), ("test-*.parquet",), ("*.parquet",))
    }

    def is_reference(self, table: Table) -> bool:
        """SEED-Bench.json, or rows of lmms-lab/SEED-Bench."""
        return table.has("question_id", "question_type_id")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """With the name of its type, which the file may carry; an id may repeat, as 49914 does."""
        types = table.head.get("question_type") or {}
        number = int(pick(row, ("question_type_id",), where))
        names = [str(name) for name, own in types.items() if int(own) == number]
        choices = {letter: str(row.get(f"choice_{letter.lower()}") or letter) for letter in LETTERS}
        return Question(
            question_id=str(pick(row, ("question_id",), where)),
            answer=row.get("answer") or None,
            tables={"type": (names[-1] if names else "") or TYPES.get(number) or f"type {number}"},
            details={
                "kind": row.get("data_type") or ("image" if number <= 9 else "video"),
                "choices": choices,
            },
            where=where,
        )

    def prompts(self, folder: DataFolder, asking: Asking) -> Iterator[Prompt]:
        """LLaVA's prompt for a letter; of a video its middle frame.

        The variants that rank choices ask the question alone, as SEED-Bench does. Its interfaces
        differ in what a loss is: LLaVA-1.5's (SEED-Bench-2/model/llava_v2_interface.py) and Hugging
        Face's InstructBLIP take the mean over the choice's tokens with the end token, LAVIS'
        InstructBLIP (model/instruct_blip_interface.py, ``reduction="none"``) their sum.
        """
        for row in folder.rows("question", "choice_a"):
            question = str(row.values["question"])
            choices = tuple(str(row.values[f"choice_{letter.lower()}"]) for letter in LETTERS)
            lines = [f"{letter}. {text}" for letter, text in lettered(choices).items()]
            ranked = asking.variant != ""
            yield Prompt(
                question_id=str(pick(row.values, ("question_id",), row.where)),
                text=question if ranked else "\n".join((question, *lines, LETTER_ANSWER)),
                choices=Choices(texts=choices, per_token=asking.variant == "likelihood")
                if ranked
                else None,
                media=(_shown(row, folder),),
                where=row.where,
            )

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """As every benchmark; four ``losses`` become the letter of the lowest one."""
        return [
            replace(one, text=_ranked(one)) if isinstance(one.text, list) else one
            for one in super().predictions(table, questions)
        ]

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """The stripped text (``raw``: the text itself), which must equal the letter.

        lmms: its first character, in upper case. vlmeval: a letter or a choice's text, see
        :func:`coat_eval.extract.inferred_letter`.
        """
        if settings.profile == "lmms":
            return text.strip()[:1].upper()
        if settings.profile == "vlmeval":
            return inferred_letter(text, question.details["choices"])
        return text if settings.raw else text.strip()

    def parsed(self, extracted: str | None, text: str) -> bool:
        """Whether one of the four letters was extracted."""
        return extracted in tuple(LETTERS)

    def aggregate(self, scored: Sequence[Scored], settings: Settings) -> dict[str, float]:
        """``image``, ``video``, ``all``; ``macro`` over types, also per kind; ``type.<name>``."""
        types = table_percents(scored)
        metrics = {"all": percent([one.score for one in scored]), "macro": _mean(types.values())}
        for kind in ("image", "video"):
            part = [one for one in scored if one.question.details["kind"] == kind]
            if part:
                metrics[kind] = percent([one.score for one in part])
                metrics[f"macro_{kind}"] = _mean(table_percents(part).values())
        return metrics | types

    def submission(self, scored: Sequence[Scored], settings: Settings) -> list[dict[str, Any]]:
        """The leaderboard's rows {question_id, prediction}."""
        return [
            {"question_id": one.question.question_id, "prediction": one.extracted or ""}
            for one in scored
        ]


def _shown(row: Row, folder: DataFolder) -> Shown:
    """The picture, or the middle frame of the video or of its part."""
    is_video = row.values.get("data_type") == "video"
    name = str(row.values.get("data_id"))
    if row.in_parquet or not is_video:
        # The names of CC3M's pictures have no suffix.
        suffixes, pick_of = ("", ".jpg", ".png"), "middle" if is_video else "first"
        return row.image(name, ("SEED-Bench-image", "images", "."), suffixes, pick=pick_of)
    # LLaVA's extract_video_frames.py leaves one picture per question.
    frame = folder.file(
        str(row.values["question_id"]), ("SEED-Bench-video-image",), (".png", ".jpg")
    )
    if isinstance(frame, ShownFile) and frame.path.is_file():
        return frame
    video = folder.file(name, ("SEED-Bench-video", "videos", "."), ("", ".mp4", ".webm", ".avi"))
    start, end = row.values.get("segment") or (None, None)
    assert isinstance(video, ShownFile)
    return ShownFrame(video.path, start and float(start), end and float(end))


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _ranked(one: Prediction) -> str:
    losses = one.text
    if len(losses) != len(LETTERS) or not all(isinstance(loss, int | float) for loss in losses):
        raise DataError(one.where, f"losses are {losses!r}", "give one number per choice, A to D")
    return lowest_loss(losses)
