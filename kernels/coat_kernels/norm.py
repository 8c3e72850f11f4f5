"""RMSNorm and LayerNorm from high precision to FP8, saving the input in FP8 for backward.

    y = (x - mean) rstd weight + bias,   rstd = 1 / sqrt(avg((x - mean)^2) + eps)

    dx = rstd (g - avg(g) - xhat avg(g xhat)) + residual,   g = dy weight,  xhat = (x - mean) rstd
    dweight = sum over tokens of dy xhat,   dbias = sum over tokens of dy

RMSNorm has no mean, no bias and no avg(g). xhat has a mean square of at most 1, so |xhat| is at
most sqrt(N), and y's per-tensor scale follows from the weights, without y's amax:

    scale = (sqrt(N) max|weight| + max|bias|) / max

E4M3 loses no precision to the unused part of its range: its normal numbers span 15 binades. Forward
is one pass (COAT's Group Scaling, arXiv 2410.19313 section 4.2, has two):

* ``norm_fwd`` reads x (and a residual delta: then it writes x + delta). It writes y in FP8,
  row-major for the forward GEMM, and what is saved for backward: group-scaled x, rstd and mean (N +
  N / G bytes and one or two FP32 per token).
* ``norm_recompute`` reads group-scaled x in backward and writes y again, transposed, for the
  grad-weight GEMM. y is never stored in high precision.

Backward, ``norm_bwd``, is one pass over group-scaled x. Partial sums for weight and bias are added
in a fixed order, so they are deterministic. Derivation: ``kernels/README.md``.

``norm_fwd`` and ``norm_bwd`` are persistent kernels. A row is held in one or two segments whose
widths are powers of two: 1152 channels are 1024 and 128, with no lane idle, where one power of two
would be 2048. Each program processes every n-th row and prefetches the next. Reference:
``reference/norm.py``.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import (
    block_amax_bits,
    inverse_scale,
    load_grouped,
    spread_exponents,
    store_grouped,
    store_quantized,
    word_offsets,
)
from coat_kernels.formats import (
    E4M3,
    MIN_SCALE,
    GroupScaled,
    TensorScaled,
    check_group,
    check_like,
    check_matrix,
    check_vector,
    get_format,
    pad_length,
)
from coat_kernels.launch import COUNTS, TOKENS, count_sms, launch, tile_grid, transposing_tile
from coat_kernels.quantize import empty_layouts
from coat_kernels.quantize_blockwise import empty_grouped
from coat_kernels.registry import register

REGISTER_FILE = 65536
"""Registers of a multiprocessor."""

MAX_PROGRAMS = 32
"""Maximum number of programs per multiprocessor."""

MIN_WIDTH = 128
"""Minimum width of a row's first segment."""

WARPS_AND_REGISTERS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "fwd": ((1280, 1, 128), (2048, 2, 128), (4096, 4, 128), (8192, 16, 80)),
    "sum": ((2048, 2, 128), (4096, 8, 80), (8192, 16, 128)),
    "bwd": ((1152, 1, 255), (1536, 2, 168), (2048, 4, 128), (4096, 8, 128), (8192, 16, 128)),
}
"""Kernel -> (maximum row width in lanes of both segments, warps, maximum registers per thread); the
last entry also serves wider rows. ``sum`` is ``norm_fwd`` with a delta. Without a bound the
compiler uses so many registers that one or two programs fill a multiprocessor. All entries compile
without spills."""

_MIN_SCALE = tl.constexpr(MIN_SCALE)


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
def _load_parameter(ptr, o_h, o_t, N, TAIL: tl.constexpr):
    """Load both segments of a parameter, and return its largest magnitude; a NaN stays."""
    head = load_channels(ptr, o_h, N)
    bits = block_amax_bits(head.to(tl.float32))
    tail = head
    if TAIL:
        tail = load_channels(ptr, o_t, N)
        bits = tl.maximum(bits, block_amax_bits(tail.to(tl.float32)))
    return head, tail, bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_output(middle, factor, weight, bias_ptr, y_ptr, inverse, row, o_n, N):
    """Store (middle factor weight + bias) / scale; ``inverse`` is 1 / scale."""
    y = middle * factor * weight.to(tl.float32)
    if bias_ptr is not None:
        y += load_channels(bias_ptr, o_n, N).to(tl.float32)
    store_row(y * inverse, y_ptr, row, o_n, N)


