"""Properties of quantization, and of products of codes, for any input."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from op_check import assert_same_bits
from torch import Tensor

from coat_kernels import (
    E4M3,
    E5M2,
    GROUP_SIZES,
    OPS,
    Format,
    dequantize_group,
    quantize_group,
    quantize_layouts,
    quantize_tensor,
)
from op_cases import run_op

hypothesis = pytest.importorskip("hypothesis")
numpy_strategies = pytest.importorskip("hypothesis.extra.numpy")
st = hypothesis.strategies
given = hypothesis.given


Run = Callable[[str, Sequence[Any]], list[Tensor]]
formats = st.sampled_from([E4M3, E5M2])
group_sizes = st.sampled_from(GROUP_SIZES)


def matrices(elements: Any) -> Any:
    """FP32 [rows, 128] of few distinct elements, repeated: enough for everything here."""
    shapes = st.tuples(st.integers(1, 5), st.just(128))
    arrays = numpy_strategies.arrays(np.float32, shapes, elements=elements, fill=elements)
    return arrays.map(torch.from_numpy)


finite = matrices(st.floats(width=32, allow_nan=False, allow_infinity=False))
moderate = matrices(st.floats(-(2.0**20), 2.0**20, width=32))
# Beyond 1.9 * 2^127, rounding up to the next FP8 value leaves FP32: infinity, and rightly so.
LARGEST = 1.75 * 2.0**127


any_value = matrices(
    st.floats(-LARGEST, LARGEST, width=32)
    | st.sampled_from([float("nan"), float("inf"), -float("inf")])
)


def run_reference(op: str, args: Sequence[Any]) -> list[Tensor]:
    return run_op(op, OPS[op].reference, args)


def half_step(q: Tensor, fmt: Format) -> Tensor:
    """Half of the distance from a code's value to the next larger one, in units of the scale."""
    mantissa_bits = 3 if fmt == E4M3 else 2
    exponent = torch.frexp(q.double()).exponent - 1
    smallest_normal = int(np.log2(fmt.min_subnormal)) + mantissa_bits
    return torch.exp2(exponent.clamp_min(smallest_normal).double() - mantissa_bits - 1)


@given(finite, group_sizes, formats)
def test_group_error_is_at_most_half_a_step(x: Tensor, size: int, fmt: Format):
    quantized = quantize_group(x, size, fmt)
    scale = torch.exp2(quantized.exponents.double() - 127).repeat_interleave(size, -1)
    error = (quantized.q.double() * scale - x.double()).abs()
    assert (error <= half_step(quantized.q, fmt) * scale).all()


@given(finite, formats)
def test_errors_of_a_tensor_are_at_most_half_a_step(x: Tensor, fmt: Format):
    quantized = quantize_tensor(x, fmt)
    scale = quantized.scale.double()
    error = (quantized.q.double() * scale - x.double()).abs()
    # The scale and its inverse are rounded to FP32: three roundings beside the one to FP8.
    inexact = 3 * 2.0**-24 * x.double().abs()
    assert (error <= half_step(quantized.q, fmt) * scale + inexact).all()


@given(moderate, group_sizes, formats, st.integers(-40, 40))
def test_scaling_by_a_power_of_two_changes_the_exponents_only(
    x: Tensor, size: int, fmt: Format, power: int
):
    x = torch.where(x.abs() < 2.0**-20, 0.0, x)  # nothing reaches FP32's subnormals
    plain, scaled = quantize_group(x, size, fmt), quantize_group(x * 2.0**power, size, fmt)
    assert_same_bits("codes", scaled.q, plain.q)
    peaks = x.view(len(x), -1, size).abs().amax(-1)
    expected = torch.where(peaks > 0, plain.exponents.int() + power, 1)
    assert scaled.exponents.tolist() == expected.tolist()
    tensor, scaled_tensor = quantize_tensor(x, fmt), quantize_tensor(x * 2.0**power, fmt)
    assert_same_bits("codes", scaled_tensor.q, tensor.q)
    assert not x.any() or scaled_tensor.scale == tensor.scale * 2.0**power


@given(any_value, formats, st.integers(0, 20))
def test_rows_of_zeros_appended_change_no_other_row(x: Tensor, fmt: Format, extra: int):
    longer = torch.cat([x, torch.zeros(extra, 128)])
    plain, padded = (
        quantize_layouts([values], fmt, rows=True, transposed=True) for values in (x, longer)
    )
    assert_same_bits("scale", padded[0].scale, plain[0].scale)
    assert_same_bits("rows", padded[0].q[: len(x)], plain[0].q)
    columns = slice(0, len(x))
    assert_same_bits("transposed", padded[1].q[:, columns], plain[1].q[:, columns])
    assert_same_bits(
        "groups", quantize_group(longer, 32, fmt).q[: len(x)], quantize_group(x, 32, fmt).q
    )


@given(any_value, group_sizes, formats)
def test_groups_are_zero_finite_or_nan_as_a_whole(x: Tensor, size: int, fmt: Format):
    groups = x.view(len(x), -1, size)
    decoded = dequantize_group(quantize_group(x, size, fmt)).view_as(groups)
    good = groups.isfinite().all(-1)
    assert torch.equal(decoded.isnan().all(-1), ~good)
    assert decoded[good].isfinite().all()
    assert not decoded[~groups.any(-1)].any()


@given(any_value, group_sizes, formats)
def test_kernels_agree_with_the_references_bit_for_bit(run: Run, x: Tensor, size: int, fmt: Format):
    scale = OPS["tensor_scale"].reference([x], fmt.name)
    for op, args in (
        ("tensor_scale", ([x], fmt.name)),
        ("quantize_tensor", ([x], scale, fmt.name, True, True)),
        ("quantize_group", (x, size, fmt.name)),
    ):
        expected = run_op(op, OPS[op].reference, args)
        for actual, wanted in zip(run(op, args), expected, strict=True):
            assert_same_bits(op, actual, wanted)


@given(
    st.integers(1, 5), st.sampled_from([16, 32, 96]), st.integers(0, 999),
    st.integers(-20, 20), st.integers(-20, 20), st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_products_of_small_integers_are_exact(
    run: Run, rows: int, columns: int, seed: int, power_a: int, power_b: int, dtype: torch.dtype
):
    """In any order of summation; so scales, padding and other rows can be compared bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-8, 9, (rows, columns), generator=generator).float()
    b = torch.randint(-8, 9, (32, columns), generator=generator).float()
    bias = torch.randint(-8, 9, (32,), generator=generator) * 2.0 ** (power_a + power_b)
    scales = [torch.tensor(2.0**power) for power in (power_a, power_b)]
    exact = (a @ b.t()) * 2.0 ** (power_a + power_b) + bias
    longer = torch.nn.functional.pad(a, (0, 16, 0, 3))
    for body in (run, run_reference):

        def product(a: Tensor, b: Tensor, bias: Tensor | None, body: Run = body) -> Tensor:
            a, b = (t.to(E4M3.dtype) for t in (a, b))
            return body("scaled_mm", (a, scales[0], b, scales[1], bias, dtype, False))[0]

        assert_same_bits("product", product(a, b, bias), exact.to(dtype))
        padded = product(longer, torch.nn.functional.pad(b, (0, 16)), bias)
        assert_same_bits("padded", padded[:rows], exact.to(dtype))
        assert_same_bits("only the bias", padded[rows:], bias.to(dtype).expand(3, -1).contiguous())
