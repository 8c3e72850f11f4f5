"""One linear layer in FP8: ``fp8_linear`` converts every linear layer of a block to it.

Saves its input in E4M3 for the grad-weight GEMM: K bytes per token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from coat_kernels import TensorScaled, quantize_tensor, transpose_quantized
from coat_vlm.fp8 import gemm, saturation
from coat_vlm.fp8.gemm import FusedLinear, Needs, matrix


class Fp8Linear(nn.Linear):
    """A linear layer with FP8 GEMMs and the parameters of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the input's dtype."""
        return linear(input, self)


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Compute ``layer(x)`` in FP8.

    Args:
        x: [..., K], FP32, BF16 or FP16.
        layer: weight [N, K] and bias [N] or None; K and N multiples of 16.

    Returns:
        [..., N] in x's dtype.
    """
    return _Linear.apply(x, *gemm.arguments([layer]))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fused: FusedLinear, *stacked: Tensor | None) -> Tensor:
        rows = matrix(x)
        x8 = quantize_tensor(rows)
        saturation.observe("linear input", x8.q, rows)
        y, saved = gemm.forward(x8, fused, stacked, x.dtype, rows if fused.bf16_forward else None)
        needs = Needs.of(ctx.needs_input_grad[:1], ctx.needs_input_grad[2:], fused)
        ctx.save_for_backward(x8.q if needs.input_transposed else None, x8.scale, *saved)
        ctx.fused, ctx.shape, ctx.dtype = fused, x.shape, x.dtype
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, scale, *saved = ctx.saved_tensors
        needs = Needs.of(ctx.needs_input_grad[:1], ctx.needs_input_grad[2:], ctx.fused)
        x8 = TensorScaled(q, scale)
        grad_input, grads = gemm.backward(
            grad_outputs[0], ctx.fused, saved, needs, ctx.dtype, lambda _: transpose_quantized(x8)
        )
        return None if grad_input is None else grad_input.view(ctx.shape), None, *grads
