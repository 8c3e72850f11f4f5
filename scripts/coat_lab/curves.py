"""Losses of the decoder benchmark: as CSV, as a table, as a picture."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from coat_bench.rows import replace_csv, table
from coat_vlm.report.plots import COLOURS

COLUMNS = ("precision", "seed", "step", "training_loss", "held_out_loss")
LAST_STEPS = 20
"""The final training loss is the mean over so many steps."""
SMOOTHING_SHARE = 50
"""Drawn training losses average over 1/50 of the steps."""


@dataclass(slots=True)
class DecoderCurve:
    """Losses of one precision and seed, in nats per token."""

    precision: str
    seed: int = 0
    training: list[float] = field(default_factory=list)
    """Per step."""
    held_out: dict[int, float] = field(default_factory=dict)
    """By step, counted from 1."""

    @property
    def best_step(self) -> int:
        """The step with the lowest held-out loss."""
        return min(self.held_out, key=lambda step: self.held_out[step])

    @property
    def final_training(self) -> float:
        """Mean training loss of the last 20 steps."""
        return float(np.mean(self.training[-LAST_STEPS:]))


def write_curves(path: Path, curves: Sequence[DecoderCurve]) -> None:
    """Write one row per precision, seed and step; the file is replaced at once or not at all."""
    replace_csv(
        path,
        COLUMNS,
        (
            (curve.precision, curve.seed, step, loss, curve.held_out.get(step, ""))
            for curve in curves
            for step, loss in enumerate(curve.training, start=1)
        ),
    )


def read_curves(path: Path) -> list[DecoderCurve]:
    """The curves of a file of :func:`write_curves`, in its order; none if it is not there.

    Raises:
        ValueError: the file is another one.
    """
    if not path.is_file():
        return []
    curves: dict[tuple[str, str], DecoderCurve] = {}
    with path.open(newline="") as file:
        rows = csv.reader(file)
        columns = next(rows, [])
        if tuple(columns) != COLUMNS:
            raise ValueError(
                f"{path}: has the columns {columns}, expected {list(COLUMNS)}; write to another "
                "folder"
            )
        for precision, seed, step, training, held_out in rows:
            curve = curves.setdefault((precision, seed), DecoderCurve(precision, int(seed)))
            curve.training.append(float(training))
            if held_out:
                curve.held_out[int(step)] = float(held_out)
    return list(curves.values())


def format_curves(curves: Sequence[DecoderCurve]) -> str:
    """Markdown: held-out losses by step, then every seed at the first precision's best step.

    Differences are to the first precision, in percent.
    """
    by_precision: dict[str, list[DecoderCurve]] = {}
    for curve in curves:
        by_precision.setdefault(curve.precision, []).append(curve)
    groups = list(by_precision.values())
    return f"{_by_step(groups)}\n\n{_by_seed(groups)}"


def _by_step(groups: list[list[DecoderCurve]]) -> str:
    seeds = len(groups[0])
    of = f", mean of {seeds} seeds" if seeds > 1 else ""
    lines = []
    for step in groups[0][0].held_out:
        means = [np.mean([curve.held_out[step] for curve in group]) for group in groups]
        lines.append([str(step), *(f"{mean:.4f}" for mean in means)])
    return table(["step", *(f"{group[0].precision}, held out{of}" for group in groups)], lines)


def _by_seed(groups: list[list[DecoderCurve]]) -> str:
    names = [group[0].precision for group in groups]
    head = ["seed", f"{names[0]}'s best step"]
    for what in ("held out there", f"training, last {LAST_STEPS}"):
        head += [f"{names[0]}, {what}"]
        head += [text for name in names[1:] for text in (f"{name}, {what}", "difference")]
    lines: list[list[str]] = []
    losses: list[list[float]] = []
    for runs in zip(*groups, strict=True):
        best = runs[0].best_step
        losses.append([curve.held_out[best] for curve in runs])
        losses[-1] += [curve.final_training for curve in runs]
        lines.append([str(runs[0].seed), str(best), *_cells(losses[-1], len(runs))])
    if len(losses) > 1:
        means = [float(np.mean(column)) for column in zip(*losses, strict=True)]
        lines.append(["mean", "", *_cells(means, len(groups))])
    return table(head, lines)


def _cells(losses: list[float], number: int) -> list[str]:
    """Losses of so many precisions twice, each but the first with its difference to the first."""
    cells: list[str] = []
    for first, *others in (losses[:number], losses[number:]):
        cells.append(f"{first:.4f}")
        for other in others:
            cells += [f"{other:.4f}", f"{100 * (other / first - 1):+.2f}%"]
    return cells


def draw_curves(curves: Sequence[DecoderCurve], out: Path) -> None:
    """Draw training losses as lines and held-out losses as points, one colour per precision.

    Args:
        curves: what to draw; curves of one precision share a colour.
        out: picture to write; the ending (.svg, .png, .pdf) chooses the format.
    """
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    precisions = list(dict.fromkeys(curve.precision for curve in curves))
    for curve in curves:
        colour = COLOURS[precisions.index(curve.precision) % len(COLOURS)]
        first = next(c for c in curves if c.precision == curve.precision) is curve
        names = [
            f"{curve.precision}, {what}" if first else None for what in ("training", "held out")
        ]
        steps, losses = _smoothed(curve.training)
        axes.plot(steps, losses, color=colour, linewidth=0.9, alpha=0.6, label=names[0])
        points, values = list(curve.held_out), list(curve.held_out.values())
        axes.plot(points, values, "o--", color=colour, linewidth=0.9, markersize=3, label=names[1])
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.legend(frameon=False)
    axes.grid(linewidth=0.3)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _smoothed(losses: list[float]) -> tuple[list[int], list[float]]:
    width = max(1, len(losses) // SMOOTHING_SHARE)
    chunks = [losses[start : start + width] for start in range(0, len(losses), width)]
    ends = [min(len(losses), (number + 1) * width) for number in range(len(chunks))]
    return ends, [float(np.mean(chunk)) for chunk in chunks]
