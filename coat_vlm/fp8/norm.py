"""The norm before FP8 linear layers, for the Functions that begin with it (``heads``, ``mlp``).

    residual = x + delta,   a = norm(residual)

The kernel writes ``a`` in E4M3 with one scale, as the forward GEMM reads it. Saves for backward,
per token: ``residual`` in FP8 with per-group scales (K + K / G bytes) and the FP32 norm statistics.
``coat_kernels.norm_recompute`` makes ``a^T`` from them for the grad-weight GEMM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import GroupScaled, NormSaved, TensorScaled, norm_bwd, norm_fwd
from coat_kernels.reference import norm_values
from coat_vlm.fp8 import monitor
from coat_vlm.fp8.linear import rows


@dataclass(frozen=True, slots=True)
class NormSettings:
    """What a norm does, besides its parameters."""

    eps: float
    centered: bool
    """LayerNorm; RMSNorm otherwise."""
    group_size: int
    """Groups of the FP8 copy of its input."""


def arguments(norm: Any, group_size: int) -> tuple[Tensor, Tensor | None, NormSettings]:
    """What a Function takes of a LayerNorm or an RMSNorm module: weight, bias and settings."""
    centered = isinstance(norm, nn.LayerNorm)
    eps = norm.eps if centered else float(norm.variance_epsilon)
    bias = getattr(norm, "bias", None)
    return norm.weight, bias, NormSettings(eps, centered, group_size)


def forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: NormSettings
) -> tuple[Tensor, TensorScaled, tuple[Tensor, ...]]:
    """Norm of x + delta.

    Args:
        x: the residual stream [..., K], FP32, BF16 or FP16.
        delta: like x, or None: what is added to it first.
        weight: the norm's, [K].
        bias: the norm's, [K] or None.
        settings: the norm's.

    Returns:
        x + delta, like x; its norm in E4M3 [M, K]; what is saved for backward, as :func:`saved_of`
        takes it.
    """
    residual, a, saved = norm_fwd(
        rows(x),
        weight,
        bias,
        settings.eps,
        centered=settings.centered,
        group_size=settings.group_size,
        delta=None if delta is None else rows(delta),
    )

    def values() -> Tensor:
        mean = saved.mean if saved.mean.numel() else None
        return norm_values(residual.float(), weight, bias, saved.rstd, mean)

    monitor.observe("norm input", saved.x.q, residual)
    monitor.observe("norm output", a.q, values)
    # Without a delta x itself goes on, not a view of it: autograd then knows that it is the input.
    result = x if delta is None else residual.view(x.shape)
    return result, a, (*saved.x, saved.rstd, saved.mean, saved.scale)


def saved_of(tensors: Sequence[Tensor]) -> NormSaved:
    """What :func:`forward` saved."""
    q, exponents, rstd, mean, scale = tensors
    return NormSaved(GroupScaled(q, exponents), rstd, mean, scale)


def forward_hp(x: Tensor, weight: Tensor, bias: Tensor | None, settings: NormSettings) -> Tensor:
    """The norm of x [..., K] in high precision, as torch computes it: [M, K] in x's dtype."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if settings.centered:
        return F.layer_norm(rows(x), x.shape[-1:], weight, bias, settings.eps)
    return F.rms_norm(rows(x), x.shape[-1:], weight, settings.eps)


def backward(
    grad_output: Tensor | None,
    grad_residual: Tensor | None,
    saved: NormSaved,
    weight: Tensor,
    bias: Tensor | None,
    ctx: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, delta, weight and bias, in their dtypes; None where they are not wanted.

    Args:
        grad_output: gradient of the norm's output [M, K]; None if none of the four is wanted.
        grad_residual: gradient of x + delta that comes past the norm, like x, or None.
        saved: from :func:`forward`.
        weight: the norm's, [K].
        bias: the norm's, [K] or None.
        ctx: of a Function whose first inputs are these four.
    """
    if grad_output is None:
        return None, None, None, None
    residual = None if grad_residual is None else rows(grad_residual)
    grad_x, grad_weight, grad_bias = norm_bwd(grad_output, saved, weight, residual)
    return (
        *grads_of_sum(grad_x.view(ctx.shape), ctx),
        grad_weight.to(weight.dtype),
        None if bias is None else grad_bias.to(bias.dtype),
    )


def grads_of_sum(grad: Tensor | None, ctx: Any) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and delta from that of their sum."""
    wants_x, wants_delta = ctx.needs_input_grad[:2]
    return grad if wants_x else None, grad if wants_delta else None
