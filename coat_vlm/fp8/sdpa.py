"""Torch's fused attention with separate forward and backward passes.

Autograd saves q, k, v and the output of attention in high precision. With separate calls, the
caller provides them to the backward pass (which may compute q, k and v again).
Packed samples use the variable-length flash kernel or, on a CPU, separate calls.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coat_vlm.model.cudnn import avoid_unsafe_cudnn
from coat_vlm.model.packing import Packing, choose_kernel, flash_forward, to_token_major
from coat_vlm.model.sequence_parallel import SequenceShard

_ATEN: Any = torch.ops.aten
_FLASH, _CUDNN = 1, 3
"""Values of at::SDPBackend."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One of torch's fused kernels and its arguments."""

    kernel: Literal["flash", "cudnn", "cpu"]
    causal: bool
    scale: float | None
    """Factor of q k^T; 1 / sqrt(D) when None."""
    packing: Packing | None = None
    """Packing of the sequences in a single row; every row is one sequence when None."""
    shard: SequenceShard | None = None
    """Set if the tokens are a shard's, which are exchanged for heads around the kernel."""


class Statistics(NamedTuple):
    """What a fused kernel saves for backward in addition to q, k, v and the output."""

    tensors: tuple[Tensor | None, ...]
    sizes: tuple[int, ...] = ()


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    packing: Packing | None = None,
    shard: SequenceShard | None = None,
) -> Fused | None:
    """Return the kernel that torch selects for q [B, H, T, D] and k, v [B, H_kv, T, D], or None."""
    if query.shape[-1] % 8:
        return None  # torch pads such heads before it calls a kernel
    if packing is not None:
        kernel = choose_kernel(query, key, value, causal, 0.0)
        if query.device.type == "cuda":
            return Fused("flash", causal, scale, packing, shard) if kernel == "flash" else None
    grouped = query.shape[1] != key.shape[1]
    with avoid_unsafe_cudnn(key, causal=causal, masked=False):
        backend = _ATEN._fused_sdp_choice(
            query, key, value, None, 0.0, causal, scale=scale, enable_gqa=grouped
        )
    if query.device.type == "cpu":
        return Fused("cpu", causal, scale, packing, shard) if backend == _FLASH else None
    if backend == _FLASH:
        return Fused("flash", causal, scale, shard=shard)
    return Fused("cudnn", causal, scale, shard=shard) if backend == _CUDNN else None


def forward(how: Fused, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Statistics]:
    """Run attention; return [B, T, H * D] in query's dtype, and the statistics for backward."""
    if how.shard is not None:
        return _sharded_forward(how, how.shard, query, key, value)
    if how.packing is not None:
        return _packed_forward(how, how.packing, query, key, value)
    heads, causal, scale = (query, key, value), how.causal, how.scale
    if how.kernel == "cpu":
        forward = _ATEN._scaled_dot_product_flash_attention_for_cpu
        out, lse = forward(*heads, 0.0, causal, scale=scale)
        return out.transpose(1, 2).flatten(-2), Statistics((lse,))
    if how.kernel == "flash":
        forward = _ATEN._scaled_dot_product_flash_attention
        results = forward(*heads, 0.0, causal, False, scale=scale)
    else:
        forward = _ATEN._scaled_dot_product_cudnn_attention
        results = forward(*heads, None, True, 0.0, causal, False, scale=scale)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = results
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
    """Compute gradients of query, key and value; ``out`` and ``grad_out`` are [B, T, H * D]."""
    if how.shard is not None:
        return _sharded_backward(how, how.shard, (query, key, value), (out, grad_out), statistics)
    if how.packing is not None:
        return _packed_backward(how, how.packing, grad_out, query, key, value, out, statistics)
    out, grad_out = (x.unflatten(-1, (query.shape[1], -1)).transpose(1, 2) for x in (out, grad_out))
    lse, *rest = statistics.tensors
    common = (grad_out, query, key, value, out, lse)
    if how.kernel == "cpu":
        backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(*common, 0.0, how.causal, scale=how.scale)
    cum_q, cum_k, seed, offset = rest
    lengths = (cum_q, cum_k, *statistics.sizes, 0.0, how.causal)
    if how.kernel == "flash":
        backward = _ATEN._scaled_dot_product_flash_attention_backward
        return backward(*common, *lengths, seed, offset, scale=how.scale)
    backward = _ATEN._scaled_dot_product_cudnn_attention_backward
    return backward(*common, seed, offset, None, *lengths, scale=how.scale)


def _sharded_forward(
    how: Fused, shard: SequenceShard, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Statistics]:
    heads = shard.gather_tokens(query, key, value)
    out, statistics = forward(replace(how, shard=None), *heads)
    return shard.scatter_tokens(out.unflatten(2, (-1, value.shape[3]))).flatten(2), statistics


def _sharded_backward(
    how: Fused,
    shard: SequenceShard,
    heads: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    statistics: Statistics,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange the heads, the output and its gradient; exchange the heads' gradients back."""
    leaves = [x.detach().requires_grad_() for x in heads]
    as_heads = [x.unflatten(2, (-1, heads[2].shape[3])).transpose(1, 2) for x in outputs]
    with torch.enable_grad():
        q, k, v, out, grad_out = shard.gather_tokens(*leaves, *as_heads)
    out, grad_out = (x.detach().transpose(1, 2).flatten(2) for x in (out, grad_out))
    unsharded, inputs = replace(how, shard=None), (q.detach(), k.detach(), v.detach())
    grads = backward(unsharded, grad_out, *inputs, out, statistics)
    dq, dk, dv = torch.autograd.grad((q, k, v), leaves, grads)
    return dq, dk, dv


def _packed_forward(
    how: Fused, packing: Packing, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Statistics]:
    if how.kernel == "flash":
        out, lse, rng, unused, _ = flash_forward(query, key, value, packing, how.causal, how.scale)
        return out.flatten(-2)[None], Statistics((lse, rng, unused))
    unpacked = replace(how, packing=None)
    parts = [forward(unpacked, q, k, v) for q, k, v in packing.split(query, key, value)]
    saved = tuple(tensor for _, statistics in parts for tensor in statistics.tensors)
    return torch.cat([out for out, _ in parts], 1), Statistics(saved)


def _packed_backward(
    how: Fused,
    packing: Packing,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    statistics: Statistics,
) -> tuple[Tensor, Tensor, Tensor]:
    if how.kernel == "flash":
        lse, rng, unused = statistics.tensors
        out, grad_out = (x.squeeze(0).unflatten(-1, (query.shape[1], -1)) for x in (out, grad_out))
        grads = _ATEN._flash_attention_backward(
            grad_out, *map(to_token_major, (query, key, value)), out, lse,
            packing.bounds, packing.bounds, packing.longest, packing.longest,
            0.0, how.causal, rng, unused, scale=how.scale,
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(0, 1)[None] for grad in grads)
        return dq, dk, dv
    unpacked = replace(how, packing=None)
    parts = [
        backward(unpacked, grad_out[:, start:end], q, k, v, out[:, start:end], Statistics((lse,)))
        for (start, end), (q, k, v), lse in zip(
            packing.spans(), packing.split(query, key, value), statistics.tensors, strict=True
        )
    ]
    dq, dk, dv = (torch.cat(grads, 2) for grads in zip(*parts, strict=True))
    return dq, dk, dv
