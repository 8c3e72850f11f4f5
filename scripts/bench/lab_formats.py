"""Measures quantization noise of number formats, and models converted to them after training.

Formats are eXmY floats and intN integers, scales none, tensor, channel, token or groupN, then :mse
and :static (number_formats.py); data normal, tN (Student's t with N degrees of freedom) or outliers
(0.1% of normal values times 30). Of a run, the last stage's linear layers are measured, and the
model's losses with weights and inputs of all linear layers but the output layer converted. Each
line of the CSV file is one value of one format with one kind of scales:

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

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from harness import (
    VersionedResult,
    append_results,
    at_least,
    format_table,
    get_origin,
    make_parser,
    run_script,
    say,
)
from number_formats import (
    NumberFormat,
    Scaling,
    find_scale,
    parse_format,
    parse_scaling,
    quantize,
    sqnr,
)
from run_tensors import (
    capture,
    converted,
    list_tensors,
    make_evaluation,
    measure_losses,
    open_run,
)

SHAPE = (256, 4096)
UNCHANGED = "fp32"


@dataclass(slots=True)
class FormatResult(VersionedResult):
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
) -> Iterator[FormatResult]:
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
                yield FormatResult(
                    *where, distribution.name, measure, "", fmt.name, scaling.name, value
                )
    for folder in runs:
        for measure, layer, fmt_name, scaling_name, value in _study_run(
            folder, pairs, num_batches, evaluate=evaluate
        ):
            yield FormatResult(*where, folder.name, measure, layer, fmt_name, scaling_name, value)


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


def format_formats(results: Sequence[FormatResult]) -> str:
    """Format the table of the module's docstring."""
    columns = list(dict.fromkeys((result.source, result.measure) for result in results))
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for r in results:
        groups.setdefault((r.source, r.measure, r.format, r.scales), []).append(r.value)
    # Means over layers; exact layers are left out.
    finite = {key: [v for v in group if math.isfinite(v)] for key, group in groups.items()}
    values = {key: float(np.mean(group)) if group else math.inf for key, group in finite.items()}
    lines = []
    for fmt, scales in dict.fromkeys((result.format, result.scales) for result in results):
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


EXAMPLES = """\
  python scripts/bench/lab_formats.py --formats int8 e4m3 --scales tensor group128 group128:mse
  python scripts/bench/lab_formats.py --runs runs/bf16 runs/coat --data --formats int8 \\
      --scales token tensor:static --eval
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    formats = ["int8", "e3m4", "e4m3", "e5m2"]
    add("--formats", nargs="+", default=formats, help=f"default {' '.join(formats)}")
    add("--scales", nargs="+", default=["tensor"], help="default tensor")
    add("--data", nargs="*", default=["normal", "t4"], help="distributions; default normal t4")
    add("--runs", type=Path, nargs="+", default=[], metavar="RUN", help="finished run folders")
    add("--batches", type=at_least(1), default=8, help="of each loss of a run; default 8")
    add("--eval", action="store_true", help="also answer eval_samples of each of a run's eval_sets")
    add("--csv", type=Path, help="append the results to this file")
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print all formats."""
    if not (args.data or args.runs):
        raise ValueError("nothing to measure: give --data normal t4, --runs RUN, or both")
    if args.eval and not args.runs:
        raise ValueError("--eval answers a run's evaluation sets; give --runs RUN")
    study = study_formats(
        args.formats, args.scales, args.data, args.runs,
        num_batches=args.batches, evaluate=args.eval,
    )  # fmt: skip
    results = list(study)
    append_results(args.csv, results)
    say(format_formats(results))


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), main))