@triton.jit(do_not_specialize=(*TOKENS, *COUNTS))
def _norm_fwd_kernel(  # noqa: C901 - constexpr branches
    x_ptr, delta_ptr, weight_ptr, bias_ptr,  # (M, N), (M, N) or null, (N,), (N,) or null
    sum_ptr,  # (M, N) if there is a delta
    q_ptr, e_ptr, rstd_ptr, mean_ptr,  # (M, N) FP8, (M, N / GROUP), (M,), (M,)
    y_ptr, scale_ptr,  # (M, N) FP8, ()
    M, N, programs, eps,
    ROOT: tl.constexpr, INVERSE_MAX: tl.constexpr,  # sqrt(N) / max, 1 / max
    HAS_DELTA: tl.constexpr, CENTERED: tl.constexpr, MASKED: tl.constexpr,
    MAX_EXPONENT: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    o_h = tl.arange(0, HEAD)
    o_t = o_h
    next_h = load_row(x_ptr, row, o_h, M, N)
    if HAS_DELTA:
        next_delta_h = load_row(delta_ptr, row, o_h, M, N)
    if TAIL:
        o_t = HEAD + tl.arange(0, TAIL)
        next_t = load_row(x_ptr, row, o_t, M, N)
        if HAS_DELTA:
            next_delta_t = load_row(delta_ptr, row, o_t, M, N)
    weight_h, weight_t, largest = _load_parameter(weight_ptr, o_h, o_t, N, TAIL)
    scale = largest * ROOT
    if bias_ptr is not None:
        _, _, largest = _load_parameter(bias_ptr, o_h, o_t, N, TAIL)
        scale += largest * INVERSE_MAX
    scale = tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)  # a NaN stays
    inverse = tl.math.div_rn(1.0, scale)
    if row == 0:
        tl.store(scale_ptr, scale)
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
        _store_output(x_h, rstd, weight_h, bias_ptr, y_ptr, inverse, row, o_h, N)
        if TAIL:
            _store_output(x_t, rstd, weight_t, bias_ptr, y_ptr, inverse, row, o_t, N)


