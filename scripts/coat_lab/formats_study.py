"""``coat-vlm lab formats``: signal to quantization noise ratios, and models converted to formats.

Each row of the CSV file is one value of one format with one kind of scales:

    source     measure                 value
    normal...  SQNR                    dB, of 1,048,576 drawn values in rows of 4,096
    normal...  expected SQNR           dB, closed form at the drawn values' scale and largest value
    a run      SQNR of weights, inputs, gradients, exp_avg, exp_avg_sq: dB, of one linear layer
    a run      training loss, held-out loss: nats per token of the converted model
    a run      an evaluation set's metric: percent of the converted model

The format ``fp32`` is the run's model as it is. The table has one line per format and scales and
one column per source and measure: means over layers of dB, and otherwise the value, with its
difference to the run's own.

The expected SQNR is that of the distribution, in closed form. For a format with values v_i and the
thresholds t_i between them, the mean squared error is a sum of integrals over the cells of the
format:

    E (Q(x) - x)^2 = 2 sum_i  I2(i) - 2 v_i I1(i) + v_i^2 I0(i),   In(i) = int_cell x^n p(x) dx

The integrals have closed forms for the normal distribution and for Student's t with an integer
number of degrees of freedom (its distribution function: Abramowitz and Stegun 26.7.3 and 26.7.4).
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from coat_bench.rows import Row, format_table, get_origin
from coat_lab.number_formats import (
    NumberFormat,
    Scaling,
    find_scale,
    parse_format,
    parse_scaling,
    quantize,
    sqnr,
)
from coat_lab.run_tensors import (
    capture,
    converted,
    list_tensors,
    make_evaluation,
    measure_losses,
    open_run,
)
from coat_vlm.report.plots import COLORS

SHAPE = (256, 4096)
UNCHANGED = "fp32"
_MARKERS = "os^Dv<>p"


@dataclass(slots=True)
class FormatRow(Row):
    """One value of one format; the columns of the CSV file."""

    source: str
    """A distribution or the name of a run folder."""
    measure: str
    layer: str
    """Empty if the value is not one layer's."""
    format: str
    scales: str
    value: float


def study_formats(
    formats: Sequence[str],
    scales: Sequence[str],
    data: Sequence[str],
    runs: Sequence[Path] = (),
    *,
    num_batches: int = 8,
    evaluate: bool = False,
) -> Iterator[FormatRow]:
    """Measure every format with every kind of scales.

    Args:
        formats: names for :func:`parse_format`.
        scales: names for :func:`parse_scaling`.
        data: names for :func:`get_distribution`.
        runs: run folders with different names.
        num_batches: micro-batches of each of a run's losses.
        evaluate: also answer the runs' evaluation sets.

    Raises:
        ValueError: there is no such format, scaling or distribution, or a run has no eval_sets.
        FileNotFoundError: a folder has no finished run.
    """
    pairs = [(parse_format(f), parse_scaling(s)) for s in scales for f in formats]
    distributions = [get_distribution(name) for name in data]
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(
            f"--runs {' '.join(map(str, runs))}: two folders have the same name, by which the rows "
            "are distinguished; rename one"
        )
    where = get_origin()
    for distribution in distributions:
        x = distribution.draw(SHAPE, torch.Generator().manual_seed(0))
        for fmt, scaling in tqdm(pairs, distribution.name, disable=None):
            scale = find_scale(x, fmt, scaling)
            measured = {"SQNR": sqnr(x, quantize(x, fmt, scaling, scale=scale))}
            if scale.numel() == 1:
                expected = expected_sqnr(fmt, distribution, scale.item(), x.abs().max().item())
                measured |= {} if expected is None else {"expected SQNR": expected}
            for measure, value in measured.items():
                yield FormatRow(
                    *where, distribution.name, measure, "", fmt.name, scaling.name, value
                )
    for folder in runs:
        for measure, layer, fmt_name, scaling_name, value in _study_run(
            folder, pairs, num_batches, evaluate=evaluate
        ):
            yield FormatRow(*where, folder.name, measure, layer, fmt_name, scaling_name, value)


