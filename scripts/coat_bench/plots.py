"""Plots of benchmark rows as SVG: bars of layers and of long rows, points of training steps.

Our implementations are colored; rows without a speed are left out. The same rows always give the
same file.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from coat_bench.layer import OURS, REFERENCE, LayerRow
from coat_bench.long import LongRow
from coat_bench.shapes import LayerShape
from coat_bench.step import NAMES, StepRow
from coat_vlm.report.plots import COLORS, GREY

_MARKERS = "os^Dv<>p"


def find_last_run(rows: Sequence[LayerRow], shape: LayerShape, attention: str) -> list[LayerRow]:
    """Return the rows of the last process that measured a block; the reference is first.

    Args:
        rows: all rows of a file.
        shape: the block, with its batch and length.
        attention: the backend of SDPA.

    Raises:
        ValueError: there are no such rows.
    """
    run: list[LayerRow] = []
    wanted = (shape.name, shape.tokens, shape.length, attention)
    for row in rows:
        if (row.shape, row.tokens, row.length, row.attention) == wanted:
            run = [row] if row.implementation == REFERENCE else [*run, row]
    if not run:
        raise ValueError(
            f"no rows of {shape.name}, {shape.batch} x {shape.length:,} tokens, attention "
            f"{attention}; measure them first"
        )
    return run


def draw_layers(runs: Sequence[Sequence[LayerRow]], out: Path) -> None:
    """Draw one line of panels per run: milliseconds of both passes, MiB saved between them.

    Args:
        runs: results of :func:`find_last_run`.
        out: the SVG to write.
    """
    drawn = [[row for row in run if not row.problem] for run in runs]
    heights = [len(run) + 2 for run in drawn]
    with _open_figure(out, "layer", (9, 0.25 * sum(heights))) as figure:
        panels = figure.subplots(len(drawn), 2, squeeze=False, height_ratios=heights)
        for run, (time, memory) in zip(drawn, panels, strict=True):
            first = run[0]
            what = f"{first.shape}, {first.tokens // first.length} x {first.length:,} tokens"
            _draw_bars(time, run, "fwdbwd_ms", f"{what}: fwd + bwd, ms", 1)
            _draw_bars(memory, run, "saved_mib", "saved between them, MiB", 0)
            memory.set_yticklabels([])


def _draw_bars(axes: Axes, run: Sequence[LayerRow], column: str, title: str, digits: int) -> None:
    names = [row.implementation for row in run]
    colors = [COLORS[0] if name.startswith(OURS) else GREY for name in names]
    _fill_bars(axes, names, [getattr(row, column) for row in run], colors, f"%.{digits}f", title)


def _fill_bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    colors: Sequence[str],
    form: str,
    title: str,
) -> None:
    bars = axes.barh(range(len(names)), values, 0.7, color=colors)
    axes.bar_label(bars, fmt=form, padding=3, color=GREY)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(title, color=GREY, fontsize=9, loc="left")
    axes.tick_params(colors=GREY, length=0)
    axes.xaxis.set_visible(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_steps(rows: Sequence[StepRow], model: str, out: Path) -> None:
    """Draw tokens per second against peak memory, a point per implementation and batch.

    One panel shows forward and backward passes, one shows whole steps. If a case was measured
    several times, its last row is drawn. Rows of variants that only a script measured, such as
    ``coat_lean_first0``, are not drawn.

    Args:
        rows: all rows of a file.
        model: name of the model whose rows are drawn.
        out: the SVG to write.

    Raises:
        ValueError: there are no rows of that model with a speed and a peak.
    """
    points = {
        (
            _describe_series(row),
            row.batch,
            row.tokens,
        ): row  # tokens: of all accumulated micro-batches
        for row in rows
        if row.model == model and row.tok_s is not None and row.peak_gb is not None
        if not row.implementation.startswith(OURS) or row.implementation in NAMES.values()
    }
    panels: dict[str, list[StepRow]] = {}
    for row in sorted(points.values(), key=lambda row: row.optimizer != "none"):
        what = "forward + backward" if row.optimizer == "none" else "whole step"
        panels.setdefault(f"{model}: {what}", []).append(row)
    if not panels:
        raise ValueError(f"no rows of {model} have a speed and a peak; measure them on a GPU first")
    with _open_figure(out, "step", (11, 3.6 * len(panels))) as figure:
        axes = figure.subplots(len(panels), squeeze=False)
        for (title, found), (panel,) in zip(panels.items(), axes, strict=True):
            _draw_points(panel, title, found)


def _describe_series(row: StepRow) -> str:
    """Name a line of the plot: everything but the batch."""
    words = [row.implementation]
    if row.optimizer != "none":
        gpu = row.gpu.removeprefix("NVIDIA ")
        words.append(f"{row.optimizer}, ZeRO-{row.zero}, {row.gpus} {gpu}")
    if row.checkpointing:
        words.append("checkpointing")
    return ", ".join(words)


def _draw_points(axes: Axes, title: str, rows: Sequence[StepRow]) -> None:
    names = list(dict.fromkeys(_describe_series(row) for row in rows))
    colors = iter(COLORS * len(names))
    for number, name in enumerate(names):
        own = sorted(
            (row for row in rows if _describe_series(row) == name), key=lambda row: row.batch
        )
        color = next(colors) if name.startswith(OURS) else GREY
        x: list[Any] = [row.peak_gb for row in own]
        y: list[Any] = [row.tok_s for row in own]
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(x, y, marker=marker, color=color, label=name, linewidth=1)
        for row, across, up in zip(own, x, y, strict=True):
            axes.annotate(
                f"B{row.batch}", (across, up), (4, 4), textcoords="offset points", color=GREY
            )
    axes.set_title(title, color=GREY, fontsize=9, loc="left")
    axes.set_xlabel("peak GB of a GPU", color=GREY)
    axes.set_ylabel("tokens/s", color=GREY)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    axes.tick_params(colors=GREY)
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}  # points may be anywhere
    axes.legend(frameon=False, labelcolor=GREY, fontsize=8, **beside)
    for spine in axes.spines.values():
        spine.set_color(GREY)


def draw_long(rows: Sequence[LongRow], out: Path) -> None:
    """Draw the longest rows that fit, and tokens per second of training steps, as bars.

    If a case was measured several times, its last row is drawn.

    Args:
        rows: all rows of a file.
        out: the SVG to write.

    Raises:
        ValueError: there are no rows with a speed.
    """
    panels: dict[str, dict[str, tuple[LongRow, float]]] = {}
    for row in rows:
        gpu = f"{row.gpus} {row.gpu.removeprefix('NVIDIA ')}"
        shape = f"{row.implementation}, {row.tokens:,} tokens, {row.frames:,} frames"
        if row.ms is None or row.tok_s is None:
            continue
        if row.note.startswith("forward and backward"):
            panel = panels.setdefault(f"{row.model}, {gpu}: longest row, tokens", {})
            found = panel.get(row.implementation)
            if found is None or found[1] < row.tokens:
                panel[row.implementation] = row, row.tokens
        else:
            title = f"{row.model}, {gpu}, ZeRO-{row.zero}: training step, tokens/s per GPU"
            panels.setdefault(title, {})[shape] = row, row.tok_s / row.gpus
    if not panels:
        raise ValueError("no rows have a speed; measure them on a GPU first")
    heights = [len(panel) + 2 for panel in panels.values()]
    with _open_figure(out, "long", (8, 0.25 * sum(heights))) as figure:
        axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
        for (title, panel), (bars,) in zip(panels.items(), axes, strict=True):
            ours = [row.implementation.startswith(OURS) for row, _ in panel.values()]
            colors = [COLORS[0] if own else GREY for own in ours]
            values = [value for _, value in panel.values()]
            _fill_bars(bars, [*panel], values, colors, "{:,.0f}", "")
            # Names take half of the width: the title extends over them.
            bars.set_title(title, color=GREY, fontsize=9, loc="right")


@contextlib.contextmanager
def _open_figure(out: Path, salt: str, size: tuple[float, float]) -> Iterator[Figure]:
    """Open a figure and save it as SVG at the end, with text as text and reproducible ids."""
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": salt}
    with mpl.rc_context(style | {"font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        yield figure
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
