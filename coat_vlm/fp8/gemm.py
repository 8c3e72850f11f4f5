"""The three GEMMs of a linear layer in FP8, shared by every FP8 block.

    forward      y [M, N]           = x [M, K]            @ W [N, K]^T  + b
    grad-input   grad_x [M, K]      = grad_y [M, N]       @ W^T [K, N]^T
    grad-weight  grad_W [N, K]      = grad_y^T [N, M']    @ x^T [K, M']^T

x and W are E4M3, grad_y is E5M2 or E4M3 (``fp8.gradients`` of a recipe). Every operand is row-major
along the dimension that is summed over, has one scale per tensor (arXiv 2410.19313, section 4.1),
and M' is the number of tokens M padded with zeros to a multiple of 16. The forward GEMM accumulates
fast, the other two do not, as in torchao and TransformerEngine by default.

Layers that read the same input (q, k, v; gate, up) are one GEMM: their weights are quantized
together, under one scale. Where the FP8 weights come from, and whether they are saved, is up to
``weights.py``. In the first blocks the forward GEMM is not FP8 (``fp8.bf16_forward_first``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import E5M2, Format, GradientCodes, TensorScaled, quantize_gradient, scaled_mm
from coat_kernels.formats import FORMATS
from coat_vlm.fp8 import saturation, weights


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """What a GEMM has to know of the layers, with the same input, that it is one for."""

    key: weights.Key
    """Says which weights they are, to ``weights.py``."""
    grad_format: Format
    """Format of the quantized gradient of their output."""
    bf16_forward: bool
    """Whether the forward GEMM is that of the layers themselves, in the model's dtype."""


class Needs(NamedTuple):
    """Which gradients of a fused linear layer are wanted."""

    input: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, upstream: Sequence[bool], stacked: Sequence[bool]) -> "Needs":
        """From ``ctx.needs_input_grad``: what comes before the layers, and their own tensors."""
        half = len(stacked) // 2
        return cls(any(upstream), any(stacked[:half]), any(stacked[half:]))


def arguments(layers: Sequence[nn.Linear]) -> tuple[Any, ...]:
    """What an autograd Function takes of layers that read the same input.

    The first layer's attributes ``fp8_gradients``, the name of a format, and ``fp8_bf16_forward``
    hold for all.

    Returns:
        Their :class:`FusedLinear`; their weights [n_i, K]; their biases [n_i] or None. The tensors
        are called ``stacked`` below.
    """
    settings = vars(layers[0])
    fused = FusedLinear(
        weights.key_of(layers),
        FORMATS[settings.get("fp8_gradients", E5M2.name)],
        settings.get("fp8_bf16_forward", False),
    )
    return (fused, *(layer.weight for layer in layers), *(layer.bias for layer in layers))


def forward(
    x: TensorScaled,
    fused: FusedLinear,
    stacked: Sequence[Tensor | None],
    dtype: torch.dtype,
    hp: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The forward GEMM.

    Args:
        x: E4M3 [M, K].
        fused: the layers.
        stacked: their weights and biases.
        dtype: of the result.
        hp: x in high precision, [M, K], if the GEMM is to be the layers' own.

    Returns:
        [M, N], the layers side by side; what to save for backward: the scale [] that the weights
        got, None if they got none, and ``stacked``.
    """
    parts = _weights(stacked)
    biases = stacked[len(parts) :]
    bias = None
    if any(bias is not None for bias in biases):
        given = [
            weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
            for weight, bias in zip(parts, biases, strict=True)
        ]
        bias = given[0] if len(given) == 1 else torch.cat(given)
    if hp is not None:
        weight = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)
        y = F.linear(hp.to(dtype), weight, None if bias is None else bias.to(dtype))
        return y.to(dtype), (None, *stacked)  # under autocast it may have another
    quantized = weights.codes(fused.key, parts)
    return scaled_mm(x, quantized, dtype, bias, fast=True), (quantized.scale, *stacked)


def quantize_grad(parts: Sequence[Tensor], fused: FusedLinear, needs: Needs) -> GradientCodes:
    """The gradient of the layers' output, in the layouts that its GEMMs need.

    Args:
        parts: the gradient, as matrices [M, n_i] that lie side by side.
        fused: the layers.
        needs: the gradients that are wanted.
    """
    quantized = quantize_gradient(
        parts, fused.grad_format, rows=needs.input, transposed=needs.weight, bias=needs.bias
    )
    saturation.observe_gradient(quantized, lambda: torch.cat([*parts], 1))
    return quantized


def backward(
    grad_output: Tensor | Callable[[], GradientCodes],
    fused: FusedLinear,
    saved: Sequence[Tensor | None],
    needs: Needs,
    dtype: torch.dtype,
    input_transposed: Callable[[Tensor | None], TensorScaled],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The grad-input GEMM, then the grad-weight GEMM.

    Args:
        grad_output: gradient of :func:`forward`'s result, [..., N] in high precision; or a function
            that gives it in FP8. Each layout is freed as soon as its GEMM is done.
        fused: the layers.
        saved: from :func:`forward`.
        needs: the gradients that are wanted.
        dtype: of the input's gradient.
        input_transposed: gives x^T, E4M3 [K, M'], from the input's gradient; called only if the
            weights' gradients are wanted.

    Returns:
        The input's gradient [M, K] or None; and those of ``stacked``, in their dtypes, or None.
    """
    weight_scale, *stacked = saved
    parts = _weights(stacked)
    if isinstance(grad_output, Tensor):
        rows, transposed, grad_bias = quantize_grad([matrix(grad_output)], fused, needs)
    else:
        rows, transposed, grad_bias = grad_output()
    grad_input = None
    if needs.input:
        grad_input = scaled_mm(
            rows, weights.transposed_codes(fused.key, parts, weight_scale), dtype
        )
    del rows
    grads: list[Tensor | None] = [None] * len(stacked)
    if needs.weight:
        grad_weight = scaled_mm(transposed, input_transposed(grad_input), parts[0].dtype)
        grads[: len(parts)] = _split(grad_weight, parts)
    if grad_bias is not None:
        grads[len(parts) :] = [
            None if bias is None else piece.to(bias.dtype)
            for piece, bias in zip(_split(grad_bias, parts), stacked[len(parts) :], strict=True)
        ]
    return grad_input, grads


def matrix(x: Tensor) -> Tensor:
    """[..., K] as a contiguous matrix [M, K]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _weights(stacked: Sequence[Tensor | None]) -> list[Tensor]:
    return [weight for weight in stacked[: len(stacked) // 2] if weight is not None]


def _split(grad: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradient of each layer, from that of all."""
    return [grad] if len(parts) == 1 else grad.split([weight.shape[0] for weight in parts])
