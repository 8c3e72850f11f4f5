"""GEMMs of FP8 activations or gradients with the narrow matrices of LoRA adapters.

    low_rank_project    P [M, r]      = s x [M, n] U [n, r]       P = x A^T; grad_P = s grad_y B
    low_rank_gradient   grad_U [n, r] = s x^T [n, M] P [M, r]     grad_B = s grad_y^T P
    append_low_rank     [a | P] [b | U]^T = a b^T + P U^T         one FP8 GEMM with an adapter

x is FP8 with one scale; s is an adapter's factor times this scale. U and P have the model's dtype.
An adapter's columns of x are read once for every 64 columns of P.

P is computed by FP8 tensor cores, so that no element of x is converted. A BF16 number has 8 bits,
and is the sum of two E4M3 numbers of 4 bits each (FP16: of three). Each tile of U has an exponent
e, so that its largest value u fits. Values below u 2^-14 are subnormal in E4M3, and their errors
reach u 2^-17:

    U = 2^e (U0 + U1 / 16),   U0 = round(U / 2^e) to 4 bits,   U1 = 16 (U / 2^e - U0)

The products of 128 columns are added as FP8 tensor cores do, with about 14 bits, then in FP32.

Layers with the same input (q, k, v; gate, up) have one FP8 matrix and one P: one launch computes
up to three adapters. Each reads some columns of x, and has some of P. Where the rows or columns of
the result make too few programs, pieces of the sums get programs of their own; pieces are added in
a fixed order.

P and U are appended in the formats and with the scales of a and b: FP8 data a8 become [a8 | P8].
The largest values of P8 and U8 are the same share h of the formats' largest numbers. If h > 1, a8
and b8 are divided by a power of two h':

    h^2 = scale(P) scale(U) / (scale(a) scale(b)),   h' = max(1, h rounded up to a power of two)
    P8 = cast(P h / (scale(P) h')),   a8' = cast(a8 / h'),   scale(a)' = h' scale(a)

Reference: ``reference/low_rank.py``.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import (
    INTERPRETED,
    block_amax_bits,
    exponent_inverse,
    exponent_scale,
    get_exponent,
    row_offsets,
)
from coat_kernels.formats import (
    E4M3,
    FORMATS,
    Format,
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

APPEND_TILE = Tile(32, 128, 4)
"""Tile of ``append_low_rank``: the fastest of six on an H200."""

_TERMS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Terms of U in ``low_rank_project``: FP32 itself, or E4M3 numbers of 4 bits each."""

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
    """Load a tile [N, R] of a matrix (size, rank), or (rank, size) if TRANSPOSED; zeros outside."""
    o = o_n[:, None] * rank + o_r[None, :]
    if TRANSPOSED:
        o = o_r[None, :] * size + o_n[:, None]
    m_n = (o_n >= 0) & (o_n < size)
    m_r = (o_r >= 0) & (o_r < rank)
    return tl.load(u_ptr + o, mask=m_n[:, None] & m_r[None, :], other=0.0)


@triton.jit
def _low_rank_terms_kernel(
    u0_ptr, u1_ptr, u2_ptr, terms_ptr, e_ptr,  # three times (size, rank), (TERMS, rows, S), (tiles)
    S, blocks, size0, size1, size2, rank0, rank1, rank2,
    TERMS: tl.constexpr, MAX_EXPONENT: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    part, u_ptr = tl.program_id(1) // blocks, u0_ptr
    if u1_ptr is not None and part == 1:
        u_ptr = u1_ptr
    if u2_ptr is not None and part == 2:
        u_ptr = u2_ptr
    size = _select(part, size0, size1, size2)
    rank = _select(part, rank0, rank1, rank2)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_r = tl.arange(0, BLOCK_R)
    u = _narrow_tile(u_ptr, o_n, tl.program_id(1) % blocks * BLOCK_R + o_r, size, rank, TRANSPOSED)
    rest = u.to(tl.float32)
    if TERMS > 1:
        e = get_exponent(block_amax_bits(rest), MAX_EXPONENT)
        tl.store(e_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), e)
        rest *= exponent_inverse(e)
    terms_ptr += (tl.program_id(1) * BLOCK_R + o_r)[None, :] * S + o_n[:, None]
    for _ in tl.static_range(TERMS):
        term = rest
        if TERMS > 1:
            # Rounded to 4 bits by integers: ptxas 12.8 reads the result of a cast to FP8 too early.
            bits = rest.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
            term = bits.to(tl.float32, bitcast=True)
        tl.store(terms_ptr, term.to(terms_ptr.dtype.element_ty))
        terms_ptr += tl.num_programs(1) * BLOCK_R * S
        rest = (rest - term) * 16.0


