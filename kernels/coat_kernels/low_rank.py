"""GEMMs of FP8 activations or gradients with the narrow matrices of LoRA adapters.

    low_rank_project    P [M, r]      = s x [M, n] U [n, r]       P = x A^T; grad_P = s grad_y B
    low_rank_gradient   grad_U [n, r] = s x^T [n, M] P [M, r]     grad_B = s grad_y^T P
    append_low_rank     [a | P] [b | U]^T = a b^T + P U^T         one FP8 GEMM with an adapter

x is FP8 with one scale. U and P have the model's dtype, and sums are FP32. Up to a rank r of about
100 memory limits these GEMMs, which read an adapter's columns of x once for every 64 columns of P.

Layers with the same input (q, k, v; gate, up) have one FP8 matrix and one P: one launch computes
up to three adapters. Each reads some columns of x, and has some of P. Where the rows or columns of
the result make too few programs, pieces of the sums get programs of their own; pieces are added in
a fixed order.

P and U are appended in the formats and with the scales of a and b, their largest values at the same
share h of the formats' largest. If h > 1, all of a and b becomes smaller, by a power of two:

    h^2 = scale(P) scale(U) / (scale(a) scale(b)),   h' = max(1, h rounded up to a power of two)
    P8 = cast(P h / (scale(P) h')),   a8' = cast(a8 / h'),   scale(a)' = h' scale(a);   so U and b

Reference: ``reference/low_rank.py``.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import INTERPRETED, row_offsets
from coat_kernels.formats import (
    FORMATS,
    TensorScaled,
    check_dtype,
    check_matrix,
    check_quantized,
    pad_length,
)
from coat_kernels.launch import TOKENS, Tile, cdiv, launch, tile_grid
from coat_kernels.quantize import MAX_PARTS, pad_to_three, tensor_scale
from coat_kernels.registry import register

MIN_RANK = 16
"""Columns of the smallest tile of P: tensor cores multiply 16 at a time."""

MAX_RANK = 64
"""Columns of the largest tile of P; higher ranks take several."""

ROWS = 64
"""Rows of x in a tile."""

COLUMNS = 128
"""Columns of x in a tile."""

FEW_COLUMNS = 32
"""The same for FP32, which tensor cores do not multiply, or if the columns of a layer are not a
multiple of 16 and are loaded one by one: registers do not suffice for more."""

_ALIGNED = 16
"""Triton loads several elements at once if it knows that an offset is a multiple of this."""

APPEND_TILE = Tile(128, 128, 8)
"""Tile of ``append_low_rank``, which copies, as ``transpose_quantized`` does."""

PROGRAMS = 256
"""With fewer programs sums are divided: about two per multiprocessor of an H200."""


LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _dot(a, b, acc):
    """Add the product of two tiles in FP32.

    On compute capability 10, Triton 3.7 and older ignores the precision and multiplies in TF32.
    """
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _select(part, x0, x1, x2):
    """Return the number of a part; absent parts have None."""
    x = x0
    if x1 is not None:
        x = tl.where(part == 1, x1, x)
    if x2 is not None:
        x = tl.where(part == 2, x2, x)
    return x


@triton.jit
def _narrow_tile(u_ptr, o_n, o_r, size, rank, TRANSPOSED: tl.constexpr):
    """Load a tile [N, R] of a matrix (size, rank), or (rank, size) if TRANSPOSED."""
    o = o_n[:, None] * rank + o_r[None, :]
    if TRANSPOSED:
        o = o_r[None, :] * size + o_n[:, None]
    return tl.load(u_ptr + o, mask=(o_n < size)[:, None] & (o_r < rank)[None, :], other=0.0)


@triton.jit(do_not_specialize=TOKENS)
def _low_rank_project_kernel(
    q_ptr, scale_ptr,  # (M, N), ()
    u0_ptr, u1_ptr, u2_ptr, sums_ptr,  # three times (size, rank), (pieces, M, R)
    M, N, R, blocks, start0, start1, start2, size0, size1, size2, rank0, rank1, rank2,
    first0, first1, first2, factor0, factor1, factor2,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    part, u_ptr = tl.program_id(2) // blocks, u0_ptr
    if u1_ptr is not None and part == 1:
        u_ptr = u1_ptr
    if u2_ptr is not None and part == 2:
        u_ptr = u2_ptr
    start = _select(part, start0, start1, start2)
    size = _select(part, size0, size1, size2)
    rank = _select(part, rank0, rank1, rank2)
    i_r = tl.program_id(2) % blocks * BLOCK_R
    if i_r >= rank:
        return  # the grid covers the highest rank
    o_m = row_offsets(tl.program_id(0), BLOCK_M)
    o_r = i_r + tl.arange(0, BLOCK_R)
    columns = tl.cdiv(tl.cdiv(size, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for i_n in range(0, columns, BLOCK_N):
        o_n = tl.program_id(1) * columns + i_n + tl.arange(0, BLOCK_N)
        o = o_m[:, None] * N + (start + o_n)[None, :]
        q = tl.load(q_ptr + o, mask=(o_m < M)[:, None] & (o_n < size)[None, :], other=0.0)
        u = _narrow_tile(u_ptr, o_n, o_r, size, rank, TRANSPOSED)
        acc = _dot(q.to(u_ptr.dtype.element_ty), u, acc)
    acc *= tl.load(scale_ptr) * _select(part, factor0, factor1, factor2)
    sums_ptr += tl.program_id(1).to(tl.int64) * M * R
    o = o_m[:, None] * R + (_select(part, first0, first1, first2) + o_r)[None, :]
    mask = (o_m < M)[:, None] & (o_r < rank)[None, :]
    tl.store(sums_ptr + o, acc.to(sums_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=TOKENS)
def _low_rank_gradient_kernel(
    q_ptr, scale_ptr, p_ptr, sums_ptr,  # (M, N), (), (M, R), (pieces, length)
    M, N, R, length, blocks, start0, start1, start2, size0, size1, size2, rank0, rank1, rank2,
    first0, first1, first2, offset0, offset1, offset2, factor0, factor1, factor2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2) // blocks
    start = _select(part, start0, start1, start2)
    size = _select(part, size0, size1, size2)
    rank = _select(part, rank0, rank1, rank2)
    first = _select(part, first0, first1, first2)
    i_n = tl.program_id(0) * BLOCK_N
    i_r = tl.program_id(2) % blocks * BLOCK_R
    if i_n >= size or i_r >= rank:
        return  # the grid covers the largest part and the highest rank
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_r = i_r + tl.arange(0, BLOCK_R)
    rows = tl.cdiv(tl.cdiv(M, tl.num_programs(1)), BLOCK_M) * BLOCK_M
    begin = tl.program_id(1).to(tl.int64) * rows
    acc = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for i_m in range(0, rows, BLOCK_M):
        o_m = begin + i_m + tl.arange(0, BLOCK_M)
        o = o_m[:, None] * N + (start + o_n)[None, :]
        q = tl.load(q_ptr + o, mask=(o_m < M)[:, None] & (o_n < size)[None, :], other=0.0)
        o = o_m[:, None] * R + (first + o_r)[None, :]
        p = tl.load(p_ptr + o, mask=(o_m < M)[:, None] & (o_r < rank)[None, :], other=0.0)
        # Transposing p instead of x is twice as fast: it is smaller, and not converted.
        acc = _dot(tl.trans(p), q.to(p.dtype), acc)
    acc *= tl.load(scale_ptr) * _select(part, factor0, factor1, factor2)
    sums_ptr += tl.program_id(1).to(tl.int64) * length + _select(part, offset0, offset1, offset2)
    o = o_n[None, :] * rank + o_r[:, None]
    mask = (o_r < rank)[:, None] & (o_n < size)[None, :]
    tl.store(sums_ptr + o, acc.to(sums_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=TOKENS)
def _append_low_rank_kernel(
    q_ptr, scale_ptr, u_ptr, u_scale_ptr,  # (M, N), (), (M, R), ()
    other_scale_ptr, other_u_scale_ptr, wide_ptr, wide_scale_ptr,  # (), (), (M, W), ()
    M, N, R, W, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = wide_ptr.dtype.element_ty
    scale, u_scale = tl.load(scale_ptr), tl.load(u_scale_ptr)
    share = tl.sqrt_rn(u_scale) * tl.sqrt_rn(tl.load(other_u_scale_ptr))
    share = tl.math.div_rn(share, tl.sqrt_rn(scale) * tl.sqrt_rn(tl.load(other_scale_ptr)))
    power = (share.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    smaller = tl.where(share > 1.0, power.to(tl.float32, bitcast=True), 1.0)
    if tl.program_id(0) == 0:
        tl.store(wide_scale_ptr, scale * smaller)
    o_m = row_offsets(tl.program_id(0) // tiles_n, BLOCK_M)
    i_n = tl.program_id(0) % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_m = o_m[:, None] < M
    m_n = m_m & (o_n[None, :] < N)
    q = tl.load(q_ptr + o_m[:, None] * N + o_n[None, :], mask=m_n, other=0.0)
    if smaller > 1.0:
        q = (q.to(tl.float32) * tl.math.div_rn(1.0, smaller)).to(dtype)
    o_wide = o_m[:, None] * W + o_n[None, :]
    tl.store(wide_ptr + o_wide, q, mask=m_n)
    if i_n + BLOCK_N > N:
        m_r = m_m & (o_n[None, :] >= N)
        o_r = o_n[None, :] - N
        u = tl.load(u_ptr + o_m[:, None] * R + o_r, mask=m_r & (o_r < R), other=0.0)
        factor = tl.math.div_rn(tl.math.div_rn(share, smaller), u_scale)
        factor = tl.where(factor > LARGEST, LARGEST, factor)  # zero stays zero, NaN NaN
        u = (u.to(tl.float32) * factor).to(dtype)
        tl.store(wide_ptr + o_wide, u, mask=m_r & (o_r < W - N))


def _parts(**lists: Sequence[float]) -> dict[str, Any]:
    """Return numbered arguments for up to three adapters; None for an absent one."""
    return {
        f"{name}{i}": value
        for name, values in lists.items()
        for i, value in enumerate(pad_to_three(values))
    }


def _starts_of(lengths: Sequence[int]) -> list[int]:
    """Return where each part starts if they are side by side."""
    return list(accumulate(lengths, initial=0))[:-1]


def _sizes(matrix: Tensor, transposed: bool) -> tuple[int, int]:
    """Return the channels and the rank of a matrix."""
    return (matrix.shape[1], matrix.shape[0]) if transposed else (matrix.shape[0], matrix.shape[1])


def _tile(dtype: torch.dtype, ranks: Sequence[int], *offsets: Sequence[int]) -> tuple[int, int]:
    """Return the columns of x and of P in a tile, given starts and sizes of the columns of x."""
    if dtype.itemsize > 2:
        return FEW_COLUMNS, MIN_RANK
    aligned = not any(number % _ALIGNED for values in offsets for number in values)
    block = min(MAX_RANK, max(MIN_RANK, 1 << (max(ranks) - 1).bit_length()))
    return COLUMNS if aligned else FEW_COLUMNS, block


def _total_rank(matrices: Sequence[Tensor], transposed: bool) -> int:
    return sum(_sizes(matrix, transposed)[1] for matrix in matrices)


def _count_pieces(programs: int, steps: int) -> int:
    """Return into how many pieces the sums are divided, to have enough programs."""
    return max(1, min(steps, cdiv(PROGRAMS, max(1, programs))))


def _allocate_sums(like: Tensor, pieces: int, shape: tuple[int, ...]) -> Tensor:
    """Allocate the result, or FP32 sums of each piece."""
    if pieces == 1:
        return like.new_empty(shape)
    return like.new_empty((pieces, *shape), dtype=torch.float32)


def _add_pieces(sums: Tensor, pieces: int, dtype: torch.dtype) -> Tensor:
    """Add the pieces in a fixed order and round once."""
    return sums if pieces == 1 else sums.sum(0).to(dtype)


@register(
    fake=lambda q, _scale, matrices, _starts, _factors, transposed: matrices[0].new_empty(
        (q.shape[0], _total_rank(matrices, transposed))
    ),
)
def _low_rank_project(
    q: Tensor,
    scale: Tensor,
    matrices: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    transposed: bool,
) -> Tensor:
    (M, N), R = q.shape, _total_rank(matrices, transposed)
    sizes, ranks = zip(*(_sizes(matrix, transposed) for matrix in matrices), strict=True)
    columns, block = _tile(matrices[0].dtype, ranks, sizes, starts)
    tiles, blocks = cdiv(M, ROWS), cdiv(max(ranks), block)
    pieces = _count_pieces(tiles * len(matrices) * blocks, cdiv(max(sizes), columns))
    sums = _allocate_sums(matrices[0], pieces, (M, R))
    u0, u1, u2 = pad_to_three(matrices)
    launch(
        _low_rank_project_kernel, (tiles, pieces, len(matrices) * blocks), num_warps=4,
        q_ptr=q, scale_ptr=scale, u0_ptr=u0, u1_ptr=u1, u2_ptr=u2, sums_ptr=sums, M=M, N=N, R=R,
        blocks=blocks, TRANSPOSED=transposed, BLOCK_M=ROWS, BLOCK_N=columns, BLOCK_R=block,
        **_parts(start=starts, size=sizes, rank=ranks, first=_starts_of(ranks), factor=factors),
    )  # fmt: skip
    return _add_pieces(sums, pieces, matrices[0].dtype)


def _lengths(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the number of elements of each matrix."""
    return [size * rank for size, rank in zip(sizes, ranks, strict=True)]


