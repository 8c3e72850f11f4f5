"""The three GEMMs of a linear layer in FP8, shared by every FP8 block.

    forward          y  = x W^T + b      x E4M3 [M, K],    W E4M3 [N, K]
    input gradient   dx = dy W           dy [M, N],        W^T E4M3 [K, N]
    weight gradient  dW = dy^T x         dy^T [N, M'],     x^T E4M3 [K, M']

dy is E5M2 or E4M3, as the layers say (``fp8.gradients`` of a recipe). All operands have one scale
per tensor (arXiv 2410.19313, section 4.1). The first accumulates fast, the gradients do not, as in
torchao and TransformerEngine by default. Layers that read the same input (q, k, v; gate, up) are
one GEMM: their weights are quantized together, under one scale. Where the FP8 weights come from,
and whether they stay, is up to ``weights.py``. In the first blocks the forward product is not FP8
(``fp8.bf16_forward_first`` of a recipe).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import Format, GradientCodes, TensorScaled, quantize_gradient, scaled_mm
from coat_vlm.fp8 import monitor, weights


@dataclass(frozen=True, slots=True)
class LinearNeeds:
    """Which gradients of a linear layer are wanted, and in which format they are worked out."""

    input: bool
    weight: bool
    bias: bool
    fmt: Format
    """Of the codes of its output's gradient."""

    @property
    def any(self) -> bool:
        """Whether there is anything to compute."""
        return self.input or self.weight or self.bias


def stack(linears: Sequence[nn.Linear]) -> tuple[Tensor | None, ...]:
    """Weights, then biases, of layers that read the same input: a Function's tensor arguments."""
    return (*(layer.weight for layer in linears), *(layer.bias for layer in linears))


def unstack(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], Tensor | None]:
    """The inverse of :func:`stack`: the weights, and one concatenated bias [N] or None."""
    half = len(tensors) // 2
    parts = [weight for weight in tensors[:half] if weight is not None]
    if all(bias is None for bias in tensors[half:]):
        return parts, None
    biases = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
        for weight, bias in zip(parts, tensors[half:], strict=True)
    ]
    return parts, biases[0] if len(biases) == 1 else torch.cat(biases)


def forward(
    x: TensorScaled,
    key: weights.Key,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
    unrounded: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Y of one matrix product.

    Args:
        x: codes [M, K].
        key: of the weights.
        parts: the weights [n_i, K].
        bias: [N], the sum of n_i, or None.
        dtype: of y.
        unrounded: x, [M, K], if the product is to be the layers' own.

    Returns:
        [M, N], and the scale [] that the weights got; None if they got none.
    """
    if unrounded is not None:
        weight = (parts[0] if len(parts) == 1 else torch.cat([*parts])).to(dtype)
        y = F.linear(unrounded.to(dtype), weight, None if bias is None else bias.to(dtype))
        return y.to(dtype), None  # under autocast it may have another
    codes = weights.codes(key, parts)
    return scaled_mm(x, codes, dtype, bias, fast=True), codes.scale


def gradient_codes(parts: Sequence[Tensor], needs: LinearNeeds) -> GradientCodes:
    """Dy, in parts [M, n_i] side by side, in the layouts that its GEMMs will need."""
    codes = quantize_gradient(
        parts, needs.fmt, rows=needs.input, transposed=needs.weight, bias=needs.bias
    )
    monitor.observe_gradient(codes.rows, codes.transposed, lambda: torch.cat([*parts], 1))
    return codes


def input_gradient(
    dy: TensorScaled,
    key: weights.Key,
    parts: Sequence[Tensor],
    weight_scale: Tensor | None,
    needs: LinearNeeds,
    dtype: torch.dtype,
) -> Tensor | None:
    """The gradient of :func:`forward`'s x.

    Args:
        dy: gradient of y, codes [M, N].
        key: of the weights, as in forward.
        parts: the weights, as in forward.
        weight_scale: from forward.
        needs: whether to compute it.
        dtype: of the result.

    Returns:
        [M, K], or None.
    """
    if not needs.input:
        return None
    return scaled_mm(dy, weights.transposed_codes(key, parts, weight_scale), dtype)


def weight_gradients(
    dy: TensorScaled,
    input_transposed: Callable[[], TensorScaled],
    parts: Sequence[Tensor],
    needs: LinearNeeds,
) -> list[Tensor | None]:
    """The gradients of :func:`forward`'s weights.

    Args:
        dy: gradient of y, codes [N, M'].
        input_transposed: gives x^T [K, M'] in FP8; called only if they are wanted.
        parts: the weights, as in forward.
        needs: whether to compute them.

    Returns:
        [n_i, K] per weight, in its dtype, or None.
    """
    if not needs.weight:
        return [None] * len(parts)
    joint = scaled_mm(dy, input_transposed(), parts[0].dtype)
    return list(joint.split([weight.shape[0] for weight in parts]))


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
