"""Quantization per tensor, row and group, bit for bit equal to the kernels.

Numerics of ``quantize.py`` and ``quantize_blockwise.py``; the scale convention: ``formats.py``.
"""

import math

import torch
from torch import Tensor

from coat_kernels.formats import E4M3, MIN_SCALE, Format, get_format, pad_length
from coat_kernels.master_weights import mix_bits
from coat_kernels.shared_scales import finish_scale

_INFINITY = 0x7F800000
_MANTISSA_MASK = 0x7FFFFF
_MAX_MANTISSA = 0x600000
_BYTES = torch.arange(256, dtype=torch.int32, device="cpu")
_E4M3_VALUES = _BYTES.to(torch.uint8).view(E4M3.dtype).float()
_SCALES = (_BYTES << 23).view(torch.float32).masked_fill(_BYTES == 255, math.nan)
_INVERSES = ((254 - _BYTES) << 23).view(torch.float32).masked_fill(_BYTES == 255, math.nan)
"""E8M0 byte e -> 2^(127 - e), and in ``_SCALES`` -> 2^(e - 127); NaN for 255."""


def cast(x: Tensor, fmt: Format) -> Tensor:
    """Cast FP32 to FP8: saturate, round to nearest even. NaN stays NaN. Overwrites x."""
    # torch's cast to E5M2 overflows to infinity; the hardware's saturates.
    return x.clamp_(-fmt.max, fmt.max).to(fmt.dtype)


def to_float(q: Tensor) -> Tensor:
    """Convert FP8 data to FP32, exactly."""
    if q.dtype != E4M3.dtype or q.device.type != "cpu":
        return q.float()
    # torch converts E4M3 one element at a time on a CPU; a table of 256 values is faster.
    return _look_up(_E4M3_VALUES, q.view(torch.uint8).int())


def tensor_scale(parts: list[Tensor], fmt: str, shared: bool = True, margin: float = 1.0) -> Tensor:
    """Compute one scale for all parts, FP32 []: max(amax * fp32(margin / max), 2^-126); NaN stays.

    The op ``tensor_scale`` has no margin, which is for guesses (``activation_once``).
    """
    scale = torch.full((), MIN_SCALE, device=parts[0].device)
    extremes = [torch.aminmax(part) for part in parts if part.numel()]  # NaN if there is one
    if extremes:
        amax = torch.stack([torch.maximum(-low, high).float() for low, high in extremes]).amax()
        scale = (amax * (margin / get_format(fmt).max)).clamp_min(MIN_SCALE)
    return finish_scale(scale) if shared else scale


def dither_scale(scale: Tensor, weight: Tensor) -> Tensor:
    """Multiply a scale [], FP32, by a factor in [1, 2) that 4,096 of the weights determine."""
    every = max(1, weight.numel() // 4096)
    words = weight.flatten()[::every][:4096].float().view(torch.int32)
    fraction = (mix_bits(words.sum(dtype=torch.int64)) >> 8).float() * 2.0**-24
    return scale * (1.0 + fraction)


def quantize_tensor(
    parts: list[Tensor], scale: Tensor, fmt: str, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Quantize parts [m_i, N], concatenated by rows, with :func:`make_layouts`."""
    x = parts[0] if len(parts) == 1 else torch.cat(parts)
    return make_layouts(x.float(), scale, get_format(fmt), rows, transposed)


def quantize_gradient(
    parts: list[Tensor], fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize parts [M, n_i] by columns: [M, N] and/or [N, M'], the scale, the sums [N]."""
    dy = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).float()
    scale = tensor_scale([dy], fmt)
    sums = dy.sum(0) if bias else dy.new_empty(0)
    return *make_layouts(dy, scale, get_format(fmt), rows, transposed), scale, sums


def make_layouts(
    x: Tensor, scale: Tensor, fmt: Format, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Quantize x [M, N] (FP32) with a given scale: [M, N] and/or [N, M'], otherwise empty.

    The transposed layout is padded with zeros to M' for a GEMM over tokens.
    """
    # With a NaN scale the data is 0 (NaN only where x is NaN) and dequantizes to NaN.
    q = cast(x * (1.0 / scale).nan_to_num_(0.0, math.inf), fmt)
    first = q if rows else q.new_empty(0)
    if not transposed:
        return first, q.new_empty(0)
    qt = q.new_zeros(x.shape[1], pad_length(x.shape[0]))
    qt[:, : x.shape[0]] = q.t()
    return first, qt


def transpose_quantized(q: Tensor) -> Tensor:
    """Transpose FP8 data [..., M, N] to [..., N, M'], zero-padded for a GEMM over tokens."""
    *matrices, M, N = q.shape
    bits = q.new_zeros(*matrices, N, pad_length(M), dtype=torch.uint8)
    bits[..., :M] = q.view(torch.uint8).transpose(-2, -1)
    return bits.view(q.dtype)


def dequantize_tensor(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute q * scale in ``dtype``."""
    return (to_float(q) * scale).to(dtype)


def quantize_group(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize x to FP8 [M, N] with E8M0 exponents, uint8 [M, N / G]."""
    form = get_format(fmt)
    groups = x.float().unflatten(-1, (-1, group_size))
    bits = groups.abs().amax(-1).view(torch.int32)  # a NaN is the largest
    # The sum carries into the exponent where the mantissa is above 1.75's.
    exponent = (bits + (_MANTISSA_MASK - _MAX_MANTISSA)) >> 23
    exponent = exponent.sub_(form.max_exponent).clamp_(min=1)
    exponent.masked_fill_(bits >= _INFINITY, 255)
    q = cast(groups * _look_up(_INVERSES, exponent).unsqueeze(-1), form)
    return q.flatten(-2), exponent.to(torch.uint8)


def dequantize_group(q: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute q * 2^(e - 127), [M, N] in ``dtype``."""
    group_size = q.shape[-1] // exponents.shape[-1]
    groups = to_float(q).unflatten(-1, (-1, group_size))
    scale = _look_up(_SCALES, exponents.int())
    return groups.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return ``table[index]`` for an int32 index of any shape."""
    return table.to(index.device).index_select(0, index.reshape(-1)).view(index.shape)
