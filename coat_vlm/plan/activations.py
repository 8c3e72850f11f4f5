"""Measures the memory that one micro-batch saves for backward, and its peak memory.

Nothing is computed. Tensors on torch's ``meta`` device have shapes and storage sizes, but no
memory. The real model on ``meta`` allocates, saves and frees the same tensors as on a GPU, in the
same order, within seconds.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coat_vlm.config import MODULES
from coat_vlm.fp8.weights import list_stored
from coat_vlm.model.vlm import module_parameters

_ATEN: Any = torch.ops.aten
_FLASH = 1
"""Value of at::SDPBackend."""


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of live storages of a device type that were allocated in this context.

    ``peak`` may be set, to measure a part of a computation.
    """

    def __init__(self, device: str, ignore: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._device = device
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # by address of the storage
        self._ignored = {s._cdata: s for s in (tensor.untyped_storage() for tensor in ignore)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation; replace the result of operations that need values."""
        if func is _ATEN._fused_sdp_choice.default and args[0].device.type == "meta":
            result = _FLASH
        elif func is _ATEN.addmm.dtype_out and args[0].device.type == "meta":
            result = (kwargs or {})["out"]  # on meta, torch 2.11 takes the dtype for a factor
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self._watch(leaf)
        self.peak = max(self.peak, self.live)
        if func is _ATEN._scaled_dot_product_flash_attention_backward.default:
            _, query, key = args[:3]
            workspace = flash_workspace_bytes(query.shape, key.shape[1], query.element_size())
            self.peak = max(self.peak, self.live + workspace)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes and key not in self._ignored:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._forget, key)
            self.live += self._sizes[key]

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


@contextmanager
def use_flash_attention() -> Iterator[None]:
    """Run attention on ``meta`` through the flash kernel, as SDPA does on a GPU.

    cuDNN's kernel saves tensors of the same sizes; SDPA's formula on ``meta`` all probabilities.
    """
    # Torch's function is replaced: checkpointed blocks are recomputed without function modes.
    plain = F.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type != "meta":
            how = {"scale": scale, "enable_gqa": enable_gqa}
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **how)
        # A sliding window comes as a mask; the kernel for masks saves the same tensors.
        channels = query.shape[-1]
        if missing := -channels % 8:  # SDPA pads the heads before it calls the kernel
            scale = scale or channels**-0.5
            query, key, value = (F.pad(x, (0, missing)) for x in (query, key, value))
        out = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :channels] if missing else out

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def flash_workspace_bytes(query: torch.Size, key_heads: int, element_size: int) -> int:
    """Return the bytes that flash attention's backward pass allocates in addition to gradients.

    ``mha_bwd`` in pytorch, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
    allocates row sums and a query gradient in FP32, with lengths rounded up to 128 and head widths
    to 32 (above 128, to 64). If query heads share keys, it also allocates gradients of keys and
    values for every query head. ``query`` is [B, H, T, D].
    """
    batch, heads, length, channels = query
    length = -(-length // 128) * 128
    multiple = 32 if channels <= 128 else 64
    rounded = -(-channels // multiple) * multiple
    accumulators = 4 * batch * heads * length * (rounded + 1)
    expanded = 2 * element_size * batch * heads * query[2] * channels
    return accumulators + (expanded if key_heads != heads else 0)


PARTS = (*MODULES, "output")  # the output layer with the loss, which is not in "language"


@dataclass(frozen=True, slots=True)
class Activations:
    """Memory of a forward and a backward pass in bytes, without parameters and their gradients."""

    saved: dict[str, float]
    """Bytes at the end of the forward pass by part (:data:`PARTS`), with the loss's gradients."""
    forward_peak: float
    backward: tuple[tuple[int, float], ...]
    """Pairs (gradient elements completed so far, peak since the previous gradient)."""

    @property
    def total_saved(self) -> float:
        """Bytes at the start of the backward pass."""
        return sum(self.saved.values())

    def peak(self, bytes_per_gradient: float = 0.0) -> float:
        """Return the peak of both passes if completed gradients stay, at this size per element."""
        backward = (live + bytes_per_gradient * finished for finished, live in self.backward)
        return max(self.forward_peak, *backward)

    def scale(self, factor: float) -> "Activations":
        """Return an approximation for another micro-batch: all sizes times ``factor``."""
        return self._combine(self, lambda size, _: factor * size)

    def extrapolate(self, other: "Activations", amount: float) -> "Activations":
        """Extrapolate linearly: ``amount`` 0 gives this object, 1 gives the other."""
        return self._combine(other, lambda a, b: a + amount * (b - a))

    def _combine(self, other: "Activations", of: Callable[[float, float], float]) -> "Activations":
        return Activations(
            {part: of(size, other.saved[part]) for part, size in self.saved.items()},
            of(self.forward_peak, other.forward_peak),
            tuple(
                (finished, of(a, b))
                for (finished, a), (_, b) in zip(self.backward, other.backward, strict=True)
            ),
        )


def trace_inputs(model: Any, inputs: Mapping[str, Any]) -> Activations:
    """Run both passes of a micro-batch on ``meta`` and record their memory.

    ``model`` is converted, with ``requires_grad`` and train mode set.
    """
    stored = [tensor for weight in list_stored(model) for tensor in weight]
    own = [*model.parameters(), *model.buffers(), *stored]
    memory = LiveMemory("meta", own)
    backward: list[tuple[int, float]] = []
    with use_flash_attention(), memory, _free_gradients(model, memory, backward):
        with _measure_parts(model, memory) as saved:
            loss = model(**inputs, skip_logits=True).loss
        forward_peak = memory.peak
        memory.peak = memory.live
        loss.backward()
    backward.append((backward[-1][0] if backward else 0, memory.peak))
    return Activations(
        {part: float(size) for part, size in saved.items()},
        forward_peak,
        tuple(backward),
    )


@contextmanager
def _measure_parts(model: Any, memory: LiveMemory) -> Iterator[dict[str, int]]:
    """Yield the bytes by which the forward pass of each part raises the live memory."""
    output: nn.Module = model.get_output_embeddings()
    saved: dict[str, int] = dict.fromkeys(PARTS, 0)
    running: list[str] = []
    before = 0

    def count() -> None:
        nonlocal before
        if running:
            saved[running[-1]] += memory.live - before
        before = memory.live

    def enter(name: str, *_: object) -> None:
        count()
        running.append(name)

    def leave(*_: object) -> None:
        count()
        running.pop()

    with ExitStack() as hooks:
        called = [("output", output)]
        for name, part in module_parameters(model).items():
            called += [(name, module) for module in part.modules() if module is not output]
        for name, module in called:
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(module.register_forward_hook(leave))
        yield saved


@contextmanager
def _free_gradients(
    model: nn.Module, memory: LiveMemory, finished: list[tuple[int, float]]
) -> Iterator[None]:
    """Free each complete gradient, and record the peak up to then.

    :meth:`Activations.peak` adds the gradients again, because their lifetime depends on ZeRO.
    """
    elements = 0

    def note(parameter: Tensor) -> None:
        nonlocal elements
        finished.append((elements, memory.peak))
        elements += parameter.numel()
        parameter.grad = None
        memory.peak = memory.live

    with ExitStack() as hooks:
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(note))
        yield
        finished.append((elements, memory.peak))
