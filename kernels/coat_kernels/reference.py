"""Every op in plain PyTorch, with the rounding points of the kernels: the page of numerics.

All arithmetic is FP32. ``x`` may be FP32, BF16 or FP16; results named ``y`` come back in the dtype
the docstring says. These functions are what runs on a CPU, and what the kernels are tested against:
quantization bit for bit, everything that sums or exponentiates to a relative tolerance.

Shapes: M tokens, N or K channels, G channels per group, M' tokens padded to a multiple of 16.
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


# quantize


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
    """Codes at a given scale of parts [m_i, N], one below the other: [M, N] and/or [N, M'].

    The transposed copy is padded with zeros to M' for a GEMM over tokens.
    """
    x = parts[0] if len(parts) == 1 else torch.cat(parts)
    return _layouts(x.float(), scale, format_of(fmt), rows, transposed)


def quantize_gradient(
    parts: list[Tensor], fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of parts [M, n_i], side by side, [M, N] and/or [N, M']; their scale; their sums [N]."""
    dy = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).float()
    scale = tensor_scale([dy], fmt)
    sums = dy.sum(0) if bias else dy.new_empty(0)
    return *_layouts(dy, scale, format_of(fmt), rows, transposed), scale, sums


def _layouts(
    x: Tensor, scale: Tensor, fmt: Format, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
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
    q, qt = _layouts(x, scale[:, None], format_of(fmt), not transposed, transposed)
    return (qt if transposed else q), scale


def dequantize_rows(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [M, N] in ``dtype``: q * scale."""
    return dequantize_tensor(q, scale[:, None], dtype)


def quantize_group(
    x: Tensor, group_size: int, fmt: str, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes [M, N] and E8M0 exponents, uint8 [M, N / G]; transposed [N, M'] and [N / G, M']."""
    if transposed:
        x = torch.nn.functional.pad(x, (0, 0, 0, padded(len(x)) - len(x)))
    form = format_of(fmt)
    groups = x.float().unflatten(-1, (-1, group_size))
    bits = groups.abs().amax(-1).view(torch.int32)  # a NaN is the largest
    # The sum carries into the exponent where the mantissa is above that of 1.75.
    exponent = (bits + (_MANTISSA_MASK - _MAX_MANTISSA)) >> 23
    exponent = exponent.sub_(form.max_exponent).clamp_(min=1)
    exponent.masked_fill_(bits >= _INFINITY, 255)
    q = cast(groups * _looked_up(_INVERSES, exponent).unsqueeze(-1), form)
    codes = q.flatten(-2), exponent.to(torch.uint8)
    return (codes[0].t().contiguous(), codes[1].t().contiguous()) if transposed else codes


def dequantize_group(q: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [M, N] in ``dtype``: q * 2^(e - 127)."""
    group_size = q.shape[-1] // exponents.shape[-1]
    groups = to_float(q).unflatten(-1, (-1, group_size))
    scale = _looked_up(_SCALES, exponents.int())
    return groups.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` for an int32 index of any shape."""
    return table.to(index.device).index_select(0, index.reshape(-1)).view(index.shape)


# GEMM


def scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, _fast: bool = False,
) -> Tensor:  # fmt: skip
    """(a [M, K] @ b [N, K]^T) * (a_scale * b_scale) + bias [N], FP32 inside, rounded to dtype.

    Scales are one per tensor, [], or one per row, [M, 1] and [1, N]. The bias is rounded to
    ``dtype`` before it is added. Fast accumulation is a GPU's.
    """
    y = (to_float(a) @ to_float(b).t()).mul_(a_scale * b_scale)
    if bias is not None:
        y.add_(bias.to(dtype).float())
    return y.to(dtype)


# norms


def _normalized(x: Tensor, rstd: Tensor, mean: Tensor | None) -> Tensor:
    return (x if mean is None else x - mean[:, None]) * rstd[:, None]


def norm_stats(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    centered: bool, group_size: int, fmt: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """First pass of RMSNorm, or of LayerNorm when ``centered``, of x + delta.

    Returns:
        x + delta in x's dtype (empty without a delta), its group-scaled codes [M, N] and exponents
        [M, N / G] (kept for backward), rstd FP32 [M], mean FP32 [M] (empty without centering), and
        the per-tensor scale of y FP32 [].
    """
    total = x.new_empty(0) if delta is None else (x.float() + delta.float()).to(x.dtype)
    source = x if delta is None else total
    x32 = source.float()
    mean = x32.mean(-1) if centered else None
    middle = x32 if mean is None else x32 - mean[:, None]
    rstd = torch.rsqrt(middle.square().mean(-1) + eps)
    y = norm_values(x32, weight, bias, rstd, mean)
    q, exponents = quantize_group(source, group_size, fmt)
    mean = x32.new_empty(0) if mean is None else mean
    return total, q, exponents, rstd, mean, tensor_scale([y], fmt)


def norm_values(
    x: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, mean: Tensor | None
) -> Tensor:
    """FP32 [M, N]: (x - mean) * rstd * weight + bias."""
    y = _normalized(x, rstd, mean).mul_(weight.float())
    return y if bias is None else y.add_(bias.float())


def norm_apply(
    x: Tensor, exponents: Tensor | None, weight: Tensor, bias: Tensor | None, rstd: Tensor,
    mean: Tensor, scale: Tensor, fmt: str, rows: bool, transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Second pass: y's per-tensor codes, [M, N] and/or [N, M'].

    ``x`` is the input itself, or its group-scaled codes together with ``exponents``.
    """
    x32 = x.float() if exponents is None else dequantize_group(x, exponents, torch.float32)
    y = norm_values(x32, weight, bias, rstd, mean if mean.numel() else None)
    return _layouts(y, scale, format_of(fmt), rows, transposed)


def norm_bwd(
    dy: Tensor, x: Tensor, exponents: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a norm from its group-scaled input.

    With xhat = (x - mean) * rstd and g = dy * weight, averages over the channels:
    dx = rstd * (g - [centered] avg(g) - xhat * avg(g * xhat)) + residual,
    dweight = sum over tokens of dy * xhat, dbias = sum over tokens of dy.

    Returns:
        dx [M, N] in dy's dtype, dweight FP32 [N], dbias FP32 [N] (empty for RMSNorm).
    """
    centered = mean.numel() > 0
    x32 = dequantize_group(x, exponents, torch.float32)
    xhat = _normalized(x32, rstd, mean if centered else None)
    dy32 = dy.float()
    g = dy32 * weight.float()
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if centered:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd[:, None]
    if residual is not None:
        dx += residual.float()
    dbias = dy32.sum(0) if centered else dy32.new_empty(0)
    return dx.to(dy.dtype), (dy32 * xhat).sum(0), dbias


# activations


ACTIVATIONS = ("silu_mul", "gelu", "gelu_tanh", "quick_gelu")
"""``silu_mul`` takes [gate | up], the others one matrix."""


_TANH_SLOPE = 1.5957691216057308
"""2 sqrt(2 / pi)."""


def _gate(a: Tensor, kind: str) -> Tensor:
    """What the input is multiplied with: Phi(a) or a sigmoid."""
    if kind == "gelu":
        return 0.5 * (1.0 + torch.erf(a * 0.7071067811865476))
    if kind == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) = sigmoid(2u)
        return torch.sigmoid(_TANH_SLOPE * (a + 0.044715 * a * a * a))
    return torch.sigmoid(1.702 * a if kind == "quick_gelu" else a)


def _slope(a: Tensor, gate: Tensor, kind: str) -> Tensor:
    """d(a * gate) / da."""
    if kind == "gelu":
        return gate + a * torch.exp(-0.5 * a * a) * 0.3989422804014327
    inner = 1.702 if kind == "quick_gelu" else 1.0
    if kind == "gelu_tanh":
        inner = _TANH_SLOPE * (1.0 + 0.134145 * a * a)
    return gate + a * gate * (1.0 - gate) * inner


def activation_values(a: Tensor, kind: str) -> Tensor:
    """FP32 [M, F] of a [M, 2F] (``silu_mul``) or [M, F]."""
    if kind == "silu_mul":
        a, up = a.float().chunk(2, -1)
        return _gate(a, kind).mul_(a).mul_(up)
    a = a.float()
    return _gate(a, kind).mul_(a)


def activation_stats(
    a: Tensor, kind: str, group_size: int, fmt: str
) -> tuple[Tensor, Tensor, Tensor]:
    """First pass: a's group-scaled codes and exponents (kept for backward), and h's scale []."""
    q, exponents = quantize_group(a, group_size, fmt)
    return q, exponents, tensor_scale([activation_values(a, kind)], fmt)


def activation_apply(
    a: Tensor, exponents: Tensor | None, kind: str, scale: Tensor, fmt: str, rows: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Second pass: h's per-tensor codes, [M, F] and/or [F, M']."""
    a32 = a.float() if exponents is None else dequantize_group(a, exponents, torch.float32)
    return _layouts(activation_values(a32, kind), scale, format_of(fmt), rows, transposed)


def activation_gradient(dh: Tensor, a: Tensor, kind: str) -> Tensor:
    """FP32 gradient of :func:`activation_values`'s input, of a's shape."""
    a, dh = a.float(), dh.float()
    if kind != "silu_mul":
        return dh * _slope(a, _gate(a, kind), kind)
    a, up = a.chunk(2, -1)
    gate = _gate(a, kind)
    return torch.cat([dh * up * _slope(a, gate, kind), dh * (a * gate)], -1)


def activation_bwd_stats(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, output_scale: Tensor | None,
    output_fmt: str, fmt: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """First pass: da's scale [] in ``fmt``; with h's scale, h's codes [F, M'] in ``output_fmt``."""
    ht = a.new_empty(0, dtype=format_of(output_fmt).dtype)
    if output_scale is not None:
        _, ht = activation_apply(a, exponents, kind, output_scale, output_fmt, False, True)
    da = activation_gradient(dh, dequantize_group(a, exponents, torch.float32), kind)
    return tensor_scale([da], fmt), ht


def activation_bwd(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, fmt: str, rows: bool, transposed: bool,
    bias: bool, scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradient of the activation's input from its group-scaled copy, in FP8.

    Returns:
        da's per-tensor codes [M, W] and/or [W, M'], their scale FP32 [] (empty where it was given),
        and with ``bias`` the sum of da over the tokens, FP32 [W].
    """
    da = activation_gradient(dh, dequantize_group(a, exponents, torch.float32), kind)
    if scale is None:
        return quantize_gradient([da], fmt, rows, transposed, bias)
    sums = da.sum(0) if bias else da.new_empty(0)
    return *_layouts(da, scale, format_of(fmt), rows, transposed), da.new_empty(0), sums


# rotary embedding


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """FP32 [M, heads, D] of x [M, heads * D]."""
    tokens, (period, channels) = x.shape[0], cos.shape
    c1, c2 = cos.float().repeat(tokens // period, 1)[:, None].chunk(2, -1)
    s1, s2 = sin.float().repeat(tokens // period, 1)[:, None].chunk(2, -1)
    x1, x2 = x.float().unflatten(-1, (-1, channels)).chunk(2, -1)
    if backward:
        return torch.cat([x1 * c1 + x2 * s2, x2 * c2 - x1 * s1], -1)
    return torch.cat([x1 * c1 - x2 * s1, x2 * c2 + x1 * s2], -1)


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Q and k rotated, v copied: [M, heads * D] and twice [M, kv_heads * D], in qkv's dtype."""
    sizes = [n * cos.shape[1] for n in (heads, kv_heads, kv_heads)]
    q, k, v = qkv.split(sizes, -1)
    q, k = (_rotated(x, cos, sin, backward=False).flatten(-2).to(qkv.dtype) for x in (q, k))
    return q, k, v.clone(memory_format=torch.contiguous_format)


def rope_quantize(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`rope` quantized per head from FP32: q, k, v rounded to their copies, codes, exponents.

    Codes are E4M3 of the shapes of q, k, v; exponents E8M0, [M, heads] and twice [M, kv_heads].
    """
    sizes = [n * cos.shape[1] for n in (heads, kv_heads, kv_heads)]
    q, k, v = qkv.float().split(sizes, -1)
    q, k = (_rotated(x, cos, sin, backward=False).flatten(-2) for x in (q, k))
    copies = [quantize_group(x, cos.shape[1], "e4m3") for x in (q, k, v)]
    values = [dequantize_group(*copy, qkv.dtype) for copy in copies]
    (q8, eq), (k8, ek), (v8, ev) = copies
    return values[0], values[1], values[2], q8, k8, v8, eq, ek, ev


def rope_gradient_values(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """FP32 gradient [M, (heads + 2 kv_heads) * D] of qkv."""
    back = (_rotated(x, cos, sin, backward=True).flatten(-2) for x in (dq, dk))
    return torch.cat([*back, dv.float()], -1)


def rope_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, fmt: str, rows: bool,
    transposed: bool, bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`quantize_gradient` of :func:`rope_gradient_values`."""
    gradient = rope_gradient_values(dq, dk, dv, cos, sin)
    return quantize_gradient([gradient], fmt, rows, transposed, bias)
