"""From the residual stream to the heads of attention: norm, joint q, k, v projection, rotation.

One autograd Function (``linear.py``) from the residual stream to q, k and v; what follows the
projection is told by a :class:`coat_vlm.fp8.linear.Split`. In the backward pass the gradients of q,
k and v, as attention returns them, are rotated back and quantized where they are: their joint
matrix never exists in high precision. Where heads have norms of their own (Qwen3) they are normed
and rotated by the model's own functions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coat_kernels import (
    GROUP_SIZES,
    GradientCodes,
    GroupScaled,
    dequantize_group,
    quantize_group,
    rope,
    rope_gradient,
    rope_quantize,
)
from coat_kernels.reference import rope_gradient_values
from coat_vlm.fp8 import gemms, monitor
from coat_vlm.fp8.attention import heads, modeling_of
from coat_vlm.fp8.gemms import LinearNeeds
from coat_vlm.fp8.lean import Copies, as_heads, paired
from coat_vlm.fp8.linear import Split, norm_linear, norm_split, rows

Heads = tuple[Tensor, Tensor, Tensor]
"""Query [B, heads, T, head_dim]; key and value [B, key/value heads, T, head_dim]."""


def norm_heads(
    x: Tensor,
    norm: nn.Module,
    attention: Any,
    group_size: int,
    lean: bool,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
) -> tuple[Heads, Copies | None, Tensor]:
    """Query, key and value of the normed residual stream.

    Args:
        x: the residual stream [B, T, hidden].
        norm: as in :func:`coat_vlm.fp8.linear.norm_linear`.
        attention: an attention module with ``q_proj``, ``k_proj``, ``v_proj`` and ``head_dim``.
        group_size: groups of the FP8 copy of the norm's input.
        lean: round the heads to FP8 copies, for attention that keeps these.
        position_embeddings: (cos, sin) [1 or B, T, rotary channels]; no rotation when absent.

    Returns:
        The heads; their FP8 copies, where these were made: the heads are then what the copies are
        worth; and x, from where the residual stream goes on.
    """
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    D = attention.head_dim
    sizes = [layer.out_features for layer in projections]
    split: Split | None = None
    if position_embeddings is None:
        split = _Plain(D, sizes, lean)
    elif position_embeddings[0].shape[-1] == D and not hasattr(attention, "q_norm"):
        split = _Rotated(D, sizes, lean and D in GROUP_SIZES, *position_embeddings)
    if split is not None:
        query, key, value, residual, *tensors = norm_split(x, norm, projections, group_size, split)
        return (query, key, value), paired(tensors) or None, residual
    assert position_embeddings is not None
    qkv, residual = norm_linear(x, norm, projections, group_size)
    query, key, value = qkv.split(sizes, -1)
    query = heads(query, D, getattr(attention, "q_norm", None))
    key = heads(key, D, getattr(attention, "k_norm", None))
    query, key = modeling_of(attention).apply_rotary_pos_emb(query, key, *position_embeddings)
    # Attention keeps its value, and a view of it would keep all that the GEMM wrote.
    return (query, key, heads(value.clone(), D)), None, residual


class _Rotated:
    """Rotates q and k: of decoders.

    Args:
        head_dim: D.
        sizes: widths of q, k and v.
        copied: make FP8 copies, one scale per head and token.
        cos: of the rotary embedding, [1 or B, T, D].
        sin: likewise.
    """

    def __init__(
        self, head_dim: int, sizes: Sequence[int], copied: bool, cos: Tensor, sin: Tensor
    ) -> None:
        self._cos, self._sin = (t.reshape(-1, head_dim).contiguous() for t in (cos, sin))
        self._numbers = (sizes[0] // head_dim, sizes[1] // head_dim)
        self._sizes, self._copied = sizes, copied

    def outputs(self, y: Tensor, shape: torch.Size) -> tuple[list[Tensor], list[Tensor]]:
        """Heads, and codes and exponents of their copies."""
        arguments = (y, self._cos, self._sin, *self._numbers)
        copies: tuple[GroupScaled, ...] = ()
        if self._copied:
            parts, copies = rope_quantize(*arguments)
        else:
            parts = rope(*arguments)
        made = [as_heads(part, shape, self._cos.shape[1]) for part in parts]
        return made, [tensor for copy in copies for tensor in copy]

    def gradient(self, gradients: Sequence[Tensor | None], needs: LinearNeeds) -> GradientCodes:
        """Of the joint projection."""
        dq, dk, dv = _matrices(gradients, self._sizes)
        back = (dq, dk, dv, self._cos, self._sin)
        codes = rope_gradient(
            *back, needs.fmt, rows=needs.input, transposed=needs.weight, bias=needs.bias
        )
        monitor.observe_gradient(codes.rows, codes.transposed, lambda: rope_gradient_values(*back))
        return codes


class _Plain:
    """Takes the projection apart and no more: of encoders.

    Args:
        head_dim: D.
        sizes: widths of q, k and v.
        copied: make an FP8 copy of all three.
    """

    def __init__(self, head_dim: int, sizes: Sequence[int], copied: bool) -> None:
        self._head_dim, self._sizes, self._copied = head_dim, sizes, copied

    def outputs(self, y: Tensor, shape: torch.Size) -> tuple[list[Tensor], list[Tensor]]:
        """Heads, which are views of one matrix, and codes and exponents of its copy."""
        copies: list[Tensor] = []
        if self._copied:
            group_size = max(size for size in GROUP_SIZES if not any(n % size for n in self._sizes))
            copy = quantize_group(y, group_size)
            monitor.observe_group("attention input", copy, y)
            copies, y = list(copy), dequantize_group(copy, y.dtype)
        parts = y.split(list(self._sizes), 1)
        return [as_heads(part, shape, self._head_dim) for part in parts], copies

    def gradient(self, gradients: Sequence[Tensor | None], needs: LinearNeeds) -> GradientCodes:
        """Of the joint projection."""
        return gemms.gradient_codes(_matrices(gradients, self._sizes), needs)


def _matrices(gradients: Sequence[Tensor | None], sizes: Sequence[int]) -> list[Tensor]:
    """Gradients of heads [B, n, T, D] as matrices [B * T, n * D]; zeros for what was not used."""
    (like,) = [gradient for gradient in gradients if gradient is not None][:1]
    tokens = like.shape[0] * like.shape[2]
    return [
        like.new_zeros(tokens, size) if dy is None else rows(dy.transpose(1, 2).flatten(-2))
        for dy, size in zip(gradients, sizes, strict=True)
    ]
