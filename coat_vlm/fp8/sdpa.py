"""Torch's fused attention with its forward and backward pass apart.

Autograd's own record of attention keeps q, k, v and the output as they are. Called apart, the
backward pass takes them from wherever they were kept (``lean.py``: from FP8 copies).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

_ATEN: Any = torch.ops.aten
_FLASH, _CUDNN = 1, 3
"""Values of at::SDPBackend."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One of torch's fused kernels, and how it is called."""

    kernel: Literal["flash", "cudnn", "cpu"]
    causal: bool
    scale: float | None
    """What q k^T is multiplied with; 1 / sqrt(D) when None."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a fused kernel keeps for its backward pass besides q, k, v and the output."""

    tensors: tuple[Tensor | None, ...]
    sizes: tuple[int, ...] = ()


def choose(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> Fused | None:
    """The kernel that torch would take for these heads without a mask; None if it is none of these.

    Args:
        query: [B, H, T, D].
        key: [B, H_kv, T, D].
        value: likewise.
        causal: every token sees the tokens up to itself only.
        scale: see :class:`Fused`.
    """
    if query.shape[-1] % 8:
        return None  # torch pads such heads before it calls a kernel
    grouped = query.shape[1] != key.shape[1]
    backend = _ATEN._fused_sdp_choice(
        query, key, value, None, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    if query.device.type == "cpu":
        return Fused("cpu", causal, scale) if backend == _FLASH else None
    if backend == _FLASH:
        return Fused("flash", causal, scale)
    return Fused("cudnn", causal, scale) if backend == _CUDNN else None


def forward(how: Fused, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Statistics]:
    """Attention, and what its backward pass needs.

    Returns:
        [B, T, H * D] in query's dtype, and the statistics.
    """
    scale: Any = {"scale": how.scale}
    if how.kernel == "cpu":
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, how.causal, **scale
        )
        statistics = Statistics((lse,))
    elif how.kernel == "flash":
        out, lse, cum_q, cum_k, max_q, max_k, rng, unused, _ = (
            _ATEN._scaled_dot_product_flash_attention(
                query, key, value, 0.0, how.causal, False, **scale
            )
        )
        statistics = Statistics((lse, cum_q, cum_k, rng, unused), (max_q, max_k))
    else:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = (
            _ATEN._scaled_dot_product_cudnn_attention(
                query, key, value, None, True, 0.0, how.causal, False, **scale
            )
        )
        statistics = Statistics((lse, cum_q, cum_k, seed, offset), (max_q, max_k))
    return out.transpose(1, 2).flatten(-2), statistics


def backward(
    how: Fused,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    statistics: Statistics,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``out`` and ``grad_out`` are [B, T, H * D]."""
    scale: Any = {"scale": how.scale}
    heads = query.shape[1]
    out, grad_out = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (out, grad_out))
    lse, *rest = statistics.tensors
    common = (grad_out, query, key, value, out, lse)
    if how.kernel == "cpu":
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *common, 0.0, how.causal, **scale
        )
    cum_q, cum_k, seed, offset = rest
    if how.kernel == "flash":
        return _ATEN._scaled_dot_product_flash_attention_backward(
            *common, cum_q, cum_k, *statistics.sizes, 0.0, how.causal, seed, offset, **scale
        )
    return _ATEN._scaled_dot_product_cudnn_attention_backward(
        *common, seed, offset, None, cum_q, cum_k, *statistics.sizes, 0.0, how.causal, **scale
    )
