"""Attention of the FP8 blocks, with its output projection in FP8.

If attention is one of torch's fused kernels (``sdpa.py``), kernel and projection are one autograd
Function:

    o = attention(q, k, v);   y = FP8(o) W^T + b

It saves for backward, in the model's dtype, q, k, v and o, and attention's log-sum-exp. FP8(o) is
not saved: backward quantizes o again, with the same scale.

With ``fp8.recompute_qkv`` the backward pass computes q, k and v again, with the kernels of the
forward pass and from the same FP8 operands, so that they are equal bit by bit. The input of the QKV
GEMM in E4M3 is saved instead; if each head has a norm, the projection's result, which that norm
saves anyway.

o is not saved in FP8, because attention's backward pass computes the row sums of do * o from it: an
error of o is an error of every score's gradient in that row, and training can diverge
(docs/experiments/attention_rounding.md; arXiv 2510.04212).

With a mask, dropout or another implementation ``coat`` calls the attention that the model is
configured with, through transformers' interface, and saves FP8(o) in addition to what that
attention saves. With ``fp8.recompute_qkv`` backward calls it again, and only FP8(o) is saved. Where
ranks share tokens, backward exchanges q, k, v and o again.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coat_kernels import TensorScaled, quantize_again, quantize_tensor, transpose_quantized
from coat_vlm.fp8 import gemm, saturation, sdpa
from coat_vlm.fp8.gemm import FusedLinear, Needs, Saved, matrix
from coat_vlm.fp8.linear import linear
from coat_vlm.model.packing import PACKED, UNKNOWN_ARGUMENTS, SequenceMasks, read_packing
from coat_vlm.model.sequence_parallel import SHARD, SequenceShard

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps q [B, H, T, D], k and v [B, H_kv, T, D] to [B, T, H * D]."""

Heads = tuple[Tensor, Tensor, Tensor]
"""Query [B, heads, T, head_dim]; key and value [B, key/value heads, T, head_dim]."""


class HeadsSource(NamedTuple):
    """What the backward pass computes q, k and v from."""

    tensors: tuple[Tensor | None, ...]
    """Saved for backward."""
    compute: Callable[[Sequence[Any]], Heads]
    """Returns the heads of the forward pass, given ``tensors``."""


