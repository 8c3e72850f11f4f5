"""The rows of the step benchmark as a picture: tokens per second against peak memory."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from coat_bench.layer import OURS
from coat_bench.step_case import StepRow
from coat_vlm.report.plots import COLOURS, GREY

_MARKERS = "os^Dv<>p"


def draw_steps(rows: Sequence[StepRow], model: str, out: Path) -> None:
    """Draw a point per implementation and batch; a panel for both passes, one for whole steps.

    Of rows that differ in their measurement alone the last is drawn. Our implementations are
    coloured. Two drawings of the same rows are the same file.

    Args:
        rows: of a file.
        model: whose rows are drawn.
        out: the SVG to write.

    Raises:
        ValueError: there are no rows of that model with a speed and a peak.
    """
    points = {
        (_series(row), row.batch, row.tokens): row  # tokens: of all accumulated micro-batches
        for row in rows
        if row.model == model and row.tok_s is not None and row.peak_gb is not None
    }
    passes = [row for row in points.values() if row.optimizer == "none"]
    steps = [row for row in points.values() if row.optimizer != "none"]
    panels = [
        (title, found)
        for title, found in (
            (f"{model}: forward + backward", passes), (f"{model}: whole step", steps)
        )
        if found
    ]  # fmt: skip
    if not panels:
        raise ValueError(f"no rows of {model} have a speed and a peak; measure them on a GPU first")
    # Text stays text; ids are hashed with a fixed salt, not a random one.
    fixed = {"svg.fonttype": "none", "svg.hashsalt": "step"}
    with mpl.rc_context(fixed | {"font.family": "sans-serif", "font.size": 9}):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(8, 3.6 * len(panels)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(len(panels), squeeze=False)
        for (title, found), (panel,) in zip(panels, axes, strict=True):
            _panel(panel, title, found)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})


def _series(row: StepRow) -> str:
    """What a line connects: everything but the batch."""
    words = [row.implementation]
    if row.optimizer != "none":
        gpus = "GPU" if row.gpus == 1 else "GPUs"
        words.append(f"{row.optimizer}, ZeRO-{row.zero}, {row.gpus} {gpus}")
    if row.checkpointing:
        words.append("checkpointing")
    return ", ".join(words)


def _panel(axes: Axes, title: str, rows: Sequence[StepRow]) -> None:
    names = list(dict.fromkeys(_series(row) for row in rows))
    colours = iter(COLOURS * len(names))
    for number, name in enumerate(names):
        own = sorted((row for row in rows if _series(row) == name), key=lambda row: row.batch)
        colour = next(colours) if name.startswith(OURS) else GREY
        x, y = [row.peak_gb for row in own], [row.tok_s for row in own]
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(x, y, marker=marker, color=colour, label=name, linewidth=1)  # pyright: ignore[reportArgumentType]
        for row, across, up in zip(own, x, y, strict=True):
            axes.annotate(
                f"B{row.batch}", (across, up), (4, 4), textcoords="offset points", color=GREY
            )  # pyright: ignore[reportCallIssue, reportArgumentType] - None is left out above
    axes.set_title(title, color=GREY, fontsize=9, loc="left")
    axes.set_xlabel("peak GB of a GPU", color=GREY)
    axes.set_ylabel("tokens/s", color=GREY)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    axes.tick_params(colors=GREY)
    axes.legend(frameon=False, labelcolor=GREY, fontsize=8)
    for spine in axes.spines.values():
        spine.set_color(GREY)
