"""Captures both passes of blocks in CUDA graphs that share memory (:mod:`coat_vlm.fp8.graphs`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

_Found = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, int, bool]
"""Where a parameter is held and by what name, itself, its address, and whether it trains."""


@dataclass(slots=True)
class Captured:
    """The graphs of a row of blocks for some shapes, and where their arguments and results lie."""

    spec: TreeSpec
    arguments: list[Any]
    """Leaves of the arguments after the hidden states; tensors are static."""
    hidden: Tensor
    out: Tensor
    dy: Tensor
    dhidden: Tensor
    parameters: list[list[nn.Parameter]]
    """Of each block, those that are trained."""
    gradients: list[list[Tensor]]
    """Of these; blocks of the same shapes share them."""
    forward: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    backward: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    found: list[_Found] = field(default_factory=list)
    """All parameters of the blocks."""

    def is_stale(self) -> bool:
        """Whether a parameter is another one, has moved, or began or ceased to train."""
        return any(
            held.get(name) is not p or p.data_ptr() != address or p.requires_grad is not trains
            for held, name, p, address, trains in self.found
        )


class Capturer:
    """Captures blocks for one shape after the other, all in the same memory.

    Args:
        blocks: which follow each other; each gets the same arguments but for the hidden states.
        device: the GPU they are on.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.blocks = blocks
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._gradients: dict[Any, list[Tensor]] = {}
        """Where graphs leave the gradients of a block whose parameters have these shapes."""

    def nbytes(self) -> int:
        """Memory of the graphs."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == self._pool)

    def capture(self, hidden: Tensor, leaves: list[Any], spec: TreeSpec) -> Captured:
        """Capture the passes of all blocks for arguments like these.

        Args:
            hidden: what the first block got, [..., hidden].
            leaves: its other arguments, flattened.
            spec: how to unflatten them to (args, kwargs).

        Raises:
            RuntimeError: something in a block cannot be captured, or there is too little memory.
                Call :meth:`mend` then.
        """
        captured = self._with_memory(hidden, leaves, spec)
        args, kwargs = tree_unflatten(captured.arguments, spec)
        kept: list[tuple[Tensor, Tensor, list[nn.Parameter]]] = []
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # Libraries allocate their workspace for this stream now, not in the graphs' memory.
            x = captured.hidden.detach().requires_grad_()
            y = forward_of(self.blocks[0])(x, *args, **kwargs)
            torch.autograd.grad(y, x, captured.dy)
            del x, y
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            for block in self.blocks:
                x = captured.hidden.detach().requires_grad_()
                with _own_leaves(block) as own, self._capturing(captured.forward):
                    y = forward_of(block)(x, *args, **kwargs)
                    captured.out.copy_(y.detach())
                kept.append((x, y, own))
            for number in reversed(range(len(kept))):
                x, y, own = kept.pop()
                wanted = [x, *own]
                static = [captured.dhidden, *captured.gradients[number]]
                with self._capturing(captured.backward):
                    found = torch.autograd.grad(y, wanted, captured.dy, allow_unused=True)
                    _copy(found, static)
                del x, y, own, wanted, found
        torch.cuda.synchronize()
        captured.backward.reverse()
        return captured

    def _with_memory(self, hidden: Tensor, leaves: list[Any], spec: TreeSpec) -> Captured:
        """Static tensors for these shapes, with the values of now."""
        copies = {id(leaf): leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)}
        parameters = [[p for p in b.parameters() if p.requires_grad] for b in self.blocks]
        gradients = []
        for trained in parameters:
            shapes = tuple((p.shape, p.dtype) for p in trained)
            if shapes not in self._gradients:
                self._gradients[shapes] = [torch.zeros_like(p) for p in trained]
            gradients.append(self._gradients[shapes])
        # Only what is alive from the first capture to the last is the same in all of them.
        return Captured(
            spec,
            [copies.get(id(leaf), leaf) for leaf in leaves],
            hidden=hidden.detach().clone(),
            out=torch.zeros_like(hidden),
            dy=torch.zeros_like(hidden),
            dhidden=torch.zeros_like(hidden),
            parameters=parameters,
            gradients=gradients,
            found=found_in(self.blocks),
        )

    def mend(self) -> None:
        """Capture something after a capture that failed: it left torch's random numbers in it."""
        with torch.cuda.stream(self._stream):
            x = torch.zeros(1, device=self._device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            x.zero_()
            graph.capture_end()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed."""
        try:
            graph.capture_end()
        except RuntimeError:  # it only says that the capture failed; why is on its way
            # Torch raised before it told its allocator, which would go on with this memory.
            end = getattr(torch._C, "_cuda_endAllocateToPool")  # noqa: B009 - it has no type stub
            with suppress(RuntimeError):  # that it was told before
                end(self._device.index, self._pool)

    @contextmanager
    def _capturing(self, graphs: list[torch.cuda.CUDAGraph]) -> Iterator[None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads (a loader that pins memory, NCCL) may call what a capture forbids.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            with torch.enable_grad():
                yield
        except BaseException:
            self._abandon(graph)
            raise
        graph.capture_end()
        graphs.append(graph)


def found_in(blocks: Sequence[nn.Module]) -> list[_Found]:
    """The parameters of blocks as they are now."""
    return [
        (module._parameters, name, parameter, parameter.data_ptr(), parameter.requires_grad)
        for block in blocks
        for module in block.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def forward_of(block: nn.Module) -> Any:
    """``forward`` as the block's class has it."""
    return partial(type(block).forward, block)


@contextmanager
def _own_leaves(block: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Let a block read its trained parameters by other names, in the order of ``parameters()``.

    DeepSpeed's hooks on the parameters themselves would take part in the capture.
    """
    aliases: dict[nn.Parameter, nn.Parameter] = {}
    swapped = []
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                aliases.setdefault(parameter, nn.Parameter(parameter.detach()))
                swapped.append((module, name, parameter))
    for module, name, parameter in swapped:
        module._parameters[name] = aliases[parameter]
    try:
        yield list(aliases.values())
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


def _copy(gradients: Sequence[Tensor | None], static: Sequence[Tensor]) -> None:
    """Set static tensors to gradients; None, of what was not used, is zero."""
    for gradient, own in zip(gradients, static, strict=True):
        if gradient is None:
            own.zero_()
        else:
            own.copy_(gradient)
