"""Writes an HTML page of samples: media, conversation, and tokens colored by their labels.

With an encoder the page shows images from the pixel values and every token, supervised or not;
without one, the media and the text of the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.media.image import open_image
from coat_data.media.video import read_frames
from coat_data.sample import DataError, Sample
from coat_data.tools.html_page import data_address, sample_evenly, write_page

LONGEST_SIDE = 320
"""Pixels; larger pictures are scaled down."""
FRAMES_SHOWN = 8
"""Frames of a video without an encoder."""
_MAX_PICTURES = 64  # maximum pictures of one sample; the number of the others is written
_NEWLINE = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n"
"""Shown for a newline, which may be a token of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """Functions and constants of a model that the page needs."""

    encode: Callable[[Sample], EncodedSample]
    decode: Callable[[list[int]], str]  # decodes token ids, special tokens included
    image_token_id: int
    mean: Sequence[float]  # mean of each channel, in 0..1, as subtracted from the pixels
    std: Sequence[float]
    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """Text of the page with one marking."""

    text: str
    kind: str  # trained, context, image or plain


@dataclass(slots=True, kw_only=True)
class Card:
    """One sample of the page."""

    where: str
    id: str = ""
    facts: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)  # data: URLs
    turns: list[tuple[str, list[Span]]] = field(default_factory=list)
    tokens: list[Span] = field(default_factory=list)
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
    """Write ``number`` samples, evenly spaced over the source; returns how many there are."""
    if number < 1:
        raise ValueError(f"number={number} must be at least 1")
    dataset = SampleDataset(path, in_order=True, **options)  # pyright: ignore[reportArgumentType]
    chosen: list[Sample | DataError] = []
    for index in sample_evenly(range(len(dataset)), number):
        try:
            chosen.append(dataset[index])
        except DataError as error:
            chosen.append(error)
    cards = [_card(sample, model) for sample in tqdm(chosen, "preview")]
    write_page(
        Path(out),
        "coat_data.tools",
        "preview.html.jinja",
        name=dataset.name,
        path=str(path),
        format=dataset.format,
        rows=len(dataset),
        model=model.name if model else None,
        cards=cards,
    )
    return len(cards)


def _card(sample: Sample | DataError, model: ModelView | None) -> Card:
    if isinstance(sample, DataError):
        return Card(where=sample.where, problem=sample.problem, remedy=sample.remedy)
    card = Card(where=sample.where, id=sample.id)
    for turn in sample.turns:
        spans = [
            Span(part.tagged or part.text, "plain")
            if part.kind == "text"
            else Span(f"<{part.kind}>", "image")
            for part in turn.parts
        ]
        card.turns.append((turn.role, spans))
    if sample.rejected:
        card.turns.append(("rejected", [Span(sample.rejected, "plain")]))
    try:
        if model is not None:
            _add_encoded(card, model.encode(sample), model)
        for medium in sample.media if model is None else ():
            if medium.kind == "image":
                image = open_image(medium)
                card.facts.append(f"{image.width} x {image.height}")
                card.pictures.append(data_address(image, LONGEST_SIDE))
            else:
                frames = read_frames(medium, FRAMES_SHOWN)
                card.facts.append(f"{len(frames)} frames of {frames[0].width} x {frames[0].height}")
                card.pictures += [data_address(frame, LONGEST_SIDE) for frame in frames]
    except DataError as error:
        where = "" if error.where == card.where else error.where.removeprefix(f"{card.where}: ")
        card.problem = f"{where}: {error.problem}" if where else error.problem
        card.remedy = error.remedy
    hidden = len(card.pictures) - _MAX_PICTURES
    if hidden > 0:
        card.pictures = card.pictures[:_MAX_PICTURES]
        card.facts.append(f"{hidden} more pictures")
    return card


def _add_encoded(card: Card, encoded: EncodedSample, model: ModelView) -> None:
    supervised = int((encoded.labels != IGNORE_INDEX).sum())
    pixels = encoded.pixel_values
    card.facts = [f"{len(encoded.input_ids)} tokens, {supervised} supervised"]
    if len(pixels):
        card.facts.append(f"{len(pixels)} x {pixels.shape[-1]} x {pixels.shape[-2]} pixels")
    card.pictures = [
        data_address(to_picture(image, model.mean, model.std), LONGEST_SIDE) for image in pixels
    ]
    tokens = token_spans(
        encoded.input_ids.tolist(), encoded.labels.tolist(), model.decode, model.image_token_id
    )
    card.tokens = [Span(span.text.replace("\n", _NEWLINE), span.kind) for span in tokens]


def to_picture(pixels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """Invert the normalization of pixels (3, H, W): value = 255 (pixel * std + mean)."""
    values = pixels.float().numpy() * np.reshape(std, (3, 1, 1)) + np.reshape(mean, (3, 1, 1))
    return Image.fromarray(
        np.clip(np.rint(255 * values), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    )


def token_spans(
    ids: Sequence[int],
    labels: Sequence[int],
    decode: Callable[[list[int]], str],
    image_token_id: int,
) -> list[Span]:
    """Decode tokens, each marked as supervised or not; runs of image tokens are counted.

    A character of several tokens is one span, with the label of the last token.
    """
    spans: list[Span] = []
    before: list[int] = []
    pending: list[int] = []
    run = 0
    for index, token in enumerate(ids):
        if token == image_token_id:
            run += 1
            last = index + 1 == len(ids) or ids[index + 1] != image_token_id
            if last:
                spans.append(Span(f"{run} image tokens", "image"))
                run = 0
            before = pending = []
            continue
        pending = [*pending, token]
        text = decode([*before, *pending])[len(decode(before)) if before else 0 :]
        next_is_text = index + 1 < len(ids) and ids[index + 1] != image_token_id
        if text.endswith("\N{REPLACEMENT CHARACTER}") and next_is_text and len(pending) < 4:
            continue  # the first bytes of a character
        spans.append(Span(text, "context" if labels[index] == IGNORE_INDEX else "trained"))
        before, pending = pending, []
    return spans