def attention_output(
    module: Any,
    heads: Heads,
    mask: Tensor | SequenceMasks | None,
    layer: nn.Linear,
    source: HeadsSource | None = None,
    *,
    dropout: float = 0.0,
    implementation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute attention, and its output projection in FP8: [B, T, hidden].

    The heads are saved unless ``source``, which excludes dropout, says what backward computes them
    from. The attention ``implementation`` is the model's when absent.
    """
    name = implementation or module.config._attn_implementation

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(
            name, modeling_of(module).eager_attention_forward
        )
        out, _ = function(module, query, key, value, mask, dropout=dropout, **kwargs)
        return out.reshape(*out.shape[:2], -1).contiguous()

    # Without gradients nothing is saved, and the backward pass cannot repeat dropout.
    together = source is not None or (not dropout and any(x.requires_grad for x in heads))
    fused = fused_kernel(module, heads, mask, name, kwargs) if together else None
    if source is None:
        if fused is None:
            return linear(attend(*heads), layer)
        source = HeadsSource(tuple(x.detach() for x in heads), lambda x: (x[0], x[1], x[2]))
    projection, parameters = gemm.collect([layer])
    return _AttentionOutput.apply(
        *heads, attend, fused, source.compute, projection, *parameters.flat, *source.tensors
    )


def modeling_of(module: nn.Module) -> Any:
    """Return the transformers module that defines a module's class."""
    return sys.modules[type(module).__module__]


def fused_kernel(
    module: Any,
    heads: Heads,
    mask: Tensor | SequenceMasks | None,
    implementation: str,
    kwargs: Mapping[str, Any],
) -> sdpa.Fused | None:
    """Return the fused kernel equivalent to the attention implementation, or None."""
    packing = None
    shard: SequenceShard | None = kwargs.get(SHARD)
    batch, _, length, _ = heads[0].shape
    if shard is not None:
        length *= shard.group.size
        mask = None  # an empty one
    unknown = any(kwargs.get(argument) is not None for argument in UNKNOWN_ARGUMENTS)
    if unknown or isinstance(mask, SequenceMasks):
        return None
    if implementation == PACKED:
        packing = read_packing(batch, length, heads[0].device, mask, kwargs)
        if packing is not None and heads[1].shape[2] != heads[0].shape[2]:
            return None  # which is refused
    window = kwargs.get("sliding_window") or length
    if packing is None:
        if mask is not None or implementation not in ("sdpa", PACKED):
            return None
        if shard is not None and window < length:
            return None
    elif packing.limit_window(window) is not None:
        return None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if shard is not None and not causal:
        return None  # which is refused: tokens would read those that fill up the shards
    return sdpa.choose(*heads, causal and length > 1, kwargs.get("scaling"), packing, shard)


class _AttentionOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attend: Attend,
        kernel: sdpa.Fused | None,
        compute_heads: Callable[[Sequence[Any]], Heads],
        fused: FusedLinear,
        *flat: Tensor | None,
    ) -> Tensor:
        (layers,), source = gemm.unpack(flat, fused), flat[fused.num_tensors :]
        statistics = sdpa.Statistics(())
        if kernel is None:
            out = attend(query, key, value)
        else:
            out, statistics = sdpa.forward(kernel, query, key, value)
        out = matrix(out)
        o8 = quantize_tensor(out)
        saturation.observe("linear input", o8.q, out)
        hp = out if fused.bf16_forward else None
        y, of_layer = gemm.forward(o8, fused, layers, query.dtype, hp)
        needs = Needs.find(ctx, fused, 3, 7)
        output = out if kernel is not None else o8.q if needs.input_again else None
        gemm.save(ctx, [output, o8.scale], of_layer.flat, source, statistics.tensors)
        ctx.shape, ctx.dtype, ctx.sizes = query.shape, query.dtype, statistics.sizes
        ctx.attend, ctx.kernel, ctx.fused = attend, kernel, fused
        ctx.compute_heads = compute_heads
        return y.view(query.shape[0], query.shape[2], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (out, scale), of_layer, source, of_kernel = gemm.load(ctx)
        grad_out, grads = gemm.backward(
            grad_outputs[0],
            ctx.fused,
            Saved.of(of_layer, ctx.fused),
            Needs.find(ctx, ctx.fused, 3, 7),
            ctx.dtype,
            lambda _: (
                transpose_quantized(TensorScaled(out, scale))
                if ctx.kernel is None
                else quantize_again([out], scale, transposed=True)
            ),
        )
        grad_heads: tuple[Tensor | None, ...] = (None, None, None)
        if grad_out is not None:
            batch, heads, length, head_dim = ctx.shape
            grad_out = grad_out.view(batch, length, heads * head_dim)
            q, k, v = ctx.compute_heads(source)
            if ctx.kernel is None:
                grad_heads = _repeat(ctx.attend, (q, k, v), grad_out)
            else:
                statistics = sdpa.Statistics(tuple(of_kernel), ctx.sizes)
                of_heads = out.view(grad_out.shape)
                grad_heads = sdpa.backward(ctx.kernel, grad_out, q, k, v, of_heads, statistics)
        return *grad_heads, None, None, None, None, *grads.flat, *(None for _ in source)


def _repeat(attend: Attend, heads: Sequence[Tensor], grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Compute gradients of attention by running it again."""
    leaves = [x.detach().requires_grad_() for x in heads]
    with torch.enable_grad():
        out = attend(*leaves)
    return torch.autograd.grad(out, leaves, grad_out)


def as_heads(matrix: Tensor, shape: Sequence[int], head_dim: int) -> Tensor:
    """View [B * T, H * D] as [B, H, T, D]; ``shape`` begins with B and T."""
    return matrix.view(*shape[:2], matrix.shape[1] // head_dim, head_dim).transpose(1, 2)