@triton.jit(do_not_specialize=TOKENS)
def _norm_recompute_kernel(
    q_ptr, e_ptr, weight_ptr, bias_ptr, rstd_ptr, mean_ptr, scale_ptr,
    yt_ptr,  # (N, M_PADDED) FP8
    M, N, M_PADDED, tiles_n,
    CENTERED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    x = load_grouped(q_ptr, e_ptr, o_m, i_n, M, N, N, GROUP, BLOCK_M, BLOCK_N)
    rstd = tl.load(rstd_ptr + o_m, mask=o_m < M, other=0.0)
    if CENTERED:
        x -= tl.load(mean_ptr + o_m, mask=o_m < M, other=0.0)[:, None]
    y = x * rstd[:, None] * load_channels(weight_ptr, o_n, N).to(tl.float32)
    if bias_ptr is not None:
        y += load_channels(bias_ptr, o_n, N).to(tl.float32)
        y = tl.where(o_m[:, None] < M, y, 0.0)
    store_quantized(
        y * inverse_scale(scale_ptr), yt_ptr, yt_ptr, o_m, i_m, o_n, o_n < N, M, M_PADDED, N,
        M_PADDED, False, True, BLOCK_M, BLOCK_N,
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
    dx_ptr, dweight_ptr, dbias_ptr,  # (M, N), (programs, N) FP32 partial sums or null
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
        if dweight_ptr is not None:
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
            if dweight_ptr is not None:
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
    if dweight_ptr is not None:
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


def _empty_fwd(x: Tensor, delta: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Allocate the results of ``norm_fwd``."""
    *_, centered, group_size, fmt = rest
    M = x.shape[0]
    total = torch.empty_like(x) if delta is not None else x.new_empty(0)
    rstd = x.new_empty((M,), dtype=torch.float32)
    mean = x.new_empty((M if centered else 0,), dtype=torch.float32)
    y = torch.empty_like(x, dtype=get_format(fmt).dtype)
    scale = x.new_empty((), dtype=torch.float32)
    return total, *empty_grouped(x, group_size, fmt), rstd, mean, y, scale


@register(fake=_empty_fwd)
def _norm_fwd(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    centered: bool, group_size: int, fmt: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    form = get_format(fmt)
    M, N = x.shape
    made: Any = _empty_fwd(x, delta, centered, group_size, fmt)
    total, q, exponents, rstd, mean, y, scale = made
    kernel = "fwd" if delta is None else "sum"
    programs, options = _persistent(kernel, max(1, M), N, x.device)  # M = 0: one writes the scale
    launch(
        _norm_fwd_kernel, (programs,),
        x_ptr=x, delta_ptr=delta, weight_ptr=weight, bias_ptr=bias, sum_ptr=total, q_ptr=q,
        e_ptr=exponents, rstd_ptr=rstd, mean_ptr=mean, y_ptr=y, scale_ptr=scale, M=M, N=N,
        programs=programs, eps=float(eps), ROOT=math.sqrt(N) / form.max,
        INVERSE_MAX=1.0 / form.max, HAS_DELTA=delta is not None, CENTERED=centered,
        MASKED=options["HEAD"] + options["TAIL"] > N, MAX_EXPONENT=form.max_exponent,
        GROUP=group_size, **options,
    )  # fmt: skip
    return made


@register(
    fake=lambda q, *rest: empty_layouts(len(q), q.shape[1], q, rest[-1], False, True)[1],
)
def _norm_recompute(
    q: Tensor, exponents: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, mean: Tensor,
    scale: Tensor, fmt: str,
) -> Tensor:  # fmt: skip
    M, N = q.shape
    _, yt = empty_layouts(M, N, q, fmt, False, True)
    group = N // exponents.shape[1]
    grid, options = tile_grid(pad_length(M), N, transposing_tile(group))
    launch(
        _norm_recompute_kernel, grid,
        q_ptr=q, e_ptr=exponents, weight_ptr=weight, bias_ptr=bias, rstd_ptr=rstd, mean_ptr=mean,
        scale_ptr=scale, yt_ptr=yt, M=M, N=N, M_PADDED=pad_length(M), CENTERED=mean.numel() > 0,
        GROUP=group, **options,
    )  # fmt: skip
    return yt


def _empty_bwd(grad_output: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of ``norm_bwd``."""
    *_, mean, _, sums = rest
    N, centered = grad_output.shape[1] * sums, mean.numel() > 0
    dweight, dbias = (grad_output.new_empty((n,), dtype=torch.float32) for n in (N, N * centered))
    return torch.empty_like(grad_output), dweight, dbias


@register(fake=_empty_bwd)
def _norm_bwd(
    dy: Tensor, x: Tensor, exponents: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor,
    residual: Tensor | None, sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, N = x.shape
    centered = mean.numel() > 0
    programs, options = _persistent("bwd", max(1, M), N, dy.device)  # M = 0: one writes zero sums
    dx = torch.empty_like(dy)
    partial = dy.new_empty((sums * (1 + centered), programs, N), dtype=torch.float32)
    launch(
        _norm_bwd_kernel, (programs,),
        dy_ptr=dy, x_ptr=x, e_ptr=exponents, weight_ptr=weight, rstd_ptr=rstd, mean_ptr=mean,
        residual_ptr=residual, dx_ptr=dx, dweight_ptr=partial[0] if sums else None,
        dbias_ptr=partial[-1] if sums else None, M=M, N=N, programs=programs,
        HAS_RESIDUAL=residual is not None, CENTERED=centered, GROUP=N // exponents.shape[1],
        **options,
    )  # fmt: skip
    # Two sums, not two views of one sum: results of an op may not share memory.
    dweight, dbias = (
        partial[i].sum(0) if i < len(partial) else partial.new_empty(0) for i in range(2)
    )
    return dx, dweight, dbias


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
    total, q, exponents, rstd, mean, y, scale = _norm_fwd(
        x, delta, weight, bias, eps, centered, group_size, E4M3.name
    )
    saved = NormSaved(GroupScaled(q, exponents), rstd, mean, scale)
    return x if delta is None else total, TensorScaled(y, scale), saved


def norm_recompute(saved: NormSaved, weight: Tensor, bias: Tensor | None) -> TensorScaled:
    """Recompute the norm's output from the saved input, transposed [N, M'], for grad-weight."""
    check_vector("norm_recompute", "weight", weight, saved.x.q.shape[1])
    check_vector("norm_recompute", "bias", bias, saved.x.q.shape[1])
    yt = _norm_recompute(*saved.x, weight, bias, *saved[1:], E4M3.name)
    return TensorScaled(yt, saved.scale)


def norm_bwd(
    grad_output: Tensor,
    saved: NormSaved,
    weight: Tensor,
    grad_residual: Tensor | None = None,
    *,
    frozen: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`norm_fwd` from ``grad_output`` [M, N], contiguous.

    ``grad_residual`` is the gradient of the norm's input through the residual path, which is added.
    Returns gradients of the input [M, N] in grad_output's dtype, of the weight, FP32 [N], and of
    the bias, FP32 [N] (empty for RMSNorm); the last two are empty if the norm is ``frozen``.
    """
    M, N = saved.x.q.shape
    check_matrix("norm_bwd", "grad_output", grad_output, (M, N))
    check_vector("norm_bwd", "weight", weight, N)
    if grad_residual is not None:
        check_like("norm_bwd", "grad_residual", grad_residual, "grad_output", grad_output)
    return _norm_bwd(
        grad_output, *saved.x, weight, saved.rstd, saved.mean, grad_residual, not frozen
    )
