"""Fused norm, QKV projection and RoPE: the residual stream to the attention heads' q, k and v.

    q | k | v = norm(x) W_qkv^T + b_qkv,   q, k = rotate(q), rotate(k)

One autograd Function from the residual stream to q, k and v. Saves for backward what the norm saves
(``norm.py``). In the backward pass the gradients of q, k and v, as attention returns them, are
rotated back and quantized where they are: their matrix [M, N] never exists in high precision. Where
heads have norms of their own (Qwen3) the model's own functions normalize and rotate them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coat_kernels import (
    GROUP_SIZES,
    GradientCodes,
    dequantize_group,
    quantize_group,
    rope,
    rope_gradient,
    rope_quantize,
)
from coat_kernels.reference import rope_gradient_values
from coat_vlm.fp8 import gemm, saturation
from coat_vlm.fp8 import norm as norms
from coat_vlm.fp8.attention import Copies, as_heads, modeling_of, paired
from coat_vlm.fp8.gemm import FusedLinear, Needs, matrix
from coat_vlm.fp8.norm import NormSettings

Heads = tuple[Tensor, Tensor, Tensor]
"""Query [B, heads, T, head_dim]; key and value [B, key/value heads, T, head_dim]."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What is made of the output of the fused QKV projection."""

    head_dim: int
    sizes: list[int]
    """Channels of q, k and v."""
    copied: bool
    """Make FP8 copies of the heads; the heads are then the dequantized copies."""
    rotation: tuple[Tensor, Tensor] | None
    """cos and sin [T or B * T, head_dim] of the rotary embedding; q and k stay as they are when
    None."""


def norm_heads(
    x: Tensor,
    norm: nn.Module,
    attention: Any,
    group_size: int,
    lean: bool,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
) -> tuple[Heads, Copies | None, Tensor]:
    """Query, key and value of the normalized residual stream.

    Args:
        x: the residual stream [B, T, hidden].
        norm: a LayerNorm, or an RMSNorm of a Llama, Mistral or Qwen model.
        attention: an attention module with ``q_proj``, ``k_proj``, ``v_proj`` and ``head_dim``.
        group_size: groups of the FP8 copy of the norm's input.
        lean: round the heads to FP8 copies, for attention that saves these.
        position_embeddings: (cos, sin) [1 or B, T, rotary channels]; no rotation when absent.

    Returns:
        The heads; their FP8 copies, where these were made: the heads are then the dequantized
        copies; and x, from where the residual stream goes on: its gradient is added where the
        norm's is computed.
    """
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    D = attention.head_dim
    rotation, by_model, copied = None, False, lean
    if position_embeddings is not None:
        by_model = position_embeddings[0].shape[-1] != D or hasattr(attention, "q_norm")
        copied = lean and D in GROUP_SIZES and not by_model
        if not by_model:
            cos, sin = (t.reshape(-1, D).contiguous() for t in position_embeddings)
            rotation = (cos, sin)
    settings = HeadSettings(D, [layer.out_features for layer in layers], copied, rotation)
    query, key, value, residual, *copies = _NormHeads.apply(
        x, None, *norms.arguments(norm, layers, group_size), settings
    )
    if by_model and position_embeddings is not None:
        query = _normalize(query, getattr(attention, "q_norm", None))
        key = _normalize(key, getattr(attention, "k_norm", None))
        query, key = modeling_of(attention).apply_rotary_pos_emb(query, key, *position_embeddings)
        # Attention saves its value, and a view of it would hold all that the GEMM wrote.
        value = value.transpose(1, 2).clone().transpose(1, 2)
    return (query, key, value), paired(copies) or None, residual


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
        parts, copies = _heads_forward(y, heads)
        copies = [tensor for copy in copies for tensor in copy]
        ctx.mark_non_differentiable(*copies)
        ctx.set_materialize_grads(False)
        return *(as_heads(part, x.shape, heads.head_dim) for part in parts), residual, *copies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpointed block refuses to unpack them again
        grad_heads, grad_residual = grad_outputs[:3], grad_outputs[3]
        if all(grad is None for grad in grad_heads):
            return norms.residual_only(grad_residual, ctx)
        needs = Needs.of(ctx.needs_input_grad[:4], ctx.needs_input_grad[6:-1])
        of_norm, grads = norms.backward(
            lambda: _heads_backward(grad_heads, ctx.heads, ctx.fused, needs),
            grad_residual,
            saved,
            ctx.fused,
            needs,
            ctx,
        )
        return *of_norm, None, None, *grads, None


def _heads_forward(y: Tensor, heads: HeadSettings) -> tuple[Sequence[Tensor], Copies]:
    """q, k and v as matrices [M, n], and their FP8 copies."""
    if heads.rotation is not None:
        numbers = (heads.sizes[0] // heads.head_dim, heads.sizes[1] // heads.head_dim)
        if heads.copied:
            return rope_quantize(y, *heads.rotation, *numbers)
        return rope(y, *heads.rotation, *numbers), ()
    copies: Copies = ()
    if heads.copied:  # one copy of all three, of which they are views
        group_size = max(size for size in GROUP_SIZES if not any(n % size for n in heads.sizes))
        copies = (quantize_group(y, group_size),)
        saturation.observe("attention input", copies[0].q, lambda: y)
        y = dequantize_group(copies[0], y.dtype)
    return y.split(heads.sizes, 1), copies


def _heads_backward(
    grad_heads: Sequence[Tensor | None], heads: HeadSettings, fused: FusedLinear, needs: Needs
) -> GradientCodes:
    """The gradient of the fused projection's output in FP8."""
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
        rows=needs.input,
        transposed=needs.weight,
        bias=needs.bias,
    )
    saturation.observe_gradient(quantized, lambda: rope_gradient_values(*back))
    return quantized


def _normalize(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Heads [B, n, T, D], normalized one by one where the model does that."""
    return x if norm is None else norm(x.transpose(1, 2)).transpose(1, 2)
