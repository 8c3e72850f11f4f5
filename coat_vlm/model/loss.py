"""The next-token loss of a causal language model, from its logits and without them.

    next_token_loss        from logits (B, T, V), where somebody wants to see these
    hidden_loss            from what the output layer reads (B, T, H)
    linear_cross_entropy   the same for trained positions alone, (M, H): the fused one

The logits of a batch are its largest tensor by far: 16k trained tokens of a vocabulary of 152k are
10 GB in FP32, and cross-entropy keeps several of that size for the backward pass. So the fused loss
runs the output layer on a chunk of tokens, computes the chunk's loss and at once the gradients of
its input and of the layer's parameters, and forgets the chunk's logits before it makes the next
ones. The backward pass only multiplies. On a GPU, Liger's kernels do that (arXiv:2410.10989,
section 3.2) where they are installed and the layer is a plain one.

How many tokens are trained decides on shapes: labels on a GPU make the CPU wait for it, labels on
the CPU do not.
"""

import copy
import math
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from coat_vlm.model.transfer import sent

IGNORE_INDEX = -100

CHUNK_BYTES = 256 * 2**20
"""Bytes that the FP32 logits of one chunk may take (441 tokens of a vocabulary of 152k). At the
peak about four tensors of that size exist: logits, log-probabilities and their gradients. Smaller
chunks would read and write the weight's gradient more often; it costs that traffic per chunk."""


def next_token_loss(
    logits: Tensor, labels: Tensor, num_items_in_batch: float | Tensor | None = None
) -> Tensor:
    """Cross-entropy of the next token in FP32, summed and divided, as transformers' causal LM loss.

    Only logits at trained positions are converted to FP32. Without any trained token the loss is 0
    with a graph, so that a rank without targets still takes part in the backward pass.

    Args:
        logits: (B, T, V).
        labels: (B, T), not shifted; -100 is not trained.
        num_items_in_batch: divisor; the number of trained tokens when absent.

    Returns:
        Scalar, FP32.

    Raises:
        ValueError: logits and labels do not belong together.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"the loss got logits {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}; "
            "it needs (B, T, V) and (B, T): give every token a label, -100 where it is not trained"
        )
    places, targets = _trained(labels, logits.device)
    total = _cross_entropy(_rows(logits, places), targets)
    return total / _divisor(targets, num_items_in_batch)


def hidden_loss(
    layer: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: float | Tensor | None = None,
) -> Tensor:
    """:func:`next_token_loss` of ``layer(hidden)``, whose logits are never all there.

    Args:
        layer: the output layer.
        hidden: (B, T, H), what it would make logits of.
        labels: (B, T), not shifted; -100 is not trained.
        num_items_in_batch: divisor; the number of trained tokens when absent.

    Returns:
        Scalar, FP32; without any trained token 0, with a graph.

    Raises:
        ValueError: hidden and labels do not belong together.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"the output layer got hidden states {tuple(hidden.shape)} for labels of shape "
            f"{tuple(labels.shape)}; it needs (B, T, H) and (B, T): pass skip_logits=False"
        )
    places, targets = _trained(labels, hidden.device)
    divisor = _divisor(targets, num_items_in_batch)
    return linear_cross_entropy(layer, _rows(hidden, places), targets, divisor)


