"""SwiGLU, GeGLU and GELU to FP8, and their gradients: numerics of ``activation.py``."""

import torch
from torch import Tensor

from coat_kernels.formats import get_format
from coat_kernels.reference.quantize import (
    dequantize_group,
    make_layouts,
    quantize_group,
    tensor_scale,
)

ACTIVATIONS = ("silu_mul", "gelu_tanh_mul", "gelu", "gelu_tanh", "quick_gelu")
"""The first two are gated: their input is [gate | up]; the others' is one matrix."""

SAMPLE_EVERY = 16
"""A guess of a scale reads every row whose index is a multiple of this."""

MARGIN = 2.0
"""Factor of the guess: values may be so many times as large as the sample's."""

_TANH_SLOPE = 1.5957691216057308
"""2 sqrt(2 / pi)."""


def is_gated(kind: str) -> bool:
    """Return whether an activation's input is [gate | up]."""
    return kind in ACTIVATIONS[:2]


def _gate(a: Tensor, kind: str) -> Tensor:
    """Compute the factor of the input: Phi(a) or a sigmoid."""
    if kind == "gelu":
        return 0.5 * (1.0 + torch.erf(a * 0.7071067811865476))
    if kind in ("gelu_tanh", "gelu_tanh_mul"):
        # 0.5 * (1 + tanh(u)) = sigmoid(2u)
        return torch.sigmoid(_TANH_SLOPE * (a + 0.044715 * a * a * a))
    if kind not in ("quick_gelu", "silu_mul"):
        raise ValueError(f"activation {kind!r} has no formula; use one of {', '.join(ACTIVATIONS)}")
    return torch.sigmoid(1.702 * a if kind == "quick_gelu" else a)


def _slope(a: Tensor, gate: Tensor, kind: str) -> Tensor:
    """Compute d(a * gate) / da."""
    if kind == "gelu":
        return gate + a * torch.exp(-0.5 * a * a) * 0.3989422804014327
    inner = 1.702 if kind == "quick_gelu" else 1.0
    if kind in ("gelu_tanh", "gelu_tanh_mul"):
        inner = _TANH_SLOPE * (1.0 + 0.134145 * a * a)
    return gate + a * gate * (1.0 - gate) * inner


def activation_values(a: Tensor, kind: str) -> Tensor:
    """Compute the activation, FP32 [M, F], of a [M, 2F] (gated) or [M, F]."""
    if is_gated(kind):
        a, up = a.float().chunk(2, -1)
        return _gate(a, kind).mul_(a).mul_(up)
    a = a.float()
    return _gate(a, kind).mul_(a)


def activation_stats(
    a: Tensor, kind: str, group_size: int, fmt: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the first pass: a's FP8 data and exponents (saved for backward), and h's scale []."""
    q, exponents = quantize_group(a, group_size, fmt)
    return q, exponents, tensor_scale([activation_values(a, kind)], fmt)


def activation_apply(a: Tensor, kind: str, scale: Tensor, fmt: str) -> Tensor:
    """Run the second pass: h in per-tensor FP8 [M, F]."""
    return make_layouts(activation_values(a, kind), scale, get_format(fmt), True, False)[0]


def activation_once(
    a: Tensor, kind: str, group_size: int, fmt: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run both passes in one: a's FP8 data and exponents; h in per-tensor FP8 and its scale []."""
    q, exponents = quantize_group(a, group_size, fmt)
    values = activation_values(a, kind)
    guess = tensor_scale([values[::SAMPLE_EVERY]], fmt, margin=MARGIN)
    scale = torch.maximum(guess, tensor_scale([values], fmt))  # NaN if one is
    return q, exponents, activation_apply(a, kind, scale, fmt), scale


def activation_gradient(grad_output: Tensor, a: Tensor, kind: str) -> Tensor:
    """Compute the FP32 gradient of :func:`activation_values`'s input, of a's shape."""
    a, dh = a.float(), grad_output.float()
    if not is_gated(kind):
        return dh * _slope(a, _gate(a, kind), kind)
    a, up = a.chunk(2, -1)
    gate = _gate(a, kind)
    return torch.cat([dh * up * _slope(a, gate, kind), dh * (a * gate)], -1)


def activation_bwd_stats(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, output_scale: Tensor | None,
    output_fmt: str, fmt: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute da's scale [] in ``fmt``; with h's scale, also h in ``output_fmt``, [F, M']."""
    form = get_format(output_fmt)
    ht = a.new_empty(0, dtype=form.dtype)
    a32 = dequantize_group(a, exponents, torch.float32)
    if output_scale is not None:
        _, ht = make_layouts(activation_values(a32, kind), output_scale, form, False, True)
    return tensor_scale([activation_gradient(dh, a32, kind)], fmt), ht


def activation_bwd(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, fmt: str, rows: bool, transposed: bool,
    bias: bool, scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute da in per-tensor FP8, [M, W] and/or [W, M'], and with ``bias`` its sum, FP32 [W]."""
    da = activation_gradient(dh, dequantize_group(a, exponents, torch.float32), kind)
    sums = da.sum(0) if bias else da.new_empty(0)
    return *make_layouts(da, scale, get_format(fmt), rows, transposed), sums


def activation_bwd_once(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, output_scale: Tensor | None,
    output_fmt: str, fmt: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute da in ``fmt`` [M, W], its scale [] and, with h's, h in ``output_fmt`` [M, F]."""
    a32, form = dequantize_group(a, exponents, torch.float32), get_format(output_fmt)
    da = activation_gradient(dh, a32, kind)
    guess = tensor_scale([da[::SAMPLE_EVERY]], fmt, margin=MARGIN)
    scale = torch.maximum(guess, tensor_scale([da], fmt))  # NaN if one is
    h = a.new_empty(0, dtype=form.dtype)
    if output_scale is not None:
        h, _ = make_layouts(activation_values(a32, kind), output_scale, form, True, False)
    return make_layouts(da, scale, get_format(fmt), True, False)[0], scale, h
