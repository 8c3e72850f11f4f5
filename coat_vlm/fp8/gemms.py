"""The three GEMMs of a linear layer in FP8, shared by every FP8 block.

    forward          y  = x W^T + b      x E4M3 [M, K],    W E4M3 [N, K]
    input gradient   dx = dy W           dy E5M2 [M, N],   W^T E4M3 [K, N]
    weight gradient  dW = dy^T x         dy^T E5M2 [N, M'], x^T E4M3 [K, M']

All operands have one scale per tensor (arXiv 2410.19313, section 4.1). Layers that read the same
input (q, k, v; gate, up) are one GEMM: their weights are quantized together, under one scale. The
FP8 weight is not kept: backward quantizes the weight again, transposed, at the forward's scale, so
that a layer costs no memory for it between the passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coat_kernels import (
    E5M2,
    TensorScaled,
    quantize_tensor,
    quantize_tensor_both,
    quantize_tensor_transposed,
    scaled_mm,
)
from coat_vlm.fp8 import monitor

Parameters = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class LinearNeeds:
    """Which gradients of a linear layer are wanted."""

    input: bool
    weight: bool
    bias: bool


def stack(linears: Sequence[nn.Linear]) -> tuple[Tensor | None, ...]:
    """Weights, then biases, of layers that read the same input: a Function's tensor arguments."""
    return (*(layer.weight for layer in linears), *(layer.bias for layer in linears))


def unstack(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], Tensor | None]:
    """The inverse of :func:`stack`: the weights, and one concatenated bias [N] or None."""
    half = len(tensors) // 2
    weights = [weight for weight in tensors[:half] if weight is not None]
    if all(bias is None for bias in tensors[half:]):
        return weights, None
    biases = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias
        for weight, bias in zip(weights, tensors[half:], strict=True)
    ]
    return weights, joined(biases)


def joined(tensors: Parameters) -> Tensor:
    """Along the first dimension; a single tensor stays itself."""
    return tensors[0].detach() if len(tensors) == 1 else torch.cat([t.detach() for t in tensors])


def forward(
    x: TensorScaled, weights: Parameters, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Y [M, N] in ``dtype`` for x [M, K] and weights [n_i, K], and the weights' scale []."""
    weight = joined(weights).contiguous()
    codes = quantize_tensor(weight)
    monitor.observe("weight", codes, weight)
    return scaled_mm(x, codes, dtype, bias), codes.scale


def backward(
    dy: Tensor,
    weights: Parameters,
    weight_scale: Tensor,
    input_transposed: Callable[[], TensorScaled],
    needs: LinearNeeds,
    dy_scale: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None], Tensor | None]:
    """Gradients of :func:`forward`.

    Args:
        dy: gradient of y [M, N], contiguous.
        weights: as in forward.
        weight_scale: from forward.
        input_transposed: gives x^T [K, M'] in FP8; called only for weight gradients.
        needs: what to compute; the rest is None.
        dy_scale: E5M2 scale of dy [] where it is known already.

    Returns:
        dx [M, K] in dy's dtype; a gradient [n_i, K] per weight, in its dtype; the bias's gradient
        [N], FP32.
    """
    rows, transposed = quantize_tensor_both(dy, E5M2, dy_scale)
    monitor.observe("gradient", rows, dy)
    dx = None
    if needs.input:
        weight = quantize_tensor_transposed(joined(weights).contiguous(), weight_scale)
        dx = scaled_mm(rows, weight, dy.dtype)
    dweights: list[Tensor | None] = [None] * len(weights)
    if needs.weight:
        dweight = scaled_mm(transposed, input_transposed(), weights[0].dtype)
        dweights = list(dweight.split([weight.shape[0] for weight in weights]))
    return dx, dweights, dy.float().sum(0) if needs.bias else None


def split_bias_gradient(
    gradient: Tensor | None, tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """A concatenated bias gradient [N] as the gradients of :func:`stack`'s biases."""
    half = len(tensors) // 2
    sizes = [weight.shape[0] for weight in tensors[:half] if weight is not None]
    if gradient is None:
        return [None] * half
    return [
        None if bias is None else piece.to(bias.dtype)
        for piece, bias in zip(gradient.split(sizes), tensors[half:], strict=True)
    ]
