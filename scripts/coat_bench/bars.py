"""The rows of the layer benchmark as a picture: bars of time and of saved memory."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from coat_bench.layer import OURS, REFERENCE, LayerRow
from coat_bench.shapes import LayerShape
from coat_vlm.report.plots import COLOURS, GREY


def last_run(rows: Sequence[LayerRow], shape: LayerShape, attention: str) -> list[LayerRow]:
    """The rows that one process made of a block, those nearest the end; the reference is first.

    Args:
        rows: of a file.
        shape: the block, with its batch and length.
        attention: the backend of SDPA.

    Raises:
        ValueError: there are none.
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
    """Draw one line of panels per run: milliseconds of both passes, MiB kept between them.

    Our implementations are coloured; what has no speed is left out. Two drawings of the same rows
    are the same file.

    Args:
        runs: of :func:`last_run`.
        out: the SVG to write.
    """
    drawn = [[row for row in run if not row.problem] for run in runs]
    # Text stays text; ids are hashed with a fixed salt, not a random one.
    fixed = {"svg.fonttype": "none", "svg.hashsalt": "layer"}
    with mpl.rc_context(fixed | {"font.family": "sans-serif", "font.size": 9}):  # pyright: ignore[reportArgumentType]
        heights = [len(run) + 2 for run in drawn]
        figure = Figure(figsize=(9, 0.25 * sum(heights)), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(len(drawn), 2, squeeze=False, height_ratios=heights)
        for run, (time, memory) in zip(drawn, panels, strict=True):
            first = run[0]
            what = f"{first.shape}, {first.tokens // first.length} x {first.length:,} tokens"
            _bars(time, run, "fwdbwd_ms", f"{what}: fwd + bwd, ms", 1)
            _bars(memory, run, "saved_mib", "saved between them, MiB", 0)
            memory.set_yticklabels([])
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})


def _bars(axes: Axes, run: Sequence[LayerRow], column: str, title: str, digits: int) -> None:
    names = [row.implementation for row in run]
    colours = [COLOURS[0] if name.startswith(OURS) else GREY for name in names]
    bars = axes.barh(range(len(run)), [getattr(row, column) for row in run], 0.7, color=colours)
    axes.bar_label(bars, fmt=f"%.{digits}f", padding=3, color=GREY)
    axes.set_yticks(range(len(run)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(title, color=GREY, fontsize=9, loc="left")
    axes.tick_params(colors=GREY, length=0)
    axes.xaxis.set_visible(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
