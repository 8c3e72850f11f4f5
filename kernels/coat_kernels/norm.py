"""RMSNorm and LayerNorm from high precision to FP8, saving the input in FP8 for backward.

    y = (x - mean) rstd weight + bias,   rstd = 1 / sqrt(avg((x - mean)^2) + eps)

    dx = rstd (g - avg(g) - xhat avg(g xhat)) + residual,   g = dy weight,  xhat = (x - mean) rstd
    dweight = sum over tokens of dy xhat,   dbias = sum over tokens of dy

RMSNorm has no mean, no bias and no avg(g). Forward has two passes, because y's per-tensor scale
depends on all of y:

* ``norm_stats`` reads x once (and a residual delta: then it writes x + delta). It computes rstd,
  mean, group-scaled x (all that is saved for backward: N + N / G bytes and one or two FP32 per
  token) and y's amax (the first stage of COAT's Group Scaling, arXiv 2410.19313 section 4.2).
* ``norm_apply`` reads x (forward) or saved group-scaled x (backward) and writes y in FP8, row-major
  for the forward GEMM or transposed for the grad-weight GEMM. y is never stored in high precision.

Backward, ``norm_bwd``, is one pass over group-scaled x. Partial sums for weight and bias are added
in a fixed order, so they are deterministic. Derivation: ``kernels/README.md``.

``norm_stats`` and ``norm_bwd`` are persistent kernels. A row is held in one or two segments whose
widths are powers of two: 1152 channels are 1024 and 128, with no lane idle, where one power of two
would be 2048. Each program processes every n-th row and prefetches the next. Reference:
``reference/norm.py``.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import (
    inverse_scale,
    load_grouped,
    load_tile,
    magnitude_bits,
    publish_scale,
    spread_exponents,
    store_grouped,
    store_quantized,
    word_offsets,
)
from coat_kernels.formats import (
    E4M3,
    GroupScaled,
    TensorScaled,
    check_group,
    check_like,
    check_matrix,
    check_vector,
    get_format,
    pad_length,
)
from coat_kernels.launch import COUNTS, TILE, TOKENS, count_sms, launch, tile_grid, transposing_tile
from coat_kernels.quantize import empty_layouts
from coat_kernels.quantize_blockwise import empty_grouped
from coat_kernels.registry import register
from coat_kernels.scale_pool import new_scale
from coat_kernels.shared_scales import finish_scale

REGISTER_FILE = 65536
"""Registers of a multiprocessor."""

MAX_PROGRAMS = 32
"""Maximum number of programs per multiprocessor."""

MIN_WIDTH = 128
"""Minimum width of a row's first segment."""

WARPS_AND_REGISTERS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "stats": ((1280, 1, 128), (2048, 2, 128), (4096, 4, 128), (8192, 16, 80)),
    "sum": ((2048, 2, 128), (4096, 8, 80), (8192, 16, 128)),
    "bwd": ((1152, 1, 255), (1536, 2, 168), (2048, 4, 128), (4096, 8, 128), (8192, 16, 128)),
}
"""Kernel -> (maximum row width in lanes of both segments, warps, maximum registers per thread); the
last entry also serves wider rows. ``sum`` is ``norm_stats`` with a delta. Without a bound the
compiler uses so many registers that one or two programs fill a multiprocessor. All entries compile
without spills."""

LANE = tl.constexpr(16)
"""Channels that share one running maximum."""


@triton.jit
def load_row(ptr, row, o_n, M, N):
    """Load a row [1, WIDTH] without conversion; zeros beyond the last row."""
    mask = (o_n[None, :] < N) & (row < M)
    return tl.load(ptr + row.to(tl.int64) * N + o_n[None, :], mask=mask, other=0.0)


@triton.jit
def store_row(values, ptr, row, o_n, N):
    """Store [1, WIDTH] in a row of N channels, cast to its dtype."""
    o = row.to(tl.int64) * N + o_n[None, :]
    tl.store(ptr + o, values.to(ptr.dtype.element_ty), mask=o_n[None, :] < N)


