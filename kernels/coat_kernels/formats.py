"""FP8 formats, and the one scale convention here: **the scale multiplies on dequantize**.

    x  ~=  q * scale          q: FP8 data

There are two granularities, COAT's mixed granularity (arXiv 2410.19313, section 4):

* per tensor (:class:`TensorScaled`): one FP32 scale, for operands of a GEMM.
  ``scale = max(amax * fp32(1 / max), 2^-126)``, ``q = cast(clamp(x * fp32(1 / scale)))``.
* per group (:class:`GroupScaled`): one scale per 1 x G group of the last dimension, for the inputs
  that non-linear layers save for backward. Scales are powers of two, stored as E8M0 exponent bytes
  (OCP Microscaling, section 5.4.1): value ``2^(e - 127)``, 255 is NaN. The exponent is the smallest
  one, at least 1, for which the group's largest magnitude does not saturate. Multiplying by a power
  of two or its inverse is exact.

Casts round to nearest, ties to even (except ``logit_gradient``), and saturate. Zero stays zero. A
NaN or an infinity makes the scale NaN or infinite, so all values with that scale dequantize to NaN,
never to plausible numbers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MIN_SCALE = 2.0**-126
"""Smallest scale of a tensor: the smallest normal FP32, whose inverse is finite."""

GROUP_SIZES = (16, 32, 64, 128)
"""Group sizes of :class:`GroupScaled`; the paper uses 16 (section 4)."""

GEMM_MULTIPLE = 16
"""FP8 GEMMs on Hopper require N and K to be multiples of 16 bytes (cuBLASLt documentation)."""


@dataclass(frozen=True, slots=True)
class Format:
    """An FP8 format."""

    name: str
    """``e4m3`` or ``e5m2``."""
    dtype: torch.dtype
    """Torch's dtype."""
    max: float
    """Largest value."""
    max_exponent: int
    """Exponent of the largest binade. Both formats end at 1.75 * 2^max_exponent."""
    min_subnormal: float
    """Smallest positive value."""


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 8, 2.0**-9)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 15, 2.0**-16)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of inputs, weights, gradients and results of a GEMM outside FP8."""


class TensorScaled(NamedTuple):
    """FP8 data with one scale: ``x ~= q * scale``."""

    q: Tensor
    """FP8, any shape."""
    scale: Tensor
    """FP32, shape ()."""


class GroupScaled(NamedTuple):
    """FP8 data with a power-of-two scale per 1 x G group of the last dimension."""

    q: Tensor
    """FP8 [..., N]."""
    exponents: Tensor
    """E8M0 bytes, uint8 [..., N / G]."""


class QuantizedGradient(NamedTuple):
    """A gradient [M, N] in the layouts of the backward GEMMs; layouts not requested are empty."""

    rows: TensorScaled
    """FP8 [M, N], for the grad-input GEMM."""
    transposed: TensorScaled
    """FP8 [N, M'], for the grad-weight GEMM."""
    bias: Tensor | None
    """FP32 [N], the sum over the tokens: the gradient of the bias."""


def get_format(name: str) -> Format:
    """Return the format called ``name``."""
    if name not in FORMATS:
        raise ValueError(f"FP8 format {name!r} is not known; use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def pad_length(tokens: int) -> int:
    """Round ``tokens`` up to a multiple of 16, as the inner dimension of a GEMM."""
    return -(-tokens // GEMM_MULTIPLE) * GEMM_MULTIPLE


def check_matrix(op: str, name: str, x: Tensor, shape: tuple[int, int] | None = None) -> None:
    """Check that ``x`` is a contiguous high-precision matrix, of ``shape`` if given."""
    if x.dim() != 2 or not x.is_contiguous() or (shape is not None and x.shape != shape):
        raise ValueError(
            f"{op}: {name} has shape {tuple(x.shape)} and strides {x.stride()}; it must be a "
            f"contiguous matrix {list(shape) if shape else '[M, N]'}: flatten the leading "
            "dimensions and call .contiguous()"
        )
    check_dtype(op, name, x)


def check_like(op: str, name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Check that ``x`` is contiguous and has the shape and dtype of ``other``."""
    if x.shape != other.shape or x.dtype != other.dtype or not x.is_contiguous():
        raise ValueError(
            f"{op}: {name} is {x.dtype} of shape {tuple(x.shape)} and strides {x.stride()}; it "
            f"must match {other_name}: contiguous {other.dtype} of shape {tuple(other.shape)}"
        )


def check_dtype(op: str, name: str, x: Tensor) -> None:
    """Check that ``x`` is FP32, BF16 or FP16."""
    if x.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"{op}: {name} is {x.dtype}; pass float32, bfloat16 or float16 (the quantize functions "
            "create FP8 tensors)"
        )


def check_vector(op: str, name: str, v: Tensor | None, size: int) -> None:
    """Check that a weight or bias is None or has one contiguous value per channel."""
    if v is None:
        return
    if v.shape != (size,) or not v.is_contiguous():
        raise ValueError(
            f"{op}: {name} has shape {tuple(v.shape)} and strides {v.stride()}; it must be a "
            f"contiguous vector [{size}], one value per channel"
        )
    check_dtype(op, name, v)


def check_quantized(op: str, name: str, q: Tensor) -> None:
    """Check that ``q`` is a contiguous FP8 matrix."""
    dtypes = [fmt.dtype for fmt in FORMATS.values()]
    if q.dim() != 2 or not q.is_contiguous() or q.dtype not in dtypes:
        raise ValueError(
            f"{op}: the FP8 data of {name} is {q.dtype} of shape {tuple(q.shape)} and strides "
            f"{q.stride()}; it must be a contiguous matrix of {' or '.join(map(str, dtypes))}, as "
            "the quantize functions return it"
        )


def check_grouped(op: str, name: str, x: GroupScaled) -> None:
    """Check that FP8 data and exponents fit together."""
    check_quantized(op, name, x.q)
    M, N = x.q.shape
    fitting = [(M, N // size) for size in GROUP_SIZES if N % size == 0]
    e = x.exponents
    if e.dtype != torch.uint8 or not e.is_contiguous() or e.shape not in fitting:
        raise ValueError(
            f"{op}: the exponents of {name} are {e.dtype} of shape {tuple(e.shape)} and strides "
            f"{e.stride()}; for FP8 data of shape {(M, N)} they must be contiguous torch.uint8 of "
            f"one of the shapes {fitting}"
        )


def check_group(op: str, channels: int, group_size: int) -> None:
    """Check that a group size is supported and divides the channels."""
    if channels and group_size in GROUP_SIZES and channels % group_size == 0:
        return
    fitting = [size for size in GROUP_SIZES if channels and channels % size == 0]
    remedy = f"use {' or '.join(map(str, fitting))}" if fitting else "pad the last dimension"
    raise ValueError(
        f"{op}: N = {channels} channels in groups of {group_size}; groups are one of "
        f"{GROUP_SIZES} and must divide N: {remedy}"
    )
