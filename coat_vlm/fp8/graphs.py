"""CUDA graphs of FP8 blocks: the CPU launches one graph in place of some twenty or thirty kernels.

A small model waits for the CPU, which launches the kernels of a block one by one. With
:func:`graph_blocks` the passes of all FP8 blocks of the tower, and of the language model, are
captured once they were seen with some shapes, and replayed from then on:

    pass 1, 2       eager, which also compiles the kernels
    pass 3          forward passes are captured block by block, backward passes in reverse
    later           hidden -> [static input -> graph -> static output] -> copy; the same backward

What blocks save for their backward pass is statically allocated, in the same memory for all shapes;
what they need in between is shared. So a captured model takes the memory that its activations have
at their highest point in the optimizer's step, too. Weights are quantized in every replay.

Packed rows (:mod:`coat_vlm.model.packing`) hold a different number of sequences each:
their bounds are followed by empty sequences up to a multiple of 8, and the longest counts as a
power of two, so that rows of one length share graphs.

Further shapes, arguments that are no tensors and no constants, evaluation, gradient checkpointing,
a scope of reused weights or a monitor: such passes run eagerly. Weights must stay where they are in
memory (ZeRO 0, 1, 2). A graph does what the blocks did when it was captured: after a change of what
trains, of dropout or of the attention implementation call :func:`graph_blocks` again.
"""

import logging
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from coat_vlm.fp8 import saturation, weights
from coat_vlm.fp8.convert import fp8_blocks

logger = logging.getLogger(__name__)

EAGER_PASSES = 2
"""Passes with the same shapes before they are captured."""

MOST_CAPTURED = 8
"""Shapes of which a part of the model has graphs: the first that come often enough. (To let go of
one for another would capture all the time where more shapes take turns.)"""

BOUNDS_STEP = 8
"""Numbers of bounds of packed sequences are multiples of it in graphs."""

FORWARD = "forward"
"""The attribute of a block that replays; copies of a block that compute otherwise do without."""

_MOST_SEEN = 256

_CONSTANTS = (bool, int, float, str, type(None))
"""Arguments of a block that are part of its shapes."""

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
            y = _eager(self.blocks[0], x, *args, **kwargs)
            torch.autograd.grad(y, x, captured.dy)
            del x, y
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            for block in self.blocks:
                x = captured.hidden.detach().requires_grad_()
                with _own_leaves(block) as own, self._capturing(captured.forward):
                    y = _eager(block, x, *args, **kwargs)
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


