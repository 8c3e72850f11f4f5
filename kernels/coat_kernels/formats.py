"""FP8 formats, and the one scale convention here: **the scale multiplies on dequantize**.

    x  ~=  q * scale          q: FP8 codes, scale: what a code of 1.0 is worth

Three granularities; the first and the last are COAT's mixed granularity (arXiv 2410.19313,
section 4):

* per tensor (:class:`TensorScaled`): one FP32 scale, for operands of a GEMM.
  ``scale = max(amax * fp32(1 / max), 2^-126)``; codes are ``cast(clamp(x * fp32(1 / scale)))``.
* per row (:class:`RowScaled`): the same for each row, so that no token shares another's range.
* per group (:class:`GroupScaled`): one scale per 1 x G run of the last dimension, for what a
  non-linear layer keeps for its backward pass. Scales are powers of two, stored as the exponent
  byte of E8M0 (OCP Microscaling, section 5.4.1): value ``2^(e - 127)``, 255 is NaN. The exponent
  is the smallest one, from 1 on, for which the group's largest magnitude fits without saturating.
  Multiplying by such a scale or its inverse is exact.

Casts round to nearest, ties to even, and saturate. Zero stays zero. A NaN or an infinity makes the
scale NaN or infinite, so everything under that scale dequantizes to NaN: never plausible numbers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MIN_SCALE = 2.0**-126
"""Smallest scale of a tensor or a row, the smallest normal FP32: its inverse is finite."""

GROUP_SIZES = (16, 32, 64, 128)
"""Group sizes of :class:`GroupScaled`; the paper's is 16 (numerics in section 4 of the paper)."""

GEMM_MULTIPLE = 16
"""FP8 GEMMs on Hopper take N and K in multiples of 16 bytes (cuBLASLt documentation)."""


@dataclass(frozen=True, slots=True)
class Format:
    """An 8-bit floating-point format."""

    name: str
    """``e4m3`` or ``e5m2``."""
    dtype: torch.dtype
    """Torch's dtype of the codes."""
    max: float
    """Largest finite value."""
    max_exponent: int
    """Exponent of the largest binade. Both formats end at 1.75 * 2^max_exponent."""
    min_subnormal: float
    """Smallest positive value."""


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 8, 2.0**-9)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 15, 2.0**-16)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of what is not FP8: inputs, weights, gradients, results of a GEMM."""


class TensorScaled(NamedTuple):
    """FP8 codes with one scale: ``x ~= q * scale``."""

    q: Tensor
    """Codes, FP8, any shape."""
    scale: Tensor
    """FP32, shape ()."""


class RowScaled(NamedTuple):
    """FP8 codes of a matrix x [M, N] with one scale per row: ``x ~= q * scale[:, None]``."""

    q: Tensor
    """Codes, FP8 [M, N]; or, if ``transposed``, [N, M'] with M padded to a multiple of 16."""
    scale: Tensor
    """FP32 [M]."""
    transposed: bool = False
    """The scales belong to the columns of ``q``, which is then no operand of a GEMM by itself."""


class GroupScaled(NamedTuple):
    """FP8 codes with a power-of-two scale per 1 x G group of the last dimension."""

    q: Tensor
    """Codes, FP8 [..., N]."""
    exponents: Tensor
    """E8M0 bytes, uint8 [..., N / G]."""

    @property
    def group_size(self) -> int:
        """G."""
        return self.q.shape[-1] // self.exponents.shape[-1]


class GradientCodes(NamedTuple):
    """A gradient dy [M, N] as the GEMMs of a backward pass take it; what is not needed is empty."""

    rows: TensorScaled
    """Codes [M, N], for the input gradient."""
    transposed: TensorScaled
    """Codes [N, M'], for the weight gradient."""
    bias: Tensor | None
    """FP32 [N], the sum of dy over the tokens, for the bias."""


def format_of(name: str) -> Format:
    """The format called ``name``.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"FP8 format {name!r} is not known; use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def padded(tokens: int) -> int:
    """``tokens`` rounded up to what a GEMM takes as its inner dimension."""
    return -(-tokens // GEMM_MULTIPLE) * GEMM_MULTIPLE


def check_matrix(op: str, name: str, x: Tensor, shape: tuple[int, int] | None = None) -> None:
    """Refuse what is not a contiguous matrix of a high-precision dtype, of ``shape`` if given.

    Raises:
        ValueError: ``x`` has another shape, dtype or layout.
    """
    if x.dim() != 2 or not x.is_contiguous() or (shape is not None and x.shape != shape):
        raise ValueError(
            f"{op}: {name} has shape {tuple(x.shape)} and strides {x.stride()}; it must be a "
            f"contiguous matrix {list(shape) if shape else '[M, N]'}: flatten the leading "
            "dimensions and call .contiguous()"
        )
    check_dtype(op, name, x)


def check_like(op: str, name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse what has not the shape and dtype of ``other``, or is not contiguous.

    Raises:
        ValueError: it says what both are.
    """
    if x.shape != other.shape or x.dtype != other.dtype or not x.is_contiguous():
        raise ValueError(
            f"{op}: {name} is {x.dtype} of shape {tuple(x.shape)} and strides {x.stride()}; it "
            f"must be like {other_name}: contiguous {other.dtype} of shape {tuple(other.shape)}"
        )


def check_dtype(op: str, name: str, x: Tensor) -> None:
    """Refuse what is not FP32, BF16 or FP16.

    Raises:
        ValueError: ``x`` has another dtype.
    """
    if x.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"{op}: {name} is {x.dtype}; give float32, bfloat16 or float16 (FP8 tensors are made "
            "by the quantize functions)"
        )


