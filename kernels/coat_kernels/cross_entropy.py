"""Cross-entropy of rows of logits; the gradient overwrites the logits.

    loss = log(sum_v exp(x_v)) - x_target,   x_v <- (softmax(x)_v - [v = target]) / divisor

One program reads one row twice: the first pass computes the largest logit and the sum of
exponentials, the second overwrites the logits with the gradient. A row of a vocabulary of 152k is
304 KB in BF16, more than a multiprocessor holds, so the second pass runs backwards: the end of the
row may still be in the cache. Reference: ``reference.cross_entropy_``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import exp2_fast
from coat_kernels.formats import check_dtype
from coat_kernels.launch import launch
from coat_kernels.registry import register

MOST_COLUMNS = 16384
"""Maximum number of logits in a program's tile."""

_LEAST_COLUMNS = 256

_WARPS = 16
"""Warps of a program with MOST_COLUMNS: two such programs fit a multiprocessor."""

LANE = tl.constexpr(8)
"""Adjacent logits that share a running maximum: one load of 16 bytes in BF16."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Lowest FP32 value, the initial maximum: subtracting it from -inf gives no NaN."""

LOG2E = tl.constexpr(1.4426950408889634)


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
    most = MOST_COLUMNS if wide else MOST_COLUMNS // 2
    block = min(most, max(_LEAST_COLUMNS, 1 << (V - 1).bit_length()))
    launch(
        _cross_entropy_kernel, (M,),
        x_ptr=logits, targets_ptr=targets, divisor_ptr=divisor, losses_ptr=losses,
        V=V, stride=logits.stride(0), BLOCK=block, num_warps=max(1, _WARPS * block // most),
    )  # fmt: skip
    return losses


def cross_entropy_(logits: Tensor, targets: Tensor, divisor: Tensor | None = None) -> Tensor:
    """Compute the cross-entropy of each row and, with a divisor, its gradient in place.

    Args:
        logits: FP32, BF16 or FP16 [M, V], each row contiguous. With a divisor they are overwritten
            with the gradient of ``losses.sum() / divisor``, rounded once to their dtype.
        targets: int64 [M], each in [0, V); any other target makes loss and gradient of its row NaN.
        divisor: FP32 []; None to compute no gradient and leave the logits unchanged.

    Returns:
        The losses, FP32 [M], not divided.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            f"cross_entropy_: logits have shape {tuple(logits.shape)} and strides "
            f"{logits.stride()}; they must be a matrix [M, V], V > 0, with contiguous rows: "
            "flatten the leading dimensions and call .contiguous()"
        )
    check_dtype("cross_entropy_", "logits", logits)
    _check("targets", targets, torch.int64, logits.shape[:1], logits.device)
    if divisor is not None:
        _check("divisor", divisor, torch.float32, (), logits.device)
    return _cross_entropy_(logits, targets, divisor)


def _check(
    name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or x.device != device:
        raise ValueError(
            f"cross_entropy_: {name} is {x.dtype} of shape {tuple(x.shape)} and strides "
            f"{x.stride()} on {x.device}; it must be contiguous {dtype} of shape {tuple(shape)} on "
            f"{device}, the device of the logits"
        )
