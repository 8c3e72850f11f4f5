"""RMSNorm and LayerNorm from high precision to FP8, keeping only an FP8 copy of the input.

    y = (x - mean) * rstd * weight + bias,   rstd = 1 / sqrt(avg((x - mean)^2) + eps)

RMSNorm has no mean and no bias. Two passes, because y's per-tensor scale needs all of y:

* ``norm_stats`` reads x once (and what a residual connection adds to it: then it writes the sum):
  rstd, mean, x's group-scaled copy (all that backward keeps: N + N / G bytes and one or two FP32
  per token) and y's amax (the first stage of COAT's Group Scaling, arXiv 2410.19313 section 4.2).
* ``norm_apply`` reads x (forward) or its FP8 copy (backward) and writes y's codes, row-major for
  the forward GEMM or transposed for the weight gradient. y itself is never stored.

Backward (``norm_bwd``) works from the FP8 copy and adds the gradient of the residual path; weight
and bias gradients are summed in FP32 in a fixed order (partial sums per block of rows, then one
sum), so they are deterministic.
Reference: ``reference.norm_stats``, ``norm_apply``, ``norm_bwd``.
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
from coat_kernels.launch import NUM_WARPS, TOKENS, Tile, cdiv, chosen, launch, tiled
from coat_kernels.quantize import empty_grouped, empty_layouts, new_amax
from coat_kernels.registry import register
from coat_kernels.tile import (
    block_amax_bits,
    inverse_scale,
    load_grouped,
    load_tile,
    row_offsets,
    store_codes,
    store_grouped,
    word_offsets,
)

ROW_ELEMENTS = 8192
"""Elements of a tile of whole rows in the forward pass."""

GRADIENT_ROW_ELEMENTS = 4096
"""The same in the backward pass, which holds most: with 8192 one block fills an SM."""

MAX_PARTIALS = 264
"""Blocks of rows whose weight gradients are summed apart: two per multiprocessor of an H200."""


@triton.jit
def _load_vector(ptr, o_n, N):
    return tl.load(ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=TOKENS)
def _norm_stats_kernel(
    x_ptr, delta_ptr, weight_ptr, bias_ptr,  # (M, N), (M, N) or null, (N,), (N,) or null
    sum_ptr,  # (M, N) if there is a delta
    q_ptr, e_ptr, rstd_ptr, mean_ptr, amax_bits_ptr,  # (M, N) FP8, (M, N / GROUP), (M,), (M,), ()
    M, N, eps,
    HAS_DELTA: tl.constexpr, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    MAX_EXPONENT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o_m = row_offsets(tl.program_id(0), BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < N)
    x = load_tile(x_ptr, o_m, o_n, m_mn, N)
    if HAS_DELTA:
        added = (x + load_tile(delta_ptr, o_m, o_n, m_mn, N)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + o_m[:, None] * N + o_n[None, :], added, mask=m_mn)
        x = added.to(tl.float32)
    store_grouped(x, q_ptr, e_ptr, o_m, 0, M, N, N, MAX_EXPONENT, GROUP, BLOCK_M, BLOCK_N)
    middle = x
    if CENTERED:
        mean = tl.sum(x, axis=1) / N
        tl.store(mean_ptr + o_m, mean, mask=o_m < M)
        middle = tl.where(m_mn, x - mean[:, None], 0.0)
    rstd = tl.math.rsqrt(tl.sum(middle * middle, axis=1) / N + eps)
    tl.store(rstd_ptr + o_m, rstd, mask=o_m < M)
    y = middle * rstd[:, None] * _load_vector(weight_ptr, o_n, N)
    if HAS_BIAS:
        y += _load_vector(bias_ptr, o_n, N)
    tl.atomic_max(amax_bits_ptr, block_amax_bits(tl.where(m_mn, y, 0.0)))


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
    y = x * rstd[:, None] * _load_vector(weight_ptr, o_n, N)
    if HAS_BIAS:
        y += _load_vector(bias_ptr, o_n, N)
        y = tl.where(o_m[:, None] < M, y, 0.0)
    store_codes(
        y * inverse_scale(scale_ptr), q_ptr, qt_ptr, o_m, i_m, o_n, o_n < N, M, M_PADDED, N,
        M_PADDED, ROWS, TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=TOKENS)
def _norm_bwd_kernel(
    dy_ptr, x_ptr, e_ptr, weight_ptr, rstd_ptr, mean_ptr, residual_ptr,  # the last (M, N) or null
    dx_ptr, dweight_ptr, dbias_ptr,  # (M, N), (programs, N) FP32 partial sums
    M, N, rows_per_program,
    HAS_RESIDUAL: tl.constexpr, CENTERED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    o_n = tl.arange(0, BLOCK_N)
    weight = _load_vector(weight_ptr, o_n, N)
    dweight = tl.zeros((BLOCK_N,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, rows_per_program, BLOCK_M):
        row = pid.to(tl.int64) * rows_per_program + start
        o_m = row + tl.arange(0, BLOCK_M)
        m_mn = (o_m[:, None] < M) & (o_n[None, :] < N)
        dy = load_tile(dy_ptr, o_m, o_n, m_mn, N)
        x = load_grouped(x_ptr, e_ptr, o_m, 0, M, N, N, GROUP, BLOCK_M, BLOCK_N)
        rstd = tl.load(rstd_ptr + o_m, mask=o_m < M, other=0.0)[:, None]
        if CENTERED:
            x -= tl.load(mean_ptr + o_m, mask=o_m < M, other=0.0)[:, None]
        xhat = x * rstd  # beyond the last channel it need not be zero, but dy and g are
        g = dy * weight
        dx = g - xhat * (tl.sum(g * xhat, axis=1) / N)[:, None]
        if CENTERED:
            dx -= (tl.sum(g, axis=1) / N)[:, None]
        dx *= rstd
        if HAS_RESIDUAL:
            dx += load_tile(residual_ptr, o_m, o_n, m_mn, N)
        tl.store(
            dx_ptr + o_m[:, None] * N + o_n[None, :], dx.to(dx_ptr.dtype.element_ty), mask=m_mn
        )
        dweight += tl.sum(dy * xhat, axis=0)
        if CENTERED:
            dbias += tl.sum(dy, axis=0)
    o = pid * N + o_n
    tl.store(dweight_ptr + o, dweight, mask=o_n < N)
    if CENTERED:
        tl.store(dbias_ptr + o, dbias, mask=o_n < N)


def _row_block(N: int, elements: int = ROW_ELEMENTS) -> dict[str, int]:
    """Launch options of a tile of whole rows: one row, or more up to that many elements."""
    block_n = max(128, 1 << (N - 1).bit_length())
    rows = max(1, min(64, elements // block_n))
    tile = chosen(Tile(rows, block_n, NUM_WARPS if block_n <= ROW_ELEMENTS else 2 * NUM_WARPS))
    return {"BLOCK_N": block_n, "BLOCK_M": tile.rows, "num_warps": tile.warps}


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
    total, q, exponents, rstd, mean, _ = _empty_stats(x, delta, centered, group_size, fmt)
    amax = new_amax(x.device)
    block = _row_block(N)
    launch(
        _norm_stats_kernel, (cdiv(M, block["BLOCK_M"]),),
        x_ptr=x, delta_ptr=delta, weight_ptr=weight, bias_ptr=bias, sum_ptr=total, q_ptr=q,
        e_ptr=exponents, rstd_ptr=rstd, mean_ptr=mean, amax_bits_ptr=amax.view(torch.int32),
        M=M, N=N, eps=eps, HAS_DELTA=delta is not None, CENTERED=centered,
        HAS_BIAS=bias is not None, MAX_EXPONENT=form.max_exponent, GROUP=group_size,
        **block,
    )  # fmt: skip
    return total, q, exponents, rstd, mean, reference.amax_to_scale(amax, fmt)


def _norm_apply_triton(
    x: Tensor, exponents: Tensor | None, weight: Tensor, bias: Tensor | None, rstd: Tensor,
    mean: Tensor, scale: Tensor, fmt: str, rows: bool, transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    M, N = x.shape
    q, qt = empty_layouts(M, N, format_of(fmt), rows, transposed, x.device)
    grid, options = tiled(padded(M) if transposed else M, N)
    launch(
        _norm_apply_kernel, grid,
        x_ptr=x, e_ptr=exponents, weight_ptr=weight, bias_ptr=bias, rstd_ptr=rstd, mean_ptr=mean,
        scale_ptr=scale, q_ptr=q, qt_ptr=qt, M=M, N=N, M_PADDED=padded(M),
        GROUPED=exponents is not None, CENTERED=mean.numel() > 0, HAS_BIAS=bias is not None,
        ROWS=rows, TRANSPOSED=transposed,
        GROUP=1 if exponents is None else N // exponents.shape[1], **options,
    )  # fmt: skip
    return q, qt


def _norm_apply_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    fmt, rows, transposed = rest[-3:]
    return empty_layouts(x.shape[0], x.shape[1], format_of(fmt), rows, transposed, x.device)


def _norm_bwd_triton(
    dy: Tensor, x: Tensor, exponents: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, N = x.shape
    centered = mean.numel() > 0
    block = _row_block(N, GRADIENT_ROW_ELEMENTS)
    tiles_m = max(1, cdiv(M, block["BLOCK_M"]))  # no rows: one program writes zero sums
    tiles_per_program = cdiv(tiles_m, MAX_PARTIALS)
    programs = cdiv(tiles_m, tiles_per_program)
    dx = torch.empty_like(dy)
    sums = torch.empty((1 + centered, programs, N), dtype=torch.float32, device=dy.device)
    launch(
        _norm_bwd_kernel, (programs,),
        dy_ptr=dy, x_ptr=x, e_ptr=exponents, weight_ptr=weight, rstd_ptr=rstd, mean_ptr=mean,
        residual_ptr=residual, dx_ptr=dx, dweight_ptr=sums[0], dbias_ptr=sums[-1], M=M, N=N,
        rows_per_program=tiles_per_program * block["BLOCK_M"],
        HAS_RESIDUAL=residual is not None, CENTERED=centered, GROUP=N // exponents.shape[1],
        **block,
    )  # fmt: skip
    return dx, sums[0].sum(0), sums[1].sum(0) if centered else sums.new_empty(0)


def _norm_bwd_fake(dy: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    N, mean = dy.shape[1], rest[4]
    biases = N if mean.numel() else 0
    dweight, dbias = (dy.new_empty((size,), dtype=torch.float32) for size in (N, biases))
    return torch.empty_like(dy), dweight, dbias


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
_norm_bwd = register(
    "norm_bwd",
    triton=_norm_bwd_triton,
    reference=reference.norm_bwd,
    fake=_norm_bwd_fake,
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


def norm_bwd(
    dy: Tensor, saved: NormSaved, weight: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`norm_fwd`.

    Args:
        dy: gradient of the output [M, N], contiguous.
        saved: from the forward pass.
        weight: [N].
        residual: gradient that reaches the norm's input past the norm, like dy; added to dx.

    Returns:
        dx [M, N] in dy's dtype, dweight FP32 [N], dbias FP32 [N] (empty for RMSNorm).

    Raises:
        ValueError: dy is not a contiguous matrix of x's shape, residual is not like dy, or weight
            does not fit.
    """
    M, N = saved.x.q.shape
    check_matrix("norm_bwd", "dy", dy, (M, N))
    check_vector("norm_bwd", "weight", weight, N)
    if residual is not None:
        check_like("norm_bwd", "residual", residual, "dy", dy)
    return _norm_bwd(dy, saved.x.q, saved.x.exponents, weight, saved.rstd, saved.mean, residual)
