"""Rows with a scale each, and the GEMM and gradient of experts: numerics of ``experts.py``."""

import math

import torch
from torch import Tensor

from coat_kernels.formats import E4M3, MIN_SCALE
from coat_kernels.reference.activation import activation_gradient, activation_values
from coat_kernels.reference.quantize import cast, dequantize_group, to_float


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [M, N] to E4M3 with a scale per row, FP32 [M]."""
    x = x.float()
    scale = (x.abs().amax(-1) * (1.0 / E4M3.max)).clamp_min(MIN_SCALE)
    return cast(x * (1.0 / scale).nan_to_num_(0.0, math.inf)[:, None], E4M3), scale


def scaled_grouped_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply the rows of a [S, K] that end at offsets[e] with b[e] [N, K], in FP32."""
    y = a_scale.new_empty(len(a), b.shape[1])
    ends = offsets.tolist()
    for start, end, weight, scale in zip([0, *ends], ends, b, b_scale, strict=False):
        y[start:end] = (to_float(a[start:end]) @ to_float(weight).t()).mul_(scale)
    return y.mul_(a_scale[:, None]).to(dtype)


def expert_gradient(
    dh: Tensor, a: Tensor, exponents: Tensor, weights: Tensor, kind: str, quantized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute da, its scales, the gradient of the weights, and h times the weights."""
    a32, row = dequantize_group(a, exponents, torch.float32), weights[:, None]
    h = activation_values(a32, kind)
    dweights = (dh.float() * h).sum(1)
    da = activation_gradient(dh, a32, kind) * row
    if quantized:
        return *quantize_rows(da), dweights, dh.new_empty(0)
    return da.to(dh.dtype), dweights.new_empty(0), dweights, (h * row).to(dh.dtype)
