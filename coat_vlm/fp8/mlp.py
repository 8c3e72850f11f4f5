"""Norm and MLP as one autograd Function, FP8 inside: SwiGLU of decoders, GELU of encoders.

    a = norm(x) W_in^T + b_in,   h = activation(a),   y = h W_out^T + b_out

W_in is [gate; up] for SwiGLU. Kept for the backward pass, per token: FP8 copies of x (K + K / G
bytes) and of a (W + W / G), one or two FP32 numbers, and three scales. The normed input and h are
computed again from these copies when the weight gradients need them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coat_kernels import (
    ActivationSaved,
    GroupScaled,
    activation_bwd,
    activation_fwd,
    activation_recompute,
    norm_recompute,
)
from coat_vlm.fp8 import gemms, monitor
from coat_vlm.fp8.gemms import LinearNeeds
from coat_vlm.fp8.linear import (
    NormSettings,
    flat,
    norm_gradients,
    norm_settings,
    normed,
    rows,
    unflat,
)


def norm_mlp(
    x: Tensor,
    norm: nn.Module,
    layers_in: Sequence[nn.Linear],
    layer_out: nn.Linear,
    activation: str,
    group_size: int,
) -> Tensor:
    """``layer_out(activation(layers_in(norm(x))))`` in FP8.

    Args:
        x: [..., K], FP32, BF16 or FP16.
        norm: as in :func:`coat_vlm.fp8.linear.norm_linear`.
        layers_in: (gate, up) for ``silu_mul``, else one layer; weights [F, K].
        layer_out: weight [K, F].
        activation: one of ``coat_kernels.ACTIVATIONS``.
        group_size: groups of the FP8 copies.

    Returns:
        [..., K] in x's dtype.
    """
    settings = norm_settings(norm, group_size)
    return _NormMlp.apply(
        x,
        norm.weight,
        getattr(norm, "bias", None),
        settings,
        activation,
        layer_out.weight,
        layer_out.bias,
        *gemms.stack(layers_in),
    )


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        settings: NormSettings,
        activation: str,
        weight_out: Tensor,
        bias_out: Tensor | None,
        *stacked_in: Tensor | None,
    ) -> Tensor:
        weights_in, bias_in = gemms.unstack(stacked_in)
        codes, saved = normed(rows(x), norm_weight, norm_bias, settings)
        a, scale_in = gemms.forward(codes, weights_in, bias_in, x.dtype)
        h, kept = activation_fwd(a, activation, group_size=settings.group_size)
        monitor.observe_group("activation input", kept.a, a)
        monitor.observe_activation("activation output", h, a, activation)
        y, scale_out = gemms.forward(h, [weight_out], bias_out, x.dtype)
        ctx.save_for_backward(
            *flat(saved),
            *kept.a,
            kept.scale,
            norm_weight,
            norm_bias,
            weight_out,
            bias_out,
            scale_in,
            scale_out,
            *stacked_in,
        )
        ctx.activation = activation
        ctx.shape = x.shape
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        saved = unflat(tensors[:5])
        kept = ActivationSaved(GroupScaled(tensors[5], tensors[6]), tensors[7])
        norm_weight, norm_bias, weight_out, bias_out, scale_in, scale_out = tensors[8:14]
        stacked_in = tensors[14:]
        half = len(stacked_in) // 2
        wanted = ctx.needs_input_grad
        wants_in = LinearNeeds(any(wanted[:3]), any(wanted[7 : 7 + half]), any(wanted[7 + half :]))
        needs_a = wants_in.input or wants_in.weight or wants_in.bias
        dh, (dweight_out,), dbias_out = gemms.backward(
            rows(grad_outputs[0]),
            [weight_out],
            scale_out,
            lambda: activation_recompute(kept, ctx.activation),
            LinearNeeds(needs_a, wanted[5], wanted[6]),
        )
        dnormed, dweights_in, dbias_in = None, [None] * half, None
        if dh is not None:
            da, da_scale = activation_bwd(dh, kept, ctx.activation)
            dnormed, dweights_in, dbias_in = gemms.backward(
                da,
                list(stacked_in[:half]),
                scale_in,
                lambda: norm_recompute(saved, norm_weight, norm_bias),
                wants_in,
                da_scale,
            )
        return (
            *norm_gradients(dnormed, saved, norm_weight, norm_bias, ctx.shape),
            None,
            None,
            dweight_out,
            None if dbias_out is None else dbias_out.to(bias_out.dtype),
            *dweights_in,
            *gemms.split_bias_gradient(dbias_in, stacked_in),
        )
