"""CUDA graphs of FP8 blocks: the CPU launches one graph instead of dozens of kernels.

Passes of all FP8 blocks of the tower, and of the language model, are captured per shape after a few
eager ones, and replayed afterwards:

    pass 1, 2       eager, which also compiles the kernels
    pass 3          forward passes are captured block by block, backward passes in reverse
    later           hidden -> [static input -> graph -> static output] -> copy; the same backward

Tensors saved for backward are statically allocated, in the same memory for all shapes, so a
captured model occupies its activations' peak memory also during the optimizer's step. Weights that
are not stored in FP8 are quantized in every replay. With ``fp8.cuda_graphs: auto`` all passes run
eagerly until :mod:`coat_vlm.fp8.memory_choices` has chosen the blocks for which the GPU waits.

Bounds of packed sequences are padded, and their longest length is rounded up, to share graphs.

Passes run eagerly in Qwen-VL's towers, whose longest image differs from batch to batch, with
further shapes, with arguments that are neither tensors nor constants, in evaluation, with gradient
checkpointing, in a scope of reused weights, and under a monitor. Weights must keep their addresses
(ZeRO 0, 1, 2). A graph repeats the computation at the time of capture: call :func:`graph_blocks`
again after changing ``requires_grad``, an adapter's scale, dropout or the attention implementation,
and after merging adapters.
"""

import gc
import logging
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from coat_vlm.config.fp8 import CudaGraphs
from coat_vlm.fp8 import saturation, weights
from coat_vlm.fp8.blocks import Fp8ExpertsDecoderLayer, Fp8MlpLayer, Fp8PackedEncoderLayer
from coat_vlm.fp8.convert import fp8_blocks

logger = logging.getLogger(__name__)

EAGER_PASSES = 2
"""Eager passes with the same shapes before the capture."""

MAX_CAPTURED = 8
"""Captured shapes per :class:`BlockGraphs`. None is evicted: more shapes that alternate would lead
to constant captures."""

BOUNDS_STEP = 8
"""The number of bounds of packed sequences is padded to a multiple of it."""

FORWARD = "forward"
"""Attribute of a block that replays; copies that compute differently delete it."""

_MAX_SEEN = 256

_CONSTANTS = (bool, int, float, str, type(None))
"""Types of arguments whose values are part of the shapes' key."""

_EAGER = Fp8PackedEncoderLayer | Fp8MlpLayer | Fp8ExpertsDecoderLayer
"""Blocks that compute the longest of their images on the CPU, are FP8 only in their MLP, or whose
router's logits a hook collects."""

_Location = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, int, bool]
"""Dictionary that holds a parameter, its name, the parameter, its address, whether it trains."""


@dataclass(slots=True)
class Captured:
    """The graphs of blocks for given shapes, with their static arguments and results."""

    spec: TreeSpec
    arguments: list[Any]
    """Leaves of the arguments after the hidden states; tensors are static."""
    hidden: Tensor
    out: Tensor
    grad_output: Tensor
    grad_hidden: Tensor
    parameters: list[list[nn.Parameter]]
    """Trained parameters of each block."""
    gradients: list[list[Tensor]]
    """Static gradients of ``parameters``; blocks with the same shapes share them."""
    forward: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    backward: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    locations: list[_Location] = field(default_factory=list)
    """All parameters of the blocks."""

    def is_stale(self) -> bool:
        """Return whether a parameter was replaced, moved, frozen or unfrozen."""
        return any(
            held.get(name) is not p or p.data_ptr() != address or p.requires_grad is not trains
            for held, name, p, address, trains in self.locations
        )


