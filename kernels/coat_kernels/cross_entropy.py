"""Cross-entropy of rows of logits, and its gradient in the logits' place or in FP8.

    loss = log(sum_v exp(x_v)) - x_target,   x_v <- (softmax(x)_v - [v = target]) / divisor

One program reads one row twice: the first pass computes the largest logit and the sum of
exponentials, the second overwrites the logits with the gradient. A row of a vocabulary of 152k is
304 KB in BF16, more than a multiprocessor holds, so the second pass runs backwards: the end of the
row may still be in the cache.

:func:`logit_gradient` computes the gradient from the losses, for GEMMs in FP8, in both layouts:

    q = cast((softmax(x) - [v = target]) 2^15),   gradient = q / (2^15 divisor)

The scale is constant, as no magnitude exceeds 1. The format is E5M2: with 1 at 256, E4M3 rounds
probabilities below 2^-18 to 0, up to half of the probability of a vocabulary of 152k, and
they would never become smaller; E5M2 represents them down to 2^-32. The conversion rounds the
difference, not the probability, so it is exact enough where the model is almost certain of the
target.

The cast rounds stochastically, with a hash of the column, of the row's target and of its loss
without the last 12 bits, which depend on the order of sums. Rounding to nearest has errors of up to
12.5% with a mean that is not 0; a weight's gradient is a sum over all tokens, in which the mean
remains when the rest cancels (docs/experiments/fine_tuning.md). Reference:
``reference/cross_entropy.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import exp2_fast, load_tile, mix_bits, store_quantized, word_offsets
from coat_kernels.formats import E5M2, GEMM_MULTIPLE, check_dtype, pad_length
from coat_kernels.launch import TOKENS, launch, tile_grid, transposing_tile
from coat_kernels.registry import register

GRADIENT_SCALE = 2.0**-15
"""Value of 1 in the FP8 data of :func:`logit_gradient`, for a divisor of 1."""

MAX_COLUMNS = 16384
"""Maximum number of logits in a program's tile."""

_MIN_COLUMNS = 256

_WARPS = 16
"""Warps of a program with MAX_COLUMNS: two such programs fit a multiprocessor."""

LANE = tl.constexpr(8)
"""Adjacent logits that share a running maximum: one load of 16 bytes in BF16."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Lowest FP32 value, the initial maximum: subtracting it from -inf gives no NaN."""

LOG2E = tl.constexpr(1.4426950408889634)

_INVERSE_SCALE = tl.constexpr(1 / GRADIENT_SCALE)

_MULTIPLE = tl.constexpr(GEMM_MULTIPLE)


@triton.jit
def _offsets(i, BLOCK: tl.constexpr):
    """Return the offsets of tile i of a row, [BLOCK / LANE, LANE]."""
    o = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    return i * BLOCK + o


