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
from coat_data.saved_files import check_outputs
from coat_data.tools.html_page import data_address, sample_evenly, write_page

LONGEST_SIDE = 320
"""Pixels; larger pictures are scaled down."""
FRAMES_SHOWN = 8
"""Frames of a video without an encoder."""
_MAX_PICTURES = 64  # maximum pictures of one sample; the number of the others is written


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
    model: str | None = None,
    encoder: Encoder | None = None,
    ids: bool = False,
    **options: object,
) -> list[Card]:
    """Return ``number`` samples, evenly spaced over the source, and write them as HTML to ``out``.

    With the ``encoder`` of a ``model``, as it gets them; ``ids``: the page shows ids of tokens.
    """
    dataset = SampleDataset(path, in_order=True, **options)  # pyright: ignore[reportArgumentType]
    check_outputs([Path(out) if out is not None else None], dataset.paths)
    rows = sample_evenly(range(len(dataset)), number)
    cards = [_card(dataset, row, encoder) for row in tqdm(rows, "preview", delay=1.0)]
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
            shows_pixels=encoder is not None and encoder.reads_images,
            cards=cards,
            ids=ids,
        )
    return cards


def card_lines(card: Card, *, ids: bool) -> list[str]:
    """Return a sample for a terminal; see :func:`coat_data.load.readable.as_lines`."""
    lines = [", ".join([card.where, *([f"id {card.id}"] if card.id else []), *card.facts])]
    if card.problem:
        lines.append(f"  {card.problem} -> {card.remedy}")
    for role, spans in () if card.tokens else card.turns:
        lines += [f"  {role}", *(f"  {line}" for line in as_lines(spans))]
    return [*lines, *(f"  {line}" for line in as_lines(card.tokens, ids=ids))]


def _card(dataset: SampleDataset, row: int, encoder: Encoder | None) -> Card:
    try:
        sample = dataset[row]
    except DataError as error:
        return Card(where=error.where, problem=error.problem, remedy=error.remedy)
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
        _add_media(card, sample, encoder)
        if encoder is not None:
            _add_encoded(card, encoder(sample), encoder)
    except DataError as error:
        where = "" if error.where == card.where else error.where.removeprefix(f"{card.where}: ")
        card.problem = f"{where}: {error.problem}" if where else error.problem
        card.remedy = error.remedy
    if (hidden := len(card.pictures) - _MAX_PICTURES) > 0:
        del card.pictures[_MAX_PICTURES:]
        card.facts.append(f"{hidden} more pictures")
    return card


def _add_media(card: Card, sample: Sample, encoder: Encoder | None) -> None:
    max_pixels = None if encoder is None else encoder.media.max_pixels
    for medium in sample.media:
        if medium.kind == "image":
            card.facts.append("{} x {}".format(*image_size(medium, max_pixels)))
        if encoder is not None and encoder.reads_images:
            continue  # the page shows the pixels
        if medium.kind == "image":
            frames = [open_image(medium, max_pixels)]
        else:
            frames = read_frames(medium, FRAMES_SHOWN)
            card.facts.append(f"{len(frames)} frames of {frames[0].width} x {frames[0].height}")
        card.pictures += [data_address(frame, LONGEST_SIDE) for frame in frames]


def _add_encoded(card: Card, encoded: EncodedSample, encoder: Encoder) -> None:
    ids, transform = encoded.input_ids.tolist(), encoder.media.transform
    supervised = int((encoded.labels != IGNORE_INDEX).sum())
    of = [f"{ids.count(token)} of {kind}s" for token, kind in encoder.media_token_ids.items()]
    card.facts.append(", ".join([f"{len(ids)} tokens", *of, f"{supervised} supervised"]))
    if pixels := encoder.describe_pixels(encoded):
        card.facts.append(f"the model gets {pixels} pixels")
    if encoder.reads_images:
        card.pictures = [
            data_address(to_picture(image, transform.mean, transform.std), LONGEST_SIDE)
            for image in encoded.pixel_values
        ]
    card.tokens = token_spans(
        ids, encoded.labels.tolist(), encoder.tokenizer.decode, encoder.media_token_ids
    )


def to_picture(pixels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """Invert the normalization of pixels (3, H, W): value = 255 (pixel * std + mean)."""
    values = pixels.float().numpy() * np.reshape(std, (3, 1, 1)) + np.reshape(mean, (3, 1, 1))
    return Image.fromarray(
        np.clip(np.rint(255 * values), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    )
