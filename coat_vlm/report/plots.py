"""Plots the training curves of one stage as SVG images in ``data:`` URLs.

The background is transparent and the axes are medium gray, for light and dark pages.
"""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from coat_vlm.report.run_folder import StageLog

GREY = "#808691"
COLORS = ("#3b82f6", "#e07b39", "#2e9e6b", "#a066d3", "#d6455d", "#8a7a2f")
MAX_POINTS = 1200  # longer series are averaged over consecutive steps
SMOOTHING_SHARE = 50  # the window of the moving average is 1/50 of the stage


Draw = Callable[[Axes, StageLog], None]
Value = Callable[[Mapping[str, Any]], float | None]  # of an entry of metrics.jsonl


def plot_stage(stage: StageLog) -> list[tuple[str, str]]:
    """Plot the curves that the log has values for; return titles and URLs."""
    drawn: list[tuple[str, Draw, str]] = [
        ("loss", _draw_loss, "loss"),
        ("reward margin of the chosen answers", _draw_reward("margins"), "rewards"),
        ("share of pairs with the right order", _draw_reward("accuracies"), "rewards"),
        ("gradient norm", _draw_grad_norm, "grad_norm"),
        ("tokens/s", _draw_tokens_per_s, "tokens_per_s"),
    ]
    plots = [
        (title, _render(stage, draw))
        for title, draw, key in drawn
        if any(row.get(key) is not None for row in stage.steps)
    ]
    if stage.evaluations:
        plots.insert(1, ("evaluations in training, %", _render(stage, _draw_evaluations)))
    return plots


def _draw_loss(axes: Axes, stage: StageLog) -> None:
    _plot_noisy(axes, *_series(stage.steps, _at("loss")))
    sources = dict.fromkeys(name for row in stage.validations for name in row.get("losses") or {})
    curves = {f"val {source}": _at("losses", source) for source in sources}
    _plot_points(axes, stage.validations, curves, COLORS[1:])


def _draw_evaluations(axes: Axes, stage: StageLog) -> None:
    sets = dict.fromkeys(name for row in stage.evaluations for name in row["headline"])
    last = stage.evaluations[-1]["headline"]
    curves = {f"{name} {last.get(name, '')}": _headline_of(name) for name in sets}
    _plot_points(axes, stage.evaluations, curves, COLORS)
    axes.set_ylim(0, 105)


def _draw_grad_norm(axes: Axes, stage: StageLog) -> None:
    steps, norms = _series(stage.steps, _at("grad_norm"))
    _plot_noisy(axes, steps, norms)
    finite = norms[np.isfinite(norms)]
    if finite.size and finite.min() > 0 and finite.max() > 20 * finite.min():
        axes.set_yscale("log")


def _draw_reward(name: str) -> Draw:
    return lambda axes, stage: _plot_noisy(axes, *_series(stage.steps, _at("rewards", name)))


def _draw_tokens_per_s(axes: Axes, stage: StageLog) -> None:
    _plot_noisy(axes, *_series(stage.steps, _at("tokens_per_s")))
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_ylim(bottom=0)


def _plot_noisy(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """Plot the values as a faint line, and their moving average with the label ``train``."""
    axes.plot(steps, values, color=COLORS[0], linewidth=0.8, alpha=0.35)
    window = max(1, len(values) // SMOOTHING_SHARE)
    axes.plot(steps, _smooth(values, window), color=COLORS[0], linewidth=1.6, label="train")


def _plot_points(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Value],
    colors: Sequence[str],
) -> None:
    for (label, value), color in zip(curves.items(), cycle(colors), strict=False):
        axes.plot(*_series(rows, value), "o-", color=color, markersize=4, linewidth=1, label=label)
    axes.legend(frameon=False, labelcolor=GREY, fontsize=8)


def _at(*keys: str) -> Value:
    def value(row: Any) -> float | None:
        for key in keys:
            row = (row or {}).get(key)
        return row

    return value


def _headline_of(name: str) -> Value:
    return lambda row: _at("metrics", name, row["headline"].get(name))(row)


def _series(rows: Sequence[Mapping[str, Any]], value: Value) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values as float arrays of at most MAX_POINTS; NaN for absent values."""
    steps = np.array([row["step"] for row in rows], dtype=float)
    values = np.array([value(row) for row in rows], dtype=float)  # None becomes NaN
    size = math.ceil(len(steps) / MAX_POINTS)
    starts = np.arange(0, len(steps), max(size, 1))
    lengths = np.diff(np.append(starts, len(steps)))
    return np.add.reduceat(steps, starts) / lengths, np.add.reduceat(values, starts) / lengths


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Compute the centered moving average over ``window`` values, ignoring NaN."""
    finite = np.isfinite(values)
    kernel = np.ones(window)
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    weight = np.convolve(finite.astype(float), kernel, mode="same")
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)


def _render(stage: StageLog, draw: Draw) -> str:
    # Text stays text in the reader's sans-serif font: smaller files, sharp at any zoom.
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(4.2, 2.4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes, stage)
        axes.set_xlabel("step", color=GREY)
        axes.tick_params(colors=GREY, which="both")
        axes.grid(color=GREY, alpha=0.25, linewidth=0.5)
        for spine in axes.spines.values():
            spine.set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
