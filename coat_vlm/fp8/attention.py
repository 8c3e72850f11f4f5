"""Attention of the FP8 blocks, with its output projection in FP8.

``attend`` calls the attention that the model is configured with, through transformers' interface.
Under ``coat_lean`` attention and projection are one autograd Function that saves 8-bit data:

    q', k', v' = INT8(q), INT8(k), INT8(v);   o = attention(q', k', v');   y = FP8(o) W^T + b

q, k and v are quantized *before* attention, which reads the dequantized values, so backward
recomputes the probabilities of the forward pass. They are operands of no FP8 GEMM, so they need not
be FP8: INT8 rounds them less (``coat_kernels/formats.py``). With E4M3, gradients of a trained model
were visibly worse than ``coat``'s, above all those of the key projection. Saves for backward, per
token: one byte per element of q, k, v and o with their scales, and attention's log-sum-exp. FP8(o)
is the projection's operand and, dequantized, an input of attention's backward pass (the row sums of
do * o).

If attention is not one of torch's fused kernels (``sdpa.py``: with a mask or another
implementation), backward runs attention again from the saved q, k and v. The monitor does not count
heads quantized together with the rotation: their values before rounding are not stored.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coat_kernels import (
    GROUP_SIZES,
    INT8,
    GroupScaled,
    TensorScaled,
    dequantize_group,
    dequantize_tensor,
    quantize_group,
    quantize_tensor,
    transpose_quantized,
)
from coat_vlm.fp8 import gemm, saturation, sdpa
from coat_vlm.fp8.gemm import FusedLinear, Needs, matrix
from coat_vlm.fp8.linear import linear
from coat_vlm.model.packing import PACKED, read_packing
from coat_vlm.model.sequence_parallel import SHARD, SequenceShard

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps q [B, H, T, D], k and v [B, H_kv, T, D] to [B, T, H * D]."""

QuantizedHeads = tuple[GroupScaled, ...]
"""q, k and v in INT8, each [B * T, H * D], or one matrix with all three concatenated."""


def attention_output(
    module: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    layer: nn.Linear,
    lean: bool,
    quantized: QuantizedHeads | None = None,
    implementation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute attention, and its output projection in FP8.

    Args:
        module: the attention module.
        heads: query [B, H, T, D], key and value [B, H_kv, S, D], in the model's dtype.
        mask: the model's mask for its attention implementation.
        layer: the output projection.
        lean: save 8-bit data for the backward pass.
        quantized: the heads in INT8, if quantized already.
        implementation: name of the attention implementation; the model's when absent.
        **kwargs: passed to the attention implementation.

    Returns:
        [B, T, hidden].
    """
    name = implementation or module.config._attn_implementation

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Call the attention implementation (sdpa, eager, flash, ...)."""
        function = ALL_ATTENTION_FUNCTIONS.get_interface(
            name, modeling_of(module).eager_attention_forward
        )
        out, _ = function(module, query, key, value, mask, **kwargs)
        return out.reshape(*out.shape[:2], -1).contiguous()

    if not lean:
        return linear(attend(*heads), layer)
    fused = fused_kernel(module, heads, mask, name, kwargs)
    return fp8_saved_attention(*heads, layer, attend, fused, quantized)


def modeling_of(module: nn.Module) -> Any:
    """Return the transformers module that defines a module's class."""
    return sys.modules[type(module).__module__]


def fused_kernel(
    module: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    implementation: str,
    kwargs: Mapping[str, Any],
) -> sdpa.Fused | None:
    """Return the fused kernel equivalent to the attention implementation, or None.

    Args:
        module: the attention module.
        heads: as in :func:`attention_output`.
        mask: as in :func:`attention_output`.
        implementation: its name.
        kwargs: arguments of the attention implementation.
    """
    packing = None
    shard: SequenceShard | None = kwargs.get(SHARD)
    batch, _, length, _ = heads[0].shape
    if shard is not None:
        length *= shard.group.size
        mask = None  # an empty one
    if implementation == PACKED:
        packing = read_packing(batch, length, heads[0].device, mask, kwargs)
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
    return sdpa.choose(*heads, causal and length > 1, kwargs.get("scaling"), packing, shard)


def fp8_saved_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: nn.Linear,
    attend: Attend,
    fused: sdpa.Fused | None,
    quantized: QuantizedHeads | None = None,
) -> Tensor:
    """Compute ``layer(attention(query, key, value))``, saving q, k, v and the output in 8 bits.

    Args:
        query: [B, H, T, D], in the model's dtype.
        key: [B, H_kv, T, D].
        value: like key.
        layer: the output projection, weight [N, H * D].
        attend: the model's attention.
        fused: an equivalent fused kernel of torch, or None.
        quantized: query, key and value in INT8; the heads must then be the dequantized values.
            Quantized here when absent. The backward pass of a fused kernel frees their memory.

    Returns:
        [B, T, N] in query's dtype.
    """
    given = [tensor for item in quantized or () for tensor in item]
    return _Fp8SavedAttention.apply(
        query, key, value, attend, fused, *gemm.arguments([layer]), *given
    )


