"""Quantization and dequantization per 1 x G group and per row.

    group   e = smallest exponent that does not saturate,  q = cast(x * 2^(127 - e))
    row     scale_m = max(amax(x_m) / max, 2^-126),        q_m = cast(x_m / scale_m)

Non-linear layers save group-scaled inputs for backward, with a power-of-two scale per group (arXiv
2410.19313, section 4.1). x is read once.

With a scale per row, a token that is much larger than the others does not reduce their precision.
Each program computes the scales of some rows and casts the rows. Rows that fit a tile are read
once. Longer rows, and rows whose FP8 data is written transposed (32 at a time, for whole sectors of
memory), are read twice in chunks of columns, the second time backwards, as the last chunk is still
in the L2 cache. As operands of a GEMM: ``gemm.py``.

Bytes per element: x's and 1. Formats and the convention: ``formats.py``. Reference:
``reference/quantize.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import (
    load_grouped,
    load_tile,
    magnitude_bits,
    row_offsets,
    store_grouped,
    store_quantized,
    word_offsets,
)
from coat_kernels.formats import (
    E4M3,
    MIN_SCALE,
    Format,
    GroupScaled,
    RowScaled,
    check_group,
    check_grouped,
    check_matrix,
    check_rows,
    get_format,
    get_group_format,
    pad_length,
)
from coat_kernels.launch import TOKENS, Tile, cdiv, launch, tile_grid
from coat_kernels.registry import register

ROW_ELEMENTS = 8192
"""Elements of a tile of whole rows; longer rows are read in chunks."""

LONG_TILE = Tile(4, 2048)
"""Chunks of longer rows."""

TRANSPOSED_TILE = Tile(32, 256)
"""Chunks of rows whose FP8 data is written transposed."""

_SMALLEST = tl.constexpr(MIN_SCALE)


@triton.jit(do_not_specialize=TOKENS)
def _quantize_group_kernel(
    x_ptr, q_ptr, e_ptr,  # (M, N), (M, N) FP8 or INT8, (M, N / GROUP) uint8
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


@triton.jit
def _store_scales(amax_bits, scale_ptr, o_m, M, INVERSE_MAX: tl.constexpr):
    """Store the scales of rows with these largest magnitudes; return their inverses [BLOCK_M, 1].

    The inverse of NaN is 0, as in ``device.inverse_scale``.
    """
    scale = amax_bits.to(tl.float32, bitcast=True) * INVERSE_MAX
    scale = tl.where(scale < _SMALLEST, _SMALLEST, scale)  # NaN stays
    tl.store(scale_ptr + o_m, scale, mask=o_m < M)
    inverse = tl.math.div_rn(1.0, scale)
    return tl.where(inverse == inverse, inverse, 0.0)[:, None]


@triton.jit(do_not_specialize=TOKENS)
def _quantize_rows_kernel(
    x_ptr,  # (M, N)
    q_ptr, qt_ptr, scale_ptr,  # (M, N) or (N, M_PADDED) FP8, (M,)
    M, N, M_PADDED,
    INVERSE_MAX: tl.constexpr, TRANSPOSED: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0)
    o_m = word_offsets(i_m, BLOCK_M) if TRANSPOSED else row_offsets(i_m, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m[:, None] < M
    if WHOLE:
        x = load_tile(x_ptr, o_m, o_n, m_m & (o_n[None, :] < N), N)
        bits = tl.max(magnitude_bits(x), axis=1)
        x *= _store_scales(bits, scale_ptr, o_m, M, INVERSE_MAX)
        store_quantized(
            x, q_ptr, qt_ptr, o_m, i_m, o_n, o_n < N, M, M_PADDED, N, M_PADDED,
            not TRANSPOSED, TRANSPOSED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        largest = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        for i_n in range(0, N, BLOCK_N):
            x = load_tile(x_ptr, o_m, i_n + o_n, m_m & (i_n + o_n[None, :] < N), N)
            largest = tl.maximum(largest, magnitude_bits(x))
        bits = tl.max(largest, axis=1)
        inverse = _store_scales(bits, scale_ptr, o_m, M, INVERSE_MAX)
        last = (N - 1) // BLOCK_N * BLOCK_N
        for done in range(0, N, BLOCK_N):
            o_c = last - done + o_n
            x = load_tile(x_ptr, o_m, o_c, m_m & (o_c[None, :] < N), N)
            store_quantized(
                x * inverse, q_ptr, qt_ptr, o_m, i_m, o_c, o_c < N, M, M_PADDED, N, M_PADDED,
                not TRANSPOSED, TRANSPOSED, BLOCK_M, BLOCK_N,
            )  # fmt: skip


@triton.jit(do_not_specialize=TOKENS)
def _dequantize_rows_kernel(
    q_ptr, scale_ptr, x_ptr,  # (M, N) FP8, (M,), (M, N)
    M, N, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    o_m = row_offsets(pid // tiles_n, BLOCK_M)
    o_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < N)
    scale = tl.load(scale_ptr + o_m, mask=o_m < M, other=0.0)
    x = load_tile(q_ptr, o_m, o_n, m_mn, N) * scale[:, None]
    tl.store(x_ptr + o_m[:, None] * N + o_n[None, :], x.to(x_ptr.dtype.element_ty), mask=m_mn)


def empty_grouped(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    """Allocate data [M, N] and exponents [M, N / G] for group-scaled x."""
    M, N = x.shape
    q = x.new_empty((M, N), dtype=get_group_format(fmt).dtype)
    return q, x.new_empty((M, N // group_size), dtype=torch.uint8)


@register(fake=empty_grouped)
def _quantize_group(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    q, exponents = empty_grouped(x, group_size, fmt)
    grid, options = tile_grid(M, N)
    launch(
        _quantize_group_kernel, grid,
        x_ptr=x, q_ptr=q, e_ptr=exponents, M=M, N=N,
        MAX_EXPONENT=get_group_format(fmt).max_exponent, GROUP=group_size, **options,
    )  # fmt: skip
    return q, exponents


@register(
    fake=lambda q, _exponents, dtype: q.new_empty(q.shape, dtype=dtype),
)
def _dequantize_group(q: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    M, N = q.shape
    x = torch.empty((M, N), dtype=dtype, device=q.device)
    grid, options = tile_grid(M, N)
    launch(
        _dequantize_group_kernel, grid,
        q_ptr=q, e_ptr=exponents, x_ptr=x, M=M, N=N, GROUP=N // exponents.shape[1], **options,
    )  # fmt: skip
    return x


def _tile(N: int, transposed: bool) -> Tile:
    """Return the tile of a program."""
    if transposed:
        return TRANSPOSED_TILE
    columns = max(128, 1 << (N - 1).bit_length())
    whole = Tile(min(64, max(1, ROW_ELEMENTS // columns)), columns)
    return whole if columns <= ROW_ELEMENTS else LONG_TILE


def _empty_rows(x: Tensor, fmt: str, transposed: bool) -> tuple[Tensor, Tensor]:
    """Allocate FP8 data and scales."""
    M, N = x.shape
    q = x.new_empty((N, pad_length(M)) if transposed else (M, N), dtype=get_format(fmt).dtype)
    return q, x.new_empty((M,), dtype=torch.float32)


@register(fake=_empty_rows)
def _quantize_rows(x: Tensor, fmt: str, transposed: bool) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    q, scale = _empty_rows(x, fmt, transposed)
    tile = _tile(N, transposed)
    launch(
        _quantize_rows_kernel, (cdiv(pad_length(M) if transposed else M, tile.rows),),
        num_warps=tile.warps, x_ptr=x, q_ptr=q, qt_ptr=q, scale_ptr=scale, M=M, N=N,
        M_PADDED=pad_length(M), INVERSE_MAX=1.0 / get_format(fmt).max, TRANSPOSED=transposed,
        WHOLE=tile.columns >= N, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
    )  # fmt: skip
    return q, scale


@register(
    fake=lambda q, _scale, dtype: q.new_empty(q.shape, dtype=dtype),
)
def _dequantize_rows(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    M, N = q.shape
    x = torch.empty((M, N), dtype=dtype, device=q.device)
    grid, options = tile_grid(M, N)
    launch(
        _dequantize_rows_kernel, grid, q_ptr=q, scale_ptr=scale, x_ptr=x, M=M, N=N, **options
    )  # fmt: skip
    return x


def quantize_group(x: Tensor, group_size: int, fmt: Format = E4M3) -> GroupScaled:
    """Quantize with a power-of-two scale per 1 x ``group_size`` group.

    Args:
        x: FP32, BF16 or FP16 [M, N], contiguous; N a multiple of ``group_size``.
        group_size: 16, 32, 64 or 128.
        fmt: ``E4M3``, ``E5M2`` or ``INT8``.

    Raises:
        ValueError: the shape, dtype or group size does not fit.
    """
    check_matrix("quantize_group", "x", x)
    check_group("quantize_group", x.shape[1], group_size)
    return GroupScaled(*_quantize_group(x, group_size, fmt.name))


def dequantize_group(x: GroupScaled, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize a group-scaled matrix [M, N] to ``dtype``: FP32, BF16 or FP16.

    Raises:
        ValueError: FP8 data and exponents do not fit together.
    """
    check_grouped("dequantize_group", "x", x)
    return _dequantize_group(x.q, x.exponents, dtype)


def quantize_rows(x: Tensor, fmt: Format = E4M3, *, transposed: bool = False) -> RowScaled:
    """Quantize with one scale per row.

    Args:
        x: FP32, BF16 or FP16 [M, N], contiguous.
        fmt: FP8 format.
        transposed: write FP8 data [N, M'], M padded with zeros to a multiple of 16, not [M, N].
            For a GEMM over tokens, whose other operand must be multiplied with the scales.

    Raises:
        ValueError: x is not a contiguous matrix of such a dtype.
    """
    check_matrix("quantize_rows", "x", x)
    q, scale = _quantize_rows(x, fmt.name, transposed)
    return RowScaled(q, scale, transposed)


def dequantize_rows(x: RowScaled, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize a row-scaled matrix [M, N] to ``dtype``: FP32, BF16 or FP16.

    Raises:
        ValueError: FP8 data and scales do not fit together, or x is transposed.
    """
    check_rows("dequantize_rows", "x", x)
    return _dequantize_rows(x.q, x.scale, dtype)