def _study_run(
    folder: Path,
    pairs: Sequence[tuple[NumberFormat, Scaling]],
    num_batches: int,
    *,
    evaluate: bool,
) -> Iterator[tuple[str, str, str, str, float]]:
    """Yield measure, layer, format, scales and value of a run."""
    run = open_run(folder, num_batches)
    answer: Callable[[], dict[str, float]] = make_evaluation(run) if evaluate else dict
    calibration, _ = capture(run.model, run.training[-1])
    for measure, value in (measure_losses(run) | answer()).items():
        yield measure, "", UNCHANGED, "", value
    for what, layer, x in list_tensors(run):
        for fmt, scaling in pairs:
            yield (
                f"SQNR of {what}",
                layer,
                fmt.name,
                scaling.name,
                _layer_sqnr(x, fmt, scaling, what, calibration.get(layer)),
            )
    for fmt, scaling in tqdm(pairs, folder.name, disable=None):
        with converted(run.model, fmt, scaling, calibration):
            for measure, value in (measure_losses(run) | answer()).items():
                yield measure, "", fmt.name, scaling.name, value


def _layer_sqnr(
    x: Tensor, fmt: NumberFormat, scaling: Scaling, what: str, calibration: Tensor | None
) -> float:
    """Return the SQNR of a tensor; only inputs have static scales."""
    kind = "input" if what in ("inputs", "gradients") else "weight"
    scale = None
    if scaling.static and what == "inputs" and calibration is not None:
        scale = find_scale(calibration, fmt, scaling, kind)
    return sqnr(x, quantize(x, fmt, scaling, kind, scale))


def format_rows(rows: Sequence[FormatRow]) -> str:
    """Format the table of the module's docstring."""
    columns = list(dict.fromkeys((row.source, row.measure) for row in rows))
    values = _average(rows)
    lines = []
    for fmt, scales in dict.fromkeys((row.format, row.scales) for row in rows):
        cells = []
        for source, measure in columns:
            value = values.get((source, measure, fmt, scales))
            base = values.get((source, measure, UNCHANGED, ""))
            cells.append(
                "-" if value is None else f"{value:.1f}" if base is None else f"{value:.4f}"
            )
            if value is not None and base is not None and fmt != UNCHANGED:
                cells[-1] += f" ({value - base:+.4f})"
        lines.append([fmt, scales or "-", *cells])
    return format_table(["format", "scales", *(f"{s}: {m}" for s, m in columns)], lines)


def _average(rows: Sequence[FormatRow]) -> dict[tuple[str, str, str, str], float]:
    """Return means over layers by source, measure, format and scales; exact layers are left out."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for row in rows:
        key = (row.source, row.measure, row.format, row.scales)
        groups.setdefault(key, []).append(row.value)
    finite = {key: [v for v in found if math.isfinite(v)] for key, found in groups.items()}
    return {key: float(np.mean(found)) if found else math.inf for key, found in finite.items()}


def draw_rows(rows: Sequence[FormatRow], out: Path) -> None:
    """Draw a panel per source and measure: the formats from left to right, a line per scaling.

    Args:
        rows: what to draw.
        out: the SVG to write.
    """
    values = _average(rows)
    measured = [row for row in rows if row.format != UNCHANGED]
    panels = list(dict.fromkeys((row.source, row.measure) for row in measured))
    formats = list(dict.fromkeys(row.format for row in measured))
    scales = list(dict.fromkeys(row.scales for row in measured))
    width = min(3, len(panels))
    height = -(-len(panels) // width)
    figure = Figure(figsize=(3.6 * width, 2.9 * height), layout="constrained")
    for number, (source, measure) in enumerate(panels):
        axes = figure.add_subplot(height, width, number + 1)
        for place, name in enumerate(scales):
            line = [values.get((source, measure, fmt, name), math.nan) for fmt in formats]
            color, marker = COLORS[place % len(COLORS)], _MARKERS[place % len(_MARKERS)]
            axes.plot(formats, line, marker=marker, color=color, linewidth=0.9, label=name)
        base = values.get((source, measure, UNCHANGED, ""))
        if base is not None:
            axes.axhline(base, color="black", linewidth=0.7, linestyle=":", label=UNCHANGED)
        axes.set_title(f"{source}: {measure}", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(linewidth=0.3)
        if number == 0:
            axes.legend(frameon=False, fontsize=7)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


OUTLIERS = (1e-3, 30.0)
"""``outliers``: share of the elements of a normal distribution that are larger, and how much."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution that is symmetric around 0."""

    name: str
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor]
    """Draws FP32 values of a shape."""
    moments: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None
    """Antiderivatives of p(x), x p(x) and x^2 p(x) at FP64 values; None: no closed form."""


