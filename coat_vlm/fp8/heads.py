"""Fused norm, QKV projection and RoPE: the residual stream to the attention heads' q, k and v.

    q | k | v = norm(x) W_qkv^T + b_qkv,   q, k = rotate(q), rotate(k)

One autograd Function from the residual stream to q, k and v. Saves for backward the tensors of the
norm (``norm.py``). Backward reads the gradients of q, k and v as attention returns them, rotates
and quantizes them: the fused matrix [M, N] never exists in high precision. If each head has its own
RMSNorm (Qwen3, Gemma 3), another Function normalizes and rotates q and k. It saves them as columns
of the projection's result, which keeps v's columns, too. What fits neither (InternVL's norm of all
heads, partial rotation) is done by the model's functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coat_kernels import (
    GROUP_SIZES,
    INT8,
    QuantizedGradient,
    dequantize_group,
    head_norm,
    head_norm_bwd,
    quantize_group,
    rope,
    rope_gradient,
    rope_quantize,
)
from coat_kernels.reference import rope_gradient_values
from coat_vlm.fp8 import gemm, saturation
from coat_vlm.fp8 import norm as norms
from coat_vlm.fp8.attention import QuantizedHeads, as_heads, modeling_of, pair_tensors
from coat_vlm.fp8.gemm import FusedLinear, Needs, matrix
from coat_vlm.fp8.norm import NormSettings, read_norm

Heads = tuple[Tensor, Tensor, Tensor]
"""Query [B, heads, T, head_dim]; key and value [B, key/value heads, T, head_dim]."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """How to process the output of the fused QKV projection."""

    head_dim: int
    sizes: list[int]
    """Channels of q, k and v."""
    quantize: bool
    """Quantize the heads to INT8; the heads are then the dequantized values."""
    rotation: tuple[Tensor, Tensor] | None
    """cos and sin [T or B * T, head_dim] of the rotary embedding; None to skip rotation."""


def norm_heads(
    x: Tensor,
    norm: nn.Module,
    attention: Any,
    group_size: int,
    lean: bool,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
) -> tuple[Heads, QuantizedHeads | None, Tensor]:
    """Compute query, key and value of the normalized residual stream.

    Args:
        x: the residual stream [B, T, hidden].
        norm: a LayerNorm, or an RMSNorm of transformers.
        attention: an attention module with ``head_dim`` and either ``q_proj``, ``k_proj`` and
            ``v_proj`` or one layer ``qkv`` with as many keys and values as queries.
        group_size: group size of the norm's saved input.
        lean: round the heads to INT8, for FP8-saved attention.
        position_embeddings: (cos, sin) [..., rotary channels] of T or B * T tokens; no rotation
            when absent.

    Returns:
        The heads; the heads in INT8 if quantized here (the heads are then the dequantized values);
        and x for the residual path, whose gradient is added in the norm's backward kernel.
    """
    if hasattr(attention, "qkv"):
        layers, sizes = (attention.qkv,), [attention.qkv.out_features // 3] * 3
    else:
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        sizes = [layer.out_features for layer in layers]
    D = attention.head_dim
    by_model = not isinstance(getattr(attention, "q_norm", None), nn.Identity | None)
    rotation, quantize = None, lean and not by_model
    if position_embeddings is not None:
        by_model = by_model or position_embeddings[0].shape[-1] != D
        quantize = lean and D in GROUP_SIZES and not by_model
        if not by_model:
            cos, sin = (t.reshape(-1, D).contiguous() for t in position_embeddings)
            rotation = (cos, sin)
    settings = HeadSettings(D, sizes, quantize, rotation)
    query, key, value, residual, *quantized = _NormHeads.apply(
        x, None, *norms.arguments(norm, layers, group_size), settings
    )
    if by_model and _is_per_head(attention, position_embeddings):
        assert position_embeddings is not None
        cos_sin = [t.reshape(-1, D).contiguous() for t in position_embeddings]
        query = _HeadNorm.apply(query, *read_norm(attention.q_norm), *cos_sin)
        key = _HeadNorm.apply(key, *read_norm(attention.k_norm), *cos_sin)
    elif by_model:
        together = position_embeddings is None  # InternVL normalizes all heads of a token at once
        query = _normalize(query, getattr(attention, "q_norm", None), together)
        key = _normalize(key, getattr(attention, "k_norm", None), together)
        if position_embeddings is not None:
            rotate = modeling_of(attention).apply_rotary_pos_emb
            query, key = rotate(query, key, *position_embeddings)
        # Attention saves the value, and a view would keep the GEMM's whole result alive.
        value = value.transpose(1, 2).clone().transpose(1, 2)
    return (query, key, value), pair_tensors(quantized) or None, residual


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
        *rest: Any,
    ) -> tuple[Tensor, ...]:
        *stacked, heads = rest
        y, residual, saved = norms.forward(x, delta, norm_weight, norm_bias, norm, fused, stacked)
        ctx.save_for_backward(*saved)
        ctx.fused, ctx.heads, ctx.shape, ctx.dtype = fused, heads, x.shape, x.dtype
        parts, quantized = _heads_forward(y, heads)
        quantized = [tensor for item in quantized for tensor in item]
        ctx.mark_non_differentiable(*quantized)
        ctx.set_materialize_grads(False)
        return *(as_heads(part, x.shape, heads.head_dim) for part in parts), residual, *quantized

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpointed block refuses to unpack them again
        grad_heads, grad_residual = grad_outputs[:3], grad_outputs[3]
        if all(grad is None for grad in grad_heads):
            return norms.residual_only(grad_residual, ctx)
        needs = Needs.of(ctx.needs_input_grad[:4], ctx.needs_input_grad[6:-1], ctx.fused)
        of_norm, grads = norms.backward(
            lambda: _heads_backward(grad_heads, ctx.heads, ctx.fused, needs),
            grad_residual,
            saved,
            ctx.fused,
            needs,
            ctx,
        )
        return *of_norm, None, None, *grads, None


def _heads_forward(y: Tensor, heads: HeadSettings) -> tuple[Sequence[Tensor], QuantizedHeads]:
    """Return q, k and v as matrices [M, n], and in INT8."""
    if heads.rotation is not None:
        numbers = (heads.sizes[0] // heads.head_dim, heads.sizes[1] // heads.head_dim)
        if heads.quantize:
            return rope_quantize(y, *heads.rotation, *numbers)
        return rope(y, *heads.rotation, *numbers), ()
    quantized: QuantizedHeads = ()
    if heads.quantize:  # one INT8 matrix for all three heads, which are views
        group_size = max(size for size in GROUP_SIZES if not any(n % size for n in heads.sizes))
        quantized = (quantize_group(y, group_size, INT8),)
        saturation.observe("attention input", quantized[0].q, lambda: y)
        y = dequantize_group(quantized[0], y.dtype)
    return y.split(heads.sizes, 1), quantized


def _heads_backward(
    grad_heads: Sequence[Tensor | None], heads: HeadSettings, fused: FusedLinear, needs: Needs
) -> QuantizedGradient:
    """Compute the gradient of the fused projection's output in FP8."""
    like = next(grad for grad in grad_heads if grad is not None)
    tokens = like.shape[0] * like.shape[2]
    parts = [
        like.new_zeros(tokens, size) if grad is None else matrix(grad.transpose(1, 2).flatten(-2))
        for grad, size in zip(grad_heads, heads.sizes, strict=True)
    ]
    if heads.rotation is None:
        return gemm.quantize_grad(parts, fused, needs)
    back = (parts[0], parts[1], parts[2], *heads.rotation)
    quantized = rope_gradient(
        *back,
        fused.grad_format,
        rows=needs.rows,
        transposed=needs.weight,
        bias=needs.bias,
    )
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