def linear_cross_entropy(
    layer: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    divisor: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Summed cross-entropy of ``layer(hidden)`` over ``divisor``, a chunk of tokens at a time.

    The layer's own ``forward`` runs, without its hooks, so that whatever arithmetic it has (BF16
    roundings, FP8 GEMMs with scales of the chunk's tokens) is that of the loss. Gradients are
    computed here, for what needs one, and kept until the backward pass: a tensor like ``hidden``
    and one like each parameter. Chunks' weight gradients are added in FP32.

    Args:
        layer: [H] to [V], with no layers inside.
        hidden: [M, H].
        targets: [M] int64, each in [0, V).
        divisor: []; gradients are divided before they are rounded to their dtype. 1 when absent.
        chunk_bytes: :data:`CHUNK_BYTES` when absent; Liger's kernels have their own chunks.

    Returns:
        [] FP32; 0 with a graph where M is 0. Its backward pass can run once.
    """
    if divisor is None:
        divisor = torch.ones((), device=hidden.device)
    parameters = [p for p in layer.parameters(recurse=False) if p.requires_grad]
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or bool(parameters))
    fused = liger_function() if _liger_fits(layer, hidden, differentiable) else None
    if fused is not None:
        return _with_liger(fused, layer, hidden, targets) / divisor
    limit = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    size = chunk_tokens(len(hidden), layer.out_features, limit)
    if differentiable:
        return _ChunkedLoss.apply(hidden, targets, divisor, layer, size, *parameters)
    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        total += _cross_entropy(layer.forward(hidden[rows]), targets[rows]) / divisor
    return total


def chunk_tokens(tokens: int, vocabulary: int, chunk_bytes: int) -> int:
    """Tokens per chunk: as few chunks as ``chunk_bytes`` of FP32 logits allow, of equal size."""
    most = max(1, chunk_bytes // (4 * vocabulary))
    return max(1, math.ceil(tokens / max(1, math.ceil(tokens / most))))


class _ChunkedLoss(torch.autograd.Function):
    """The gradients of hidden and of the layer's trained parameters, found in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        divisor: Tensor,
        layer: nn.Linear,
        size: int,
        *parameters: Tensor,
    ) -> Tensor:
        wants_hidden = ctx.needs_input_grad[0]
        twin = _detached(layer)
        leaves = [p for p in twin.parameters(recurse=False) if p.requires_grad]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        sums = [torch.zeros_like(p, dtype=_sum_dtype(p)) for p in parameters]
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            rows = hidden[chunk].detach().requires_grad_(wants_hidden)
            with torch.enable_grad():
                loss = _cross_entropy(twin.forward(rows), targets[chunk]) / divisor
            total += loss.detach()
            gradients = torch.autograd.grad(loss, [rows, *leaves] if wants_hidden else leaves)
            if hidden_gradient is not None:
                hidden_gradient[chunk], *gradients = gradients
            _add(sums, gradients)
        ctx.save_for_backward(
            hidden_gradient, *(s.to(p.dtype) for s, p in zip(sums, parameters, strict=True))
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's signature
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        # In place: a weight's gradient is as large as the weight. A second pass through a kept
        # graph finds the saved tensors changed, and torch refuses it.
        hidden, *gradients = [None if g is None else g.mul_(scale) for g in ctx.saved_tensors]
        return hidden, None, None, None, None, *gradients


def _detached(layer: nn.Linear) -> nn.Linear:
    """The layer over detached parameters, so that hooks on its own see one gradient, the whole."""
    twin = copy.copy(layer)
    vars(twin)["_parameters"] = {
        name: None if p is None else p.detach().requires_grad_(p.requires_grad)
        for name, p in layer._parameters.items()
    }
    return twin


def _add(sums: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for total, gradient in zip(sums, gradients, strict=True):
        total += gradient


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def _trained(labels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which of the flattened positions [B * T] predict a trained token [M], and these tokens."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    places = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    return sent(places, device), sent(targets.index_select(0, places), device)


def _rows(x: Tensor, places: Tensor) -> Tensor:
    """[M, C], the rows of (B, T, C) at some of the flattened positions."""
    return x.flatten(0, 1).index_select(0, places)


def _divisor(targets: Tensor, num_items_in_batch: float | Tensor | None) -> Tensor:
    items = len(targets) if num_items_in_batch is None else num_items_in_batch
    if isinstance(items, Tensor):
        return sent(items.to(torch.float32), targets.device).clamp(min=1)
    # A number that is filled in there is no copy from the CPU.
    return torch.full((), max(1.0, items), dtype=torch.float32, device=targets.device)


def _liger_fits(layer: nn.Linear, hidden: Tensor, differentiable: bool) -> bool:
    """Whether Liger's function computes what is asked for.

    It knows one arithmetic, at least one token, and no gradient of a weight without one of hidden.
    """
    return (
        hidden.is_cuda
        and type(layer) is nn.Linear
        and layer.weight.dtype == hidden.dtype
        and len(hidden) > 0
        and (hidden.requires_grad or not differentiable)
    )


@cache
def liger_function() -> Any:
    """Liger's autograd function of linear layer and cross-entropy; None if it is not installed.

    Raises:
        ImportError: it is installed and does not fit the other packages.
    """
    if find_spec("liger_kernel") is None:
        return None
    module = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    return module.LigerFusedLinearCrossEntropyFunction


def _with_liger(function: Any, layer: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """The summed loss [], FP32. By position, as autograd functions take their arguments."""
    class_weight, z_loss, smoothing, softcap, return_z_loss = None, 0.0, 0.0, None, False
    return function.apply(
        hidden,
        layer.weight,
        targets,
        layer.bias,
        class_weight,
        IGNORE_INDEX,
        z_loss,
        smoothing,
        "sum",
        softcap,
        return_z_loss,
        torch.float32,  # the sum of the chunks' weight gradients
    )[0]
