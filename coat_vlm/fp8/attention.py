"""Attention of the FP8 blocks, with its output projection in FP8.

``attend`` calls the attention that the model is configured with, through transformers' interface.
Under ``coat_lean`` attention and projection are one autograd Function that saves FP8 copies:

    q', k', v' = FP8 copies of q, k, v;   o = attention(q', k', v');   y = FP8(o) W^T + b

The copies are made *before* attention and attention works on them, so the probabilities that its
backward pass recomputes are those of the forward pass. Saves for backward, per token: one byte per
element of q, k, v and o with their scales, and attention's log-sum-exp. The FP8 copy of o is the
projection's operand and, dequantized, what attention's backward pass wants of o (the row sums of
do * o).

Where attention is not one of torch's fused kernels (``sdpa.py``: a mask, another implementation),
backward runs attention once more from the copies. The monitor does not count copies made together
with the rotation: nothing holds the values before their rounding.
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
    GroupScaled,
    TensorScaled,
    dequantize_group,
    dequantize_tensor,
    quantize_group,
    quantize_tensor,
    transpose_codes,
)
from coat_vlm.fp8 import gemm, saturation, sdpa
from coat_vlm.fp8.gemm import FusedLinear, Needs, matrix
from coat_vlm.fp8.linear import linear
from coat_vlm.model.packing import PACKED, packing_of

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, H, T, D], k and v [B, H_kv, T, D] to [B, T, H * D]."""

Copies = tuple[GroupScaled, ...]
"""Of q, k and v, each [B * T, H * D], or one of all three side by side."""