@register(
    fake=lambda _, _scale, p, _starts, sizes, ranks, _factors: p.new_empty(
        sum(_lengths(sizes, ranks))
    ),
)
def _low_rank_gradient(
    q: Tensor,
    scale: Tensor,
    p: Tensor,
    starts: Sequence[int],
    sizes: Sequence[int],
    ranks: Sequence[int],
    factors: Sequence[float],
) -> Tensor:
    (M, N), lengths = q.shape, _lengths(sizes, ranks)
    columns, block = _tile(p.dtype, ranks, sizes, starts)
    blocks = cdiv(max(ranks), block)
    programs = sum(cdiv(size, columns) * blocks for size in sizes)
    pieces = _count_pieces(programs, cdiv(M, ROWS))
    sums = _allocate_sums(p, pieces, (sum(lengths),))
    launch(
        _low_rank_gradient_kernel, (cdiv(max(sizes), columns), pieces, len(sizes) * blocks),
        num_warps=4, q_ptr=q, scale_ptr=scale, p_ptr=p, sums_ptr=sums, M=M, N=N, R=p.shape[1],
        length=sum(lengths), blocks=blocks, BLOCK_M=ROWS, BLOCK_N=columns, BLOCK_R=block,
        **_parts(
            start=starts, size=sizes, rank=ranks, first=_starts_of(ranks),
            offset=_starts_of(lengths), factor=factors,
        ),
    )  # fmt: skip
    return _add_pieces(sums, pieces, p.dtype)


