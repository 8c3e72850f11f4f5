"""Quantization and dequantization per 1 x G group.

    e = smallest exponent that does not saturate,  q = cast(x * 2^(127 - e))

Non-linear layers save group-scaled inputs for backward (arXiv 2410.19313, section 4.1). x is read
once. Formats and the convention: ``formats.py``. Reference: ``reference/quantize.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import load_grouped, load_tile, row_offsets, store_grouped
from coat_kernels.formats import (
    E4M3,
    Format,
    GroupScaled,
    check_group,
    check_grouped,
    check_matrix,
    get_format,
)
from coat_kernels.launch import TOKENS, launch, tile_grid
from coat_kernels.registry import register


@triton.jit(do_not_specialize=TOKENS)
def _quantize_group_kernel(
    x_ptr, q_ptr, e_ptr,  # (M, N), (M, N) FP8, (M, N / GROUP) uint8
    M, N, tiles_n,
    MAX_EXPONENT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    o_m = row_offsets(pid // tiles_n, BLOCK_M)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    x = load_tile(x_ptr, o_m, o_n, (o_m[:, None] < M) & (o_n[None, :] < N), N)
    store_grouped(x, q_ptr, e_ptr, o_m, i_n, M, N, N, MAX_EXPONENT, GROUP, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=TOKENS)
def _dequantize_group_kernel(
    q_ptr, e_ptr, x_ptr, M, N, tiles_n,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    o_m = row_offsets(pid // tiles_n, BLOCK_M)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    x = load_grouped(q_ptr, e_ptr, o_m, i_n, M, N, N, GROUP, BLOCK_M, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < N)
    tl.store(x_ptr + o_m[:, None] * N + o_n[None, :], x.to(x_ptr.dtype.element_ty), mask=m_mn)


def empty_grouped(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    """Allocate data [M, N] and exponents [M, N / G] for group-scaled x."""
    M, N = x.shape
    q = x.new_empty((M, N), dtype=get_format(fmt).dtype)
    return q, x.new_empty((M, N // group_size), dtype=torch.uint8)


@register(fake=empty_grouped)
def _quantize_group(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    q, exponents = empty_grouped(x, group_size, fmt)
    grid, options = tile_grid(M, N)
    launch(
        _quantize_group_kernel, grid,
        x_ptr=x, q_ptr=q, e_ptr=exponents, M=M, N=N,
        MAX_EXPONENT=get_format(fmt).max_exponent, GROUP=group_size, **options,
    )  # fmt: skip
    return q, exponents


@register(fake=lambda q, _exponents, dtype: q.new_empty(q.shape, dtype=dtype))
def _dequantize_group(q: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    M, N = q.shape
    x = torch.empty((M, N), dtype=dtype, device=q.device)
    grid, options = tile_grid(M, N)
    launch(
        _dequantize_group_kernel, grid,
        q_ptr=q, e_ptr=exponents, x_ptr=x, M=M, N=N, GROUP=N // exponents.shape[1], **options,
    )  # fmt: skip
    return x


def quantize_group(x: Tensor, group_size: int, fmt: Format = E4M3) -> GroupScaled:
    """Quantize x [M, N], FP32, BF16 or FP16, with a power-of-two scale per 1 x G group."""
    check_matrix("quantize_group", "x", x)
    check_group("quantize_group", x.shape[1], group_size)
    return GroupScaled(*_quantize_group(x, group_size, fmt.name))


def dequantize_group(x: GroupScaled, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize a group-scaled matrix [M, N] to ``dtype``: FP32, BF16 or FP16."""
    check_grouped("dequantize_group", "x", x)
    return _dequantize_group(x.q, x.exponents, dtype)
