"""Sample cards: questions with their images, the reference and the prediction, right or wrong."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from coat_data.media.image import open_image
from coat_data.sample import DataError, Media

CARDS_PER_SET = 12
LONGEST_SIDE = 256
"""Pixels; larger images are shrunk before they go into the file."""
MEDIA_PER_CARD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCard:
    """One question as shown."""

    question: str
    category: str
    reference: str
    prediction: str | None
    correct: bool
    images: list[str]
    """``data:`` addresses."""
    problems: list[str]
    """Media that cannot be shown, and why."""


def sample_cards(folder: Path, number: int = CARDS_PER_SET) -> list[SampleCard]:
    """At most ``number`` cards of ``folder/items.jsonl``: half wrong and half right if there are.

    Both halves are taken at even distances over the file, so the same run gives the same cards. An
    absent file gives no card.
    """
    path = folder / "items.jsonl"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return [_card(rows[index]) for index in choose([row["correct"] for row in rows], number)]


def choose(correct: Sequence[bool], number: int) -> list[int]:
    """Indices of ``number`` items, half of them wrong where possible, in ascending order."""
    right = [index for index, value in enumerate(correct) if value]
    wrong = [index for index, value in enumerate(correct) if not value]
    num_wrong = min(len(wrong), max(number // 2, number - len(right)))
    return sorted(spread(wrong, num_wrong) + spread(right, number - num_wrong))


def shown_media(entries: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Images and frames of videos as ``data:`` addresses, made small, at most MEDIA_PER_CARD.

    Args:
        entries: rows with ``kind`` and ``path``.

    Returns:
        The addresses, and what cannot be shown and why.
    """
    images: list[str] = []
    problems: list[str] = []
    for entry in entries:
        try:
            images += [_data_address(picture) for picture in _pictures(Media(**entry))]
        except (DataError, OSError) as error:
            problems.append(str(error))
    hidden = len(images) - MEDIA_PER_CARD
    if hidden > 0:
        problems.append(f"{hidden} more images are not shown")
    return images[:MEDIA_PER_CARD], problems


def spread(indices: Sequence[int], number: int) -> list[int]:
    """At most ``number`` of the indices, at even distances, so the same ones each time."""
    number = min(number, len(indices))
    return [indices[position * len(indices) // number] for position in range(number)]


def _card(row: dict[str, Any]) -> SampleCard:
    images, problems = shown_media(row["media"])
    return SampleCard(
        question=row["question"],
        category=row["category"],
        reference=row["reference"],
        prediction=row["prediction"],
        correct=row["correct"],
        images=images,
        problems=problems,
    )


def _pictures(media: Media) -> list[Image.Image]:
    if media.kind == "image":
        return [open_image(media)]
    from coat_data.media.video import (
        read_frames,  # evaluation imports this package; it needs no decoder
    )

    return read_frames(media, MEDIA_PER_CARD)


def _data_address(picture: Image.Image) -> str:
    """The picture, at most LONGEST_SIDE pixels long, as a ``data:`` address."""
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    buffer = io.BytesIO()
    # JPEG blurs small pictures (CIFAR has 32 x 32 pixels) and saves nothing there.
    kind = "PNG" if max(picture.size) <= 96 else "JPEG"
    picture.convert("RGB").save(buffer, kind, **({} if kind == "PNG" else {"quality": 85}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
