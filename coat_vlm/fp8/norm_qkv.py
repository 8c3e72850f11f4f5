"""Fused norm, QKV projection and RoPE: the residual stream to the attention heads' q, k and v.

    q | k | v = norm(x) W_qkv^T + b_qkv,   q, k = rotate(q), rotate(k)

Saves for backward the tensors of the norm (``norm.py``). Backward reads the gradients of q, k and v
as attention returns them, rotates and quantizes them: the fused matrix [M, N] never exists in high
precision. If each head has its own RMSNorm (Qwen3, Gemma 3), another Function normalizes and
rotates q and k. It saves them as columns of the projection's result, which also keeps v's columns.
Other cases (InternVL's norm of all heads, partial rotation) use the model's own functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coat_kernels import (
    QuantizedGradient,
    TensorScaled,
    head_norm,
    head_norm_bwd,
    rope,
    rope_gradient,
)
from coat_kernels.reference import rope_gradient_values
from coat_vlm.fp8 import gemm, saturation
from coat_vlm.fp8 import norm as norms
from coat_vlm.fp8.attention import Heads, HeadsSource, as_heads, modeling_of
from coat_vlm.fp8.gemm import FusedLinear, Needs, matrix
from coat_vlm.fp8.norm import NormSettings, read_norm


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """How to process the output of the fused QKV projection."""

    head_dim: int
    sizes: list[int]
    """Channels of q, k and v."""
    return_input: bool
    """Also return the GEMM's FP8 input and its scales."""
    rotation: tuple[Tensor, Tensor] | None
    """cos and sin [T or B * T, head_dim] of the rotary embedding; None to skip rotation."""


