"""RMSNorm and LayerNorm from high precision to FP8, keeping only an FP8 copy of the input.

    y = (x - mean) * rstd * weight + bias,   rstd = 1 / sqrt(avg((x - mean)^2) + eps)

RMSNorm has no mean and no bias. Two passes, because y's per-tensor scale needs all of y:

* ``norm_stats`` reads x once (and what a residual connection adds to it: then it writes the sum):
  rstd, mean, x's group-scaled copy (all that backward keeps: N + N / G bytes and one or two FP32
  per token) and y's amax (the first stage of COAT's Group Scaling, arXiv 2410.19313 section 4.2).
* ``norm_apply`` reads x (forward) or its FP8 copy (backward) and writes y's codes, row-major for
  the forward GEMM or transposed for the weight gradient. y itself is never stored.

Gradient: ``norm_gradient.py``. Reference: ``reference.norm_stats``, ``norm_apply``.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference
from coat_kernels.formats import (
    E4M3,
    Format,
    GroupScaled,
    TensorScaled,
    check_group,
    check_like,
    check_matrix,
    check_vector,
    format_of,
    padded,
)
from coat_kernels.groups import empty_grouped
from coat_kernels.launch import COUNTS, TILE, TOKENS, Tile, chosen, launch, tiled, transposing_tile
from coat_kernels.quantize import empty_layouts, new_scale
from coat_kernels.registry import register
from coat_kernels.tile import (
    inverse_scale,
    load_grouped,
    load_tile,
    magnitude_bits,
    publish_scale,
    store_codes,
    store_grouped,
    word_offsets,
)

MULTIPROCESSORS = 132
"""Of an H200. The kernels that walk over whole rows have as many programs as these hold; each takes
every n-th row, so this also is the order in which weight gradients are summed."""

ROW_ELEMENTS_PER_WARP = 512
"""Of a row: 16 per thread, and as many registers for each vector that a program keeps."""

REGISTER_FILE = 65536
"""Registers of a multiprocessor."""

REGISTERS = (80, 128)
"""Most of a thread of ``norm_stats``: 24 warps then share a multiprocessor. With a bias or a delta,
which take more, 16 do."""


@triton.jit
def load_vector(ptr, o_n, N):
    """FP32 [1, BLOCK_N] of N channels; zero beyond."""
    return tl.load(ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_row(ptr, row, o_n, M, N):
    """One row [1, BLOCK_N] as it is stored; zeros beyond the last, for which no one waits."""
    return tl.load(
        ptr + row.to(tl.int64) * N + o_n[None, :], mask=(o_n[None, :] < N) & (row < M), other=0.0
    )


@triton.jit(do_not_specialize=(*TOKENS, *COUNTS))
def _norm_stats_kernel(
    x_ptr, delta_ptr, weight_ptr, bias_ptr,  # (M, N), (M, N) or null, (N,), (N,) or null
    sum_ptr,  # (M, N) if there is a delta
    q_ptr, e_ptr, rstd_ptr, mean_ptr,  # (M, N) FP8, (M, N / GROUP), (M,), (M,)
    work_ptr, scale_ptr, programs,  # of publish_scale
    M, N, eps,
    HAS_DELTA: tl.constexpr, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    MAX_EXPONENT: tl.constexpr, INVERSE_MAX: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n[None, :] < N
    weight = load_row(weight_ptr, tl.program_id(1), o_n, 1, N)
    bits = tl.zeros((1, BLOCK_N), dtype=tl.int32)
    row = tl.program_id(0)
    rows = tl.cdiv(M - row, programs)
    next_x = load_row(x_ptr, row, o_n, M, N)
    if HAS_DELTA:
        next_delta = load_row(delta_ptr, row, o_n, M, N)
    for i in range(rows):
        # The next row is on its way while this one is worked on.
        row = tl.program_id(0) + i * programs
        x = next_x.to(tl.float32)
        next_x = load_row(x_ptr, row + programs, o_n, M, N)
        o_m = row.to(tl.int64) + tl.arange(0, 1)
        if HAS_DELTA:
            added = (x + next_delta.to(tl.float32)).to(sum_ptr.dtype.element_ty)
            next_delta = load_row(delta_ptr, row + programs, o_n, M, N)
            tl.store(sum_ptr + o_m[:, None] * N + o_n[None, :], added, mask=m_n)
            x = added.to(tl.float32)
        store_grouped(x, q_ptr, e_ptr, o_m, 0, M, N, N, MAX_EXPONENT, GROUP, 1, BLOCK_N)
        middle = x
        if CENTERED:
            mean = tl.sum(x, axis=1) / N
            tl.store(mean_ptr + o_m, mean)
            middle = tl.where(m_n, x - mean[:, None], 0.0)
        rstd = tl.math.rsqrt(tl.sum(middle * middle, axis=1) / N + eps)
        tl.store(rstd_ptr + o_m, rstd)
        y = middle * rstd[:, None] * weight.to(tl.float32)
        if HAS_BIAS:
            y += load_vector(bias_ptr, o_n, N)
        bits = tl.maximum(bits, magnitude_bits(y))
    amax_bits = tl.max(tl.max(bits, axis=1), axis=0)
    publish_scale(amax_bits, work_ptr, scale_ptr, programs, INVERSE_MAX)


@triton.jit(do_not_specialize=TOKENS)
def _norm_apply_kernel(
    x_ptr, e_ptr, weight_ptr, bias_ptr, rstd_ptr, mean_ptr, scale_ptr,
    q_ptr, qt_ptr,  # (M, N) and (N, M_PADDED) FP8
    M, N, M_PADDED, tiles_n,
    GROUPED: tl.constexpr, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < N)
    if GROUPED:
        x = load_grouped(x_ptr, e_ptr, o_m, i_n, M, N, N, GROUP, BLOCK_M, BLOCK_N)
    else:
        x = load_tile(x_ptr, o_m, o_n, m_mn, N)
    rstd = tl.load(rstd_ptr + o_m, mask=o_m < M, other=0.0)
    if CENTERED:
        x -= tl.load(mean_ptr + o_m, mask=o_m < M, other=0.0)[:, None]
    y = x * rstd[:, None] * load_vector(weight_ptr, o_n, N)
    if HAS_BIAS:
        y += load_vector(bias_ptr, o_n, N)
        y = tl.where(o_m[:, None] < M, y, 0.0)
    store_codes(
        y * inverse_scale(scale_ptr), q_ptr, qt_ptr, o_m, i_m, o_n, o_n < N, M, M_PADDED, N,
        M_PADDED, ROWS, TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def row_programs(M: int, N: int, registers: int) -> tuple[int, dict[str, int]]:
    """How many programs walk over the rows, and their launch options.

    Args:
        M: rows.
        N: columns.
        registers: most of a thread; without a bound the compiler takes so many that one or two
            programs fill a multiprocessor.
    """
    block_n = max(128, 1 << (N - 1).bit_length())
    warps = max(1, min(16, block_n // ROW_ELEMENTS_PER_WARP))
    warps = chosen(Tile(1, block_n, warps)).warps
    each = max(1, REGISTER_FILE // (32 * registers) // warps)
    options = {"BLOCK_N": block_n, "num_warps": warps, "maxnreg": registers}
    return min(M, MULTIPROCESSORS * each), options


def _empty_stats(
    x: Tensor, delta: Tensor | None, centered: bool, group_size: int, fmt: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of ``norm_stats``."""
    M = x.shape[0]
    total = torch.empty_like(x) if delta is not None else x.new_empty(0)
    rstd = x.new_empty((M,), dtype=torch.float32)
    mean = x.new_empty((M if centered else 0,), dtype=torch.float32)
    scale = x.new_empty((), dtype=torch.float32)
    return total, *empty_grouped(x, group_size, fmt), rstd, mean, scale