@triton.jit
def row_sum(x):
    """Sum [1, WIDTH] to a scalar.

    A one-element vector would keep the layout of its segment, and adding two of them would make the
    compiler convert one segment's layout through shared memory.
    """
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def load_channels(ptr, o_n, N):
    """Load [1, WIDTH] of N channels without conversion; zeros beyond the last channel."""
    return tl.load(ptr + o_n[None, :], mask=o_n[None, :] < N, other=0.0)


@triton.jit
def _add_delta(x, delta, sum_ptr, row, o_n, N):
    """Store x + delta and return it as rounded."""
    total = (x + delta.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    store_row(total, sum_ptr, row, o_n, N)
    return total.to(tl.float32)


@triton.jit
def _max_magnitude_bits(
    middle, rstd, weight, bias_ptr, o_n, N, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return the bits of y's largest magnitude per LANE channels: [1, WIDTH / LANE]."""
    y = middle * rstd * weight.to(tl.float32)
    if HAS_BIAS:
        y += load_channels(bias_ptr, o_n, N).to(tl.float32)
    return tl.max(tl.reshape(magnitude_bits(y), (1, WIDTH // LANE, LANE)), axis=2)


@triton.jit(do_not_specialize=(*TOKENS, *COUNTS))
def _norm_stats_kernel(  # noqa: C901 - constexpr branches
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
        # The next row is loaded while this one is processed.
        row = tl.program_id(0) + i * programs
        after = row + programs
        o_m = row.to(tl.int64) + tl.arange(0, 1)
        x_h = next_h.to(tl.float32)
        next_h = load_row(x_ptr, after, o_h, M, N)
        if HAS_DELTA:
            x_h = _add_delta(x_h, next_delta_h, sum_ptr, row, o_h, N)
            next_delta_h = load_row(delta_ptr, after, o_h, M, N)
        store_grouped(x_h, q_ptr, e_ptr, o_m, 0, M, N, N, MAX_EXPONENT, GROUP, 1, HEAD)
        if TAIL:
            x_t = next_t.to(tl.float32)
            next_t = load_row(x_ptr, after, o_t, M, N)
            if HAS_DELTA:
                x_t = _add_delta(x_t, next_delta_t, sum_ptr, row, o_t, N)
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
        bits = _max_magnitude_bits(x_h, rstd, weight_h, bias_ptr, o_h, N, HAS_BIAS, HEAD)
        bits_h = tl.maximum(bits_h, bits)
        if TAIL:
            bits = _max_magnitude_bits(x_t, rstd, weight_t, bias_ptr, o_t, N, HAS_BIAS, TAIL)
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
    store_quantized(
        y * inverse_scale(scale_ptr), q_ptr, qt_ptr, o_m, i_m, o_n, o_n < N, M, M_PADDED, N,
        M_PADDED, ROWS, TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _load_segment(
    dy_ptr, x_ptr, e_ptr, row, i_n, M, N, GROUP: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Load a segment of a row without conversion: dy, x's FP8 data and exponents."""
    o_n = i_n + tl.arange(0, WIDTH)
    o_g = i_n // GROUP + tl.arange(0, WIDTH // GROUP)
    e = load_row(e_ptr, row, o_g, M, N // GROUP)
    return load_row(dy_ptr, row, o_n, M, N), load_row(x_ptr, row, o_n, M, N), e


@triton.jit
def _normalize(q, e, rstd, mean, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Compute xhat; beyond the last channel it may be non-zero, but dy is zero."""
    return (spread_exponents(q.to(tl.float32), e, GROUP, 1, WIDTH) - mean) * rstd


@triton.jit
def _average(g, xhat, N, CENTERED: tl.constexpr):
    """Compute avg(g xhat) and avg(g) in one reduction: each synchronizes the program's warps."""
    if CENTERED:
        projection, total = tl.split(tl.sum(tl.join(g * xhat, g), axis=1))
        return tl.sum(projection, axis=0) / N, tl.sum(total, axis=0) / N
    else:
        return row_sum(g * xhat) / N, 0.0


@triton.jit
def _store_gradient(
    g, xhat, projection, total, rstd, residual, dx_ptr, row, o_n, N,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    dx = (g - xhat * projection - total) * rstd
    if HAS_RESIDUAL:
        dx += residual.to(tl.float32)
    store_row(dx, dx_ptr, row, o_n, N)


@triton.jit(do_not_specialize=(*TOKENS, *COUNTS))
def _norm_bwd_kernel(  # noqa: C901 - constexpr branches
    dy_ptr, x_ptr, e_ptr, weight_ptr, rstd_ptr, mean_ptr, residual_ptr,  # the last (M, N) or null
    dx_ptr, dweight_ptr, dbias_ptr,  # (M, N), (programs, N) FP32 partial sums
    M, N, programs,
    HAS_RESIDUAL: tl.constexpr, CENTERED: tl.constexpr, GROUP: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    o_h = tl.arange(0, HEAD)
    weight_h = load_channels(weight_ptr, o_h, N)
    dweight_h = tl.zeros((1, HEAD), dtype=tl.float32)
    dbias_h = tl.zeros((1, HEAD), dtype=tl.float32)
    next_dy_h, next_q_h, next_e_h = _load_segment(dy_ptr, x_ptr, e_ptr, row, 0, M, N, GROUP, HEAD)
    if TAIL:
        o_t = HEAD + tl.arange(0, TAIL)
        weight_t = load_channels(weight_ptr, o_t, N)
        dweight_t = tl.zeros((1, TAIL), dtype=tl.float32)
        dbias_t = tl.zeros((1, TAIL), dtype=tl.float32)
        next_dy_t, next_q_t, next_e_t = _load_segment(
            dy_ptr, x_ptr, e_ptr, row, HEAD, M, N, GROUP, TAIL
        )
    next_rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
    next_mean = 0.0
    if CENTERED:
        next_mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
    # The residual of a row in two segments is not prefetched.
    AHEAD: tl.constexpr = HAS_RESIDUAL and not TAIL
    if AHEAD:
        next_residual = load_row(residual_ptr, row, o_h, M, N)
    for i in range(tl.cdiv(M - row, programs)):
        # The next row is loaded while this one is processed.
        row = tl.program_id(0) + i * programs
        after = row + programs
        rstd = next_rstd
        mean = next_mean
        next_rstd = tl.load(rstd_ptr + after, mask=after < M, other=0.0)
        if CENTERED:
            next_mean = tl.load(mean_ptr + after, mask=after < M, other=0.0)
        dy_h = next_dy_h.to(tl.float32)
        xhat_h = _normalize(next_q_h, next_e_h, rstd, mean, GROUP, HEAD)
        next_dy_h, next_q_h, next_e_h = _load_segment(
            dy_ptr, x_ptr, e_ptr, after, 0, M, N, GROUP, HEAD
        )
        g_h = dy_h * weight_h.to(tl.float32)
        projection, total = _average(g_h, xhat_h, N, CENTERED)
        dweight_h += dy_h * xhat_h
        if CENTERED:
            dbias_h += dy_h
        if TAIL:
            dy_t = next_dy_t.to(tl.float32)
            xhat_t = _normalize(next_q_t, next_e_t, rstd, mean, GROUP, TAIL)
            next_dy_t, next_q_t, next_e_t = _load_segment(
                dy_ptr, x_ptr, e_ptr, after, HEAD, M, N, GROUP, TAIL
            )
            g_t = dy_t * weight_t.to(tl.float32)
            projection_t, total_t = _average(g_t, xhat_t, N, CENTERED)
            projection += projection_t
            total += total_t
            dweight_t += dy_t * xhat_t
            if CENTERED:
                dbias_t += dy_t
            residual_t = 0.0
            if HAS_RESIDUAL:
                residual_t = load_row(residual_ptr, row, o_t, M, N)
            _store_gradient(
                g_t, xhat_t, projection, total, rstd, residual_t, dx_ptr, row, o_t, N, HAS_RESIDUAL
            )
        residual_h = 0.0
        if AHEAD:
            residual_h = next_residual
            next_residual = load_row(residual_ptr, after, o_h, M, N)
        elif HAS_RESIDUAL:
            residual_h = load_row(residual_ptr, row, o_h, M, N)
        _store_gradient(
            g_h, xhat_h, projection, total, rstd, residual_h, dx_ptr, row, o_h, N, HAS_RESIDUAL
        )
    row = tl.program_id(0)
    store_row(dweight_h, dweight_ptr, row, o_h, N)
    if CENTERED:
        store_row(dbias_h, dbias_ptr, row, o_h, N)
    if TAIL:
        store_row(dweight_t, dweight_ptr, row, o_t, N)
        if CENTERED:
            store_row(dbias_t, dbias_ptr, row, o_t, N)


def split_row(columns: int) -> tuple[int, int]:
    """Return the widths of the two segments of a row; the second is 0 if one segment suffices.

    If both together were as wide as the next power of two, one segment of that width is used.
    """
    whole = max(MIN_WIDTH, 1 << (columns - 1).bit_length())
    head = whole // 2
    if columns <= head or head < MIN_WIDTH:
        return whole, 0
    tail = 1 << (columns - head - 1).bit_length()
    return (whole, 0) if tail == head else (head, tail)


def _persistent(kernel: str, M: int, N: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """Return the number of programs for the rows of [M, N], and launch options."""
    head, tail = split_row(N)
    table = WARPS_AND_REGISTERS[kernel]
    _, warps, registers = next((row for row in table if head + tail <= row[0]), table[-1])
    each = max(1, min(MAX_PROGRAMS, REGISTER_FILE // (32 * registers * warps)))
    options = {"HEAD": head, "TAIL": tail, "num_warps": warps, "maxnreg": registers}
    # As many as fit on the GPU, which also determines the summation order of weight gradients.
    return min(M, count_sms(device) * each), options


def _empty_stats(
    x: Tensor, delta: Tensor | None, centered: bool, group_size: int, fmt: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results of ``norm_stats``, except the scale."""
    M = x.shape[0]
    total = torch.empty_like(x) if delta is not None else x.new_empty(0)
    rstd = x.new_empty((M,), dtype=torch.float32)
    mean = x.new_empty((M if centered else 0,), dtype=torch.float32)
    return total, *empty_grouped(x, group_size, fmt), rstd, mean


@register(
    fake=lambda x, delta, _weight, _bias, _eps, *rest: (
        *_empty_stats(x, delta, *rest),
        x.new_empty((), dtype=torch.float32),
    ),
)
def _norm_stats(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    centered: bool, group_size: int, fmt: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    form = get_format(fmt)
    M, N = x.shape
    total, q, exponents, rstd, mean = _empty_stats(x, delta, centered, group_size, fmt)
    programs, options = _persistent("stats" if delta is None else "sum", M, N, x.device)
    scale = new_scale(x.device)
    launch(
        _norm_stats_kernel, (programs,),
        x_ptr=x, delta_ptr=delta, weight_ptr=weight, bias_ptr=bias, sum_ptr=total, q_ptr=q,
        e_ptr=exponents, rstd_ptr=rstd, mean_ptr=mean, scale_ptr=scale, M=M, N=N,
        programs=programs, eps=float(eps), HAS_DELTA=delta is not None, CENTERED=centered,
        HAS_BIAS=bias is not None, MASKED=options["HEAD"] + options["TAIL"] > N,
        MAX_EXPONENT=form.max_exponent, INVERSE_MAX=1.0 / form.max, GROUP=group_size, **options,
    )  # fmt: skip
    return total, q, exponents, rstd, mean, finish_scale(scale)


@register(
    fake=lambda x, *rest: empty_layouts(len(x), x.shape[1], x, *rest[-3:]),
)
def _norm_apply(
    x: Tensor, exponents: Tensor | None, weight: Tensor, bias: Tensor | None, rstd: Tensor,
    mean: Tensor, scale: Tensor, fmt: str, rows: bool, transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    M, N = x.shape
    q, qt = empty_layouts(M, N, x, fmt, rows, transposed)
    group = 1 if exponents is None else N // exponents.shape[1]
    tile = transposing_tile(group) if transposed else TILE
    grid, options = tile_grid(pad_length(M) if transposed else M, N, tile)
    launch(
        _norm_apply_kernel, grid,
        x_ptr=x, e_ptr=exponents, weight_ptr=weight, bias_ptr=bias, rstd_ptr=rstd, mean_ptr=mean,
        scale_ptr=scale, q_ptr=q, qt_ptr=qt, M=M, N=N, M_PADDED=pad_length(M),
        GROUPED=exponents is not None, CENTERED=mean.numel() > 0, HAS_BIAS=bias is not None,
        ROWS=rows, TRANSPOSED=transposed, GROUP=group, **options,
    )  # fmt: skip
    return q, qt


def _empty_bwd(grad_output: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of ``norm_bwd``."""
    N, centered = grad_output.shape[1], rest[4].numel() > 0
    dweight, dbias = (grad_output.new_empty((n,), dtype=torch.float32) for n in (N, N * centered))
    return torch.empty_like(grad_output), dweight, dbias


@register(fake=_empty_bwd)
def _norm_bwd(
    dy: Tensor, x: Tensor, exponents: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, N = x.shape
    centered = mean.numel() > 0
    programs, options = _persistent("bwd", max(1, M), N, dy.device)  # M = 0: one writes zero sums
    dx = torch.empty_like(dy)
    sums = torch.empty((1 + centered, programs, N), dtype=torch.float32, device=dy.device)
    launch(
        _norm_bwd_kernel, (programs,),
        dy_ptr=dy, x_ptr=x, e_ptr=exponents, weight_ptr=weight, rstd_ptr=rstd, mean_ptr=mean,
        residual_ptr=residual, dx_ptr=dx, dweight_ptr=sums[0], dbias_ptr=sums[-1], M=M, N=N,
        programs=programs, HAS_RESIDUAL=residual is not None, CENTERED=centered,
        GROUP=N // exponents.shape[1], **options,
    )  # fmt: skip
    # Two sums, not two views of one sum: results of an op may not share memory.
    return dx, sums[0].sum(0), sums[1].sum(0) if centered else sums.new_empty(0)


class NormSaved(NamedTuple):
    """Tensors that a norm saves for backward."""

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
) -> tuple[Tensor, TensorScaled, NormSaved]:
    """Compute RMSNorm, or LayerNorm if ``centered``, of x or of x + delta, in per-tensor E4M3.

    x and delta are FP32, BF16 or FP16 [M, N], contiguous; weight and bias [N] may have another of
    these dtypes. Returns the norm's input (x, or x + delta rounded to x's dtype), y in E4M3, and
    the saved tensors.
    """
    check_matrix("norm_fwd", "x", x)
    check_group("norm_fwd", x.shape[1], group_size)
    check_vector("norm_fwd", "weight", weight, x.shape[1])
    check_vector("norm_fwd", "bias", bias, x.shape[1])
    if delta is not None:
        check_like("norm_fwd", "delta", delta, "x", x)
    total, q, exponents, rstd, mean, scale = _norm_stats(
        x, delta, weight, bias, eps, centered, group_size, E4M3.name
    )
    source = x if delta is None else total
    y, _ = _norm_apply(source, None, weight, bias, rstd, mean, scale, E4M3.name, True, False)
    saved = NormSaved(GroupScaled(q, exponents), rstd, mean, scale)
    return source, TensorScaled(y, scale), saved


def norm_recompute(saved: NormSaved, weight: Tensor, bias: Tensor | None) -> TensorScaled:
    """Recompute the norm's output from the saved input, transposed [N, M'], for grad-weight."""
    check_vector("norm_recompute", "weight", weight, saved.x.q.shape[1])
    check_vector("norm_recompute", "bias", bias, saved.x.q.shape[1])
    _, qt = _norm_apply(
        saved.x.q, saved.x.exponents, weight, bias, saved.rstd, saved.mean, saved.scale,
        E4M3.name, False, True,
    )  # fmt: skip
    return TensorScaled(qt, saved.scale)


def norm_bwd(
    grad_output: Tensor, saved: NormSaved, weight: Tensor, grad_residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`norm_fwd` from ``grad_output`` [M, N], contiguous.

    ``grad_residual`` is the gradient of the norm's input through the residual path, which is added.
    Returns gradients of the input [M, N] in grad_output's dtype, of the weight, FP32 [N], and of
    the bias, FP32 [N] (empty for RMSNorm).
    """
    M, N = saved.x.q.shape
    check_matrix("norm_bwd", "grad_output", grad_output, (M, N))
    check_vector("norm_bwd", "weight", weight, N)
    if grad_residual is not None:
        check_like("norm_bwd", "grad_residual", grad_residual, "grad_output", grad_output)
    return _norm_bwd(grad_output, *saved.x, weight, saved.rstd, saved.mean, grad_residual)
