"""Measures the signal to quantization noise ratio (SQNR) of number formats, in dB.

Draws 1,048,576 values in rows of 4,096; the data are normal, tN (Student's t) or outliers (0.1%
of normal values times 30).

Values are FP32 numbers that the format has, so a simulated operand is the real one. Formats:

    eXmY       sign, X exponent bits, Y mantissa bits: e5m2, e8m7 (BF16), e5m10 (FP16)
    intN       N bits, from -(2^(N-1) - 1) to 2^(N-1) - 1

A float's largest exponent means infinity and NaN, as in IEEE 754. In OCP's e4m3, e3m2, e2m3
and e2m1 it has numbers, except that the bit pattern of only ones is NaN in e4m3 (maximum 448).
Casts round to nearest, a tie to the even bit pattern, and saturate; NaN stays NaN.

Scales multiply on dequantize, as in ``coat_kernels.formats``, and are FP32:

    none       no scale
    tensor     one scale
    token      one scale per row: per token, or output channel of a weight
    groupN     one scale per N consecutive elements of a row

The largest magnitude becomes the format's largest value (``max``), or the range is the one with the
smallest mean squared error (``mse``), of 40 ranges from amax to amax / 30.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

import harness
from harness import VersionedResult

SHAPE = (256, 4096)
FN_FORMATS = ("e4m3", "e3m2", "e2m3", "e2m1")
"""Formats that OCP defines without infinities (8-bit Floating Point, Microscaling)."""
MSE_RATIOS = tuple(2.0 ** (-i / 8) for i in range(40))
"""Ranges that are tried for ``mse``, relative to amax."""

_NAME = re.compile(r"e(\d+)m(\d+)|int(\d+)")
_SCALING = re.compile(r"(none|tensor|token|group([1-9]\d*))(:mse)?")


@dataclass(slots=True)
class FormatResult(VersionedResult):
    """One value of one format; the columns of the CSV file."""

    data: str
    format: str
    scales: str
    value: float


def study_formats(
    formats: Sequence[str], scales: Sequence[str], data: Sequence[str]
) -> list[FormatResult]:
    """Measure every format with every kind of scales on every distribution.

    ValueError: there is no such format, scaling or distribution.
    """
    pairs = [(parse_format(f), parse_scaling(s)) for s in scales for f in formats]
    values = {name: draw(name, SHAPE) for name in data}
    origin, results = harness.get_origin(), []
    for (name, x), (fmt, scaling) in tqdm([*product(values.items(), pairs)], disable=None):
        value = sqnr(x, quantize(x, fmt, scaling))
        results.append(FormatResult(*origin, name, fmt.name, scaling.name, value))
    return results


def draw(name: str, shape: tuple[int, int]) -> Tensor:
    """Draw FP32 values of a distribution (module docstring) with seed 0.

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


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A format: ``2^m`` equally spaced values per binade, and equally spaced ones below."""

    name: str
    mantissa_bits: int
    """m; values below 2^min_exponent are multiples of 2^(min_exponent - m)."""
    min_exponent: int
    """Exponent of the smallest normal number. An integer format has no normal numbers."""
    max: float


def parse_format(name: str) -> NumberFormat:
    """Return the format called ``name``; ValueError if there is none or FP32 cannot simulate it."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"format {name!r}: give eXmY for a float of X exponent and Y mantissa bits, or intN "
            "for an integer of N bits"
        )
    if found[3] is not None:
        bits = int(found[3])
        if not 2 <= bits <= 24:
            raise ValueError(
                f"format {name!r}: allowed: int2 to int24; one bit is the sign, and FP32 has "
                "24 significant bits"
            )
        return NumberFormat(name, bits - 1, bits - 1, float(2 ** (bits - 1) - 1))
    exponent, m, fn = int(found[1]), int(found[2]), name in FN_FORMATS
    if exponent > 8 or m > 23:
        raise ValueError(
            f"format {name!r}: formats are simulated in FP32, which has 8 exponent and 23 mantissa "
            "bits"
        )
    if m == 0 and exponent < 2:
        raise ValueError(f"format {name!r} cannot exist: its only value is 0")
    min_exponent = 2 - 2 ** max(0, exponent - 1) if exponent else 0
    has_nan = not fn or 1 + exponent + m > 6
    if exponent == 0 or (exponent == 1 and not fn):  # all numbers are subnormal
        largest = (1 - 2.0**-m) * 2.0**min_exponent
    else:
        top = min_exponent + 2**exponent - 2  # with numbers in the last binade
        if fn:
            largest = (2 - 2.0**-m * (1 + has_nan)) * 2.0**top
        else:
            largest = (2 - 2.0**-m) * 2.0 ** (top - 1)
    return NumberFormat(name, m, min_exponent, largest)


