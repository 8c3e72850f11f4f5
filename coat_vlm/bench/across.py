"""A trained decoder's losses in other arithmetics: what FP8 costs in weights, what in a pass."""

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from torch import nn

from coat_vlm.bench.decoder import (
    Corpus,
    DecoderBench,
    arithmetic_called,
    build_decoder,
    text_loss,
)
from coat_vlm.bench.rows import table


@dataclass(frozen=True, slots=True)
class AcrossRow:
    """Losses of one model in one arithmetic, in nats per token."""

    precision: str
    """What it was trained in."""
    seed: int
    arithmetic: str
    """What its losses are computed in."""
    training_text: float
    """Over the text that it was trained on."""
    held_out: float


def losses_across(
    model: nn.Module,
    precision: str,
    seed: int,
    arithmetics: Sequence[str],
    corpus: Corpus,
    bench: DecoderBench,
) -> list[AcrossRow]:
    """The losses of a model in several arithmetics.

    Args:
        model: from :func:`coat_vlm.bench.decoder.train_decoder`; stays as it is.
        precision: it was trained in.
        seed: likewise.
        arithmetics: as :func:`coat_vlm.bench.decoder.arithmetic_called` takes them.
        corpus: the text.
        bench: the model's shape.
    """
    weights = model.state_dict()
    rows = []
    for name in arithmetics:
        arithmetic = arithmetic_called(name)
        other = build_decoder(bench).to(next(model.parameters()).device, arithmetic.dtype)
        other.load_state_dict(weights)
        arithmetic.apply(other)
        losses = [text_loss(other, ids, bench) for ids in (corpus.training, corpus.held_out)]
        rows.append(AcrossRow(precision, seed, name, *losses))
    return rows


def append_across(path: Path, rows: Sequence[AcrossRow]) -> None:
    """Add rows to a CSV file, with a head if it is new."""
    new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow([field.name for field in fields(AcrossRow)])
        writer.writerows(astuple(row) for row in rows)


def format_across(rows: Sequence[AcrossRow]) -> str:
    """Markdown, one line per model: the loss on the training text in each arithmetic."""
    arithmetics = list(dict.fromkeys(row.arithmetic for row in rows))
    lines = []
    for precision, seed in dict.fromkeys((row.precision, row.seed) for row in rows):
        own = {
            row.arithmetic: f"{row.training_text:.4f}"
            for row in rows
            if (row.precision, row.seed) == (precision, seed)
        }
        lines.append([precision, str(seed), *(own.get(name, "-") for name in arithmetics)])
    return table(
        ["trained in", "seed", *(f"training text in {name}" for name in arithmetics)], lines
    )
