"""Norm and MLP as one autograd Function, FP8 inside: gated MLPs and GELUs.

    residual = x + delta,   h = W_in norm(residual) + b_in,   y = W_out activation(h) + b_out

W_in is [gate; up] for SwiGLU and GeGLU. A width of h that is not a multiple of 16 (3420 in
Qwen2.5-VL's tower) is padded with zero channels, which all activations keep zero. Saves for
backward, per token: ``residual`` and ``h`` in FP8 with per-group scales (K + K / G and W + W / G
bytes), the FP32 norm statistics, and three per-tensor scales. Backward recomputes the normalized
input and the activation from them for the grad-weight GEMMs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import (
    ActivationSaved,
    GroupScaled,
    QuantizedGradient,
    TensorScaled,
    activation_bwd,
    activation_bwd_once,
    activation_bwd_stats,
    activation_fwd,
    dequantize_group,
)
from coat_kernels.formats import pad_length
from coat_kernels.reference import activation_gradient, activation_values
from coat_kernels.shared_scales import are_shared
from coat_vlm.fp8 import gemm, saturation
from coat_vlm.fp8 import norm as norms
from coat_vlm.fp8.gemm import FusedLinear, LayerValues, Needs, Saved
from coat_vlm.fp8.norm import NormSettings

HIGH_PRECISION: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_mul": lambda h: F.silu(h.chunk(2, -1)[0]).mul_(h.chunk(2, -1)[1]),
    "gelu_tanh_mul": lambda h: F.gelu(h.chunk(2, -1)[0], approximate="tanh").mul_(
        h.chunk(2, -1)[1]
    ),
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
}
"""Torch's activations, [M, W] to [M, F] in h's dtype."""


def norm_mlp(
    x: Tensor,
    norm: nn.Module,
    layers_in: Sequence[nn.Linear],
    layer_out: nn.Linear,
    activation: str,
    group_size: int,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``layer_out(activation(layers_in(norm(x + delta))))`` in FP8, and x + delta.

    x is the residual stream [..., K], FP32, BF16 or FP16; ``layers_in`` are (gate, up) for gated
    activations, else one layer. The residual path must continue from the returned x + delta, whose
    gradient is added in the norm's backward kernel.
    """
    pad = pad_length(layer_out.in_features) - layer_out.in_features
    fused_in, values_in = gemm.collect(layers_in, pad_rows=pad)
    fused_out, values_out = gemm.collect([layer_out], pad_columns=pad)
    return _NormMlp.apply(
        x,
        delta,
        *norms.arguments(norm, group_size),
        activation,
        fused_in,
        fused_out,
        *values_in.flat,
        *values_out.flat,
    )


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        norm: NormSettings,
        activation: str,
        fused_in: FusedLinear,
        fused_out: FusedLinear,
        *flat: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        layers_in, layers_out = gemm.unpack(flat, fused_in, fused_out)
        h, residual, saved_in, _ = norms.forward(
            x, delta, norm_weight, norm_bias, norm, fused_in, layers_in
        )
        act, saved = activation_fwd(h, activation, group_size=norm.group_size)
        saturation.observe("activation input", saved.a.q, h)
        saturation.observe("activation output", act.q, partial(activation_values, h, activation))
        hp = HIGH_PRECISION[activation](h) if fused_out.bf16_forward else None
        del h  # the GEMM below needs its memory
        y, saved_out = gemm.forward(act, fused_out, layers_out, x.dtype, hp)
        gemm.save(ctx, [*saved.a, saved.scale], saved_in, saved_out.flat)
        ctx.activation, ctx.fused = activation, (fused_in, fused_out)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.set_materialize_grads(False)
        return y.view(x.shape), residual

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_y, grad_residual = grad_outputs
        if grad_y is None:
            return norms.residual_only(grad_residual, ctx)
        (q, exponents, act_scale), saved_in, flat_out = gemm.load(ctx)
        saved = ActivationSaved(GroupScaled(q, exponents), act_scale)
        fused_in, fused_out = ctx.fused
        saved_out = Saved.of(flat_out, fused_out)
        flags_in, flags_out = gemm.unpack(ctx.needs_input_grad[8:], fused_in, fused_out)
        needs_in = Needs.of(ctx.needs_input_grad[:4], flags_in)
        needs_out = Needs.of(needs_in, flags_out)
        grad_scale, made = None, None
        # Without gradients of weights and biases, no GEMM reads the transposed layouts.
        trained = needs_in.weight or needs_in.bias or needs_out.weight
        frozen = needs_in.rows and not (trained or are_shared())

        def once(grad: Tensor) -> tuple[TensorScaled, TensorScaled]:
            return activation_bwd_once(grad, saved, ctx.activation, recompute=needs_out.adapters)

        def output_again(grad_act: Tensor | None) -> TensorScaled:
            nonlocal grad_scale, made
            grad = grad_act
            if grad is None:  # no preceding layer trains, and the scale is not used
                grad = grad_y.new_zeros(len(q), saved_out.layers.weights[0].shape[1])
            # Both results need one read of the gradient and of the saved input.
            if frozen:
                made, output = once(grad)
            else:
                grad_scale, output = activation_bwd_stats(grad, saved, ctx.activation)
            return output

        def quantize_grad_h() -> QuantizedGradient:
            nonlocal grad_act, made
            grad, grad_act = grad_act, None  # the GEMMs need its memory
            assert grad is not None
            if frozen:
                rows, made = made or once(grad)[0], None
                quantized = QuantizedGradient(
                    rows, TensorScaled(grad.new_empty(0), rows.scale), None
                )
            else:
                quantized = activation_bwd(
                    grad,
                    saved,
                    ctx.activation,
                    rows=needs_in.rows,
                    transposed=needs_in.weight,
                    bias=needs_in.bias,
                    scale=grad_scale,
                )
            saturation.observe_gradient(
                quantized,
                lambda: activation_gradient(grad, dequantize_group(saved.a), ctx.activation),
            )
            return quantized

        grad_act, grads_out = gemm.backward(
            grad_y, fused_out, saved_out, needs_out, ctx.dtype, output_again, input_rows=frozen
        )
        of_norm, grads_in = (None, None, None, None), LayerValues.empty(fused_in)
        if grad_act is not None:
            of_norm, grads_in = norms.backward(
                quantize_grad_h, grad_residual, saved_in, fused_in, needs_in, ctx
            )
        return *of_norm, None, None, None, None, *grads_in.flat, *grads_out.flat
