"""RMSNorm and rotary embedding of heads, and its gradient: numerics of ``head_norm.py``."""

import torch
from torch import Tensor

from coat_kernels.reference.rope import rotate


def _normalize(x: Tensor, channels: int, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize heads: FP32 [M, heads, D], and 1 / root mean square [M, heads, 1]."""
    heads = x.float().unflatten(-1, (-1, channels))
    rstd = torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    return heads * rstd, rstd


def head_norm(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Normalize and rotate the heads of x [M, heads * D], in x's dtype."""
    normalized, _ = _normalize(x, cos.shape[1], eps)
    y = (normalized * weight.float()).flatten(-2)
    return rotate(y, cos, sin, backward=False).flatten(-2).to(x.dtype)


def head_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x, in dy's dtype, and of the weight, FP32 [D]."""
    normalized, rstd = _normalize(x, cos.shape[1], eps)
    back = rotate(dy, cos, sin, backward=True)
    g = back * weight.float()
    dx = (g - normalized * (g * normalized).mean(-1, keepdim=True)) * rstd
    return dx.flatten(-2).to(dy.dtype), (back * normalized).sum((0, 1))