def _eager(block: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """``forward`` as the block's class has it."""
    return type(block).forward(block, *args, **kwargs)


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


_alive: "weakref.WeakSet[BlockGraphs]" = weakref.WeakSet()


def live_graphs() -> "list[BlockGraphs]":
    """Those of all models."""
    return list(_alive)


def captured_bytes() -> int:
    """Memory of all graphs, which torch's counts of allocated memory leave out."""
    return sum(graphs.nbytes for graphs in _alive)


class _Forward(partial[Tensor]):
    """``forward`` of a block that replays."""


def graph_blocks(model: nn.Module, enabled: bool = True) -> "list[BlockGraphs]":
    """Let FP8 blocks replay CUDA graphs, anew, or no longer.

    Args:
        model: converted, with its weights where they stay; blocks of one parent in a row (the
            tower's, the language model's) are captured together.
        enabled: False takes back an earlier call.

    Returns:
        One for each row of blocks.
    """
    for module in model.modules():
        if isinstance(vars(module).get(FORWARD), _Forward):
            del vars(module)[FORWARD]
    rows: dict[str, list[nn.Module]] = {}
    for name, block in fp8_blocks(model):
        rows.setdefault(name.rpartition(".")[0], []).append(block)
    return [BlockGraphs(blocks) for blocks in rows.values()] if enabled else []


@dataclass(eq=False)
class _Pass:
    """A forward pass that replays, until its backward pass is over or cannot come any more."""

    captured: Captured
    leaves: Sequence[Any]
    backward: set[int] = field(default_factory=set)
    """Blocks whose backward pass ran."""

    def fits(self, hidden: Tensor, leaves: Sequence[Any], spec: TreeSpec) -> bool:
        """Whether a block has the arguments that the first block had."""
        static = self.captured.hidden
        return (
            hidden.shape == static.shape
            and hidden.dtype == static.dtype
            and spec == self.captured.spec
            and all(
                a is b if isinstance(a, Tensor) else a == b
                for a, b in zip(leaves, self.leaves, strict=True)
            )
        )


class BlockGraphs:
    """Captures and replays the passes of FP8 blocks that follow each other.

    Args:
        blocks: which get the same arguments but for the hidden states; their ``forward`` is taken
            over.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self.captures = 0
        """Times that graphs were captured."""
        self.replays = 0
        """Forward passes that were replayed."""
        self._captured: dict[Any, Captured] = {}
        """By shapes."""
        self._seen: dict[Any, int] = {}
        self._latest: weakref.ref[_Pass] | None = None
        self._now: _Pass | None = None
        self.nbytes = 0
        """Memory of the graphs, which no tensor has: torch's counts of what is allocated leave it
        out."""
        self._capturer: Capturer | None = None
        self._full = self._failed = False
        windows = [window for block in self.blocks if (window := _window(block)) is not None]
        self._window = min(windows, default=None)
        _alive.add(self)
        for number, block in enumerate(self.blocks):
            vars(block)[FORWARD] = _Forward(self._call, number)

    def _call(self, number: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``forward`` of a block."""
        block = self.blocks[number]
        if self._allowed(block, hidden_states):
            leaves, spec = tree_flatten((args, kwargs))
            if number == 0:
                self._now = None  # the last one may be over, if nothing else holds it
                steps = in_steps(kwargs, hidden_states.shape[1], self._window)
                rounded, _ = tree_flatten((args, steps))
                self._now = self._begin(hidden_states, leaves, rounded, spec)
            now = self._now
            if now is not None and now.fits(hidden_states, leaves, spec):
                return _Replay.apply(hidden_states, now, number, *now.captured.parameters[number])
        elif number == 0:
            self._now = None
        return _eager(block, hidden_states, *args, **kwargs)

    def _allowed(self, block: nn.Module, hidden: Tensor) -> bool:
        return (
            hidden.is_cuda
            and block.training
            and torch.is_grad_enabled()
            and not saturation.is_watching()
            and not weights.are_reused()
            and not getattr(block, "gradient_checkpointing", False)
            and (hidden.requires_grad or any(p.requires_grad for p in block.parameters()))
        )

    def _begin(
        self, hidden: Tensor, given: list[Any], leaves: list[Any], spec: TreeSpec
    ) -> _Pass | None:
        """The pass that replays with what is given, rounded; None if it runs eagerly."""
        latest = None if self._latest is None else self._latest()
        if latest is not None and 0 not in latest.backward:
            return None  # its backward pass is to come: what it saved would be overwritten
        key = _key(self.blocks, hidden, leaves, spec)
        if key is None:
            return None
        if key not in self._captured:
            if not self._often(key):
                return None
            new = self._try_capture(hidden, leaves, spec)
            if new is None:
                return None
            self._captured[key] = new
        captured = self._captured[key]
        if captured.is_stale():
            del self._captured[key]
            return None
        self.replays += 1
        tensors = {
            id(static): (static, leaf)
            for static, leaf in zip(captured.arguments, leaves, strict=True)
            if isinstance(leaf, Tensor)
        }
        for static, leaf in tensors.values():  # each once
            static.copy_(leaf)
        now = _Pass(captured, given)
        self._latest = weakref.ref(now)
        return now

    def _often(self, key: Any) -> bool:
        """Count a pass with these shapes; whether there were enough, and room for their graphs."""
        if self._failed:
            return False
        if len(self._captured) >= MOST_CAPTURED:
            if not self._full:
                self._full = True
                logger.warning(
                    "FP8 blocks have CUDA graphs for %d shapes; others run without, such as %s. "
                    "Packed rows, and images in the same number, have fewer shapes",
                    MOST_CAPTURED,
                    tuple(key[0]),
                )
            return False
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] > EAGER_PASSES

    def _try_capture(self, hidden: Tensor, leaves: list[Any], spec: TreeSpec) -> Captured | None:
        if self._capturer is None:
            self._capturer = Capturer(self.blocks, hidden.device)
        capturer = self._capturer
        captured, problem = None, ""
        try:
            captured = capturer.capture(hidden, leaves, spec)
        except RuntimeError as error:
            problem = str(error).strip().partition("\n")[0]
            traceback.clear_frames(error.__traceback__)  # they hold memory
        if captured is None:
            capturer.mend()
        self.nbytes = capturer.nbytes()
        if captured is None:
            self._failed = True
            logger.warning(
                "FP8 blocks of shape %s cannot be captured as CUDA graphs; these and further "
                "shapes run without: %s",
                tuple(hidden.shape),
                problem,
            )
            return None
        self.captures += 1
        logger.info(
            "CUDA graphs: %d FP8 blocks for %s, %.2f GB for all shapes",
            len(self.blocks),
            tuple(hidden.shape),
            self.nbytes / 1e9,
        )
        return captured


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, now: _Pass, number: int, *_: nn.Parameter) -> Tensor:
        captured = now.captured
        captured.hidden.copy_(hidden)
        captured.forward[number].replay()
        ctx.now, ctx.number = now, number
        return captured.out.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        now, number = ctx.now, ctx.number
        if number in now.backward:
            raise RuntimeError(
                "CUDA graphs of FP8 blocks: this backward pass ran before, and what the forward "
                "pass saved is overwritten; run the forward pass again, or set fp8.cuda_graphs: "
                "false"
            )
        now.backward.add(number)
        captured = now.captured
        captured.dy.copy_(grad_outputs[0])
        captured.backward[number].replay()
        static = captured.gradients[number]
        gradients = [torch.empty_like(gradient) for gradient in static]
        if static:
            torch._foreach_copy_(gradients, static)  # pyright: ignore[reportPrivateImportUsage]
        dhidden = captured.dhidden.clone() if ctx.needs_input_grad[0] else None
        return dhidden, None, None, *gradients


