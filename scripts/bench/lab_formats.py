"""Measures the signal to quantization noise ratio (SQNR) of number formats, in dB.

Of 1,048,576 drawn values in rows of 4,096. Formats are eXmY floats and intN integers; scales none,
tensor, channel, token or groupN, then :mse for the range with the smallest error
(number_formats.py); data normal, tN (Student's t) or outliers (0.1% of normal values times 30).
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import harness
from harness import VersionedResult
from number_formats import parse_format, parse_scaling, quantize, sqnr

SHAPE = (256, 4096)


@dataclass(slots=True)
class FormatResult(VersionedResult):
    """One value of one format; the columns of the CSV file."""

    source: str
    """The distribution."""
    measure: str
    format: str
    scales: str
    value: float


def study_formats(
    formats: Sequence[str], scales: Sequence[str], data: Sequence[str]
) -> list[FormatResult]:
    """Measure every format with every kind of scales on every distribution.

    Raises:
        ValueError: there is no such format, scaling or distribution.
    """
    pairs = [(parse_format(f), parse_scaling(s)) for s in scales for f in formats]
    values = {name: draw(name, SHAPE) for name in data}
    origin, results = harness.get_origin(), []
    for (name, x), (fmt, scaling) in tqdm([*product(values.items(), pairs)], disable=None):
        value = sqnr(x, quantize(x, fmt, scaling))
        results.append(FormatResult(*origin, name, "SQNR", fmt.name, scaling.name, value))
    return results


def format_formats(results: Sequence[FormatResult]) -> str:
    """Format a Markdown table: one line per format and scales, one column per distribution."""
    sources = list(dict.fromkeys(result.source for result in results))
    values = {(r.source, r.format, r.scales): r.value for r in results}
    lines = [
        [fmt, scales, *(f"{values[source, fmt, scales]:.1f}" for source in sources)]
        for fmt, scales in dict.fromkeys((result.format, result.scales) for result in results)
    ]
    return harness.format_table(["format", "scales", *sources], lines)


def draw(name: str, shape: tuple[int, int]) -> Tensor:
    """Draw FP32 values of a distribution (module docstring) with seed 0.

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
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    formats = ["int8", "e3m4", "e4m3", "e5m2"]
    add("--formats", nargs="+", default=formats, help=f"default {' '.join(formats)}")
    add("--scales", nargs="+", default=["tensor"], help="default tensor")
    add("--data", nargs="+", default=["normal", "t4"], help="distributions; default normal t4")
    add("--csv", type=Path, help="append the results to this file")
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print all formats."""
    results = study_formats(args.formats, args.scales, args.data)
    harness.append_results(args.csv, results)
    harness.say(format_formats(results))


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
