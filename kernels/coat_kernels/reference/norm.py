"""RMSNorm and LayerNorm to FP8, and their gradients: numerics of ``norm.py``."""

import math

import torch
from torch import Tensor

from coat_kernels.formats import MIN_SCALE, get_format
from coat_kernels.reference.quantize import (
    dequantize_group,
    make_layouts,
    quantize_group,
)


def _normalize(x: Tensor, rstd: Tensor, mean: Tensor | None) -> Tensor:
    return (x if mean is None else x - mean[:, None]) * rstd[:, None]


def norm_fwd(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    centered: bool, group_size: int, fmt: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run RMSNorm, or LayerNorm if ``centered``, of x + delta.

    Returns x + delta in x's dtype (empty without a delta), its FP8 data [M, N] and exponents
    [M, N / G], rstd FP32 [M], mean FP32 [M] (empty without centering), and y in per-tensor FP8
    [M, N] with its scale FP32 [].
    """
    total = x.new_empty(0) if delta is None else (x.float() + delta.float()).to(x.dtype)
    source = x if delta is None else total
    x32, form = source.float(), get_format(fmt)
    mean = x32.mean(-1) if centered else None
    middle = x32 if mean is None else x32 - mean[:, None]
    rstd = torch.rsqrt(middle.square().mean(-1) + eps)
    scale = weight.float().abs().amax() * (math.sqrt(x.shape[1]) / form.max)
    if bias is not None:
        scale += bias.float().abs().amax() * (1.0 / form.max)
    scale = scale.clamp_min(MIN_SCALE)
    y, _ = make_layouts(norm_values(x32, weight, bias, rstd, mean), scale, form, True, False)
    q, exponents = quantize_group(source, group_size, fmt)
    return total, q, exponents, rstd, x32.new_empty(0) if mean is None else mean, y, scale


def norm_values(
    x: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, mean: Tensor | None
) -> Tensor:
    """Compute (x - mean) * rstd * weight + bias, FP32 [M, N]."""
    y = _normalize(x, rstd, mean).mul_(weight.float())
    return y if bias is None else y.add_(bias.float())


def norm_recompute(
    q: Tensor, exponents: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, mean: Tensor,
    scale: Tensor, fmt: str,
) -> Tensor:  # fmt: skip
    """Compute y in per-tensor FP8 [N, M'] from the group-scaled input."""
    x32 = dequantize_group(q, exponents, torch.float32)
    y = norm_values(x32, weight, bias, rstd, mean if mean.numel() else None)
    return make_layouts(y, scale, get_format(fmt), False, True)[1]


def norm_bwd(
    dy: Tensor, x: Tensor, exponents: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor,
    residual: Tensor | None, sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of a norm from its group-scaled input; formulas: ``norm.py``.

    Returns dx [M, N] in dy's dtype, dweight FP32 [N], dbias FP32 [N] (empty for RMSNorm); the last
    two are empty without ``sums``.
    """
    centered = mean.numel() > 0
    x32 = dequantize_group(x, exponents, torch.float32)
    xhat = _normalize(x32, rstd, mean if centered else None)
    dy32 = dy.float()
    g = dy32 * weight.float()
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if centered:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd[:, None]
    if residual is not None:
        dx += residual.float()
    nothing = dy32.new_empty(0)
    dweight = (dy32 * xhat).sum(0) if sums else nothing
    return dx.to(dy.dtype), dweight, dy32.sum(0) if sums and centered else nothing.clone()