def find_parameters(blocks: Sequence[nn.Module]) -> list[_Location]:
    """List the parameters of blocks in their present state."""
    return [
        (module._parameters, name, parameter, parameter.data_ptr(), parameter.requires_grad)
        for block in blocks
        for module in block.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _run_eagerly(block: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return type(block).forward(block, *args, **kwargs)


@contextmanager
def _alias_parameters(block: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Replace a block's trained parameters with aliases, in the order of ``parameters()``.

    DeepSpeed's hooks on the parameters would be captured otherwise.
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
    """Copy gradients to static tensors; None (an unused parameter) becomes zero."""
    for gradient, target in zip(gradients, static, strict=True):
        if gradient is None:
            target.zero_()
        else:
            target.copy_(gradient)


_alive: "weakref.WeakSet[BlockGraphs]" = weakref.WeakSet()


def captured_bytes() -> int:
    """Return the memory of all graphs, which torch's allocated memory does not include."""
    return sum(graphs.nbytes for graphs in _alive)


@dataclass(slots=True)
class _Forward:
    """The ``forward`` of a block that replays."""

    graphs: "BlockGraphs"
    number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.graphs.run_block(self.number, *args, **kwargs)


def find_known_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the FP8 blocks whose passes can be captured, by name."""
    return {name: block for name, block in fp8_blocks(model) if not isinstance(block, _EAGER)}


def graph_blocks(model: nn.Module, enabled: CudaGraphs = True) -> "list[BlockGraphs]":
    """Enable, reset or disable CUDA graphs of FP8 blocks; with "auto" see :class:`BlockGraphs`.

    Blocks of one parent (the tower's, the language model's) are captured together.
    """
    for module in model.modules():
        if isinstance(vars(module).get(FORWARD), _Forward):
            del vars(module)[FORWARD]
    of_parent: dict[str, list[nn.Module]] = {}
    known = find_known_blocks(model)
    eager = [name for name, _ in fp8_blocks(model) if name not in known]
    if eager and enabled is True:
        logger.warning(
            "CUDA graphs: the %d blocks from %s on run eagerly; they compute the longest of their "
            "packed images on the CPU, are FP8 only in their MLP, or have experts",
            len(eager),
            eager[0],
        )
    for name, block in known.items():
        of_parent.setdefault(name.rpartition(".")[0], []).append(block)
    most = None if enabled == "auto" else float("inf")
    return [BlockGraphs(blocks, most) for blocks in of_parent.values()] if enabled else []


def find_graphs(model: nn.Module) -> "list[BlockGraphs]":
    """Find the results of the last :func:`graph_blocks`."""
    forwards = (vars(module).get(FORWARD) for module in model.modules())
    return list(dict.fromkeys(f.graphs for f in forwards if isinstance(f, _Forward)))


@dataclass(eq=False)
class _Pass:
    """A replayed forward pass; alive until its backward pass is over or impossible."""

    captured: Captured
    leaves: Sequence[Any]
    backward: set[int] = field(default_factory=set)
    """Numbers of the blocks whose backward pass ran."""

    def fits(self, hidden: Tensor, leaves: Sequence[Any], spec: TreeSpec) -> bool:
        """Return whether a block has the same arguments as the first block."""
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
    """Captures and replays the passes of consecutive FP8 blocks, all shapes in the same memory.

    The blocks have the same arguments except the hidden states; their ``forward`` is replaced.
    Passes with more than ``max_tokens`` run eagerly; with None all do, and are measured, until
    :meth:`limit` is called.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], max_tokens: float | None = float("inf")
    ) -> None:
        self.blocks = list(blocks)
        self.max_tokens = max_tokens
        self.max_bytes = float("inf")
        """With graphs of more bytes no further shape is captured."""
        self.tokens = 0
        """Tokens of the largest measured pass."""
        self.saved = 0
        """Bytes that it saved for backward."""
        self.waits: list[float] = []
        """Seconds of the CPU for each measured pass of a block that the GPU waited for: it had
        computed all that was launched before the pass when the CPU had launched the pass."""
        self._before = 0
        self._mark: tuple[float, Any] = (0.0, None)
        self.captures = self.replays = 0
        self._captured: dict[Any, Captured] = {}
        self._seen: dict[Any, int] = {}
        self._previous: weakref.ref[_Pass] | None = None
        self._current: _Pass | None = None
        self.nbytes = 0
        """Memory of the graphs, which torch's allocated memory does not include."""
        self._pool: Any = None
        self._stream: Any = None
        self._gradients: dict[Any, list[Tensor]] = {}
        """Shapes and dtypes of a block's parameters -> static gradients."""
        self._full = self._failed = False
        windows = map(_sliding_window, self.blocks)
        self._sliding_window = min((w for w in windows if w is not None), default=None)
        _alive.add(self)
        for number, block in enumerate(self.blocks):
            vars(block)[FORWARD] = _Forward(self, number)

    def limit(self, max_tokens: float, max_bytes: float) -> None:
        """End the measurement: capture passes of at most so many tokens, or none if it is 0."""
        self.waits.clear()
        self.max_tokens, self.max_bytes = max_tokens, max_bytes
        if not max_tokens:
            for block in self.blocks:  # which are launched just in time, without this class
                vars(block).pop(FORWARD, None)

    def run_block(self, number: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replay the pass of block ``number``, or run its class's ``forward``."""
        block = self.blocks[number]
        if self._can_replay(block, hidden_states):
            leaves, spec = tree_flatten((args, kwargs))
            if number == 0:
                self._current = None  # drops the last pass unless something else refers to it
                steps = round_up_packing(kwargs, hidden_states.shape[1], self._sliding_window)
                rounded, _ = tree_flatten((args, steps))
                self._current = self._begin_pass(hidden_states, leaves, rounded, spec)
            current = self._current
            if current is not None and current.fits(hidden_states, leaves, spec):
                return _Replay.apply(
                    hidden_states, current, number, *current.captured.parameters[number]
                )
            if self.max_tokens is None:
                return self._observe(number, hidden_states, *args, **kwargs)
        elif number == 0:
            self._current = None
        return _run_eagerly(block, hidden_states, *args, **kwargs)

    def _observe(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run block ``number`` eagerly and measure what the passes save, and the GPU's waits."""
        if number == 0:
            self._before = torch.cuda.memory_allocated(hidden.device)
            self._set_mark()
        out = _run_eagerly(self.blocks[number], hidden, *args, **kwargs)
        self._end_pass()
        if out.requires_grad:  # its backward begins when the next block's ends
            last = number == len(self.blocks) - 1
            out.register_hook(lambda _: self._set_mark() if last else self._end_pass())
        tokens = hidden.shape[:-1].numel()
        if number == len(self.blocks) - 1 and tokens > self.tokens:
            self.tokens = tokens
            self.saved = torch.cuda.memory_allocated(hidden.device) - self._before
        return out

    def _set_mark(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self._mark = time.perf_counter(), event

    def _end_pass(self) -> None:
        started, event = self._mark
        if event.query():
            self.waits.append(time.perf_counter() - started)
        self._set_mark()

    def _can_replay(self, block: nn.Module, hidden: Tensor) -> bool:
        return (
            hidden.is_cuda
            and block.training
            and torch.is_grad_enabled()
            and not saturation.is_watching()
            and not weights.are_reused()
            and not getattr(block, "gradient_checkpointing", False)
            and (hidden.requires_grad or any(p.requires_grad for p in block.parameters()))
        )

    def _begin_pass(
        self, hidden: Tensor, given: list[Any], leaves: list[Any], spec: TreeSpec
    ) -> _Pass | None:
        """Start a replayed pass with rounded arguments; None if the pass must run eagerly."""
        previous = None if self._previous is None else self._previous()
        if previous is not None and 0 not in previous.backward:
            return None  # its backward pass is pending: a replay would overwrite its saved tensors
        key = _shape_key(hidden, leaves, spec)
        if key is None:
            return None
        if key not in self._captured:
            tokens, most = hidden.shape[:-1].numel(), self.max_tokens
            if not self._is_frequent(key) or most is None or tokens > most:
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
        for static, leaf in tensors.values():  # each tensor once
            static.copy_(leaf)
        current = _Pass(captured, given)
        self._previous = weakref.ref(current)
        return current

    def _is_frequent(self, key: Any) -> bool:
        """Count a pass with these shapes; return whether to capture graphs for them."""
        if self._failed:
            return False
        if len(self._captured) >= MAX_CAPTURED or self.nbytes > self.max_bytes:
            if not self._full:
                self._full = True
                level = logging.WARNING if self.max_tokens == float("inf") else logging.INFO
                logger.log(
                    level,
                    "FP8 blocks have CUDA graphs for %d shapes; other shapes, such as %s, run "
                    "eagerly. Packing and a fixed number of images reduce the shapes",
                    len(self._captured),
                    tuple(key[0]),
                )
            return False
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] > EAGER_PASSES

    def _try_capture(self, hidden: Tensor, leaves: list[Any], spec: TreeSpec) -> Captured | None:
        if self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(hidden.device)
        captured, problem = None, ""
        try:
            with _no_garbage_collection():
                captured = self._capture(hidden, leaves, spec)
        except RuntimeError as error:
            problem = str(error).strip().partition("\n")[0]
            traceback.clear_frames(error.__traceback__)  # frames keep tensors alive
        if captured is None:
            self._recover()
        segments = torch.cuda.memory_snapshot()
        in_pool = (s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == self._pool)
        self.nbytes = sum(in_pool)
        if captured is None:
            self._failed = True
            logger.warning(
                "FP8 blocks of shape %s cannot be captured as CUDA graphs; this and new shapes run "
                "eagerly: %s",
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

    def _capture(self, hidden: Tensor, leaves: list[Any], spec: TreeSpec) -> Captured:
        """Capture the passes of all blocks for arguments of these shapes.

        After a RuntimeError (a block cannot be captured, out of memory) call :meth:`_recover`.
        """
        captured = self._allocate(hidden, leaves, spec)
        args, kwargs = tree_unflatten(captured.arguments, spec)
        saved: list[tuple[Tensor, Tensor, list[nn.Parameter]]] = []
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # Libraries allocate their workspace for this stream here, not in the graphs' memory.
            x = captured.hidden.detach().requires_grad_()
            y = _run_eagerly(self.blocks[0], x, *args, **kwargs)
            torch.autograd.grad(y, x, captured.grad_output)
            del x, y
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            for block in self.blocks:
                x = captured.hidden.detach().requires_grad_()
                with _alias_parameters(block) as aliases, self._capturing(captured.forward):
                    y = _run_eagerly(block, x, *args, **kwargs)
                    captured.out.copy_(y.detach())
                saved.append((x, y, aliases))
            for number in reversed(range(len(saved))):
                x, y, aliases = saved.pop()
                inputs = [x, *aliases]
                static = [captured.grad_hidden, *captured.gradients[number]]
                with self._capturing(captured.backward):
                    grads = torch.autograd.grad(y, inputs, captured.grad_output, allow_unused=True)
                    _copy(grads, static)
                del x, y, aliases, inputs, grads
        torch.cuda.synchronize()
        captured.backward.reverse()
        return captured

    def _allocate(self, hidden: Tensor, leaves: list[Any], spec: TreeSpec) -> Captured:
        """Allocate static, contiguous tensors for these shapes, with the present values."""
        copies = {id(leaf): leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)}
        parameters = [[p for p in b.parameters() if p.requires_grad] for b in self.blocks]
        gradients = []
        for trained in parameters:
            shapes = tuple((p.shape, p.dtype) for p in trained)
            if shapes not in self._gradients:
                self._gradients[shapes] = [torch.zeros_like(p) for p in trained]
            gradients.append(self._gradients[shapes])
        # Only tensors alive from the first to the last capture keep their memory.
        return Captured(
            spec,
            [copies.get(id(leaf), leaf) for leaf in leaves],
            hidden=hidden.detach().clone(memory_format=torch.contiguous_format),
            out=hidden.new_zeros(hidden.shape),
            grad_output=hidden.new_zeros(hidden.shape),
            grad_hidden=hidden.new_zeros(hidden.shape),
            parameters=parameters,
            gradients=gradients,
            locations=find_parameters(self.blocks),
        )

    def _recover(self) -> None:
        """Run a small capture after a failed one, which left torch's RNG in capture mode."""
        with torch.cuda.stream(self._stream):
            x = torch.zeros(1, device=self._stream.device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            x.zero_()
            graph.capture_end()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture."""
        try:
            graph.capture_end()
        except RuntimeError:  # the original error with the reason is being raised
            # torch raised before it notified its allocator, which would keep using this pool.
            end = getattr(torch._C, "_cuda_endAllocateToPool")  # noqa: B009 - it has no type stub
            with suppress(RuntimeError):  # already notified
                end(self._stream.device.index, self._pool)

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


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # A collection may destroy graphs of a model that is gone, which a capture forbids
    # (https://github.com/pytorch/pytorch/pull/161037).
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, current: _Pass, number: int, *_: nn.Parameter) -> Tensor:
        captured = current.captured
        captured.hidden.copy_(hidden)
        captured.forward[number].replay()
        ctx.current, ctx.number = current, number
        return captured.out.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        current, number = ctx.current, ctx.number
        if number in current.backward:
            raise RuntimeError(
                "CUDA graphs of FP8 blocks: this backward pass already ran, and its saved tensors "
                "were overwritten; run the forward pass again, or set fp8.cuda_graphs: false"
            )
        current.backward.add(number)
        captured = current.captured
        captured.grad_output.copy_(grad_outputs[0])
        captured.backward[number].replay()
        static = captured.gradients[number]
        gradients = [torch.empty_like(gradient) for gradient in static]
        if static:
            torch._foreach_copy_(gradients, static)  # pyright: ignore[reportPrivateImportUsage]
        grad_hidden = captured.grad_hidden.clone() if ctx.needs_input_grad[0] else None
        return grad_hidden, None, None, *gradients


def _sliding_window(block: nn.Module) -> int | None:
    attention: Any = getattr(block, "self_attn", None)
    of_model = getattr(getattr(attention, "config", None), "sliding_window", None)
    return getattr(attention, "sliding_window", of_model)


def round_up_packing(
    kwargs: dict[str, Any], tokens: int, window: int | None = None
) -> dict[str, Any]:
    """Round up the arguments of packed sequences of ``tokens`` in all.

    The longest length is not rounded beyond a sliding window that exceeds the length.
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


def _shape_key(hidden: Tensor, leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """Return the key of a capture; None if an argument cannot be captured."""
    shapes: list[Any] = [hidden.shape, hidden.dtype, hidden.device, spec]
    first: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if not leaf.is_cuda or leaf.requires_grad:
                return None
            # The same tensor twice is one argument: blocks may compare identities.
            shapes.append((leaf.shape, leaf.dtype, first.setdefault(id(leaf), i)))
        elif isinstance(leaf, _CONSTANTS):
            shapes.append((type(leaf), leaf))
        else:
            return None
    return tuple(shapes)
