"""One linear layer in FP8: ``fp8_linear`` converts every linear layer of a block to it.

Saves its input in E4M3 for the grad-weight GEMM: K bytes per token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from coat_kernels import TensorScaled, quantize_tensor, transpose_quantized
from coat_vlm.fp8 import gemm, saturation
from coat_vlm.fp8.gemm import FusedLinear, Needs, Saved, matrix


class Fp8Linear(nn.Linear):
    """A linear layer with FP8 GEMMs and the parameters of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the input's dtype."""
        return linear(input, self)


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Compute ``layer(x)`` in FP8, [..., K] to [..., N] in x's dtype; multiples of 16."""
    fused, layers = gemm.collect([layer])
    return _Linear.apply(x, fused, *layers.flat)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fused: FusedLinear, *flat: Tensor | None) -> Tensor:
        (layers,) = gemm.unpack(flat, fused)
        rows = matrix(x)
        x8 = quantize_tensor(rows)
        saturation.observe("linear input", x8.q, rows)
        y, saved = gemm.forward(x8, fused, layers, x.dtype, rows if fused.bf16_forward else None)
        q = x8.q if Needs.find(ctx, fused, 1, 2).input_again else None
        gemm.save(ctx, [q, x8.scale], saved.flat)
        ctx.fused, ctx.shape, ctx.dtype = fused, x.shape, x.dtype
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (q, scale), saved = gemm.load(ctx)
        grad_input, grads = gemm.backward(
            grad_outputs[0],
            ctx.fused,
            Saved.of(saved, ctx.fused),
            Needs.find(ctx, ctx.fused, 1, 2),
            ctx.dtype,
            lambda _: transpose_quantized(TensorScaled(q, scale)),
        )
        return None if grad_input is None else grad_input.view(ctx.shape), None, *grads.flat
