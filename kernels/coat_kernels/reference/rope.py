"""Rotary embedding of a fused QKV projection, and its gradient: numerics of ``rope.py``."""

import torch
from torch import Tensor

from coat_kernels.reference.quantize import quantize_gradient


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """Rotate x [M, heads * D]; returns FP32 [M, heads, D]."""
    tokens, (period, channels) = x.shape[0], cos.shape
    c1, c2 = cos.float().repeat(tokens // period, 1)[:, None].chunk(2, -1)
    s1, s2 = sin.float().repeat(tokens // period, 1)[:, None].chunk(2, -1)
    x1, x2 = x.float().unflatten(-1, (-1, channels)).chunk(2, -1)
    if backward:
        return torch.cat([x1 * c1 + x2 * s2, x2 * c2 - x1 * s1], -1)
    return torch.cat([x1 * c1 - x2 * s1, x2 * c2 + x1 * s2], -1)


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k, copy v: [M, heads * D] and twice [M, kv_heads * D], in qkv's dtype."""
    sizes = [n * cos.shape[1] for n in (heads, kv_heads, kv_heads)]
    q, k, v = qkv.split(sizes, -1)
    q, k = (rotate(x, cos, sin, backward=False).flatten(-2) for x in (q, k))
    return q.to(qkv.dtype), k.to(qkv.dtype), v.clone(memory_format=torch.contiguous_format)


def rope_gradient_values(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the FP32 gradient [M, (heads + 2 kv_heads) * D] of qkv."""
    back = (rotate(x, cos, sin, backward=True).flatten(-2) for x in (dq, dk))
    return torch.cat([*back, dv.float()], -1)


def rope_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, fmt: str, rows: bool,
    transposed: bool, bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantize :func:`rope_gradient_values` with :func:`quantize_gradient`."""
    gradient = rope_gradient_values(dq, dk, dv, cos, sin)
    return quantize_gradient([gradient], fmt, rows, transposed, bias)
