"""A norm and the fused linear layers that read its output: used by ``norm_qkv`` and ``mlp``.

    residual = x + delta,   a = norm(residual),   y = a W^T + b

The norm's kernel writes ``a`` in E4M3 with one scale, as the forward GEMM reads it. Saves for
backward, per token: ``residual`` in FP8 with per-group scales (K + K / G bytes) and the FP32 norm
statistics. Backward recomputes ``a^T`` from them for the grad-weight GEMM.

No differentiable FP8 tensor crosses an autograd edge: torch would cast the gradient that comes back
along that edge to unscaled FP8. Every Function is high precision outside and FP8 inside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import (
    GroupScaled,
    NormSaved,
    QuantizedGradient,
    TensorScaled,
    norm_bwd,
    norm_fwd,
    norm_recompute,
)
from coat_kernels.reference import norm_values
from coat_vlm.fp8 import gemm, saturation
from coat_vlm.fp8.gemm import FusedLinear, LayerValues, Needs, Saved, matrix


@dataclass(frozen=True, slots=True)
class NormSettings:
    """Settings of a norm; ``centered`` is True for LayerNorm, False for RMSNorm."""

    eps: float
    centered: bool
    group_size: int


def arguments(norm: Any, group_size: int) -> tuple[Tensor, Tensor | None, NormSettings]:
    """Return the weight, the bias and the settings of a LayerNorm or a RMSNorm of transformers."""
    weight, eps = read_norm(norm)
    settings = NormSettings(eps, isinstance(norm, nn.LayerNorm), group_size)
    return weight, getattr(norm, "bias", None), settings


_FROM_ONE = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3_5RMSNorm")
"""RMSNorms whose parameter is the difference from one."""


def read_norm(norm: Any) -> tuple[Tensor, float]:
    """Return the weight that multiplies a norm's result, and its epsilon."""
    weight, eps = norm.weight, getattr(norm, "variance_epsilon", None)
    if type(norm).__name__ in _FROM_ONE:
        weight = 1.0 + weight.float()
    return weight, float(norm.eps if eps is None else eps)


def forward(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    settings: NormSettings,
    fused: FusedLinear,
    layers: LayerValues,
) -> tuple[Tensor, Tensor, list[Tensor | None], tuple[TensorScaled, Tensor | None]]:
    """Compute the layers' output for the norm of x + delta.

    x is the residual stream [..., K], FP32, BF16 or FP16. Returns [M, N] in x's dtype, the layers'
    outputs concatenated; x + delta; tensors to save; the layers' input in E4M3 [M, K], and the
    scale of their weight.
    """
    residual, a, saved = norm_fwd(
        matrix(x),
        weight,
        bias,
        settings.eps,
        centered=settings.centered,
        group_size=settings.group_size,
        delta=None if delta is None else matrix(delta),
    )

    def values() -> Tensor:
        mean = saved.mean if saved.mean.numel() else None
        return norm_values(residual.float(), weight, bias, saved.rstd, mean)

    saturation.observe("norm input", saved.x.q, residual)
    saturation.observe("norm output", a.q, values)
    hp = high_precision(residual, weight, bias, settings) if fused.bf16_forward else None
    y, of_layers = gemm.forward(a, fused, layers, x.dtype, hp)
    # Without a delta return x, not a view: autograd recognizes it as the input.
    result = x if delta is None else residual.view(x.shape)
    tensors = [*saved.x, saved.rstd, saved.mean, saved.scale, weight, bias, *of_layers.flat]
    return y, result, tensors, (a, of_layers.scale)


def high_precision(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: NormSettings
) -> Tensor:
    """Compute torch's norm of x [M, K] in x's dtype."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if settings.centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, settings.eps)
    return F.rms_norm(x, x.shape[-1:], weight, settings.eps)


def backward(
    quantize: Callable[[], QuantizedGradient],
    grad_residual: Tensor | None,
    saved: Sequence[Any],
    fused: FusedLinear,
    needs: Needs,
    ctx: Any,
) -> tuple[tuple[Tensor | None, ...], LayerValues]:
    """Compute gradients from the gradients of the layers' output and of the residual path.

    ``quantize`` returns the gradient of the layers' output in FP8. ``ctx`` is the context of a
    Function whose first inputs are x, delta, the norm's weight and its bias, with attributes
    ``shape`` and ``dtype`` of x. Returns gradients of these four inputs, and of the layers, in
    their dtypes; None if not needed.
    """
    q, exponents, rstd, mean, scale, weight, bias, *of_layers = saved
    of_norm = NormSaved(GroupScaled(q, exponents), rstd, mean, scale)
    grad_a, grads = gemm.backward(
        quantize,
        fused,
        Saved.of(of_layers, fused),
        needs,
        ctx.dtype,
        lambda _: norm_recompute(of_norm, weight, bias),
    )
    if grad_a is None:
        return (None, None, None, None), grads
    residual = None if grad_residual is None else matrix(grad_residual)
    trained = ctx.needs_input_grad[2:4]
    grad_x, *sums = norm_bwd(grad_a, of_norm, weight, residual, frozen=not any(trained))
    of_parameters = (
        grad.to(parameter.dtype) if needed else None
        for grad, parameter, needed in zip(sums, (weight, bias), trained, strict=True)
    )
    return (*grads_of_sum(grad_x.view(ctx.shape), ctx), *of_parameters), grads


def grads_of_sum(grad: Tensor | None, ctx: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and delta, given the gradient of their sum."""
    wants_x, wants_delta = ctx.needs_input_grad[:2]
    return grad if wants_x else None, grad if wants_delta else None


def residual_only(grad_residual: Tensor | None, ctx: Any) -> tuple[Tensor | None, ...]:
    """Return all gradients of a Function of (x, delta, ...) if only x + delta is used."""
    return *grads_of_sum(grad_residual, ctx), *(None for _ in ctx.needs_input_grad[2:])
