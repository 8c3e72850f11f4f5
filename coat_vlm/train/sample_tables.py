"""Tables of answered evaluation questions with their images, for TensorBoard and W&B.

TensorBoard gets one Markdown table per evaluation set, and for each row that has images one picture
whose tag ends in the row's number: its text pages show no embedded images. Weights & Biases gets
one ``wandb.Table`` per set with the picture in a column.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from coat_data.media.pictures import read_pictures
from coat_data.sample import Sample
from coat_data.tools.html_page import sample_evenly

ROWS = 8
"""Maximum rows of a table: evenly spaced over the questions, the same in every evaluation."""
PICTURES = 4
"""Maximum pictures of a row: images, and frames of a video."""
SIDE = 256
"""Maximum side of a picture in pixels."""
COLUMNS = ("question", "reference", "prediction", "right or wrong")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+.!|-])")


@dataclass(frozen=True, slots=True)
class AnsweredSample:
    """A question with the model's answer."""

    sample: Sample
    """The question, with the reference as the last turn."""
    prediction: str
    correct: bool


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table."""

    cells: tuple[str, ...]
    """Texts in the order of :data:`COLUMNS`."""
    picture: Image.Image | None
    """The question's images beside each other in RGB; None without images."""


def build_rows(answered: Sequence[AnsweredSample]) -> list[TableRow]:
    """Choose up to :data:`ROWS` questions and read their images.

    A medium that cannot be read leaves its place empty, and the question names the problem.
    """
    rows = []
    for index in sample_evenly(range(len(answered)), ROWS):
        one = answered[index]
        *_, question, reference = one.sample.turns
        pictures, problems = read_pictures(one.sample.media, PICTURES)
        asked = " ".join([question.text.strip(), *(f"({problem})" for problem in problems)])
        mark = "right" if one.correct else "wrong"
        cells = (asked, reference.text.strip(), one.prediction, mark)
        rows.append(TableRow(cells, _join(pictures)))
    return rows


def add_to_tensorboard(board: Any, tag: str, step: int, rows: Sequence[TableRow]) -> None:
    """Write a table as text, and its pictures as images with the tag ``tag/NUMBER`` from 1."""
    lines = [" | ".join(("#", *COLUMNS)), " | ".join("-" * (1 + len(COLUMNS)))]
    for number, row in enumerate(rows, 1):
        lines.append(" | ".join([str(number), *map(_escape, row.cells)]))
        if row.picture is not None:
            pixels = np.asarray(row.picture)
            board.add_image(f"{tag}/{number}", pixels, step, dataformats="HWC")
    board.add_text(tag, "\n".join(lines), step)


def make_wandb_table(rows: Sequence[TableRow]) -> Any:
    """Make a ``wandb.Table`` with the pictures in its first column."""
    import wandb  # pyright: ignore[reportMissingImports] - an optional dependency

    table = wandb.Table(columns=["image", *COLUMNS])
    for row in rows:
        shown = None if row.picture is None else wandb.Image(row.picture)
        table.add_data(shown, *row.cells)
    return table


def _escape(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return _MARKDOWN.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _join(pictures: Sequence[Image.Image]) -> Image.Image | None:
    """Return the pictures beside each other, each at most :data:`SIDE` pixels wide and high."""
    small = [picture.convert("RGB") for picture in pictures]
    for picture in small:
        picture.thumbnail((SIDE, SIDE))
    if not small:
        return None
    height = max(picture.height for picture in small)
    joined = Image.new("RGB", (sum(picture.width for picture in small), height))
    left = 0
    for picture in small:
        joined.paste(picture, (left, 0))
        left += picture.width
    return joined