def attention_output(
    module: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    layer: nn.Linear,
    lean: bool,
    copies: Copies | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention and its output projection in FP8.

    Args:
        module: the attention module.
        heads: query [B, H, T, D], key and value [B, H_kv, S, D], in the model's dtype.
        mask: what the model made for its attention implementation.
        layer: the output projection.
        lean: save FP8 copies for the backward pass.
        copies: of the heads, where they exist already.
        **kwargs: passed to the attention implementation.

    Returns:
        [B, T, hidden].
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As configured in the model (sdpa, eager, flash, ...)."""
        function = ALL_ATTENTION_FUNCTIONS.get_interface(
            module.config._attn_implementation, modeling_of(module).eager_attention_forward
        )
        out, _ = function(module, query, key, value, mask, **kwargs)
        return out.reshape(*out.shape[:2], -1).contiguous()

    if not lean:
        return linear(attend(*heads), layer)
    fused = fused_kernel(module, heads, mask, kwargs)
    return fp8_saved_attention(*heads, layer, attend, fused, copies)


def modeling_of(module: nn.Module) -> Any:
    """The modeling file of transformers that a module's class comes from."""
    return sys.modules[type(module).__module__]


def fused_kernel(
    module: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kwargs: Mapping[str, Any],
) -> sdpa.Fused | None:
    """The fused kernel that does what the attention implementation would; None if there is none.

    Args:
        module: the attention module.
        heads: as in :func:`attention_output`.
        mask: as in :func:`attention_output`.
        kwargs: what would be passed to the attention implementation.
    """
    implementation, packing = module.config._attn_implementation, None
    batch, _, length, _ = heads[0].shape
    if implementation == PACKED:
        packing = packing_of(batch, length, heads[0].device, mask, kwargs)
    if packing is None:
        if mask is not None or implementation not in ("sdpa", PACKED):
            return None
    elif packing.narrower(kwargs.get("sliding_window")) is not None:
        return None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return sdpa.choose(*heads, causal and length > 1, kwargs.get("scaling"), packing)


def fp8_saved_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: nn.Linear,
    attend: Attend,
    fused: sdpa.Fused | None,
    copies: Copies | None = None,
) -> Tensor:
    """``layer(attention(query, key, value))`` with FP8 copies of all four.

    Args:
        query: [B, H, T, D], in the model's dtype.
        key: [B, H_kv, T, D].
        value: like key.
        layer: the output projection, weight [N, H * D].
        attend: attention as the model would call it.
        fused: how to call it as one of torch's fused kernels; None where that is not possible.
        copies: of query, key and value, which are then the dequantized copies; made when absent.
            The backward pass of a fused kernel frees their memory.

    Returns:
        [B, T, N] in query's dtype.
    """
    given = [tensor for copy in copies or () for tensor in copy]
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
        weight: Tensor,
        bias: Tensor | None,
        *given: Tensor,
    ) -> Tensor:
        q, k, v = query, key, value
        ctx.shapes, ctx.dtype = [x.shape for x in (q, k, v)], query.dtype
        copies = paired(given)
        if not copies:
            copies = tuple(_copy(x) for x in (q, k, v))
            q, k, v = dequantized(copies, ctx.shapes, query.dtype)
            for copy, x in zip(copies, (query, key, value), strict=True):
                saturation.observe("attention input", copy.q, partial(_tokens, x))
        statistics = sdpa.Statistics(())
        if kernel is None:
            out = attend(q, k, v)
        else:
            out, statistics = sdpa.forward(kernel, q, k, v)
        del q, k, v
        out = matrix(out)
        o8 = quantize_tensor(out)
        saturation.observe("linear input", o8.q, out)
        y, of_layer = gemm.forward(o8, fused, (weight, bias), query.dtype)
        saved = [tensor for copy in copies for tensor in copy]
        ctx.save_for_backward(*o8, *of_layer, *saved, *statistics.tensors)
        ctx.end_of_copies = 5 + len(saved)
        ctx.sizes = statistics.sizes
        ctx.attend, ctx.kernel, ctx.fused = attend, kernel, fused
        return y.view(query.shape[0], query.shape[2], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        o8 = TensorScaled(*tensors[:2])
        if o8.q.numel() and not o8.q.untyped_storage().nbytes():
            raise RuntimeError(
                "coat_lean: this backward pass of attention ran before and freed what was saved; "
                "run the forward pass again (gradient checkpointing or precision coat allow a "
                "second backward pass)"
            )
        copies, saved = paired(tensors[5 : ctx.end_of_copies]), tensors[ctx.end_of_copies :]
        wanted = ctx.needs_input_grad
        needs = Needs(any(wanted[:3]), *wanted[6:8])
        grad_out, grads = gemm.backward(
            grad_outputs[0],
            ctx.fused,
            tensors[2:5],
            needs,
            ctx.dtype,
            lambda _: transpose_codes(o8),
        )
        grad_heads: tuple[Tensor | None, ...] = (None, None, None)
        if grad_out is not None:
            batch, heads, length, head_dim = ctx.shapes[0]
            grad_out = grad_out.view(batch, length, heads * head_dim)
            q, k, v = dequantized(copies, ctx.shapes, ctx.dtype)
            if ctx.kernel is None:
                grad_heads = _repeat(ctx.attend, (q, k, v), grad_out)
            else:
                out = dequantize_tensor(o8, ctx.dtype).view(grad_out.shape)
                # A block needs most memory here, where q, k, v and o stand in high precision, too:
                # their copies go as soon as they are dequantized, not when the pass is over.
                for tensor in (o8.q, *(copy.q for copy in copies)):
                    tensor.untyped_storage().resize_(0)
                statistics = sdpa.Statistics(tuple(saved), ctx.sizes)
                grad_heads = sdpa.backward(ctx.kernel, grad_out, q, k, v, out, statistics)
        return *grad_heads, None, None, None, *grads, *(None for _ in wanted[8:])


def _repeat(attend: Attend, heads: Sequence[Tensor], grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of attention by running it again."""
    leaves = [x.detach().requires_grad_() for x in heads]
    with torch.enable_grad():
        out = attend(*leaves)
    return torch.autograd.grad(out, leaves, grad_out)


def rounded_heads(x: Tensor) -> Tensor:
    """Heads [B, H, T, D], dequantized from an FP8 copy; gradients pass unchanged."""
    (rounded,) = dequantized((_copy(x),), [x.shape], x.dtype)
    return rounded + (x - x.detach())  # plus exact zeros, which carry the gradient


def _tokens(x: Tensor) -> Tensor:
    """[B, H, T, D] as a matrix [B * T, H * D]; the memory of x where that is its order."""
    return matrix(x.transpose(1, 2).flatten(-2))


def _copy(x: Tensor) -> GroupScaled:
    matrix = _tokens(x.detach())
    return quantize_group(matrix, max(n for n in GROUP_SIZES if matrix.shape[1] % n == 0))


def dequantized(copies: Copies, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
    """Copies in high precision, as heads [B, H, T, D] of these shapes."""
    matrices: Sequence[Tensor] = [dequantize_group(copy, dtype) for copy in copies]
    if len(matrices) < len(shapes):
        matrices = matrices[0].split([shape[1] * shape[3] for shape in shapes], 1)
    return [
        as_heads(matrix, (shape[0], shape[2]), shape[3])
        for matrix, shape in zip(matrices, shapes, strict=True)
    ]


def as_heads(matrix: Tensor, shape: Sequence[int], head_dim: int) -> Tensor:
    """[B * T, H * D] as [B, H, T, D], a view; ``shape`` begins with B and T."""
    return matrix.view(*shape[:2], matrix.shape[1] // head_dim, head_dim).transpose(1, 2)


def paired(tensors: Sequence[Tensor]) -> Copies:
    """FP8 copies from their codes and exponents, one after the other."""
    return tuple(GroupScaled(*tensors[i : i + 2]) for i in range(0, len(tensors), 2))
