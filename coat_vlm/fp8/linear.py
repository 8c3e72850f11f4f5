"""FP8 linear layers: one alone, and one that starts with a norm.

``linear`` keeps the FP8 codes of its input for the weight gradient (K bytes per token).
``norm_linear`` fuses norm, quantization and the GEMMs of the layers that read the normed input; it
keeps only the group-scaled FP8 copy of the norm's *input* (K + K / G bytes per token) and computes
the normed input again in the backward pass.

No differentiable FP8 tensor crosses an autograd edge: torch would cast the gradient that comes back
along that edge to unscaled FP8. Both Functions are high precision outside and FP8 inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import (
    GradientCodes,
    GroupScaled,
    NormSaved,
    TensorScaled,
    norm_bwd,
    norm_fwd,
    norm_recompute,
    quantize_tensor,
    transpose_codes,
)
from coat_vlm.fp8 import gemms, monitor
from coat_vlm.fp8.gemms import LinearNeeds
from coat_vlm.fp8.weights import Joint, joint


@dataclass(frozen=True, slots=True)
class NormSettings:
    """What a norm does, besides its parameters."""

    eps: float
    centered: bool
    """LayerNorm; RMSNorm otherwise."""
    group_size: int
    """Groups of the FP8 copy of its input."""


def norm_settings(norm: nn.Module, group_size: int) -> NormSettings:
    """The settings of a LayerNorm or an RMSNorm module, with the model's own eps."""
    if isinstance(norm, nn.LayerNorm):
        return NormSettings(norm.eps, True, group_size)
    return NormSettings(float(getattr(norm, "variance_epsilon")), False, group_size)  # noqa: B009


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """``layer(x)`` in FP8.

    Args:
        x: [..., K], FP32, BF16 or FP16.
        layer: weight [N, K] and bias [N] or None; K and N multiples of 16.

    Returns:
        [..., N] in x's dtype.
    """
    return _Linear.apply(x, layer.weight, layer.bias, joint([layer]))


class Split(Protocol):
    """What is made of the joint output of layers with the same input, inside their Function."""

    def outputs(self, y: Tensor, shape: torch.Size) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and others without a gradient, of y [M, N] for an input of ``shape``."""
        ...

    def gradient(self, gradients: Sequence[Tensor | None], needs: LinearNeeds) -> GradientCodes:
        """That of y, from those of the results; None for what was not used."""
        ...


class _Whole:
    """All in one: [..., N]."""

    def outputs(self, y: Tensor, shape: torch.Size) -> tuple[list[Tensor], list[Tensor]]:
        return [y.view(*shape[:-1], y.shape[-1])], []

    def gradient(self, gradients: Sequence[Tensor | None], needs: LinearNeeds) -> GradientCodes:
        (dy,) = gradients
        assert dy is not None
        return gemms.gradient_codes([rows(dy)], needs)


def norm_linear(
    x: Tensor,
    norm: nn.Module,
    layers: Sequence[nn.Linear],
    group_size: int,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``layer(norm(x + delta))`` of every layer, as one FP8 GEMM.

    Args:
        x: the residual stream [..., K], FP32, BF16 or FP16.
        norm: a LayerNorm, or an RMSNorm of a Llama, Mistral or Qwen model.
        layers: weights [n_i, K], biases [n_i] or None.
        group_size: groups of the FP8 copy of the norm's input.
        delta: like x, what is added to it first; nothing when absent.

    Returns:
        [..., sum of n_i] in x's dtype, the layers one after the other; and x + delta. What goes on
        from the residual stream must go on from the latter: its gradient is added where the norm's
        is computed.
    """
    y, residual = norm_split(x, norm, layers, group_size, _Whole(), delta)
    return y, residual


