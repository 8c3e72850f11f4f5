"""Products of operands with one scale per row, against FP64."""

import pytest
import torch
from torch import Tensor

from coat_bench.check import TOLERANCE, assert_same_bits, relative_rms
from coat_kernels import E4M3, RowScaled, quantize_tensor, scaled_mm


def make_operand(rows: int) -> RowScaled:
    """Integers, so that sums are exact, with a power of two as scale of each row."""
    generator = torch.Generator().manual_seed(rows)
    q = torch.randint(-8, 9, (rows, 32), generator=generator).to(E4M3.dtype)
    return RowScaled(q, torch.exp2(torch.randint(-9, 9, (rows,), generator=generator)))


def decoded(x: RowScaled) -> Tensor:
    return x.q.double() * x.scale.double()[:, None]


def test_products_of_small_integers_are_exact():
    a, b = make_operand(5), make_operand(16)
    exact = (decoded(a) @ decoded(b).t()).bfloat16()
    assert_same_bits("product", scaled_mm(a, b, torch.bfloat16), exact)


def test_a_bias_is_added():
    a, b, bias = make_operand(5), make_operand(16), torch.linspace(-1, 1, 16)
    exact = decoded(a) @ decoded(b).t() + bias.bfloat16().double()
    # Row by row, for they differ in size.
    for one, wanted in zip(scaled_mm(a, b, torch.bfloat16, bias), exact, strict=True):
        assert relative_rms(one, wanted) < 2.0**-8 + TOLERANCE["scaled_mm", torch.float32]


def test_operands_are_both_scaled_per_row_or_both_per_tensor():
    rows, tensor = make_operand(16), quantize_tensor(torch.ones(16, 32))
    for a, b in ((rows, tensor), (tensor, rows)):
        with pytest.raises(ValueError, match=r"a is (Row|Tensor)Scaled and b is .*both per tensor"):
            scaled_mm(a, b, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_row_scaled_operands_are_bf16(dtype: torch.dtype):
    x = make_operand(16)
    with pytest.raises(ValueError, match=rf"cannot be {dtype} .* only torch.bfloat16: round it"):
        scaled_mm(x, x, dtype)


FP8_X = torch.ones(16, 32).to(E4M3.dtype)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            RowScaled(FP8_X, torch.ones(())),
            r"float32 of shape \(\) .* of shape \(16,\), one scale per r",
        ),
        (RowScaled(FP8_X, torch.ones(16, 1)), r"scales of {} are torch.float32 of shape \(16, 1\)"),
        (
            RowScaled(FP8_X, torch.ones(32)),
            r"float32 of shape \(32,\) and strides \(1,\); for FP8 data of",
        ),
        (RowScaled(FP8_X, torch.ones(32)[::2]), r"strides \(2,\); .* contiguous torch.float32"),
        (RowScaled(FP8_X, torch.ones(16).double()), r"scales of {} are torch.float64"),
        (RowScaled(FP8_X, torch.ones(16), True), r"{} is transposed, .* quantize it row-major"),
        (RowScaled(torch.ones(16, 32), torch.ones(16)), r"the FP8 data of {} is torch.float32"),
        (RowScaled(FP8_X[0], torch.ones(16)), r"the FP8 data of {} is .* of shape \(32,\)"),
        (RowScaled(FP8_X.t(), torch.ones(32)), r"the FP8 data of {} is .* strides \(1, 32\)"),
    ],
)
def test_codes_and_scales_belong_together(bad: RowScaled, message: str):
    good = make_operand(16)
    with pytest.raises(ValueError, match="scaled_mm: .*" + message.format("a")):
        scaled_mm(bad, good, torch.bfloat16)
    with pytest.raises(ValueError, match="scaled_mm: .*" + message.format("b")):
        scaled_mm(good, bad, torch.bfloat16)