@register(
    fake=lambda q, scale, u, *_: (
        q.new_empty((q.shape[0], q.shape[1] + pad_length(u.shape[1]))),
        torch.empty_like(scale),
    ),
)
def _append_low_rank(
    q: Tensor,
    scale: Tensor,
    u: Tensor,
    u_scale: Tensor,
    other_scale: Tensor,
    other_u_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    (M, N), R = q.shape, u.shape[1]
    wide = q.new_empty((M, N + pad_length(R)))
    wide_scale = torch.empty_like(scale)
    grid, options = tile_grid(max(1, M), wide.shape[1], APPEND_TILE)
    launch(
        _append_low_rank_kernel, grid,
        q_ptr=q, scale_ptr=scale, u_ptr=u, u_scale_ptr=u_scale, other_scale_ptr=other_scale,
        other_u_scale_ptr=other_u_scale, wide_ptr=wide, wide_scale_ptr=wide_scale,
        M=M, N=N, R=R, W=wide.shape[1], **options,
    )  # fmt: skip
    return wide, wide_scale


def low_rank_project(
    x: TensorScaled,
    matrices: Sequence[Tensor],
    starts: Sequence[int] | None = None,
    factors: Sequence[float] | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Multiply columns of x, FP8 [M, N], with one to three narrow matrices U_i of one dtype.

    U_i are contiguous [n_i, r_i], or [r_i, n_i] if ``transposed`` (an adapter's A). Without
    ``starts`` each multiplies all columns; without ``factors`` they are 1. Returns
    s_i x[:, start_i : start_i + n_i] U_i side by side, [M, sum of r_i] in the matrices' dtype.
    """
    op = "low_rank_project"
    check_quantized(op, "x", x.q)
    columns = x.q.shape[1]
    given = [0] * len(matrices) if starts is None else starts
    factors = [1.0] * len(matrices) if factors is None else factors
    _check_counts(op, matrices, given, factors)
    for number, (matrix, start) in enumerate(zip(matrices, given, strict=True)):
        name, shape = f"matrix {number}", (matrix.shape[0], matrix.shape[-1])
        _check_narrow(op, name, matrix, shape, matrices[0].dtype)
        size = _sizes(matrix, transposed)[0]
        _check_columns(op, name, start, size, columns)
        if starts is None and size != columns:
            raise ValueError(
                f"{op}: {name} multiplies {size} columns, and x has {columns}; give starts to "
                "multiply some columns"
            )
    return _low_rank_project(x.q, x.scale, matrices, given, factors, transposed)


def low_rank_gradient(
    x: TensorScaled,
    p: Tensor,
    starts: Sequence[int],
    sizes: Sequence[int],
    ranks: Sequence[int],
    factors: Sequence[float],
) -> list[Tensor]:
    """Compute the gradients of one to three narrow matrices, ``sizes`` n_i by ``ranks`` r_i.

    x is FP8 [M, N]; p [M, sum of r_i], contiguous, has the P_i side by side. Returns
    s_i x[:, start_i : start_i + n_i]^T P_i, [n_i, r_i] in p's dtype; parts of one tensor.
    """
    op = "low_rank_gradient"
    check_quantized(op, "x", x.q)
    _check_counts(op, starts, sizes, ranks, factors)
    _check_narrow(op, "p", p, (x.q.shape[0], sum(ranks)))
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        _check_columns(op, f"matrix {number}", start, size, x.q.shape[1])
    flat = _low_rank_gradient(x.q, x.scale, p, starts, sizes, ranks, factors)
    parts = zip(flat.split(_lengths(sizes, ranks)), sizes, ranks, strict=True)
    return [part.view(size, rank) for part, size, rank in parts]


def append_low_rank(
    a: TensorScaled, p: Tensor, b: TensorScaled, u: Tensor
) -> tuple[TensorScaled, TensorScaled]:
    """Append p [M, R] to a [M, K], and u [N, R] to b [N, K], for a b^T + p u^T in one GEMM.

    p and u are contiguous, FP32, BF16 or FP16. Returns FP8 data [M, K + R'] and [N, K + R'] in the
    formats of a and b, R' = R padded with zeros to a multiple of 16.
    """
    op = "append_low_rank"
    scales: list[Tensor] = []
    for name, x, of_x, narrow in (("a", a, "p", p), ("b", b, "u", u)):
        check_quantized(op, name, x.q)
        check_matrix(op, of_x, narrow, (x.q.shape[0], p.shape[1]))
        fmt = next(fmt for fmt in FORMATS.values() if fmt.dtype == x.q.dtype)
        scales.append(tensor_scale(narrow, fmt))
    wide_a = _append_low_rank(a.q, a.scale, p, scales[0], b.scale, scales[1])
    wide_b = _append_low_rank(b.q, b.scale, u, scales[1], a.scale, scales[0])
    return TensorScaled(*wide_a), TensorScaled(*wide_b)


def _check_narrow(
    op: str, name: str, x: Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None
) -> None:
    if x.dim() != 2 or x.shape != shape or not x.is_contiguous() or dtype not in (None, x.dtype):
        of_dtype = "" if dtype is None else f" of {dtype}"
        raise ValueError(
            f"{op}: {name} is {x.dtype} of shape {tuple(x.shape)} and strides {x.stride()}; it "
            f"must be a contiguous matrix {list(shape)}{of_dtype}"
        )
    check_dtype(op, name, x)


def _check_counts(op: str, *lists: Sequence[Any]) -> None:
    counts = [len(values) for values in lists]
    if len(set(counts)) > 1 or not 0 < counts[0] <= MAX_PARTS:
        raise ValueError(
            f"{op}: got lists of {', '.join(map(str, counts))} values; pass 1 to {MAX_PARTS} "
            "matrices, and in each list one value per matrix"
        )


def _check_columns(op: str, name: str, start: int, size: int, columns: int) -> None:
    if start < 0 or start + size > columns:
        raise ValueError(
            f"{op}: {name} multiplies {size} columns from column {start} on, and x has {columns}"
        )