class _Fp8SavedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attend: Attend,
        kernel: sdpa.Fused | None,
        fused: FusedLinear,
        *rest: Any,
    ) -> Tensor:
        stacked, given = rest[: fused.num_tensors], rest[fused.num_tensors :]
        q, k, v = query, key, value
        ctx.shapes, ctx.dtype = [x.shape for x in (q, k, v)], query.dtype
        quantized = pair_tensors(given)
        if not quantized:
            quantized = tuple(_quantize_heads(x) for x in (q, k, v))
            q, k, v = dequantize_heads(quantized, ctx.shapes, query.dtype)
            for item, x in zip(quantized, (query, key, value), strict=True):
                saturation.observe("attention input", item.q, partial(_tokens, x))
        statistics = sdpa.Statistics(())
        if kernel is None:
            out = attend(q, k, v)
        else:
            out, statistics = sdpa.forward(kernel, q, k, v)
        del q, k, v
        out = matrix(out)
        o8 = quantize_tensor(out)
        saturation.observe("linear input", o8.q, out)
        y, of_layer = gemm.forward(o8, fused, stacked, query.dtype)
        saved = [tensor for item in quantized for tensor in item]
        ctx.save_for_backward(*o8, *of_layer, *saved, *statistics.tensors)
        ctx.bounds = [2, 2 + len(of_layer), 2 + len(of_layer) + len(saved)]
        ctx.sizes = statistics.sizes
        ctx.attend, ctx.kernel, ctx.fused = attend, kernel, fused
        return y.view(query.shape[0], query.shape[2], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        o8 = TensorScaled(*tensors[:2])
        if o8.q.numel() and not o8.q.untyped_storage().nbytes():
            raise RuntimeError(
                "coat_lean: this backward pass of attention ran before and freed saved tensors; "
                "run the forward pass again (gradient checkpointing or precision coat allow a "
                "second backward pass)"
            )
        begin, middle, end = ctx.bounds
        quantized, saved = pair_tensors(tensors[middle:end]), tensors[end:]
        wanted, last = ctx.needs_input_grad, 6 + ctx.fused.num_tensors
        needs = Needs.of(wanted[:3], wanted[6:last], ctx.fused)
        grad_out, grads = gemm.backward(
            grad_outputs[0],
            ctx.fused,
            tensors[begin:middle],
            needs,
            ctx.dtype,
            lambda _: transpose_quantized(o8),
        )
        grad_heads: tuple[Tensor | None, ...] = (None, None, None)
        if grad_out is not None:
            batch, heads, length, head_dim = ctx.shapes[0]
            grad_out = grad_out.view(batch, length, heads * head_dim)
            q, k, v = dequantize_heads(quantized, ctx.shapes, ctx.dtype)
            if ctx.kernel is None:
                grad_heads = _repeat(ctx.attend, (q, k, v), grad_out)
            else:
                out = dequantize_tensor(o8, ctx.dtype).view(grad_out.shape)
                # A block's peak memory is here, where q, k, v and o also exist in high precision:
                # their 8-bit data is freed after dequantization, not at the end of the pass.
                for tensor in (o8.q, *(item.q for item in quantized)):
                    tensor.untyped_storage().resize_(0)
                statistics = sdpa.Statistics(tuple(saved), ctx.sizes)
                grad_heads = sdpa.backward(ctx.kernel, grad_out, q, k, v, out, statistics)
        return *grad_heads, None, None, None, *grads, *(None for _ in wanted[last:])


def _repeat(attend: Attend, heads: Sequence[Tensor], grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Compute gradients of attention by running it again."""
    leaves = [x.detach().requires_grad_() for x in heads]
    with torch.enable_grad():
        out = attend(*leaves)
    return torch.autograd.grad(out, leaves, grad_out)


def round_heads(x: Tensor) -> Tensor:
    """Round heads [B, H, T, D] to INT8 values; gradients pass unchanged."""
    (rounded,) = dequantize_heads((_quantize_heads(x),), [x.shape], x.dtype)
    return rounded + (x - x.detach())  # adds exact zeros, which propagate the gradient


def _tokens(x: Tensor) -> Tensor:
    """Reshape [B, H, T, D] to a matrix [B * T, H * D]; a view if the memory order allows it."""
    return matrix(x.transpose(1, 2).flatten(-2))


def _quantize_heads(x: Tensor) -> GroupScaled:
    matrix = _tokens(x.detach())
    return quantize_group(matrix, max(n for n in GROUP_SIZES if matrix.shape[1] % n == 0), INT8)


def dequantize_heads(
    quantized: QuantizedHeads, shapes: Sequence[torch.Size], dtype: torch.dtype
) -> list[Tensor]:
    """Dequantize to heads [B, H, T, D] of these shapes."""
    matrices: Sequence[Tensor] = [dequantize_group(item, dtype) for item in quantized]
    if len(matrices) < len(shapes):
        matrices = matrices[0].split([shape[1] * shape[3] for shape in shapes], 1)
    return [
        as_heads(matrix, (shape[0], shape[2]), shape[3])
        for matrix, shape in zip(matrices, shapes, strict=True)
    ]


def as_heads(matrix: Tensor, shape: Sequence[int], head_dim: int) -> Tensor:
    """View [B * T, H * D] as [B, H, T, D]; ``shape`` begins with B and T."""
    return matrix.view(*shape[:2], matrix.shape[1] // head_dim, head_dim).transpose(1, 2)


def pair_tensors(tensors: Sequence[Tensor]) -> QuantizedHeads:
    """Pair a flat sequence of 8-bit data and exponents."""
    return tuple(GroupScaled(*tensors[i : i + 2]) for i in range(0, len(tensors), 2))
