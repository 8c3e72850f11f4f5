"""Quantization per tensor, row and group: scales, codes and values, bit for bit the kernels'.

Numerics of ``quantize.py`` and ``quantize_groups.py``; the convention: ``formats.py``.
"""

import math

import torch
from torch import Tensor

from coat_kernels.formats import E4M3, MIN_SCALE, Format, format_of, padded

_INFINITY = 0x7F800000
_MANTISSA_MASK = 0x7FFFFF
_MAX_MANTISSA = 0x600000
_CODES = torch.arange(256, dtype=torch.int32, device="cpu")
_E4M3_VALUES = _CODES.to(torch.uint8).view(E4M3.dtype).float()
_SCALES = (_CODES << 23).view(torch.float32).masked_fill(_CODES == 255, math.nan)
_INVERSES = ((254 - _CODES) << 23).view(torch.float32).masked_fill(_CODES == 255, math.nan)
"""E8M0 byte e -> 2^(e - 127), and -> 2^(127 - e); NaN for 255."""


def cast(x: Tensor, fmt: Format) -> Tensor:
    """FP32 to FP8: saturate, round to nearest even. NaN stays NaN. Overwrites x."""
    # torch's cast to E5M2 overflows to infinity; the hardware's saturates.
    return x.clamp_(-fmt.max, fmt.max).to(fmt.dtype)


def to_float(q: Tensor) -> Tensor:
    """FP8 codes as FP32, exact."""
    if q.dtype != E4M3.dtype or q.device.type != "cpu":
        return q.float()
    # torch converts E4M3 one element at a time on a CPU; looking the 256 codes up is faster.
    return _looked_up(_E4M3_VALUES, q.view(torch.uint8).int())


def tensor_scale(parts: list[Tensor], fmt: str) -> Tensor:
    """One scale of all parts, FP32 []: max(amax * fp32(1 / max), 2^-126), NaN if one has a NaN."""
    extremes = [torch.aminmax(part) for part in parts if part.numel()]  # NaN if there is one
    if not extremes:
        return torch.full((), MIN_SCALE, device=parts[0].device)
    amax = torch.stack([torch.maximum(-low, high).float() for low, high in extremes]).amax()
    return amax_to_scale(amax, fmt)


def amax_to_scale(amax: Tensor, fmt: str) -> Tensor:
    """The scales of tensors or rows with these largest magnitudes, FP32 of any shape."""
    return (amax * (1.0 / format_of(fmt).max)).clamp_min(MIN_SCALE)


def quantize_tensor(
    parts: list[Tensor], scale: Tensor, fmt: str, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """:func:`layouts` of parts [m_i, N], one below the other."""
    x = parts[0] if len(parts) == 1 else torch.cat(parts)
    return layouts(x.float(), scale, format_of(fmt), rows, transposed)


def quantize_gradient(
    parts: list[Tensor], fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of parts [M, n_i], side by side, [M, N] and/or [N, M']; their scale; their sums [N]."""
    dy = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).float()
    scale = tensor_scale([dy], fmt)
    sums = dy.sum(0) if bias else dy.new_empty(0)
    return *layouts(dy, scale, format_of(fmt), rows, transposed), scale, sums


def layouts(
    x: Tensor, scale: Tensor, fmt: Format, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Codes of x [M, N] (FP32) at a given scale: [M, N] and/or [N, M'], else empty.

    The transposed copy is padded with zeros to M' for a GEMM over tokens.
    """
    # Without the NaN the codes are 0 (NaN only where x is), and worth NaN by their scale.
    q = cast(x * (1.0 / scale).nan_to_num_(0.0, math.inf), fmt)
    first = q if rows else q.new_empty(0)
    if not transposed:
        return first, q.new_empty(0)
    qt = q.new_zeros(x.shape[1], padded(x.shape[0]))
    qt[:, : x.shape[0]] = q.t()
    return first, qt


def transpose_codes(q: Tensor) -> Tensor:
    """Codes [M, N] as [N, M'], zero-padded for a GEMM over tokens."""
    M, N = q.shape
    bits = q.new_zeros(N, padded(M), dtype=torch.uint8)
    bits[:, :M] = q.view(torch.uint8).t()
    return bits.view(q.dtype)


def dequantize_tensor(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in ``dtype``: q * scale."""
    return (to_float(q) * scale).to(dtype)


def quantize_rows(x: Tensor, fmt: str, transposed: bool) -> tuple[Tensor, Tensor]:
    """Codes [M, N], or [N, M'] if ``transposed``, and a scale for each row of x, FP32 [M]."""
    x = x.float()
    amax = x.abs().amax(-1) if x.shape[1] else x.new_zeros(x.shape[0])  # NaN if there is one
    scale = amax_to_scale(amax, fmt)
    q, qt = layouts(x, scale[:, None], format_of(fmt), not transposed, transposed)
    return (qt if transposed else q), scale


def dequantize_rows(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [M, N] in ``dtype``: q * scale."""
    return dequantize_tensor(q, scale[:, None], dtype)


def quantize_group(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    """Codes [M, N] and E8M0 exponents, uint8 [M, N / G]."""
    form = format_of(fmt)
    groups = x.float().unflatten(-1, (-1, group_size))
    bits = groups.abs().amax(-1).view(torch.int32)  # a NaN is the largest
    # The sum carries into the exponent where the mantissa is above that of 1.75.
    exponent = (bits + (_MANTISSA_MASK - _MAX_MANTISSA)) >> 23
    exponent = exponent.sub_(form.max_exponent).clamp_(min=1)
    exponent.masked_fill_(bits >= _INFINITY, 255)
    q = cast(groups * _looked_up(_INVERSES, exponent).unsqueeze(-1), form)
    return q.flatten(-2), exponent.to(torch.uint8)


def dequantize_group(q: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [M, N] in ``dtype``: q * 2^(e - 127)."""
    group_size = q.shape[-1] // exponents.shape[-1]
    groups = to_float(q).unflatten(-1, (-1, group_size))
    scale = _looked_up(_SCALES, exponents.int())
    return groups.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` for an int32 index of any shape."""
    return table.to(index.device).index_select(0, index.reshape(-1)).view(index.shape)
