"""Simulated formats against torch's, against a list of all values, and against integration."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from lab_formats import (
    MSE_RATIOS,
    draw,
    find_scale,
    parse_format,
    parse_scaling,
    quantize,
    round_to,
    sqnr,
)

ALL_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def more_values() -> Tensor:
    """A million FP32 values of all exponents."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=draw, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    both_nan = found.isnan() & expected.isnan()
    bits = found.view(torch.int32), expected.view(torch.int32)
    assert ((bits[0] == bits[1]) | both_nan).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("e4m3", torch.float8_e4m3fn),
        ("e5m2", torch.float8_e5m2),
        ("e5m10", torch.float16),
        ("e8m7", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("values", [ALL_BF16.float(), more_values()], ids=["all BF16", "FP32"])
def test_formats_of_torch_are_equal_bit_by_bit(
    name: str, dtype: torch.dtype, values: Tensor
) -> None:
    fmt = parse_format(name)
    assert fmt.max == torch.finfo(dtype).max
    expected = values.clamp(-fmt.max, fmt.max).to(dtype).float()  # torch's cast does not saturate
    assert_same_bits(round_to(values, fmt), expected)


FLOATS = ["e2m1", "e3m2", "e3m4", "e0m3", "e3m0"]


def list_values(name: str) -> list[tuple[Fraction, int]]:
    """All non-negative finite values of a float with their bit patterns, written out."""
    x, m = int(name[1]), int(name[3])
    finite = name in ("e2m1", "e2m3", "e3m2")
    bias = 2 ** max(0, x - 1) - 1 if x else 1
    values = []
    for pattern in range(2 ** (x + m)):
        exponent, mantissa = divmod(pattern, 2**m)
        ones = pattern == 2 ** (x + m) - 1
        if (ones and finite and 1 + x + m > 6) or (not finite and x and exponent == 2**x - 1):
            continue
        leading = 1 if exponent else 0
        power = Fraction(2) ** (max(exponent, 1) - bias)
        values.append(((leading + Fraction(mantissa, 2**m)) * power, pattern))
    return values


@pytest.mark.parametrize("name", FLOATS)
def test_any_float_rounds_to_the_nearest_of_its_values(name: str) -> None:
    values = torch.tensor([float(value) for value, _ in list_values(name)], dtype=torch.float64)
    odd = torch.tensor([pattern % 2 for _, pattern in list_values(name)])
    fmt = parse_format(name)
    x = torch.cat([ALL_BF16[ALL_BF16.isfinite()].float(), (values[1:] + values[:-1]).float() / 2])
    distance = (x.double().abs().clamp(max=fmt.max)[:, None] - values).abs()  # exact in FP64
    # The nearest value; of two, the one with the even bit pattern.
    is_nearest = distance == distance.amin(1, keepdim=True)
    nearest = values[torch.where(is_nearest, odd, 2).argmin(1)]
    assert_same_bits(round_to(x, fmt), nearest.float().copysign(x))


@pytest.mark.parametrize("bits", [2, 4, 8, 12])
def test_integers_round_and_saturate(bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    values = ALL_BF16.float()
    assert_same_bits(
        round_to(values, parse_format(f"int{bits}")), values.clamp(-most, most).round()
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("e0m0", "format 'e0m0' cannot exist: its only value is 0"),
        ("e1m0", "cannot exist"),
        ("int1", "allowed: int2 to int24"),
        ("e9m2", "8 exponent and 23 mantissa bits"),
        ("fp8", "give eXmY"),
    ],
)
def test_formats_that_cannot_exist(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        parse_format(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["tensor:static", "group", "group0", "row", "none:mse"])
def test_scales_that_cannot_exist(name: str) -> None:
    with pytest.raises(ValueError, match=rf"scales '{name}': "):
        parse_scaling(name)


@pytest.mark.parametrize("name", ["tensor", "token", "group8", "token:mse"])
def test_each_part_has_its_own_scale(name: str) -> None:
    """Elements that share a scale, one part after another."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    x *= 10.0 ** torch.arange(-3, 3)[:, None]
    fmt, scaling = parse_format("e3m2"), parse_scaling(name)
    parts = x.view(-1, 8) if name == "group8" else x if "token" in name else x.view(1, -1)
    expected = []
    for part in parts:
        scales = [part.abs().max() / fmt.max]
        if scaling.mse:
            scales = [scales[0] * ratio for ratio in MSE_RATIOS]
        tried = [round_to(part / scale, fmt) * scale for scale in scales]
        expected.append(min(tried, key=lambda q: float((q - part).square().sum())))
    found = quantize(x, fmt, scaling)
    assert torch.equal(found.flatten(), torch.cat(expected))


def test_groups_have_to_divide_a_row() -> None:
    with pytest.raises(ValueError, match="rows have 30 elements, which groups of 8"):
        quantize(torch.ones(2, 30), parse_format("int8"), parse_scaling("group8"))


def test_zeros_and_noise() -> None:
    int4, tensor = parse_format("int4"), parse_scaling("tensor")
    assert not quantize(torch.zeros(2, 4), int4, tensor).any()
    assert find_scale(torch.tensor([[-14.0, 1.0]]), int4, tensor).item() == 2
    assert sqnr(torch.ones(4), torch.ones(4)) == math.inf
    assert sqnr(torch.ones(4), torch.full((4,), 0.9)) == pytest.approx(20, abs=1e-4)


@pytest.mark.parametrize("name", ["int8", "e4m3", "e3m4", "e2m1"])
def test_sqnr_of_normal_values_equals_integration(name: str) -> None:
    """Distances to the nearest value times the density, summed over two million points."""
    fmt, x = parse_format(name), draw("normal", (256, 4096))
    scale = find_scale(x, fmt, parse_scaling("tensor"))
    points = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) * (8 / 2_000_000)
    density = (-0.5 * points.square()).exp()
    rounded = round_to((points / scale).float(), fmt).double() * scale.double()
    noise = ((rounded - points).square() * density).sum()
    expected = 10 * math.log10((points.square() * density).sum().item() / noise.item())
    found = sqnr(x, quantize(x, fmt, parse_scaling("tensor")))
    assert found == pytest.approx(expected, abs=0.05)


def test_draws_have_the_variance_of_their_distribution() -> None:
    for name, variance in (("normal", 1), ("t9", 9 / 7), ("outliers", 1 + 899e-3)):
        assert draw(name, (1000, 1000)).square().mean().item() == pytest.approx(variance, rel=0.05)
    with pytest.raises(ValueError, match="distribution 't2': give normal, outliers, or tN"):
        draw("t2", (2, 2))