def round_to(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Round FP32, BF16 or FP16 values to a format; returns FP32."""
    x32 = x.float()
    bits = x32.view(torch.int32) & 0x7FFFFFFF
    magnitude = bits.view(torch.float32)
    drop = 23 - fmt.mantissa_bits
    rounded = magnitude
    if drop:  # a carry goes into the exponent, as it should
        odd = (bits >> drop) & 1
        rounded = ((bits + ((1 << (drop - 1)) - 1) + odd) & -(1 << drop)).view(torch.float32)
    # FP32's own addition rounds to multiples of 2^(min_exponent - m).
    unit = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits + 23)
    rounded = torch.where(magnitude < 2.0**fmt.min_exponent, (magnitude + unit) - unit, rounded)
    result = torch.copysign(rounded.clamp(max=fmt.max), x32)
    return torch.where(bits > 0x7F800000, x32, result)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Granularity and range of scales."""

    granularity: Literal["none", "tensor", "token", "group"]
    group: int = 0
    """Elements of a group."""
    mse: bool = False
    """Whether the range is the one with the smallest mean squared error."""

    @property
    def name(self) -> str:
        """The text that :func:`parse_scaling` reads."""
        size = str(self.group) if self.group else ""
        return f"{self.granularity}{size}{':mse' * self.mse}"


def parse_scaling(name: str) -> Scaling:
    """Return a scaling by name (a granularity, then ``:mse``); ValueError if there is none."""
    found = _SCALING.fullmatch(name)
    if found is None:
        raise ValueError(
            f"scales {name!r}: give none, tensor, token or groupN, then :mse for the "
            "range with the smallest error"
        )
    group = int(found[2] or 0)
    granularity = "group" if group else found[1]
    mse = found[3] is not None
    if mse and granularity == "none":
        raise ValueError(f"scales {name!r}: without scales there is no range to choose")
    return Scaling(granularity, group, mse)  # pyright: ignore[reportArgumentType]


def find_scale(x: Tensor, fmt: NumberFormat, scaling: Scaling) -> Tensor:
    """Compute the scales of [rows, K], FP32, broadcastable to what :func:`_split` returns.

    ValueError: groups do not divide K.
    """
    groups, dims = _split(x.float(), scaling)
    if scaling.granularity == "none":
        return torch.ones((), device=x.device)
    amax = groups.abs().amax(dims, keepdim=True)
    scale = torch.where(amax > 0, amax, 1.0) / fmt.max
    if not scaling.mse:
        return scale
    least = torch.full_like(scale, math.inf)
    best = scale
    for ratio in MSE_RATIOS:
        tried = scale * ratio
        error = (round_to(groups / tried, fmt) * tried - groups).square().sum(dims, keepdim=True)
        best = torch.where(error < least, tried, best)
        least = torch.minimum(error, least)
    return best


def quantize(x: Tensor, fmt: NumberFormat, scaling: Scaling) -> Tensor:
    """Quantize and dequantize [..., K] in the dtype of x; ValueError: groups do not divide K."""
    rows = x.detach().reshape(-1, x.shape[-1])
    scale = find_scale(rows, fmt, scaling)
    groups, _ = _split(rows.float(), scaling)
    return (round_to(groups / scale, fmt) * scale).view(x.shape).to(x.dtype)


def _split(x: Tensor, scaling: Scaling) -> tuple[Tensor, tuple[int, ...]]:
    """Return x [rows, K], with groups [rows, K / G, G], and the dimensions that share a scale."""
    if scaling.granularity == "group":
        if x.shape[-1] % scaling.group:
            raise ValueError(
                f"scales {scaling.name!r}: rows have {x.shape[-1]} elements, which groups of "
                f"{scaling.group} do not divide; give a divisor"
            )
        return x.unflatten(-1, (-1, scaling.group)), (-1,)
    return x, (-1,) if scaling.granularity == "token" else tuple(range(x.dim()))


def sqnr(x: Tensor, quantized: Tensor) -> float:
    """Return the signal to quantization noise ratio in dB; infinite without noise."""
    signal, noise = (t.double().square().sum().item() for t in (x, x.double() - quantized.double()))
    return 10 * math.log10(signal / noise) if noise else math.inf


COLUMNS = {"format": "format", "scales": "scales", "data": "data", "SQNR, dB": "value:1"}
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
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print all formats."""
    results = study_formats(args.formats, args.scales, args.data)
    harness.append_results(args.csv, results)
    harness.say(harness.format_results(results, COLUMNS))


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