def _norm_stats_triton(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    centered: bool, group_size: int, fmt: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    form = format_of(fmt)
    M, N = x.shape
    total, q, exponents, rstd, mean = _empty_stats(x, delta, centered, group_size, fmt)[:5]
    programs, options = row_programs(M, N, REGISTERS[bias is not None or delta is not None])
    scale, shared = new_scale(fmt, programs, x.device)
    launch(
        _norm_stats_kernel, (programs,),
        x_ptr=x, delta_ptr=delta, weight_ptr=weight, bias_ptr=bias, sum_ptr=total, q_ptr=q,
        e_ptr=exponents, rstd_ptr=rstd, mean_ptr=mean, M=M, N=N, eps=eps,
        HAS_DELTA=delta is not None, CENTERED=centered, HAS_BIAS=bias is not None,
        MAX_EXPONENT=form.max_exponent, GROUP=group_size, **shared, **options,
    )  # fmt: skip
    return total, q, exponents, rstd, mean, scale


def _norm_apply_triton(
    x: Tensor, exponents: Tensor | None, weight: Tensor, bias: Tensor | None, rstd: Tensor,
    mean: Tensor, scale: Tensor, fmt: str, rows: bool, transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    M, N = x.shape
    q, qt = empty_layouts(M, N, format_of(fmt), rows, transposed, x.device)
    group = 1 if exponents is None else N // exponents.shape[1]
    tile = transposing_tile(group) if transposed else TILE
    grid, options = tiled(padded(M) if transposed else M, N, tile)
    launch(
        _norm_apply_kernel, grid,
        x_ptr=x, e_ptr=exponents, weight_ptr=weight, bias_ptr=bias, rstd_ptr=rstd, mean_ptr=mean,
        scale_ptr=scale, q_ptr=q, qt_ptr=qt, M=M, N=N, M_PADDED=padded(M),
        GROUPED=exponents is not None, CENTERED=mean.numel() > 0, HAS_BIAS=bias is not None,
        ROWS=rows, TRANSPOSED=transposed,
        GROUP=group, **options,
    )  # fmt: skip
    return q, qt


def _norm_apply_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    fmt, rows, transposed = rest[-3:]
    return empty_layouts(x.shape[0], x.shape[1], format_of(fmt), rows, transposed, x.device)


_norm_stats = register(
    "norm_stats",
    triton=_norm_stats_triton,
    reference=reference.norm_stats,
    fake=lambda x, delta, _weight, _bias, _eps, *rest: _empty_stats(x, delta, *rest),
)
_norm_apply = register(
    "norm_apply",
    triton=_norm_apply_triton,
    reference=reference.norm_apply,
    fake=_norm_apply_fake,
)


class NormSaved(NamedTuple):
    """What a norm keeps for its backward pass."""

    x: GroupScaled
    """The input, [M, N]."""
    rstd: Tensor
    """FP32 [M]."""
    mean: Tensor
    """FP32 [M]; empty for RMSNorm."""
    scale: Tensor
    """Per-tensor scale of the output, FP32 []."""


def norm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
    group_size: int,
    delta: Tensor | None = None,
    fmt: Format = E4M3,
) -> tuple[Tensor, TensorScaled, NormSaved]:
    """RMSNorm, or LayerNorm when ``centered``, of x or of x + delta, to per-tensor FP8.

    Args:
        x: FP32, BF16 or FP16 [M, N], contiguous.
        weight: [N], any of these dtypes.
        bias: [N] or None.
        eps: the model's epsilon, inside the square root.
        centered: subtract the mean (LayerNorm).
        group_size: group size of the copy of the norm's input that is kept.
        delta: what a residual connection adds to x first, like x.
        fmt: format of the codes of y and of that copy.

    Returns:
        The norm's input (x itself, or the sum rounded to x's dtype), y's codes, and what backward
        needs.

    Raises:
        ValueError: the shape, dtype or group size does not fit.
    """
    check_matrix("norm_fwd", "x", x)
    check_group("norm_fwd", x.shape[1], group_size)
    check_vector("norm_fwd", "weight", weight, x.shape[1])
    check_vector("norm_fwd", "bias", bias, x.shape[1])
    if delta is not None:
        check_like("norm_fwd", "delta", delta, "x", x)
    total, q, exponents, rstd, mean, scale = _norm_stats(
        x, delta, weight, bias, eps, centered, group_size, fmt.name
    )
    source = x if delta is None else total
    y, _ = _norm_apply(source, None, weight, bias, rstd, mean, scale, fmt.name, True, False)
    saved = NormSaved(GroupScaled(q, exponents), rstd, mean, scale)
    return source, TensorScaled(y, scale), saved


def norm_recompute(
    saved: NormSaved, weight: Tensor, bias: Tensor | None, fmt: Format = E4M3
) -> TensorScaled:
    """The norm's output again, from the FP8 copy, transposed [N, M'] for the weight gradient.

    Raises:
        ValueError: weight or bias does not fit.
    """
    check_vector("norm_recompute", "weight", weight, saved.x.q.shape[1])
    check_vector("norm_recompute", "bias", bias, saved.x.q.shape[1])
    _, qt = _norm_apply(
        saved.x.q, saved.x.exponents, weight, bias, saved.rstd, saved.mean, saved.scale,
        fmt.name, False, True,
    )  # fmt: skip
    return TensorScaled(qt, saved.scale)
