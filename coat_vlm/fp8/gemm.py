"""The three GEMMs of a linear layer in FP8, shared by every FP8 block.

    forward      y [M, N]           = x [M, K]            @ W [N, K]^T  + b
    grad-input   grad_x [M, K]      = grad_y [M, N]       @ W^T [K, N]^T
    grad-weight  grad_W [N, K]      = grad_y^T [N, M']    @ x^T [K, M']^T

x and W are E4M3, grad_y is E5M2 or E4M3 (``fp8.gradients`` of a recipe). Operands are contiguous
along the summed dimension. Each has one scale per tensor (arXiv 2410.19313, section 4.1),
and M' is the number of tokens M padded with zeros to a multiple of 16. The forward GEMM uses
fast accumulation, the other two do not, as in torchao and TransformerEngine by default.

Layers that read the same input (q, k, v; gate, up) are one GEMM with a fused weight and one scale.
``weights.py`` provides FP8 weights and caches them. In the first blocks the forward GEMM is not FP8
(``fp8.bf16_forward_first``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import E5M2, Format, QuantizedGradient, TensorScaled, quantize_gradient, scaled_mm
from coat_kernels.formats import FORMATS
from coat_vlm.fp8 import saturation, weights


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Settings of linear layers with the same input, computed by one GEMM."""

    key: weights.Key
    """Key of the fused weight in ``weights.py``."""
    grad_format: Format
    """FP8 format of the output's gradient."""
    bf16_forward: bool
    """Whether the forward GEMM runs in the model's dtype."""


class Needs(NamedTuple):
    """Which gradients of a fused linear layer to compute."""

    input: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, upstream: Sequence[bool], stacked: Sequence[bool]) -> "Needs":
        """Create from ``ctx.needs_input_grad`` of the preceding inputs and of ``stacked``."""
        half = len(stacked) // 2
        return cls(any(upstream), any(stacked[:half]), any(stacked[half:]))


def arguments(layers: Sequence[nn.Linear]) -> tuple[Any, ...]:
    """Return an autograd Function's arguments for layers that read the same input.

    The first layer's attributes ``fp8_gradients``, the name of a format, and ``fp8_bf16_forward``
    apply to all layers.

    Returns:
        A :class:`FusedLinear`; the weights [n_i, K]; the biases [n_i] or None. The tensors are
        called ``stacked`` below.

    Raises:
        ValueError: a layer was wrapped (by peft) after the conversion.
    """
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"a {type(layer).__module__}.{type(layer).__name__} wraps a linear layer of an FP8 "
                "block, which reads only the weight inside it, so the wrapper would have no "
                "effect: wrap the layers first (peft.get_peft_model), then convert the model"
            )
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
    """Run the forward GEMM.

    Args:
        x: E4M3 [M, K].
        fused: the layers.
        stacked: their weights and biases.
        dtype: dtype of the result.
        hp: x in high precision, [M, K], to run the GEMM in the model's dtype.

    Returns:
        [M, N], the layers' outputs concatenated; tensors to save for backward: the scale [] of the
        fused weight (None without FP8), and ``stacked``.
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
        return y.to(dtype), (None, *stacked)  # autocast may return another dtype
    quantized = weights.quantize_weight(fused.key, parts)
    return scaled_mm(x, quantized, dtype, bias, fast=True), (quantized.scale, *stacked)


def quantize_grad(parts: Sequence[Tensor], fused: FusedLinear, needs: Needs) -> QuantizedGradient:
    """Quantize the gradient of the layers' output in the layouts that the GEMMs need.

    Args:
        parts: the gradient, as matrices [M, n_i] to be concatenated by columns.
        fused: the layers.
        needs: the gradients to compute.
    """
    quantized = quantize_gradient(
        parts, fused.grad_format, rows=needs.input, transposed=needs.weight, bias=needs.bias
    )
    saturation.observe_gradient(quantized, lambda: torch.cat([*parts], 1))
    return quantized


def backward(
    grad_output: Tensor | Callable[[], QuantizedGradient],
    fused: FusedLinear,
    saved: Sequence[Tensor | None],
    needs: Needs,
    dtype: torch.dtype,
    input_transposed: Callable[[Tensor | None], TensorScaled],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Run the grad-input GEMM, then the grad-weight GEMM.

    Args:
        grad_output: gradient of :func:`forward`'s result, [..., N] in high precision; or a function
            that returns it in FP8. Each layout is freed after its GEMM.
        fused: the layers.
        saved: from :func:`forward`.
        needs: the gradients to compute.
        dtype: dtype of the input's gradient.
        input_transposed: returns x^T, E4M3 [K, M'], given the input's gradient; called only for
            weight gradients.

    Returns:
        The input's gradient [M, K] or None; gradients of ``stacked`` in their dtypes, or None.
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
            rows, weights.quantize_weight_transposed(fused.key, parts, weight_scale), dtype
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
    """Reshape [..., K] to a contiguous matrix [M, K]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _weights(stacked: Sequence[Tensor | None]) -> list[Tensor]:
    return [weight for weight in stacked[: len(stacked) // 2] if weight is not None]


def _split(grad: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split the fused gradient into the layers' gradients."""
    return [grad] if len(parts) == 1 else grad.split([weight.shape[0] for weight in parts])