@triton.jit(do_not_specialize=TOKENS)
def _low_rank_project_kernel(
    q_ptr, scale_ptr, terms_ptr, e_ptr, sums_ptr,  # (M, N), (), as above, (pieces, M, R)
    M, N, R, S, blocks, start0, start1, start2, size0, size1, size2, rank0, rank1, rank2,
    first0, first1, first2, factor0, factor1, factor2,
    TERMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2) // blocks
    start = _select(part, start0, start1, start2)
    size = _select(part, size0, size1, size2)
    rank = _select(part, rank0, rank1, rank2)
    i_r = tl.program_id(2) % blocks * BLOCK_R
    if i_r >= rank:
        return  # the grid covers the highest rank
    o_m = row_offsets(tl.program_id(0), BLOCK_M)
    rows = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    tiles = tl.cdiv(size, BLOCK_N)
    steps = tl.cdiv(tiles, tl.num_programs(1))
    first = tl.program_id(1) * steps
    acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for i in range(first, tl.minimum(first + steps, tiles)):
        o_n = i * BLOCK_N + tl.arange(0, BLOCK_N)
        o = o_m[:, None] * N + (start + o_n)[None, :]
        q = tl.load(q_ptr + o, mask=(o_m < M)[:, None] & (o_n < size)[None, :], other=0.0)
        o_u = rows[None, :] * S + o_n[:, None]
        if TERMS > 1:
            product = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            for t in tl.static_range(TERMS - 1, -1, -1):
                u = tl.load(terms_ptr + t * tl.num_programs(2) * BLOCK_R * S + o_u)
                product = _dot(q, u, product * 0.0625)
            acc += product * exponent_scale(tl.load(e_ptr + tl.program_id(2) * (S // BLOCK_N) + i))
        else:
            acc = _dot(q.to(tl.float32), tl.load(terms_ptr + o_u), acc)
    acc *= tl.load(scale_ptr) * _select(part, factor0, factor1, factor2)
    sums_ptr += tl.program_id(1).to(tl.int64) * M * R
    o_r = i_r + tl.arange(0, BLOCK_R)
    o = o_m[:, None] * R + (_select(part, first0, first1, first2) + o_r)[None, :]
    mask = (o_m < M)[:, None] & (o_r < rank)[None, :]
    tl.store(sums_ptr + o, acc.to(sums_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=TOKENS)
def _low_rank_gradient_kernel(
    q_ptr, scale_ptr, p_ptr, sums_ptr,  # (M, N), (), (M, R), (pieces, length)
    M, N, R, length, blocks, start0, start1, start2, size0, size1, size2, rank0, rank1, rank2,
    first0, first1, first2, offset0, offset1, offset2, factor0, factor1, factor2,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
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
    if TRANSPOSED:
        o = o_r[:, None] * size + o_n[None, :]
    mask = (o_r < rank)[:, None] & (o_n < size)[None, :]
    tl.store(sums_ptr + o, acc.to(sums_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _copy_tile(q_ptr, wide_ptr, smaller, o_m, o_n, M, N, W):
    """Copy a tile of a matrix [M, N] into the wide one, made smaller."""
    mask = (o_m[:, None] < M) & (o_n[None, :] < N)
    q = tl.load(q_ptr + o_m[:, None] * N + o_n[None, :], mask=mask, other=0.0)
    if smaller > 1.0:
        q = (q.to(tl.float32) * tl.math.div_rn(1.0, smaller)).to(q_ptr.dtype.element_ty)
    tl.store(wide_ptr + o_m[:, None] * W + o_n[None, :], q, mask=mask)


@triton.jit
def _store_columns(u, share, scale, wide_ptr, o_m, o_n, M, N, W):
    """Store a tile of the appended columns, which begin at column N."""
    factor = tl.math.div_rn(share, scale)
    u *= tl.where(factor > LARGEST, LARGEST, factor)  # zero stays zero, NaN NaN
    mask = (o_m[:, None] < M) & (o_n[None, :] >= N) & (o_n[None, :] < W)
    o = o_m[:, None] * W + o_n[None, :]
    tl.store(wide_ptr + o, u.to(wide_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=(*TOKENS, "tiles"))  # both depend on the number of tokens
def _append_low_rank_kernel(
    a_ptr, a_scale_ptr, p_ptr, p_scale_ptr,  # (M, K), (), (M, R), ()
    b_ptr, b_scale_ptr, u0_ptr, u1_ptr, u2_ptr, u_scale_ptr,  # (N, K), (), three (size, rank), ()
    wide_a_ptr, wide_a_scale_ptr, wide_b_ptr, wide_b_scale_ptr,  # (M, W), (), (N, W), ()
    M, N, K, R, W, tiles, tiles_n, largest,
    start0, start1, start2, size0, size1, size2, rank0, rank1, rank2,
    first0, first1, first2, factor0, factor1, factor2,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    a_scale, p_scale = tl.load(a_scale_ptr), tl.load(p_scale_ptr)
    b_scale, u_scale = tl.load(b_scale_ptr), tl.load(u_scale_ptr) * largest
    share = tl.sqrt_rn(p_scale) * tl.sqrt_rn(u_scale)
    share = tl.math.div_rn(share, tl.sqrt_rn(a_scale) * tl.sqrt_rn(b_scale))
    power = (share.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    smaller = tl.where(share > 1.0, power.to(tl.float32, bitcast=True), 1.0)
    share = tl.math.div_rn(share, smaller)
    pid = tl.program_id(0)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_r = o_n - K
    if pid < tiles:
        if pid == 0:
            tl.store(wide_a_scale_ptr, a_scale * smaller)
        o_m = row_offsets(pid // tiles_n, BLOCK_M)
        _copy_tile(a_ptr, wide_a_ptr, smaller, o_m, o_n, M, K, W)
        if i_n + BLOCK_N > K:
            p = _narrow_tile(p_ptr, o_m, o_r, M, R, False).to(tl.float32)
            _store_columns(p, share, p_scale, wide_a_ptr, o_m, o_n, M, K, W)
    else:
        if pid == tiles:
            tl.store(wide_b_scale_ptr, b_scale * smaller)
        o_m = row_offsets((pid - tiles) // tiles_n, BLOCK_M)
        _copy_tile(b_ptr, wide_b_ptr, smaller, o_m, o_n, N, K, W)
        if i_n + BLOCK_N > K:
            u = _narrow_tile(u0_ptr, o_m - start0, o_r - first0, size0, rank0, TRANSPOSED)
            u = u.to(tl.float32) * factor0
            if u1_ptr is not None:
                more = _narrow_tile(u1_ptr, o_m - start1, o_r - first1, size1, rank1, TRANSPOSED)
                u += more.to(tl.float32) * factor1
            if u2_ptr is not None:
                more = _narrow_tile(u2_ptr, o_m - start2, o_r - first2, size2, rank2, TRANSPOSED)
                u += more.to(tl.float32) * factor2
            _store_columns(u, share, u_scale, wide_b_ptr, o_m, o_n, N, K, W)


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
    dtype = matrices[0].dtype
    columns, block = _tile(dtype, ranks, sizes, starts)
    tiles, blocks = cdiv(max(sizes), columns), cdiv(max(ranks), block)
    count, parts = _TERMS[dtype], len(matrices) * blocks
    shape = (count, parts * block, tiles * columns)
    terms = q.new_empty(shape, dtype=E4M3.dtype if count > 1 else dtype)
    exponents = q.new_empty((parts, tiles), dtype=torch.int32)
    u0, u1, u2 = pad_to_three(matrices)
    of_parts = _parts(size=sizes, rank=ranks)
    options = {"S": tiles * columns, "blocks": blocks, "TERMS": count}
    options |= {"BLOCK_N": columns, "BLOCK_R": block}
    launch(
        _low_rank_terms_kernel, (tiles, parts), num_warps=4,
        u0_ptr=u0, u1_ptr=u1, u2_ptr=u2, terms_ptr=terms, e_ptr=exponents,
        MAX_EXPONENT=E4M3.max_exponent, TRANSPOSED=transposed, **options, **of_parts,
    )  # fmt: skip
    pieces = _count_pieces(cdiv(M, ROWS) * parts, tiles)
    sums = _allocate_sums(matrices[0], pieces, (M, R))
    launch(
        _low_rank_project_kernel, (cdiv(M, ROWS), pieces, parts), num_warps=4,
        q_ptr=q, scale_ptr=scale, terms_ptr=terms, e_ptr=exponents, sums_ptr=sums,
        M=M, N=N, R=R, BLOCK_M=ROWS, **options, **of_parts,
        **_parts(start=starts, first=_starts_of(ranks), factor=factors),
    )  # fmt: skip
    return _add_pieces(sums, pieces, dtype)


def _lengths(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the number of elements of each matrix."""
    return [size * rank for size, rank in zip(sizes, ranks, strict=True)]


@register(
    fake=lambda _, _scale, p, _starts, sizes, ranks, *_rest: p.new_empty(
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
    transposed: bool,
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
        length=sum(lengths), blocks=blocks, TRANSPOSED=transposed, BLOCK_M=ROWS, BLOCK_N=columns,
        BLOCK_R=block,
        **_parts(
            start=starts, size=sizes, rank=ranks, first=_starts_of(ranks),
            offset=_starts_of(lengths), factor=factors,
        ),
    )  # fmt: skip
    return _add_pieces(sums, pieces, p.dtype)


@register(
    fake=lambda a, a_scale, p, _p_scale, b, *_: (
        a.new_empty((a.shape[0], a.shape[1] + pad_length(p.shape[1]))),
        torch.empty_like(a_scale),
        b.new_empty((b.shape[0], b.shape[1] + pad_length(p.shape[1]))),
        torch.empty_like(a_scale),
    ),
)
def _append_low_rank(
    a: Tensor, a_scale: Tensor, p: Tensor, p_scale: Tensor, b: Tensor, b_scale: Tensor,
    matrices: Sequence[Tensor], u_scale: Tensor, starts: Sequence[int], factors: Sequence[float],
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (M, K), N, R = a.shape, len(b), p.shape[1]
    W = K + pad_length(R)
    sizes, ranks = zip(*(_sizes(matrix, transposed) for matrix in matrices), strict=True)
    wide_a, wide_b = a.new_empty((M, W)), b.new_empty((N, W))
    wide_a_scale, wide_b_scale = torch.empty_like(a_scale), torch.empty_like(a_scale)
    (tiles,), options = tile_grid(max(1, M), W, APPEND_TILE)
    (more,), _ = tile_grid(N, W, APPEND_TILE)
    u0, u1, u2 = pad_to_three(matrices)
    launch(
        _append_low_rank_kernel, (tiles + more,),
        a_ptr=a, a_scale_ptr=a_scale, p_ptr=p, p_scale_ptr=p_scale, b_ptr=b, b_scale_ptr=b_scale,
        u0_ptr=u0, u1_ptr=u1, u2_ptr=u2, u_scale_ptr=u_scale, wide_a_ptr=wide_a,
        wide_a_scale_ptr=wide_a_scale, wide_b_ptr=wide_b, wide_b_scale_ptr=wide_b_scale,
        M=M, N=N, K=K, R=R, W=W, tiles=tiles, largest=max(map(abs, factors)) or 1.0,
        TRANSPOSED=transposed, **options,
        **_parts(start=starts, size=sizes, rank=ranks, first=_starts_of(ranks), factor=factors),
    )  # fmt: skip
    return wide_a, wide_a_scale, wide_b, wide_b_scale


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
        _check_range(op, name, "columns of x", start, size, columns)
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
    *,
    transposed: bool = False,
) -> list[Tensor]:
    """Compute the gradients of one to three narrow matrices, ``sizes`` n_i by ``ranks`` r_i.

    x is FP8 [M, N]; p [M, sum of r_i], contiguous, has the P_i side by side. Returns
    s_i x[:, start_i : start_i + n_i]^T P_i, [n_i, r_i], or [r_i, n_i] if ``transposed``, in p's
    dtype; parts of one tensor.
    """
    op = "low_rank_gradient"
    check_quantized(op, "x", x.q)
    _check_counts(op, starts, sizes, ranks, factors)
    _check_narrow(op, "p", p, (x.q.shape[0], sum(ranks)))
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        _check_range(op, f"matrix {number}", "columns of x", start, size, x.q.shape[1])
    flat = _low_rank_gradient(x.q, x.scale, p, starts, sizes, ranks, factors, transposed)
    parts = zip(flat.split(_lengths(sizes, ranks)), sizes, ranks, strict=True)
    return [part.view((rank, size) if transposed else (size, rank)) for part, size, rank in parts]


def append_low_rank(
    a: TensorScaled,
    p: Tensor,
    b: TensorScaled,
    matrices: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    *,
    transposed: bool = False,
) -> tuple[TensorScaled, TensorScaled]:
    """Append P [M, R] to a [M, K], and U [N, R] to b [N, K], for a b^T + P U^T in one GEMM.

    U has up to three blocks s_i U_i, and is zero outside: U_i, of one dtype, is [n_i, r_i], or
    [r_i, n_i] if ``transposed``. Rows of block i begin at ``starts[i]``, and columns where block
    i - 1 ends; R is the sum of r_i. P and U_i are contiguous. Returns FP8 data [M, K + R'] and
    [N, K + R'] in the formats of a and b, R' = R padded with zeros to a multiple of 16.
    """
    op = "append_low_rank"
    for name, x in (("a", a), ("b", b)):
        check_quantized(op, name, x.q)
    _check_counts(op, matrices, starts, factors)
    for number, (matrix, start) in enumerate(zip(matrices, starts, strict=True)):
        name, shape = f"matrix {number}", (matrix.shape[0], matrix.shape[-1])
        _check_narrow(op, name, matrix, shape, matrices[0].dtype)
        _check_range(op, name, "rows of b", start, _sizes(matrix, transposed)[0], len(b.q))
    check_matrix(op, "p", p, (len(a.q), _total_rank(matrices, transposed)))
    p_scale, u_scale = tensor_scale([p], _format(a)), tensor_scale(matrices, _format(b))
    wide = _append_low_rank(*a, p, p_scale, *b, matrices, u_scale, starts, factors, transposed)
    return TensorScaled(*wide[:2]), TensorScaled(*wide[2:])


def _format(x: TensorScaled) -> Format:
    return next(fmt for fmt in FORMATS.values() if fmt.dtype == x.q.dtype)


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


def _check_range(op: str, name: str, what: str, start: int, size: int, count: int) -> None:
    if start < 0 or start + size > count:
        raise ValueError(
            f"{op}: {name} takes {size} {what} from number {start} on, and there are {count}"
        )
