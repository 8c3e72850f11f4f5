"""Shows samples as text or on an HTML page: media, conversation, and tokens with their labels.

With a model: every token, supervised or not, and images from the pixel values, if these are
images; else the media and the text of the rows.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import IGNORE_INDEX, EncodedSample, Encoder
from coat_data.load.readable import Span, as_lines, token_spans
from coat_data.media.image import image_size, open_image
from coat_data.media.video import read_frames
from coat_data.sample import DataError, Sample
from coat_data.tools.html_page import data_address, sample_evenly, write_page

LONGEST_SIDE = 320
"""Pixels; larger pictures are scaled down."""
FRAMES_SHOWN = 8
"""Frames of a video without an encoder."""
_MAX_PICTURES = 64  # maximum pictures of one sample; the number of the others is written


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model whose tokens are shown."""

    encoder: Encoder
    name: str
    mean: Sequence[float] = ()
    """Mean of each channel, in 0..1, as subtracted from the pixels; empty if the pixels are no
    images, so that the files are shown."""
    std: Sequence[float] = ()


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


def preview(
    path: str | Path,
    out: str | Path | None = None,
    *,
    number: int = 20,
    model: ModelView | None = None,
    ids: bool = False,
    **options: object,
) -> list[Card]:
    """Return ``number`` samples, evenly spaced over the source, and write them as HTML to ``out``.

    ``ids``: the page shows the ids of the tokens.
    """
    if number < 1:
        raise ValueError(f"number={number} must be at least 1")
    dataset = SampleDataset(path, in_order=True, **options)  # pyright: ignore[reportArgumentType]
    chosen: list[Sample | DataError] = []
    for index in sample_evenly(range(len(dataset)), number):
        try:
            chosen.append(dataset[index])
        except DataError as error:
            chosen.append(error)
    cards = [_card(sample, model) for sample in tqdm(chosen, "preview", delay=1.0)]
    if out is not None:
        write_page(
            Path(out),
            "coat_data.tools",
            "preview.html.jinja",
            name=dataset.name,
            path=str(path),
            format=dataset.format,
            rows=len(dataset),
            model=model,
            cards=cards,
            ids=ids,
        )
    return cards


def card_lines(card: Card, *, ids: bool = False) -> list[str]:
    """Return a sample for a terminal; see :func:`coat_data.load.readable.as_lines`."""
    lines = [", ".join([card.where, *([f"id {card.id}"] if card.id else []), *card.facts])]
    if card.problem:
        lines.append(f"  {card.problem} -> {card.remedy}")
    for role, spans in () if card.tokens else card.turns:
        lines += [f"  {role}", *(f"  {line}" for line in as_lines(spans))]
    return [*lines, *(f"  {line}" for line in as_lines(card.tokens, ids=ids))]


def _card(sample: Sample | DataError, model: ModelView | None) -> Card:
    if isinstance(sample, DataError):
        return Card(where=sample.where, problem=sample.problem, remedy=sample.remedy)
    card = Card(where=sample.where, id=sample.id)
    if sample.tools:
        card.turns.append(("tools", [Span(json.dumps(sample.tools, indent=1), "plain")]))
    for turn in sample.turns:
        spans = [
            Span(part.tagged or part.text, "plain")
            if part.kind == "text"
            else Span(f"<{part.kind}>", "image")
            for part in turn.parts
        ]
        spans += [Span(f"\n{name}: {value}", "plain") for name, value in turn.fields().items()]
        card.turns.append((turn.role, spans))
    if sample.rejected:
        card.turns.append(("rejected", [Span(sample.rejected, "plain")]))
    try:
        _add_media(card, sample, model)
        if model is not None:
            _add_encoded(card, model.encoder(sample), model)
    except DataError as error:
        where = "" if error.where == card.where else error.where.removeprefix(f"{card.where}: ")
        card.problem = f"{where}: {error.problem}" if where else error.problem
        card.remedy = error.remedy
    if (hidden := len(card.pictures) - _MAX_PICTURES) > 0:
        del card.pictures[_MAX_PICTURES:]
        card.facts.append(f"{hidden} more pictures")
    return card


def _add_media(card: Card, sample: Sample, model: ModelView | None) -> None:
    max_pixels = None if model is None else model.encoder.media.max_pixels
    for medium in sample.media:
        if medium.kind == "image":
            card.facts.append("{} x {}".format(*image_size(medium, max_pixels)))
        if model is not None and model.mean:
            continue  # the page shows the pixels
        if medium.kind == "image":
            frames = [open_image(medium, max_pixels)]
        else:
            frames = read_frames(medium, FRAMES_SHOWN)
            card.facts.append(f"{len(frames)} frames of {frames[0].width} x {frames[0].height}")
        card.pictures += [data_address(frame, LONGEST_SIDE) for frame in frames]


def _add_encoded(card: Card, encoded: EncodedSample, model: ModelView) -> None:
    encoder, ids = model.encoder, encoded.input_ids.tolist()
    supervised = int((encoded.labels != IGNORE_INDEX).sum())
    of_images = ids.count(encoder.image_token_id)
    card.facts.append(f"{len(ids)} tokens, {of_images} of images, {supervised} supervised")
    if len(encoded.pixel_values):
        card.facts.append(f"the model gets {encoder.describe_pixels(encoded)} pixels")
    if model.mean:
        card.pictures = [
            data_address(to_picture(image, model.mean, model.std), LONGEST_SIDE)
            for image in encoded.pixel_values
        ]
    card.tokens = token_spans(
        ids, encoded.labels.tolist(), encoder.tokenizer.decode, encoder.image_token_id
    )


def to_picture(pixels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """Invert the normalization of pixels (3, H, W): value = 255 (pixel * std + mean)."""
    values = pixels.float().numpy() * np.reshape(std, (3, 1, 1)) + np.reshape(mean, (3, 1, 1))
    return Image.fromarray(
        np.clip(np.rint(255 * values), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    )