def norm_split(
    x: Tensor,
    norm: nn.Module,
    layers: Sequence[nn.Linear],
    group_size: int,
    split: Split,
    delta: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """:func:`norm_linear` whose joint output is made into something else in the same Function.

    Args:
        x: as in :func:`norm_linear`.
        norm: likewise.
        layers: likewise.
        group_size: likewise.
        split: what is made of it.
        delta: as in :func:`norm_linear`.

    Returns:
        The split's results, x + delta, and the split's results without a gradient.
    """
    settings = norm_settings(norm, group_size)
    bias = getattr(norm, "bias", None)
    return _NormLinear.apply(
        x, delta, norm.weight, bias, settings, joint(layers), split, *gemms.stack(layers)
    )


class Fp8Linear(nn.Linear):
    """A linear layer whose GEMMs are FP8; its parameters are those of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N] in the input's dtype."""
        return linear(input, self)


def rows(x: Tensor) -> Tensor:
    """[..., K] as a contiguous matrix [M, K]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, of_weight: Joint
    ) -> Tensor:
        x2 = rows(x)
        codes = quantize_tensor(x2)
        monitor.observe("linear input", codes, x2)
        unrounded = x2 if of_weight.bf16_forward else None
        y, weight_scale = gemms.forward(codes, of_weight.key, [weight], bias, x.dtype, unrounded)
        keep = codes.q if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(keep, codes.scale, weight, bias, weight_scale)
        ctx.joint = of_weight
        ctx.shape = x.shape
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, scale, weight, bias, weight_scale = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        needs = LinearNeeds(wants_x, wants_weight, wants_bias, ctx.joint.gradients)
        dy, dy_transposed, dbias = gemms.gradient_codes([rows(grad_outputs[0])], needs)
        dtype = grad_outputs[0].dtype
        dx = gemms.input_gradient(dy, ctx.joint.key, [weight], weight_scale, needs, dtype)
        (dweight,) = gemms.weight_gradients(
            dy_transposed, lambda: transpose_codes(TensorScaled(q, scale)), [weight], needs
        )
        return (
            None if dx is None else dx.view(ctx.shape),
            dweight,
            None if dbias is None or bias is None else dbias.to(bias.dtype),
            None,
        )


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        settings: NormSettings,
        of_weights: Joint,
        split: Split,
        *stacked: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, bias = gemms.unstack(stacked)
        source, codes, saved = normed(x, delta, norm_weight, norm_bias, settings)
        unrounded = None
        if of_weights.bf16_forward:
            unrounded = norm_unrounded(source, norm_weight, norm_bias, settings)
        y, weight_scale = gemms.forward(codes, of_weights.key, weights, bias, x.dtype, unrounded)
        del unrounded
        ctx.save_for_backward(*flat(saved), norm_weight, norm_bias, weight_scale, *stacked)
        ctx.joint, ctx.split = of_weights, split
        ctx.shape, ctx.dtype = x.shape, x.dtype
        results, others = split.outputs(y, x.shape)
        ctx.number = len(results)
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return *results, source, *others

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: a checkpointed block refuses to unpack them again
        *kept, norm_weight, norm_bias, weight_scale = tensors[:8]
        stacked = tensors[8:]
        half = len(stacked) // 2
        weights = list(stacked[:half])
        saved = unflat(kept)
        wanted = ctx.needs_input_grad
        needs = LinearNeeds(
            any(wanted[:4]),
            any(wanted[7 : 7 + half]),
            any(wanted[7 + half :]),
            ctx.joint.gradients,
        )
        gradients, dresidual = grad_outputs[: ctx.number], grad_outputs[ctx.number]
        if all(gradient is None for gradient in gradients):  # only the residual stream was used
            return residual_only(dresidual, ctx)
        dy, dy_transposed, dbias = ctx.split.gradient(gradients, needs)
        del gradients, grad_outputs
        dnormed = gemms.input_gradient(dy, ctx.joint.key, weights, weight_scale, needs, ctx.dtype)
        del dy  # each layout goes as soon as its GEMM is done
        dweights = gemms.weight_gradients(
            dy_transposed, lambda: norm_recompute(saved, norm_weight, norm_bias), weights, needs
        )
        del dy_transposed
        return (
            *norm_gradients(dnormed, dresidual, saved, norm_weight, norm_bias, ctx),
            None,
            None,
            None,
            *dweights,
            *gemms.split_bias_gradient(dbias, stacked),
        )


def normed(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: NormSettings
) -> tuple[Tensor, TensorScaled, NormSaved]:
    """X + delta [..., K], its norm [M, K] in FP8, and what the backward pass needs."""
    x2 = rows(x)
    source, codes, saved = norm_fwd(
        x2,
        weight,
        bias,
        settings.eps,
        centered=settings.centered,
        group_size=settings.group_size,
        delta=None if delta is None else rows(delta),
    )
    monitor.observe_group("norm input", saved.x, source)
    monitor.observe_norm("norm output", codes, source, weight, bias, saved)
    # Without a delta x itself goes on, not a view of it: autograd then knows that it is the input.
    return x if delta is None else source.view(x.shape), codes, saved


def norm_unrounded(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: NormSettings
) -> Tensor:
    """The norm of x [..., K] as torch computes it, [M, K] in x's dtype."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if settings.centered:
        return F.layer_norm(rows(x), x.shape[-1:], weight, bias, settings.eps)
    return F.rms_norm(rows(x), x.shape[-1:], weight, settings.eps)


def norm_gradients(
    dy: Tensor | None,
    dresidual: Tensor | None,
    saved: NormSaved,
    weight: Tensor,
    bias: Tensor | None,
    ctx: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, delta, weight and bias, in their dtypes; None where dy is None.

    Args:
        dy: gradient of the norm's output [M, K].
        dresidual: gradient of x + delta that comes past the norm, of ``ctx.shape``.
        saved: what the norm kept.
        weight: the norm's, [K].
        bias: the norm's, [K] or None.
        ctx: of a Function whose first inputs are these four.
    """
    if dy is None:
        return None, None, None, None
    residual = None if dresidual is None else rows(dresidual)
    dx, dweight, dbias = norm_bwd(dy, saved, weight, residual)
    wants_x, wants_delta, _, _ = ctx.needs_input_grad[:4]
    dx = dx.view(ctx.shape)
    return (
        dx if wants_x else None,
        dx if wants_delta else None,
        dweight.to(weight.dtype),
        None if bias is None else dbias.to(bias.dtype),
    )


def residual_only(dresidual: Tensor | None, ctx: Any) -> tuple[Tensor | None, ...]:
    """Gradients of a Function of (x, delta, ...) whose other result than x + delta is not used."""
    wants_x, wants_delta, *rest = ctx.needs_input_grad
    used = (dresidual if wants_x else None, dresidual if wants_delta else None)
    return *used, *(None for _ in rest)


def flat(saved: NormSaved) -> tuple[Tensor, ...]:
    """The tensors of a NormSaved, for ``save_for_backward``."""
    return (*saved.x, saved.rstd, saved.mean, saved.scale)


def unflat(tensors: Sequence[Tensor]) -> NormSaved:
    """The inverse of :func:`flat`."""
    q, exponents, rstd, mean, scale = tensors
    return NormSaved(GroupScaled(q, exponents), rstd, mean, scale)
