"""Writes an HTML page of samples: media, conversation, and tokens coloured by their labels.

With an encoder the page shows what the model gets: images from the pixel values themselves, with
the normalization undone, and every token, trained or not. Without one it shows the media as they
are and the text as it was read.
"""

import base64
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image
from tqdm import tqdm

from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.media.image import open_image
from coat_data.media.video import read_frames
from coat_data.sample import DataError, Sample

LONGEST_SIDE = 320
"""Pixels; larger pictures are shrunk before they go into the page."""
FRAMES_SHOWN = 8
"""Of a video, where no encoder says how many."""
_MOST_PICTURES = 64
"""Of one sample; the rest is counted."""
_NEWLINE = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n"
"""Shown for a newline, which may be a token of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What the page needs of a model."""

    encode: Callable[[Sample], EncodedSample]
    decode: Callable[[list[int]], str]
    """Text of some token ids, special tokens included."""
    image_token_id: int
    mean: Sequence[float]
    """Of each channel, in 0..1, as subtracted from the pixels."""
    std: Sequence[float]
    name: str
    """Shown at the head of the page."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a page, and how it is marked."""

    text: str
    kind: str
    """``trained``, ``context``, ``image`` or ``plain``."""


@dataclass(slots=True, kw_only=True)
class Card:
    """One sample as shown."""

    where: str
    id: str = ""
    facts: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    """``data:`` addresses."""
    turns: list[tuple[str, list[Piece]]] = field(default_factory=list)
    """Role and text, as read."""
    tokens: list[Piece] = field(default_factory=list)
    problem: str = ""
    remedy: str = ""


def write_preview(
    path: str | Path,
    out: str | Path,
    *,
    number: int = 20,
    model: ModelView | None = None,
    **options: object,
) -> int:
    """Write the page.

    Args:
        path: as :class:`SampleDataset` takes it.
        out: HTML file to write.
        number: samples to show, at even distances over the source; the first ones of a source that
            can only be read in order.
        model: shows what this model gets.
        options: further arguments of :class:`SampleDataset`.

    Returns:
        The number of samples on the page.

    Raises:
        DataError: the source cannot be opened.
        ValueError: ``number`` is not positive.
    """
    if number < 1:
        raise ValueError(f"number={number} must be at least 1")
    dataset = SampleDataset(path, in_order=True, **options)  # pyright: ignore[reportArgumentType]
    rows = tqdm(_chosen(dataset, number), "preview")
    cards = [_card(sample, model) for sample in rows]
    environment = Environment(
        loader=PackageLoader("coat_data.tools", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("preview.html.jinja").render(
        name=dataset.name,
        path=str(path),
        format=dataset.format,
        rows=len(dataset) if dataset.random_access else None,
        model=model.name if model else None,
        cards=cards,
    )
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(html, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return len(cards)


def _chosen(dataset: SampleDataset, number: int) -> "list[Sample | DataError]":
    if not dataset.random_access:
        return list(islice(dataset.stream(), number))
    number = min(number, len(dataset))
    found: list[Sample | DataError] = []
    for index in range(number):
        try:
            found.append(dataset[index * len(dataset) // number])
        except DataError as error:
            found.append(error)
    return found


def _card(sample: Sample | DataError, model: ModelView | None) -> Card:
    if isinstance(sample, DataError):
        return Card(where=sample.where, problem=sample.problem, remedy=sample.remedy)
    card = Card(where=sample.where, id=sample.id)
    card.turns = [
        (turn.role, [_piece(part.kind, part.text) for part in turn.parts]) for turn in sample.turns
    ]
    try:
        if model is None:
            _add_media(card, sample)
        else:
            _add_encoded(card, model.encode(sample), model)
    except DataError as error:
        where = "" if error.where == card.where else error.where.removeprefix(f"{card.where}: ")
        card.problem = f"{where}: {error.problem}" if where else error.problem
        card.remedy = error.remedy
    hidden = len(card.pictures) - _MOST_PICTURES
    if hidden > 0:
        card.pictures = card.pictures[:_MOST_PICTURES]
        card.facts.append(f"{hidden} more pictures")
    return card


def _piece(kind: str, text: str) -> Piece:
    return Piece(text, "plain") if kind == "text" else Piece(f"<{kind}>", "image")


def _add_media(card: Card, sample: Sample) -> None:
    for medium in sample.media:
        if medium.kind == "image":
            image = open_image(medium)
            card.facts.append(f"{image.width} x {image.height}")
            card.pictures.append(_address(image))
        else:
            frames = read_frames(medium, FRAMES_SHOWN)
            card.facts.append(f"{len(frames)} frames of {frames[0].width} x {frames[0].height}")
            card.pictures += [_address(frame) for frame in frames]


def _add_encoded(card: Card, encoded: EncodedSample, model: ModelView) -> None:
    trained = int((encoded.labels != IGNORE_INDEX).sum())
    pixels = encoded.pixel_values
    card.facts = [f"{len(encoded.input_ids)} tokens, {trained} trained"]
    if len(pixels):
        card.facts.append(f"{len(pixels)} x {pixels.shape[-1]} x {pixels.shape[-2]} pixels")
    card.pictures = [_address(to_picture(image, model.mean, model.std)) for image in pixels]
    tokens = token_pieces(
        encoded.input_ids.tolist(), encoded.labels.tolist(), model.decode, model.image_token_id
    )
    card.tokens = [Piece(piece.text.replace("\n", _NEWLINE), piece.kind) for piece in tokens]


def to_picture(pixels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """The picture that normalized pixels (3, H, W) come from: value = 255 (pixel * std + mean)."""
    values = pixels.float().numpy() * np.reshape(std, (3, 1, 1)) + np.reshape(mean, (3, 1, 1))
    return Image.fromarray(
        np.clip(np.rint(255 * values), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    )


def token_pieces(
    ids: Sequence[int],
    labels: Sequence[int],
    decode: Callable[[list[int]], str],
    image_token_id: int,
) -> list[Piece]:
    """The tokens as text, each marked as trained or not; image tokens are counted.

    A character of several tokens is one piece, marked by its last one. A token's text is what it
    adds to the text of the token before it, as some tokenizers drop the first space of a text.
    """
    pieces: list[Piece] = []
    before: list[int] = []
    pending: list[int] = []
    run = 0
    for index, token in enumerate(ids):
        if token == image_token_id:
            run += 1
            last = index + 1 == len(ids) or ids[index + 1] != image_token_id
            if last:
                pieces.append(Piece(f"{run} image tokens", "image"))
                run = 0
            before = pending = []
            continue
        pending = [*pending, token]
        text = decode([*before, *pending])[len(decode(before)) if before else 0 :]
        next_is_text = index + 1 < len(ids) and ids[index + 1] != image_token_id
        if text.endswith("\N{REPLACEMENT CHARACTER}") and next_is_text and len(pending) < 4:
            continue  # the first bytes of a character
        pieces.append(Piece(text, "context" if labels[index] == IGNORE_INDEX else "trained"))
        before, pending = pending, []
    return pieces


def _address(picture: Image.Image) -> str:
    """The picture, at most LONGEST_SIDE pixels long, as a ``data:`` address."""
    picture = picture.copy()
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    buffer = io.BytesIO()
    # JPEG blurs small pictures and saves nothing there.
    kind = "PNG" if max(picture.size) <= 96 else "JPEG"
    picture.convert("RGB").save(buffer, kind, **({} if kind == "PNG" else {"quality": 85}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
