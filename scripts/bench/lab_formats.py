"""Measures quantization noise of number formats, and models converted to them after training.

Formats are eXmY floats and intN integers, scales none, tensor, channel, token or groupN, then :mse
and :static (number_formats.py); data normal, tN (Student's t with N degrees of freedom) or outliers
(0.1% of normal values times 30). Of a run, the last stage's linear layers are measured, and the
model's losses with weights and inputs of all linear layers but the output layer converted. Each
line of the CSV file is one value of one format with one kind of scales:

    source     measure                  value
    normal...  SQNR                     dB, of 1,048,576 drawn values in rows of 4,096
    a run      SQNR of weights, inputs, gradients: dB, of one linear layer
    a run      training loss, held-out loss: nats per token of the converted model

The format ``fp32`` is the run's model as it is. The table has one line per format and scales and
one column per source and measure: means over layers of dB, and otherwise the value, with its
difference to the run's own.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import harness
from harness import VersionedResult
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
    num_batches: int = 8,
) -> Iterator[FormatResult]:
    """Measure every format with every kind of scales.

    Raises:
        ValueError: there is no such format, scaling or distribution.
        FileNotFoundError: a folder has no finished run.
    """
    pairs = [(parse_format(f), parse_scaling(s)) for s in scales for f in formats]
    drawn = {name: draw(name, SHAPE) for name in data}
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(
            f"--runs {' '.join(map(str, runs))}: two folders have the same name, by which the rows "
            "are distinguished; rename one"
        )
    where = harness.get_origin()
    for name, x in drawn.items():
        for fmt, scaling in tqdm(pairs, name, disable=None):
            value = sqnr(x, quantize(x, fmt, scaling))
            yield FormatResult(*where, name, "SQNR", "", fmt.name, scaling.name, value)
    for folder in runs:
        for measured in _study_run(folder, pairs, num_batches):
            yield FormatResult(*where, folder.name, *measured)


def _study_run(
    folder: Path, pairs: Sequence[tuple[NumberFormat, Scaling]], num_batches: int
) -> Iterator[tuple[str, str, str, str, float]]:
    """Yield measure, layer, format, scales and value of a run."""
    run = open_run(folder, num_batches)
    calibration, _ = capture(run.model, run.training[-1])
    for measure, value in measure_losses(run).items():
        yield measure, "", UNCHANGED, "", value
    for what, layer, x in list_tensors(run):
        for fmt, scaling in pairs:
            # Only inputs have static scales of other data.
            kind, scale = "weight" if what == "weights" else "input", None
            if scaling.static and what == "inputs" and layer in calibration:
                scale = find_scale(calibration[layer], fmt, scaling, "input")
            value = sqnr(x, quantize(x, fmt, scaling, kind, scale))
            yield f"SQNR of {what}", layer, fmt.name, scaling.name, value
    for fmt, scaling in tqdm(pairs, folder.name, disable=None):
        with converted(run.model, fmt, scaling, calibration):
            for measure, value in measure_losses(run).items():
                yield measure, "", fmt.name, scaling.name, value


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
    return harness.format_table(["format", "scales", *(f"{s}: {m}" for s, m in columns)], lines)


def draw(name: str, shape: tuple[int, int]) -> Tensor:
    """Draw FP32 values with seed 0.

    Args:
        name: ``normal``, ``outliers`` (0.1% of normal values times 30), or ``tN`` (Student's t with
            N degrees of freedom).
        shape: of the values.

    Raises:
        ValueError: there is no such distribution, or it has no variance.
    """
    generator = torch.Generator().manual_seed(0)
    if name == "normal":
        return torch.randn(shape, generator=generator)
    if name == "outliers":
        larger = torch.rand(shape, generator=generator) < 1e-3
        return torch.randn(shape, generator=generator) * torch.where(larger, 30.0, 1.0)
    found = re.fullmatch(r"t(\d+)", name)
    if found is None or int(found[1]) < 3:
        raise ValueError(
            f"distribution {name!r}: give normal, outliers, or tN for Student's t with N degrees "
            "of freedom, 3 at least, because it has no variance with fewer"
        )
    # Normal values over the root of a chi-squared mean of N squares.
    nu = int(found[1])
    squares = sum(torch.randn(shape, generator=generator).square() for _ in range(nu))
    return torch.randn(shape, generator=generator) * (nu / torch.as_tensor(squares)).sqrt()


EXAMPLES = """\
  python scripts/bench/lab_formats.py --formats int8 e4m3 --scales tensor group128 group128:mse
  python scripts/bench/lab_formats.py --runs runs/bf16 runs/coat --data --formats int8 \\
      --scales token tensor:static
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    formats = ["int8", "e3m4", "e4m3", "e5m2"]
    add("--formats", nargs="+", default=formats, help=f"default {' '.join(formats)}")
    add("--scales", nargs="+", default=["tensor"], help="default tensor")
    add("--data", nargs="*", default=["normal", "t4"], help="distributions; default normal t4")
    add("--runs", type=Path, nargs="+", default=[], metavar="RUN", help="finished run folders")
    add("--batches", type=harness.at_least(1), default=8, help="of each loss of a run; default 8")
    add("--csv", type=Path, help="append the results to this file")
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print all formats."""
    if not (args.data or args.runs):
        raise ValueError("nothing to measure: give --data normal t4, --runs RUN, or both")
    study = study_formats(args.formats, args.scales, args.data, args.runs, args.batches)
    results = list(study)
    harness.append_results(args.csv, results)
    harness.say(format_formats(results))


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
