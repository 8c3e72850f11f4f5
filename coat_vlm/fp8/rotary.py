"""From the joint q, k, v projection to what attention takes: heads, their norms, rotary embedding.

Where a head has no norm of its own, one kernel splits and rotates; it keeps nothing of the joint
matrix. Otherwise (Qwen3) the heads are normed and rotated by the model's own functions.
"""

from typing import Any

import torch
from torch import Tensor

from coat_kernels import rope, rope_bwd
from coat_vlm.fp8.attention import heads, modeling_of
from coat_vlm.fp8.linear import rows


def rotated_heads(
    attention: Any, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value for attention.

    Args:
        attention: the attention module of a decoder layer.
        qkv: its joint projection [B, T, (heads + 2 kv_heads) * head_dim].
        position_embeddings: (cos, sin) [1 or B, T, rotary channels].

    Returns:
        [B, heads, T, head_dim], and twice [B, kv_heads, T, head_dim].
    """
    D = attention.head_dim
    sizes = [layer.out_features for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    cos, sin = position_embeddings
    if cos.shape[-1] == D and not hasattr(attention, "q_norm"):
        return _Rope.apply(
            qkv, cos.reshape(-1, D), sin.reshape(-1, D), sizes[0] // D, sizes[1] // D
        )
    query, key, value = qkv.split(sizes, -1)
    query = heads(query, D, getattr(attention, "q_norm", None))
    key = heads(key, D, getattr(attention, "k_norm", None))
    query, key = modeling_of(attention).apply_rotary_pos_emb(query, key, cos, sin)
    # Attention keeps its value, and a view of it would keep all that the GEMM wrote.
    return query, key, heads(value.clone(), D)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, kv_heads: int
    ) -> tuple[Tensor, ...]:
        cos, sin = cos.contiguous(), sin.contiguous()
        parts = rope(rows(qkv), cos, sin, num_heads, kv_heads)
        ctx.save_for_backward(cos, sin)
        ctx.shape = qkv.shape
        return tuple(part.view(*qkv.shape[:-1], -1, cos.shape[1]).transpose(1, 2) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk, dv = (rows(dy.transpose(1, 2).flatten(-2)) for dy in grad_outputs)
        return rope_bwd(dq, dk, dv, cos, sin).view(ctx.shape), None, None, None, None
