"""From the joint q, k, v projection to what attention takes: heads, their norms, rotary embedding.

Where a head has no norm of its own, one kernel splits and rotates; it keeps nothing of the joint
matrix. Otherwise (Qwen3) the heads are normed and rotated by the model's own functions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coat_kernels import GROUP_SIZES, GroupScaled, rope, rope_bwd, rope_quantize
from coat_vlm.fp8.attention import heads, modeling_of
from coat_vlm.fp8.lean import Copies
from coat_vlm.fp8.linear import rows


def rotated_heads(
    attention: Any, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor], lean: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Copies | None]:
    """Query, key and value for attention.

    Args:
        attention: the attention module of a decoder layer.
        qkv: its joint projection [B, T, (heads + 2 kv_heads) * head_dim].
        position_embeddings: (cos, sin) [1 or B, T, rotary channels].
        lean: make FP8 copies in the same kernel, where there is one for these heads.

    Returns:
        [B, heads, T, head_dim] and twice [B, kv_heads, T, head_dim], as the copies are worth where
        there are any; and the copies.
    """
    D = attention.head_dim
    sizes = [layer.out_features for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    cos, sin = position_embeddings
    if cos.shape[-1] == D and not hasattr(attention, "q_norm"):
        copied = lean and D in GROUP_SIZES
        numbers = (sizes[0] // D, sizes[1] // D)
        query, key, value, *copies = _Rope.apply(
            qkv, cos.reshape(-1, D), sin.reshape(-1, D), *numbers, copied
        )
        return (query, key, value), _paired(copies) if copied else None
    query, key, value = qkv.split(sizes, -1)
    query = heads(query, D, getattr(attention, "q_norm", None))
    key = heads(key, D, getattr(attention, "k_norm", None))
    query, key = modeling_of(attention).apply_rotary_pos_emb(query, key, cos, sin)
    # Attention keeps its value, and a view of it would keep all that the GEMM wrote.
    return (query, key, heads(value.clone(), D)), None


def _paired(copies: Sequence[Tensor]) -> Copies:
    q, k, v = (GroupScaled(*copies[i : i + 2]) for i in (0, 2, 4))
    return q, k, v


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        kv_heads: int,
        lean: bool,
    ) -> tuple[Tensor, ...]:
        cos, sin = cos.contiguous(), sin.contiguous()
        copies: tuple[Tensor, ...] = ()
        if lean:
            parts, scaled = rope_quantize(rows(qkv), cos, sin, num_heads, kv_heads)
            copies = tuple(tensor for copy in scaled for tensor in copy)
            ctx.mark_non_differentiable(*copies)
        else:
            parts = rope(rows(qkv), cos, sin, num_heads, kv_heads)
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)  # it would make zeros for the copies
        ctx.shape = qkv.shape
        ctx.parts = [part.shape for part in parts]
        shape = (*qkv.shape[:-1], -1, cos.shape[1])
        return *(part.view(shape).transpose(1, 2) for part in parts), *copies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk, dv = (
            cos.new_zeros(shape) if dy is None else rows(dy.transpose(1, 2).flatten(-2))
            for dy, shape in zip(grad_outputs, ctx.parts, strict=False)
        )
        return rope_bwd(dq, dk, dv, cos, sin).view(ctx.shape), None, None, None, None, None
