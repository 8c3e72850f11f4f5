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
from coat_kernels.launch import COUNTS, TILE, TOKENS, launch, tiled, transposing_tile
from coat_kernels.quantize import empty_layouts
from coat_kernels.registry import register
from coat_kernels.scales import new_scale
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
from coat_kernels.walk import load_channels, load_row, row_sum, store_row, walked

LANE = tl.constexpr(16)
"""Channels whose largest magnitude is kept as one."""


@triton.jit
def _added(x, delta, sum_ptr, row, o_n, N):
    """X + delta, stored, as it is stored."""
    total = (x + delta.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    store_row(total, sum_ptr, row, o_n, N)
    return total.to(tl.float32)


@triton.jit
def _largest(
    middle, rstd, weight, bias_ptr, o_n, N, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Bits of the largest magnitudes of y, of LANE channels each: [1, WIDTH / LANE]."""
    y = middle * rstd * weight.to(tl.float32)
    if HAS_BIAS:
        y += load_channels(bias_ptr, o_n, N).to(tl.float32)
    return tl.max(tl.reshape(magnitude_bits(y), (1, WIDTH // LANE, LANE)), axis=2)


@triton.jit(do_not_specialize=(*TOKENS, *COUNTS))
def _norm_stats_kernel(  # noqa: C901 - the branches are those of the compiler
    x_ptr, delta_ptr, weight_ptr, bias_ptr,  # (M, N), (M, N) or null, (N,), (N,) or null
    sum_ptr,  # (M, N) if there is a delta
    q_ptr, e_ptr, rstd_ptr, mean_ptr, scale_ptr,  # (M, N) FP8, (M, N / GROUP), (M,), (M,), ()
    M, N, programs, eps,
    HAS_DELTA: tl.constexpr, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr,
    MAX_EXPONENT: tl.constexpr, INVERSE_MAX: tl.constexpr, GROUP: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    o_h = tl.arange(0, HEAD)
    weight_h = load_channels(weight_ptr, o_h, N)
    bits_h = tl.zeros((1, HEAD // LANE), dtype=tl.int32)
    next_h = load_row(x_ptr, row, o_h, M, N)
    if HAS_DELTA:
        next_delta_h = load_row(delta_ptr, row, o_h, M, N)
    if TAIL:
        o_t = HEAD + tl.arange(0, TAIL)
        weight_t = load_channels(weight_ptr, o_t, N)
        bits_t = tl.zeros((1, TAIL // LANE), dtype=tl.int32)
        next_t = load_row(x_ptr, row, o_t, M, N)
        if HAS_DELTA:
            next_delta_t = load_row(delta_ptr, row, o_t, M, N)
    for i in range(tl.cdiv(M - row, programs)):
        # The next row is on its way while this one is worked on.
        row = tl.program_id(0) + i * programs
        after = row + programs
        o_m = row.to(tl.int64) + tl.arange(0, 1)
        x_h = next_h.to(tl.float32)
        next_h = load_row(x_ptr, after, o_h, M, N)
        if HAS_DELTA:
            x_h = _added(x_h, next_delta_h, sum_ptr, row, o_h, N)
            next_delta_h = load_row(delta_ptr, after, o_h, M, N)
        store_grouped(x_h, q_ptr, e_ptr, o_m, 0, M, N, N, MAX_EXPONENT, GROUP, 1, HEAD)
        if TAIL:
            x_t = next_t.to(tl.float32)
            next_t = load_row(x_ptr, after, o_t, M, N)
            if HAS_DELTA:
                x_t = _added(x_t, next_delta_t, sum_ptr, row, o_t, N)
                next_delta_t = load_row(delta_ptr, after, o_t, M, N)
            store_grouped(x_t, q_ptr, e_ptr, o_m, HEAD, M, N, N, MAX_EXPONENT, GROUP, 1, TAIL)
        if CENTERED:
            total = row_sum(x_h)
            if TAIL:
                total += row_sum(x_t)
            mean = total / N
            tl.store(mean_ptr + row, mean)
            x_h -= mean
            if TAIL:
                x_t -= mean
                if MASKED:
                    x_t = tl.where(o_t[None, :] < N, x_t, 0.0)
            elif MASKED:
                x_h = tl.where(o_h[None, :] < N, x_h, 0.0)
        squares = row_sum(x_h * x_h)
        if TAIL:
            squares += row_sum(x_t * x_t)
        rstd = tl.math.rsqrt(squares / N + eps)
        tl.store(rstd_ptr + row, rstd)
        bits = _largest(x_h, rstd, weight_h, bias_ptr, o_h, N, HAS_BIAS, HEAD)
        bits_h = tl.maximum(bits_h, bits)
        if TAIL:
            bits = _largest(x_t, rstd, weight_t, bias_ptr, o_t, N, HAS_BIAS, TAIL)
            bits_t = tl.maximum(bits_t, bits)
    largest = tl.max(tl.max(bits_h, axis=1), axis=0)
    if TAIL:
        largest = tl.maximum(largest, tl.max(tl.max(bits_t, axis=1), axis=0))
    publish_scale(largest, scale_ptr, INVERSE_MAX)


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
    y = x * rstd[:, None] * load_channels(weight_ptr, o_n, N).to(tl.float32)
    if HAS_BIAS:
        y += load_channels(bias_ptr, o_n, N).to(tl.float32)
        y = tl.where(o_m[:, None] < M, y, 0.0)
    store_codes(
        y * inverse_scale(scale_ptr), q_ptr, qt_ptr, o_m, i_m, o_n, o_n < N, M, M_PADDED, N,
        M_PADDED, ROWS, TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


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
    programs, options = walked("stats" if delta is None else "sum", M, N)
    scale = new_scale(x.device)
    launch(
        _norm_stats_kernel, (programs,),
        x_ptr=x, delta_ptr=delta, weight_ptr=weight, bias_ptr=bias, sum_ptr=total, q_ptr=q,
        e_ptr=exponents, rstd_ptr=rstd, mean_ptr=mean, scale_ptr=scale, M=M, N=N,
        programs=programs, eps=float(eps), HAS_DELTA=delta is not None, CENTERED=centered,
        HAS_BIAS=bias is not None, MASKED=options["HEAD"] + options["TAIL"] > N,
        MAX_EXPONENT=form.max_exponent, INVERSE_MAX=1.0 / form.max, GROUP=group_size, **options,
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