def check_vector(op: str, name: str, v: Tensor | None, size: int) -> None:
    """Refuse a weight or bias that is not one contiguous number per channel; None passes.

    Raises:
        ValueError: ``v`` has another shape, dtype or layout.
    """
    if v is None:
        return
    if v.shape != (size,) or not v.is_contiguous():
        raise ValueError(
            f"{op}: {name} has shape {tuple(v.shape)} and strides {v.stride()}; it must be a "
            f"contiguous vector [{size}], one number per channel"
        )
    check_dtype(op, name, v)


def check_codes(op: str, name: str, q: Tensor) -> None:
    """Refuse what is not a contiguous matrix of FP8 codes.

    Raises:
        ValueError: ``q`` has another shape, dtype or layout.
    """
    if q.dim() != 2 or not q.is_contiguous() or q.dtype not in (E4M3.dtype, E5M2.dtype):
        raise ValueError(
            f"{op}: the codes of {name} are {q.dtype} of shape {tuple(q.shape)} and strides "
            f"{q.stride()}; they must be a contiguous matrix of {E4M3.dtype} or {E5M2.dtype}, as "
            "the quantize functions return it"
        )


def check_rows(op: str, name: str, x: RowScaled) -> None:
    """Refuse codes without one scale for each of their rows.

    Raises:
        ValueError: the shapes do not match, a dtype or layout is wrong, or x is transposed.
    """
    check_codes(op, name, x.q)
    if x.transposed:
        raise ValueError(
            f"{op}: {name} is transposed, so that its scales belong to the columns of its codes; "
            "quantize it row-major, or the transposed matrix by its own rows"
        )
    scale, rows = x.scale, x.q.shape[0]
    if scale.dtype != torch.float32 or scale.shape != (rows,) or not scale.is_contiguous():
        raise ValueError(
            f"{op}: the scales of {name} are {scale.dtype} of shape {tuple(scale.shape)} and "
            f"strides {scale.stride()}; for codes of shape {tuple(x.q.shape)} they must be "
            f"contiguous torch.float32 of shape {(rows,)}, as quantize_rows returns them"
        )


def check_grouped(op: str, name: str, x: GroupScaled) -> None:
    """Refuse codes and exponents that do not belong together.

    Raises:
        ValueError: the shapes do not match, or a dtype or layout is wrong.
    """
    check_codes(op, name, x.q)
    M, N = x.q.shape
    fitting = [(M, N // size) for size in GROUP_SIZES if N % size == 0]
    e = x.exponents
    if e.dtype != torch.uint8 or not e.is_contiguous() or e.shape not in fitting:
        raise ValueError(
            f"{op}: the exponents of {name} are {e.dtype} of shape {tuple(e.shape)} and strides "
            f"{e.stride()}; for codes of shape {(M, N)} they must be contiguous torch.uint8 of "
            f"one of the shapes {fitting}"
        )


def check_group(op: str, channels: int, group_size: int) -> None:
    """Refuse a group size that is not offered or does not divide the channels.

    Raises:
        ValueError: it names the sizes that would do.
    """
    if channels and group_size in GROUP_SIZES and channels % group_size == 0:
        return
    fitting = [size for size in GROUP_SIZES if channels and channels % size == 0]
    remedy = f"use {' or '.join(map(str, fitting))}" if fitting else "pad the last dimension"
    raise ValueError(
        f"{op}: N = {channels} channels in groups of {group_size}; groups are one of "
        f"{GROUP_SIZES} and must divide N: {remedy}"
    )
