"""Norm and MLP as one autograd Function, FP8 inside: SwiGLU of decoders, GELU of encoders.

    a = norm(x) W_in^T + b_in,   h = activation(a),   y = h W_out^T + b_out

W_in is [gate; up] for SwiGLU. Kept for the backward pass, per token: FP8 copies of x (K + K / G
bytes) and of a (W + W / G), one or two FP32 numbers, and three scales. The normed input and h are
computed again from these copies when the weight gradients need them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import (
    ActivationSaved,
    GradientCodes,
    GroupScaled,
    activation_bwd,
    activation_bwd_stats,
    activation_fwd,
    activation_recompute,
    dequantize_group,
    norm_recompute,
    scaled_mm,
)
from coat_kernels.reference import activation_gradient
from coat_vlm.fp8 import gemms, monitor
from coat_vlm.fp8.gemms import LinearNeeds
from coat_vlm.fp8.linear import (
    NormSettings,
    flat,
    norm_gradients,
    norm_settings,
    norm_unrounded,
    normed,
    residual_only,
    rows,
    unflat,
)
from coat_vlm.fp8.weights import Joint, joint

_UNROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_mul": lambda a: F.silu(a.chunk(2, -1)[0]).mul_(a.chunk(2, -1)[1]),
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "quick_gelu": lambda a: a * torch.sigmoid(1.702 * a),
}
"""The activations as torch computes them, [M, W] to [M, F] in a's dtype."""


def norm_mlp(
    x: Tensor,
    norm: nn.Module,
    layers_in: Sequence[nn.Linear],
    layer_out: nn.Linear,
    activation: str,
    group_size: int,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``layer_out(activation(layers_in(norm(x + delta))))`` in FP8.

    Args:
        x: the residual stream [..., K], FP32, BF16 or FP16.
        norm: as in :func:`coat_vlm.fp8.linear.norm_linear`.
        layers_in: (gate, up) for ``silu_mul``, else one layer; weights [F, K].
        layer_out: weight [K, F].
        activation: one of ``coat_kernels.ACTIVATIONS``.
        group_size: groups of the FP8 copies.
        delta: as in :func:`coat_vlm.fp8.linear.norm_linear`.

    Returns:
        [..., K] in x's dtype, and x + delta: as in :func:`coat_vlm.fp8.linear.norm_linear`.
    """
    settings = norm_settings(norm, group_size)
    return _NormMlp.apply(
        x,
        delta,
        norm.weight,
        getattr(norm, "bias", None),
        settings,
        activation,
        (joint(layers_in), joint([layer_out])),
        layer_out.weight,
        layer_out.bias,
        *gemms.stack(layers_in),
    )


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        settings: NormSettings,
        activation: str,
        joints: tuple[Joint, Joint],
        weight_out: Tensor,
        bias_out: Tensor | None,
        *stacked_in: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        weights_in, bias_in = gemms.unstack(stacked_in)
        source, codes, saved = normed(x, delta, norm_weight, norm_bias, settings)
        unrounded = None
        if joints[0].bf16_forward:
            unrounded = norm_unrounded(source, norm_weight, norm_bias, settings)
        a, scale_in = gemms.forward(codes, joints[0].key, weights_in, bias_in, x.dtype, unrounded)
        del unrounded
        h, kept = activation_fwd(a, activation, group_size=settings.group_size)
        monitor.observe_group("activation input", kept.a, a)
        monitor.observe_activation("activation output", h, a, activation)
        unrounded = _UNROUNDED[activation](a) if joints[1].bf16_forward else None
        del a, codes  # the GEMM below needs their memory
        y, scale_out = gemms.forward(h, joints[1].key, [weight_out], bias_out, x.dtype, unrounded)
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
        ctx.joints = joints
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return y.view(x.shape), source

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        saved = unflat(tensors[:5])
        kept = ActivationSaved(GroupScaled(tensors[5], tensors[6]), tensors[7])
        norm_weight, norm_bias, weight_out, bias_out, scale_in, scale_out = tensors[8:14]
        stacked_in = tensors[14:]
        half = len(stacked_in) // 2
        weights_in = list(stacked_in[:half])
        wanted = ctx.needs_input_grad
        joint_in, joint_out = ctx.joints
        wants_in = LinearNeeds(
            any(wanted[:4]),
            any(wanted[9 : 9 + half]),
            any(wanted[9 + half :]),
            joint_in.gradients,
        )
        wants_out = LinearNeeds(wants_in.any, wanted[7], wanted[8], joint_out.gradients)
        grad_y, dresidual = grad_outputs
        if grad_y is None:  # only the residual stream was used
            return residual_only(dresidual, ctx)
        dtype = grad_y.dtype
        dy, dy_transposed, dbias_out = gemms.gradient_codes([rows(grad_y)], wants_out)
        del grad_y, grad_outputs
        dh = gemms.input_gradient(dy, joint_out.key, [weight_out], scale_out, wants_out, dtype)
        del dy  # each layout goes as soon as its GEMM is done
        scale, dweight_out = None, None
        if wants_out.weight:
            if dh is None:
                ht = activation_recompute(kept, ctx.activation)
            else:  # one read of dh and of the copy for both
                scale, ht = activation_bwd_stats(dh, kept, ctx.activation, fmt=wants_in.fmt)
            dweight_out = scaled_mm(dy_transposed, ht, weight_out.dtype)
            del ht
        del dy_transposed
        if dbias_out is not None:
            dbias_out = dbias_out.to(bias_out.dtype)
        dnormed, dweights_in, dbias_in = None, [None] * half, None
        if dh is not None:
            da, da_transposed, dbias_in = _activation_gradient(
                dh, kept, ctx.activation, wants_in, scale
            )
            del dh
            dnormed = gemms.input_gradient(da, joint_in.key, weights_in, scale_in, wants_in, dtype)
            del da
            dweights_in = gemms.weight_gradients(
                da_transposed,
                lambda: norm_recompute(saved, norm_weight, norm_bias),
                weights_in,
                wants_in,
            )
            del da_transposed
        return (
            *norm_gradients(dnormed, dresidual, saved, norm_weight, norm_bias, ctx),
            None,
            None,
            None,
            dweight_out,
            dbias_out,
            *dweights_in,
            *gemms.split_bias_gradient(dbias_in, stacked_in),
        )


def _activation_gradient(
    dh: Tensor,
    kept: ActivationSaved,
    activation: str,
    needs: LinearNeeds,
    scale: Tensor | None,
) -> GradientCodes:
    """The gradient of the activation's input, in the layouts that are needed."""
    da = activation_bwd(
        dh,
        kept,
        activation,
        rows=needs.input,
        transposed=needs.weight,
        bias=needs.bias,
        fmt=needs.fmt,
        scale=scale,
    )
    monitor.observe_gradient(
        da.rows,
        da.transposed,
        lambda: activation_gradient(dh, dequantize_group(kept.a), activation),
    )
    return da