def norm_heads(
    x: Tensor,
    norm: nn.Module,
    attention: Any,
    group_size: int,
    recompute: bool,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    rotates_halves: bool = True,
) -> tuple[Heads, HeadsSource | None, Tensor]:
    """Compute query, key and value of the normalized residual stream x [B, T, hidden].

    ``attention`` has ``q_proj``, ``k_proj`` and ``v_proj``, or one layer ``qkv`` with as many keys
    and values as queries. ``position_embeddings`` are (cos, sin) [..., rotary channels] of T or
    B * T tokens; the kernel rotates pairs of channels i and i + D / 2, and without
    ``rotates_halves`` the model's own function rotates. Returns the heads; with ``recompute`` what
    backward computes them from; and x for the residual path, whose gradient is added in the norm's
    backward kernel.
    """
    if hasattr(attention, "qkv"):
        layers, sizes = (attention.qkv,), [attention.qkv.out_features // 3] * 3
    else:
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        sizes = [layer.out_features for layer in layers]
    D, rotation = attention.head_dim, None
    by_model = not isinstance(getattr(attention, "q_norm", None), nn.Identity | None)
    if position_embeddings is not None:
        by_model = by_model or position_embeddings[0].shape[-1] != D or not rotates_halves
        if not by_model:
            cos, sin = (t.reshape(-1, D).contiguous() for t in position_embeddings)
            rotation = (cos, sin)
    settings = HeadSettings(D, sizes, recompute and not by_model, rotation)
    fused, parameters = gemm.collect(layers)
    query, key, value, residual, *input8 = _NormHeads.apply(
        x, None, *norms.arguments(norm, group_size), fused, settings, *parameters.flat
    )
    if by_model:
        projected = (query, key, value)
        return *_finish_by_model(projected, attention, position_embeddings, recompute), residual
    source = None
    if recompute:
        shape, dtype = x.shape, x.dtype

        def compute(saved: Sequence[Any]) -> Heads:
            q, scale, weight_scale, *flat = saved
            x8, (parameters,) = TensorScaled(q, scale), gemm.unpack(flat, fused)
            y, _ = gemm.forward(x8, fused, parameters, dtype, weight_scale=weight_scale)
            query, key, value = (as_heads(part, shape, D) for part in _split(y, settings))
            return query, key, value

        source = HeadsSource((*input8, *parameters.flat), compute)
    return (query, key, value), source, residual


def _finish_by_model(
    projected: Heads,
    attention: Any,
    position_embeddings: tuple[Tensor, Tensor] | None,
    recompute: bool,
) -> tuple[Heads, HeadsSource | None]:
    """Normalize and rotate projected heads as the model does; returns like :func:`norm_heads`."""

    def compute(saved: Sequence[Any]) -> Heads:
        query, key, value = saved
        if _is_per_head(attention, position_embeddings):
            assert position_embeddings is not None
            D = attention.head_dim
            cos_sin = [t.reshape(-1, D).contiguous() for t in position_embeddings]
            query = _HeadNorm.apply(query, *read_norm(attention.q_norm), *cos_sin)
            key = _HeadNorm.apply(key, *read_norm(attention.k_norm), *cos_sin)
            return query, key, value
        together = position_embeddings is None  # InternVL normalizes all heads of a token at once
        query = _normalize(query, getattr(attention, "q_norm", None), together)
        key = _normalize(key, getattr(attention, "k_norm", None), together)
        if position_embeddings is not None:
            rotate = modeling_of(attention).apply_rotary_pos_emb
            query, key = rotate(query, key, *position_embeddings)
        return query, key, value

    query, key, value = compute(projected)
    if recompute:
        saved = tuple(x.detach() for x in projected)
        return (query, key, value), HeadsSource(saved, compute)
    # Attention saves the value, and a view would keep the GEMM's whole result alive.
    return (query, key, value.transpose(1, 2).clone().transpose(1, 2)), None


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        norm: NormSettings,
        fused: FusedLinear,
        heads: HeadSettings,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        (layers,) = gemm.unpack(flat, fused)
        y, residual, saved, (a, weight_scale) = norms.forward(
            x, delta, norm_weight, norm_bias, norm, fused, layers
        )
        ctx.save_for_backward(*saved)
        ctx.fused, ctx.heads, ctx.shape, ctx.dtype = fused, heads, x.shape, x.dtype
        input8 = ()
        if heads.return_input:
            assert weight_scale is not None  # the forward GEMM is FP8
            input8 = (*a, weight_scale)
            ctx.mark_non_differentiable(*input8)
        ctx.set_materialize_grads(False)
        parts = _split(y, heads)
        return *(as_heads(part, x.shape, heads.head_dim) for part in parts), residual, *input8

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpointed block refuses to unpack them again
        grad_heads, grad_residual = grad_outputs[:3], grad_outputs[3]
        if all(grad is None for grad in grad_heads):
            return norms.residual_only(grad_residual, ctx)
        needs = Needs.find(ctx, ctx.fused, 4, 7)
        of_norm, grads = norms.backward(
            lambda: _heads_backward(grad_heads, ctx.heads, needs),
            grad_residual,
            saved,
            ctx.fused,
            needs,
            ctx,
        )
        return *of_norm, None, None, None, *grads.flat


def _split(y: Tensor, heads: HeadSettings) -> Sequence[Tensor]:
    """Return q, k and v as matrices [M, n]; q and k rotated."""
    if heads.rotation is None:
        return y.split(heads.sizes, 1)
    numbers = (heads.sizes[0] // heads.head_dim, heads.sizes[1] // heads.head_dim)
    return rope(y, *heads.rotation, *numbers)


def _heads_backward(
    grad_heads: Sequence[Tensor | None], heads: HeadSettings, needs: Needs
) -> QuantizedGradient:
    """Compute the gradient of the fused projection's output in FP8."""
    like = next(grad for grad in grad_heads if grad is not None)
    tokens = like.shape[0] * like.shape[2]
    parts = [
        like.new_zeros(tokens, size) if grad is None else matrix(grad.transpose(1, 2).flatten(-2))
        for grad, size in zip(grad_heads, heads.sizes, strict=True)
    ]
    if heads.rotation is None:
        return gemm.quantize_grad(parts, needs)
    back = (parts[0], parts[1], parts[2], *heads.rotation)
    quantized = rope_gradient(*back, rows=needs.rows, transposed=needs.weight, bias=needs.bias)
    saturation.observe_gradient(quantized, lambda: rope_gradient_values(*back))
    return quantized


def _is_per_head(attention: Any, position_embeddings: tuple[Tensor, Tensor] | None) -> bool:
    """Return whether q and k have an RMSNorm for each head, and all channels are rotated."""
    D = attention.head_dim
    norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return (
        position_embeddings is not None
        and position_embeddings[0].shape[-1] == D
        and all(type(n).__name__.endswith("RMSNorm") and n.weight.shape == (D,) for n in norms)
    )


class _HeadNorm(torch.autograd.Function):
    """RMSNorm and rotation of heads [B, n, T, D]."""

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        x = heads.transpose(1, 2).flatten(-2).flatten(0, 1)  # a view
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        shape = (heads.shape[0], heads.shape[2])
        return as_heads(head_norm(x, weight, cos, sin, eps), shape, heads.shape[3])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        (grad,) = grad_outputs
        dy = matrix(grad.transpose(1, 2).flatten(-2))
        dx, dweight = head_norm_bwd(dy, x, weight, cos, sin, ctx.eps)
        shape = (grad.shape[0], grad.shape[2])
        return as_heads(dx, shape, grad.shape[3]), dweight.to(weight.dtype), None, None, None


def _normalize(x: Tensor, norm: nn.Module | None, together: bool) -> Tensor:
    """Normalize heads [B, n, T, D], one by one or together, if the model has a norm for them."""
    if norm is None:
        return x
    heads = x.transpose(1, 2)
    normalized = norm(heads.flatten(-2)).view(heads.shape) if together else norm(heads)
    return normalized.transpose(1, 2)