@triton.jit
def _cross_entropy_kernel(
    x_ptr, targets_ptr, divisor_ptr,  # (M, V), (M,) int64, () FP32 or null
    losses_ptr,  # (M,) FP32
    V, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    target = tl.load(targets_ptr + row)
    is_known = (target >= 0) & (target < V)
    target = target.to(tl.int32)
    of_target = tl.load(x_ptr + target, mask=is_known, other=0.0).to(tl.float32)
    # Starting from the target's logit makes every thread read it before anything is written.
    largest = tl.zeros((BLOCK // LANE,), dtype=tl.float32) + tl.maximum(of_target, LOWEST)
    sums = tl.zeros((BLOCK // LANE,), dtype=tl.float32)
    tiles = tl.cdiv(V, BLOCK)
    for i in range(tiles):
        o = _offsets(i, BLOCK)
        x = tl.load(x_ptr + o, mask=o < V, other=float("-inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(x, axis=1))
        exponentials = exp2_fast((x - largest[:, None]) * LOG2E)
        sums = sums * exp2_fast((before - largest) * LOG2E) + tl.sum(exponentials, axis=1)
    top = tl.max(largest, axis=0)
    total = tl.sum(sums * exp2_fast((largest - top) * LOG2E), axis=0)
    total = tl.where(is_known, total, float("nan"))
    tl.store(losses_ptr + row, (top - of_target) + tl.log(total))
    if divisor_ptr is not None:
        one = 1.0 / tl.load(divisor_ptr)
        factor = one / total
        for i in range(tiles):
            o = _offsets(tiles - 1 - i, BLOCK)
            x = tl.load(x_ptr + o, mask=o < V, other=float("-inf")).to(tl.float32)
            gradient = exp2_fast((x - top) * LOG2E) * factor
            gradient = tl.where(o == target, gradient - one, gradient)
            tl.store(x_ptr + o, gradient.to(x_ptr.dtype.element_ty), mask=o < V)


@triton.jit(do_not_specialize=TOKENS)
def _logit_gradient_kernel(
    x_ptr, targets_ptr, losses_ptr,  # (M, V), (M,) int64, (M,) FP32
    q_ptr, qt_ptr,  # (M, V), (V, M padded), E5M2
    M, V, stride, stride_t, tiles_n,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M)
    o_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < M, o_n < V
    target = tl.load(targets_ptr + o_m, mask=m_m, other=-1)
    is_known = (target >= 0) & (target < V)
    of_target = tl.load(x_ptr + o_m * stride + target, mask=is_known, other=0.0).to(tl.float32)
    # exp(x - inf) is 0 in the padding; the loss of an unknown target is NaN.
    losses = tl.load(losses_ptr + o_m, mask=m_m, other=float("inf"))
    total = of_target + losses
    x = load_tile(x_ptr, o_m, o_n, m_m[:, None] & m_n[None, :], stride)
    y = exp2_fast((x - total[:, None]) * LOG2E)
    y = tl.where(o_n[None, :] == target.to(tl.int32)[:, None], y - 1.0, y) * _INVERSE_SCALE
    keys = mix_bits(target.to(tl.uint32)) ^ (losses.to(tl.uint32, bitcast=True) >> 12)
    words = mix_bits(o_n.to(tl.uint32)[None, :] ^ mix_bits(keys)[:, None])
    # E5M2 has 21 bits less than FP32, and equal steps of 2^-16 below 2^-14.
    bits = (y.to(tl.uint32, bitcast=True) + (words >> 11)) & 0xFFE00000
    small = y + ((words >> 8).to(tl.float32) * 2.0**-24 - 0.5) * 2.0**-16
    rounded = tl.where(tl.abs(y) < 2.0**-14, small, bits.to(tl.float32, bitcast=True))
    y = tl.where((y == y) & (y != 0.0), rounded, y)  # NaN and zero stay
    end = tl.cdiv(M, _MULTIPLE) * _MULTIPLE
    store_quantized(
        y, q_ptr, qt_ptr, o_m, i_m, o_n, m_n, M, end, V, stride_t, ROWS, TRANSPOSED,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip


@register(
    fake=lambda logits, _targets, _divisor: logits.new_empty(logits.shape[:1], dtype=torch.float32),
    mutates=("logits",),
)
def _cross_entropy_(logits: Tensor, targets: Tensor, divisor: Tensor | None) -> Tensor:
    M, V = logits.shape
    losses = logits.new_empty((M,), dtype=torch.float32)
    # A thread loads 32 logits at a time, 64 bytes in 16 bits; or 16 if registers do not suffice: in
    # FP32, and for rows that are not aligned for loads of 16 bytes.
    wide = logits.dtype.itemsize == 2 and V % 16 == 0 and logits.stride(0) % 16 == 0
    most = MAX_COLUMNS if wide else MAX_COLUMNS // 2
    block = min(most, max(_MIN_COLUMNS, 1 << (V - 1).bit_length()))
    launch(
        _cross_entropy_kernel, (M,),
        x_ptr=logits, targets_ptr=targets, divisor_ptr=divisor, losses_ptr=losses,
        V=V, stride=logits.stride(0), BLOCK=block, num_warps=max(1, _WARPS * block // most),
    )  # fmt: skip
    return losses


def cross_entropy_(logits: Tensor, targets: Tensor, divisor: Tensor | None = None) -> Tensor:
    """Compute the cross-entropy of each row, FP32 [M] (not divided), and its gradient in place.

    ``logits`` are FP32, BF16 or FP16 [M, V], each row contiguous. With a divisor, FP32 [], they are
    overwritten with the gradient of ``losses.sum() / divisor``, rounded once. ``targets`` are int64
    [M]; one outside [0, V) makes loss and gradient of its row NaN.
    """
    _check_logits("cross_entropy_", logits)
    _check("cross_entropy_", "targets", targets, torch.int64, logits.shape[:1], logits.device)
    if divisor is not None:
        _check("cross_entropy_", "divisor", divisor, torch.float32, (), logits.device)
    return _cross_entropy_(logits, targets, divisor)


@register(
    fake=lambda logits, _targets, _losses, _qt, _start, rows: logits.new_empty(
        logits.shape if rows else (0,), dtype=E5M2.dtype
    ),
    mutates=("qt",),
)
def _logit_gradient(
    logits: Tensor, targets: Tensor, losses: Tensor, qt: Tensor, start: int, rows: bool
) -> Tensor:
    M, V = logits.shape
    q = logits.new_empty((M, V) if rows else (0,), dtype=E5M2.dtype)
    transposed = qt.numel() > 0
    tile = transposing_tile()
    grid, options = tile_grid(pad_length(M) if transposed else M, V, tile)
    launch(
        _logit_gradient_kernel, grid if rows or transposed else (0,),
        x_ptr=logits, targets_ptr=targets, losses_ptr=losses, q_ptr=q, qt_ptr=qt[:, start:],
        M=M, V=V, stride=logits.stride(0), stride_t=qt.stride(0), ROWS=rows, TRANSPOSED=transposed,
        **options,
    )  # fmt: skip
    return q


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    transposed: Tensor | None = None,
    start: int = 0,
    *,
    rows: bool = True,
) -> Tensor:
    """Compute the gradient q of ``losses.sum()``, E5M2 [M, V] (empty without ``rows``).

    A value of q means ``q * GRADIENT_SCALE``. ``logits`` [M, V], V a multiple of 16, and
    ``targets`` are as in :func:`cross_entropy_`, which returned the losses. In ``transposed``,
    E5M2 [V, T], columns from ``start`` on (a multiple of 16) are overwritten with the transposed
    gradient: M columns, and zeros up to a multiple of 16.
    """
    op = "logit_gradient"
    M, V = _check_logits(op, logits)
    _check(op, "targets", targets, torch.int64, (M,), logits.device)
    _check(op, "losses", losses, torch.float32, (M,), logits.device)
    if V % GEMM_MULTIPLE:
        raise ValueError(
            f"{op}: the vocabulary has {V} tokens; FP8 GEMMs take a multiple of "
            f"{GEMM_MULTIPLE}: use cross_entropy_ with a divisor"
        )
    if transposed is None:
        transposed = logits.new_empty((0, 0), dtype=E5M2.dtype)
    else:
        columns = transposed.shape[-1]
        _check(op, "transposed", transposed, E5M2.dtype, (V, columns), logits.device)
        if start % GEMM_MULTIPLE or start + pad_length(M) > columns or columns % GEMM_MULTIPLE:
            raise ValueError(
                f"{op}: {M} tokens from column {start} on do not fit into transposed data of shape "
                f"{(V, columns)}: the first column and the number of columns must be multiples of "
                f"{GEMM_MULTIPLE}, and {pad_length(M)} columns are written"
            )
    return _logit_gradient(logits, targets, losses, transposed, start, rows)


def _check_logits(op: str, logits: Tensor) -> torch.Size:
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            f"{op}: logits have shape {tuple(logits.shape)} and strides "
            f"{logits.stride()}; they must be a matrix [M, V], V > 0, with contiguous rows: "
            "flatten the leading dimensions and call .contiguous()"
        )
    check_dtype(op, "logits", logits)
    return logits.shape


def _check(
    op: str, name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or x.device != device:
        raise ValueError(
            f"{op}: {name} is {x.dtype} of shape {tuple(x.shape)} and strides "
            f"{x.stride()} on {x.device}; it must be contiguous {dtype} of shape {tuple(shape)} on "
            f"{device}, the device of the logits"
        )
