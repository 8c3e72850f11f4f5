"""Losses of the decoder benchmark as CSV, Markdown tables and a picture."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from coat_bench.rows import format_table
from coat_vlm.report.plots import COLORS

COLUMNS = ("precision", "seed", "step", "training_loss", "held_out_loss")
LAST_STEPS = 20
"""Number of steps that the final training loss averages."""
SMOOTHING_SHARE = 50
"""The picture averages training losses over 1/50 of the steps."""


@dataclass(slots=True)
class DecoderCurve:
    """Losses of one precision and seed, in nats per token."""

    precision: str
    seed: int = 0
    training: list[float] = field(default_factory=list)
    """One loss per step."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Step, counted from 1 -> loss."""

    @property
    def best_step(self) -> int:
        """Step with the lowest held-out loss."""
        return min(self.held_out, key=lambda step: self.held_out[step])

    @property
    def final_training(self) -> float:
        """Mean training loss of the last 20 steps."""
        return float(np.mean(self.training[-LAST_STEPS:]))


def write_curves(path: Path, curves: Sequence[DecoderCurve]) -> None:
    """Write one row per precision, seed and step; the file is replaced atomically."""
    rows = (
        (curve.precision, curve.seed, step, loss, curve.held_out.get(step, ""))
        for curve in curves
        for step, loss in enumerate(curve.training, start=1)
    )
    write_csv(path, COLUMNS, rows)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file, which is replaced atomically."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    temporary.replace(path)


def read_curves(path: Path) -> list[DecoderCurve]:
    """Read a file of :func:`write_curves`; returns no curves if it does not exist.

    Raises:
        ValueError: the file has other columns.
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
    """Format two Markdown tables: held-out losses by step, and each seed at its best step.

    The best step is the first precision's. Differences are to the first precision, in percent.
    """
    by_precision: dict[str, list[DecoderCurve]] = {}
    for curve in curves:
        by_precision.setdefault(curve.precision, []).append(curve)
    names, groups = list(by_precision), list(by_precision.values())
    of = f", mean of {len(groups[0])} seeds" if len(groups[0]) > 1 else ""
    lines = []
    for step in groups[0][0].held_out:
        means = [np.mean([curve.held_out[step] for curve in group]) for group in groups]
        lines.append([str(step), *(f"{mean:.4f}" for mean in means)])
    by_step = format_table(["step", *(f"{name}, held out{of}" for name in names)], lines)
    head = ["seed", f"{names[0]}'s best step"]
    for what in ("held out there", f"training, last {LAST_STEPS}"):
        head += [f"{names[0]}, {what}"]
        head += [text for name in names[1:] for text in (f"{name}, {what}", "difference")]
    lines, losses = [], []
    for runs in zip(*groups, strict=True):
        best = runs[0].best_step
        losses.append([run.held_out[best] for run in runs] + [run.final_training for run in runs])
        lines.append([str(runs[0].seed), str(best), *_format_cells(losses[-1], len(runs))])
    if len(losses) > 1:
        means = [float(np.mean(column)) for column in zip(*losses, strict=True)]
        lines.append(["mean", "", *_format_cells(means, len(groups))])
    return f"{by_step}\n\n{format_table(head, lines)}"


def _format_cells(losses: list[float], number: int) -> list[str]:
    """Format ``number`` losses twice, all but the first with their difference to the first."""
    cells: list[str] = []
    for first, *others in (losses[:number], losses[number:]):
        cells.append(f"{first:.4f}")
        for other in others:
            cells += [f"{other:.4f}", f"{100 * (other / first - 1):+.2f}%"]
    return cells


def draw_curves(curves: Sequence[DecoderCurve], out: Path) -> None:
    """Draw training losses as lines and held-out losses as points, one color per precision.

    Args:
        curves: what to draw; curves of one precision share a color.
        out: file to write; its suffix (.svg, .png, .pdf) chooses the format.
    """
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    precisions = list(dict.fromkeys(curve.precision for curve in curves))
    for curve in curves:
        color = COLORS[precisions.index(curve.precision) % len(COLORS)]
        first = next(c for c in curves if c.precision == curve.precision) is curve
        names = [
            f"{curve.precision}, {what}" if first else None for what in ("training", "held out")
        ]
        width = max(1, len(curve.training) // SMOOTHING_SHARE)
        starts = range(0, len(curve.training), width)
        steps = [min(len(curve.training), start + width) for start in starts]
        losses = [float(np.mean(curve.training[start : start + width])) for start in starts]
        axes.plot(steps, losses, color=color, linewidth=0.9, alpha=0.6, label=names[0])
        points, values = list(curve.held_out), list(curve.held_out.values())
        axes.plot(points, values, "o--", color=color, linewidth=0.9, markersize=3, label=names[1])
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.legend(frameon=False)
    axes.grid(linewidth=0.3)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
