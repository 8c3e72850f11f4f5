"""Attention and its output projection, keeping FP8 copies: what ``coat_lean`` adds to ``coat``.

    q', k', v' = FP8 copies of q, k, v;   o = attention(q', k', v');   y = FP8(o) W^T + b

The copies are made *before* attention and attention works on them, so the probabilities that its
backward pass recomputes are those of the forward pass. Kept per token: one byte per element of q,
k, v and o with their scales, and attention's log-sum-exp. The FP8 copy of o is the projection's
operand and, dequantized, what attention's backward pass wants of o (the row sums of do * o).

Where attention is not one of torch's fused kernels (a mask, another implementation), backward runs
attention once more from the copies. Copies made together with the rotation are not counted by the
monitor: nothing holds the values before their rounding.

The backward pass of attention is where a block needs most memory: q, k, v and o stand there in high
precision, too. So their copies go as soon as they are decoded, not when the pass is over.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
from coat_vlm.fp8 import gemms, monitor, sdpa
from coat_vlm.fp8.gemms import LinearNeeds
from coat_vlm.fp8.linear import rows
from coat_vlm.fp8.weights import Joint, joint

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, H, T, D], k and v [B, H_kv, T, D] to [B, T, H * D]."""

Copies = tuple[GroupScaled, ...]
"""Of q, k and v, each [B * T, H * D], or one of all three side by side."""


def rounded_heads(x: Tensor) -> Tensor:
    """Heads [B, H, T, D] rounded to what their FP8 copy is worth; gradients pass unchanged."""
    (rounded,) = decoded((_copy(x),), [x.shape], x.dtype)
    return rounded + (x - x.detach())  # plus exact zeros, which carry the gradient


def lean_attention(
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
        value: likewise.
        layer: the output projection, weight [N, H * D].
        attend: attention as the model would call it.
        fused: how to call it as one of torch's fused kernels; None where that is not possible.
        copies: of query, key and value, which are then what these are worth; made when absent. The
            backward pass of a fused kernel frees their memory.

    Returns:
        [B, T, N] in query's dtype.
    """
    given = [tensor for copy in copies or () for tensor in copy]
    return _LeanAttention.apply(
        query, key, value, layer.weight, layer.bias, attend, fused, joint([layer]), *given
    )


class _LeanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        attend: Attend,
        fused: sdpa.Fused | None,
        of_weight: Joint,
        *given: Tensor,
    ) -> Tensor:
        q, k, v = query, key, value
        ctx.shapes, ctx.dtype = [x.shape for x in (q, k, v)], query.dtype
        copies = paired(given)
        if not copies:
            copies = tuple(_copy(x) for x in (q, k, v))
            q, k, v = decoded(copies, ctx.shapes, query.dtype)
            for copy, x in zip(copies, (query, key, value), strict=True):
                monitor.observe_copy("attention input", copy, lambda x=x: _tokens(x))
        statistics = sdpa.Statistics(())
        if fused is None:
            out = attend(q, k, v)
        else:
            out, statistics = sdpa.forward(fused, q, k, v)
        del q, k, v
        out = rows(out)
        codes = quantize_tensor(out)
        monitor.observe("linear input", codes, out)
        y, weight_scale = gemms.forward(codes, of_weight.key, [weight], bias, query.dtype)
        kept = [tensor for copy in copies for tensor in copy]
        ctx.save_for_backward(*codes, weight, bias, weight_scale, *kept, *statistics.tensors)
        ctx.kept = len(kept)
        ctx.sizes = statistics.sizes
        ctx.attend, ctx.fused, ctx.joint = attend, fused, of_weight
        batch, _, length, _ = query.shape
        return y.view(batch, length, -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        codes = TensorScaled(*tensors[:2])
        if codes.q.numel() and not codes.q.untyped_storage().nbytes():
            raise RuntimeError(
                "lean attention: its backward pass ran before and freed what it had kept; run the "
                "forward pass again (gradient checkpointing or precision coat allow a second one)"
            )
        weight, bias, weight_scale = tensors[2:5]
        copies, saved_statistics = paired(tensors[5 : 5 + ctx.kept]), tensors[5 + ctx.kept :]
        wanted = ctx.needs_input_grad
        needs = LinearNeeds(any(wanted[:3]), wanted[3], wanted[4], ctx.joint.gradients)
        dy, dy_transposed, dbias = gemms.gradient_codes([rows(grad_outputs[0])], needs)
        del grad_outputs
        dattended = gemms.input_gradient(
            dy, ctx.joint.key, [weight], weight_scale, needs, ctx.dtype
        )
        del dy
        (dweight,) = gemms.weight_gradients(
            dy_transposed, lambda: transpose_codes(codes), [weight], needs
        )
        del dy_transposed
        if dbias is not None and bias is not None:
            dbias = dbias.to(bias.dtype)
        gradients: tuple[Tensor | None, ...] = (None, None, None)
        if dattended is not None and ctx.fused is None:
            heads = decoded(copies, ctx.shapes, ctx.dtype)
            gradients = _replayed(ctx.attend, heads, dattended.view(_joined(ctx.shapes[0])))
        elif dattended is not None:
            q, k, v = decoded(copies, ctx.shapes, ctx.dtype)
            dattended = dattended.view(_joined(ctx.shapes[0]))
            out = dequantize_tensor(codes, ctx.dtype).view(dattended.shape)
            for tensor in (codes.q, *(copy.q for copy in copies)):
                tensor.untyped_storage().resize_(0)
            statistics = sdpa.Statistics(tuple(saved_statistics), ctx.sizes)
            gradients = sdpa.backward(ctx.fused, dattended, q, k, v, out, statistics)
        return (*gradients, dweight, dbias, *(None for _ in wanted[5:]))


def _joined(shape: torch.Size) -> torch.Size:
    """[B, T, H * D] of heads [B, H, T, D]."""
    return torch.Size((shape[0], shape[2], shape[1] * shape[3]))


def _replayed(
    attend: Attend, inputs: Sequence[Tensor], dattended: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of attention by running it again."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = attend(*leaves)
    return torch.autograd.grad(out, leaves, dattended)


def _tokens(x: Tensor) -> Tensor:
    """[B, H, T, D] as a matrix [B * T, H * D]; the memory of x where that is its order."""
    return rows(x.transpose(1, 2).flatten(-2))


def _copy(x: Tensor) -> GroupScaled:
    matrix = _tokens(x.detach())
    fitting = [size for size in GROUP_SIZES if matrix.shape[1] % size == 0]
    return quantize_group(matrix, max(fitting))


def decoded(copies: Copies, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
    """What copies are worth, as heads [B, H, T, D] of these shapes."""
    matrices: Sequence[Tensor] = [dequantize_group(copy, dtype) for copy in copies]
    if len(matrices) < len(shapes):
        matrices = matrices[0].split([shape[1] * shape[3] for shape in shapes], 1)
    return [
        as_heads(matrix, torch.Size((shape[0], shape[2], matrix.shape[1])), shape[3])
        for matrix, shape in zip(matrices, shapes, strict=True)
    ]


def as_heads(matrix: Tensor, shape: torch.Size, head_dim: int) -> Tensor:
    """[B * T, H * D] as [B, H, T, D], a view; ``shape`` is [B, T, ...]."""
    heads = matrix.shape[1] // head_dim
    return matrix.view(shape[0], shape[1], heads, head_dim).transpose(1, 2)


def paired(tensors: Sequence[Tensor]) -> Copies:
    """The inverse of putting codes and exponents one after the other."""
    return tuple(GroupScaled(*tensors[i : i + 2]) for i in range(0, len(tensors), 2))