def _window(block: nn.Module) -> int | None:
    """The sliding window of a block's attention."""
    attention: Any = getattr(block, "self_attn", None)
    of_model = getattr(getattr(attention, "config", None), "sliding_window", None)
    return getattr(attention, "sliding_window", of_model)


def in_steps(kwargs: dict[str, Any], tokens: int, window: int | None = None) -> dict[str, Any]:
    """A block's arguments with those of packed sequences in a row of ``tokens`` rounded up.

    A longest sequence that no sliding window cuts still is one.
    """
    bounds, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if not isinstance(bounds, Tensor) or keys is not bounds:
        return kwargs
    more = bounds.new_full((-len(bounds) % BOUNDS_STEP,), tokens)
    bounds = torch.cat([bounds, more])
    rounded = kwargs | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    for name in ("max_length_q", "max_length_k"):
        longest = kwargs.get(name)
        if isinstance(longest, int):
            most = tokens if window is None or window < longest else min(tokens, window)
            rounded[name] = min(most, 1 << max(0, longest - 1).bit_length())
    return rounded


def _key(blocks: Sequence[nn.Module], hidden: Tensor, leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """What a capture is for; None if there is something that cannot be captured."""
    shapes: list[Any] = [hidden.shape, hidden.dtype, hidden.device, spec]
    shapes += map(type, blocks)  # a monitor may have sent one back to BF16
    first: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if not leaf.is_cuda or leaf.requires_grad:
                return None
            # The same tensor twice is one argument: a block may ask for that.
            shapes.append((leaf.shape, leaf.dtype, first.setdefault(id(leaf), i)))
        elif isinstance(leaf, _CONSTANTS):
            shapes.append((type(leaf), leaf))
        else:
            return None
    return tuple(shapes)