def get_distribution(name: str) -> Distribution:
    """Return ``normal``, ``outliers`` (0.1% of normal values times 30) or ``tN`` (Student's t).

    Raises:
        ValueError: there is no such distribution, or it has no variance.
    """
    if name == "normal":
        return Distribution(name, _draw_normal, _normal_moments)
    if name == "outliers":
        return Distribution(name, _draw_outliers, None)
    found = re.fullmatch(r"t(\d+)", name)
    if found is None or int(found[1]) < 3:
        raise ValueError(
            f"distribution {name!r}: give normal, outliers, or tN for Student's t with N degrees "
            "of freedom, 3 at least, because it has no variance with fewer"
        )
    nu = int(found[1])
    return Distribution(name, partial(_draw_t, nu), partial(_t_moments, nu))


def expected_sqnr(
    fmt: NumberFormat, distribution: Distribution, scale: float, limit: float = math.inf
) -> float | None:
    """Return the SQNR in dB of values of a distribution; None without a closed form.

    Args:
        fmt: the format.
        distribution: the distribution.
        scale: the scale; values beyond ``fmt.max * scale`` saturate.
        limit: larger magnitudes do not occur. With the largest magnitude of a sample this is the
            SQNR of the sample, also where rare values of a heavy tail would change it.
    """
    if distribution.moments is None:
        return None
    values = fmt.values() * scale
    ends = torch.cat([(values[1:] + values[:-1]) / 2, values.new_tensor([math.inf])])
    ends = ends.clamp(max=limit)
    starts = torch.cat([values.new_zeros(1), ends[:-1]])
    integrals = zip(distribution.moments(ends), distribution.moments(starts), strict=True)
    zeroth, first, second = (end - start for end, start in integrals)
    error = (second - 2 * values * first + values.square() * zeroth).sum()
    return 10 * torch.log10(second.sum() / error).item()


def _draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _draw_outliers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    share, factor = OUTLIERS
    larger = torch.rand(shape, generator=generator) < share
    return torch.randn(shape, generator=generator) * torch.where(larger, factor, 1.0)


def _draw_t(nu: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw normal values over the root of a chi-squared mean of ``nu`` squares."""
    squares = sum(torch.randn(shape, generator=generator).square() for _ in range(nu))
    return torch.randn(shape, generator=generator) * (nu / torch.as_tensor(squares)).sqrt()


def _normal_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    density = (-0.5 * x.square()).exp() / math.sqrt(2 * math.pi)
    zeroth = torch.special.ndtr(x)
    return zeroth, -density, zeroth - torch.where(x.isinf(), 0.0, x) * density


def _t_moments(nu: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    spread = 1 + x.square() / nu
    first = -nu / (nu - 1) * math.exp(log_constant) * spread ** (-(nu - 1) / 2)
    # x^2 p(x) = nu ((1 + x^2 / nu) p(x) - p(x)); the first term is t with nu - 2, of another scale.
    zeroth, narrower = _t_cdf(nu, x), _t_cdf(nu - 2, x * math.sqrt((nu - 2) / nu))
    return zeroth, first, nu * ((nu - 1) / (nu - 2) * narrower - zeroth)


def _t_cdf(nu: int, x: Tensor) -> Tensor:
    """Distribution function of Student's t, FP64."""
    angle = (x / math.sqrt(nu)).atan()
    cos, sin = angle.cos(), angle.sin()
    term = cos.clone() if nu % 2 else torch.ones_like(cos)
    total = torch.zeros_like(cos)
    for k in range(2 + nu % 2, nu + 1, 2):
        total += term
        term = term * cos.square() * (k - 1) / k
    inside = 2 / math.pi * (angle + sin * total) if nu % 2 else sin * total
    return (1 + inside) / 2
