"""FP8 matrix products against FP64 products of the decoded operands."""

import pytest
import torch
from op_check import TOLERANCE, Run, relative_rms
from torch import Tensor

from coat_kernels import (
    E4M3,
    E5M2,
    Format,
    TensorScaled,
    quantize_tensor,
    scaled_mm,
)


def decoded(x: TensorScaled) -> Tensor:
    return x.q.double() * x.scale.double()


def matrix(rows: int, columns: int, fmt: Format = E4M3) -> TensorScaled:
    generator = torch.Generator().manual_seed(rows + columns)
    return quantize_tensor(torch.randn(rows, columns, generator=generator) / 7, fmt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("rows", [1, 63, 64])
def test_product(rows: int, formats: tuple[Format, Format], dtype: torch.dtype, run: Run):
    a, b = matrix(rows, 304, formats[0]), matrix(48, 304, formats[1])
    exact = decoded(a) @ decoded(b).t()
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for got in (run("scaled_mm", (*a, *b, None, dtype, False))[0], scaled_mm(a, b, dtype)):
        assert got.dtype == dtype
        assert relative_rms(got, exact) < rounding + TOLERANCE["scaled_mm", torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_bias_of_any_dtype(dtype: torch.dtype, bias_dtype: torch.dtype, run: Run):
    a, b = matrix(5, 64), matrix(32, 64)
    bias = torch.randn(32, generator=torch.Generator().manual_seed(2)).to(bias_dtype)
    exact = decoded(a) @ decoded(b).t() + bias.to(dtype).double()
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for got in (run("scaled_mm", (*a, *b, bias, dtype, False))[0], scaled_mm(a, b, dtype, bias)):
        assert relative_rms(got, exact) < rounding + TOLERANCE["scaled_mm", torch.float32]


def test_a_bad_scale_never_gives_plausible_numbers(run: Run):
    x = torch.randn(4, 32)
    x[1, 1] = float("nan")
    bad = quantize_tensor(x)
    (y,) = run("scaled_mm", (*bad, *matrix(16, 32), None, torch.float32, False))
    assert y.isnan().all()
