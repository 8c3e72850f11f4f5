"""Measures the bytes that blocks keep for their backward pass, in FP8 and as they were before."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coat_vlm.fp8.convert import fp8_blocks, original_class


@dataclass(slots=True)
class BlockFootprint:
    """What one block keeps."""

    name: str
    tokens: int = 0
    """Tokens of the measured forward pass."""
    bytes: int = 0
    """Bytes of the distinct storages that autograd keeps, parameters not counted."""


@dataclass(slots=True)
class Footprint:
    """Bytes per token of every FP8 block, as converted and as the original class."""

    blocks: list[tuple[str, float, float]] = field(default_factory=list)
    """(name, FP8 bytes per token, original bytes per token)."""


def measure_footprint(model: nn.Module, forward: Callable[[], object]) -> Footprint:
    """Run a forward pass with the FP8 blocks, and one with the original classes; no backward pass.

    Args:
        model: a converted model, in training mode. It is left as it was.
        forward: runs the model on a batch (a small one is enough: bytes grow with the tokens).
    """
    blocks = fp8_blocks(model)
    with torch.random.fork_rng(), torch.enable_grad():
        converted = _kept(blocks, forward)
        with _as_original(blocks):
            original = _kept(blocks, forward)
    return Footprint(
        [
            (fp8.name, fp8.bytes / fp8.tokens, before.bytes / before.tokens)
            for fp8, before in zip(converted, original, strict=True)
            if fp8.tokens and before.tokens
        ]
    )


def _kept(
    blocks: list[tuple[str, nn.Module]], forward: Callable[[], object]
) -> list[BlockFootprint]:
    footprints = [BlockFootprint(name) for name, _ in blocks]
    with ExitStack() as stack:
        for footprint, (_, block) in zip(footprints, blocks, strict=True):
            stack.enter_context(_watched(block, footprint))
        forward()
    return footprints


@contextmanager
def _watched(block: nn.Module, footprint: BlockFootprint) -> Iterator[None]:
    """Count the storages that autograd keeps while ``block`` runs."""
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # alive until counted: a freed storage's address is used again
    stack = ExitStack()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        footprint.tokens += hidden.shape[:-1].numel()
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t))

    def leave(*_: object) -> None:
        stack.close()
        # Looked up here: ZeRO-3 gathers the weights for the block and releases them after it.
        parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
        footprint.bytes += sum(size for at, size in storages.items() if at not in parameters)
        storages.clear()
        kept.clear()

    handles = [
        block.register_forward_pre_hook(enter, with_kwargs=True),
        block.register_forward_hook(leave, prepend=True),
    ]
    try:
        yield
    finally:
        stack.close()
        for handle in handles:
            handle.remove()


@contextmanager
def _as_original(blocks: list[tuple[str, nn.Module]]) -> Iterator[None]:
    """The blocks with the classes they had before :func:`coat_vlm.fp8.convert.convert`."""
    classes = [type(block) for _, block in blocks]
    for _, block in blocks:
        block.__class__ = original_class(block)
    try:
        yield
    finally:
        for (_, block), kind in zip(blocks, classes, strict=True):
            block.__class__ = kind
