"""The repaired interpreter converts floats as torch and the hardware do; the stock one does not."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from op_check import assert_same_bits

from coat_kernels import E4M3, E5M2, Format
from coat_kernels.launch import launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def _cast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n)
    tl.store(y_ptr + o, x.to(y_ptr.dtype.element_ty), mask=o < n)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, y_ptr, N: tl.constexpr):
    o = tl.arange(0, N)
    tile = o[:, None] * N + o[None, :]
    y = tl.dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile))
    tl.store(y_ptr + tile, y)


def interpreted_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.numel(), dtype=dtype)
    block = 1 << (x.numel() - 1).bit_length()
    with np.errstate(all="ignore"):
        launch(_cast_kernel, (1,), x_ptr=x, y_ptr=y, n=x.numel(), BLOCK=block)
    return y


def awkward_floats() -> torch.Tensor:
    """Random bit patterns, and the neighbourhood of every tie of both FP8 formats and of BF16."""
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(1))
    ties = torch.arange(0, 2**16, dtype=torch.int32) << 16
    near = torch.cat([ties, ties + 0x8000, ties + 0x7FFF, ties + 0x8001])
    return torch.cat([bits.int(), near[::7]]).view(torch.float32)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_casts_to_fp8_saturate_and_round_to_nearest_even(fmt: Format, grid):
    x = awkward_floats()
    expected = torch.from_numpy(grid.nearest(x.numpy(), fmt)).view(fmt.dtype)
    assert_same_bits("cast", interpreted_cast(x, fmt.dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_to_16_bits_round_as_torch_does(dtype: torch.dtype):
    x = awkward_floats()
    assert_same_bits("cast", interpreted_cast(x, dtype), x.to(dtype))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_codes_convert_to_their_value(fmt: Format, dtype: torch.dtype, grid):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    expected = torch.from_numpy(grid.values(fmt)).to(dtype)
    assert_same_bits("cast", interpreted_cast(codes, dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3.dtype, E5M2.dtype])
def test_dot_multiplies_values_not_bits(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(2))
    y = torch.empty(16, 16)
    launch(_dot_kernel, (1,), a_ptr=a, b_ptr=b, y_ptr=y, N=16)
    np.testing.assert_allclose(y, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
