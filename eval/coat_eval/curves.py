"""Training curves of two groups of runs in one picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from coat_eval.table import read_json_lines

SMOOTHING_SHARE = 50
"""Curves average over 1/50 of the steps."""
COLOURS = ("#3b82f6", "#e07b39")


def draw_curves(
    first: Sequence[Path], second: Sequence[Path], labels: tuple[str, str], out: Path
) -> None:
    """Draw the smoothed training loss of the runs' last stage, one colour per group.

    Args:
        first: run folders of one group.
        second: run folders of the other; may be empty.
        labels: names of the groups.
        out: picture to write; the ending (.svg, .png, .pdf) chooses the format.

    Raises:
        ValueError: the ending names no picture format.
        OSError: a run has no metrics.jsonl, or the picture cannot be written.
    """
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for runs, label, colour in zip((first, second), labels, COLOURS, strict=True):
        for number, run in enumerate(runs):
            steps, losses = _smoothed(run)
            name = label if number == 0 else None
            axes.plot(steps, losses, color=colour, linewidth=0.9, alpha=0.8, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per token")
    axes.legend(frameon=False)
    axes.grid(which="both", linewidth=0.3)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _smoothed(run: Path) -> tuple[list[int], list[float]]:
    rows = [row for _, row in read_json_lines(run / "metrics.jsonl")]
    steps = [row for row in rows if row["kind"] == "step"]
    steps = [row for row in steps if row["stage"] == steps[-1]["stage"]]
    width = max(1, len(steps) // SMOOTHING_SHARE)
    chunks = [steps[i : i + width] for i in range(0, len(steps), width)]
    means = [float(np.mean([row["loss"] for row in chunk])) for chunk in chunks]
    return [chunk[-1]["step"] for chunk in chunks], means
