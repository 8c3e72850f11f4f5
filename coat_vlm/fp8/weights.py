"""FP8 copies of weights: made when a GEMM needs them, or once for all micro-batches of a step.

Outside of :func:`reused_weights` nothing is kept: the forward pass quantizes a weight row-major,
the backward pass quantizes it again, transposed, at the forward's scale (at its own where the
forward product is BF16). Inside, both layouts are
written at the first use and serve all later ones (2 bytes per parameter): the weights must not
change until the scope ends. Several weights with the same input are one matrix under one scale.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from coat_kernels import E5M2, Format, TensorScaled, quantize_layouts, quantize_transposed
from coat_kernels.formats import FORMATS
from coat_vlm.fp8 import monitor

ROOM = 0.8
"""Share of the free memory that FP8 weights may take: steps differ, and memory fragments."""

QUANTIZATION = "coat: quantization of weights"
"""The name of that range in a profile: its kernels also quantize gradients and activations."""

Key = tuple[Hashable, ...]
"""Says which weights are meant. Not an address: ZeRO-3 gathers one weight where another was. Nor
the tensors that a backward pass unpacks: under checkpointing those are other objects."""


@dataclass(frozen=True, slots=True)
class Joint:
    """What a GEMM has to know of the layers, with the same input, that it is one for."""

    key: Key
    """Their weights."""
    gradients: Format
    """Format of the codes of their output's gradient."""
    bf16_forward: bool
    """Whether the forward product is that of the layers themselves, in the model's dtype."""


class _Kept:
    """The FP8 copies of one scope."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[TensorScaled, TensorScaled]] = {}

    def get(self, key: Key, parts: Sequence[Tensor]) -> tuple[TensorScaled, TensorScaled]:
        """Both layouts of the weights, quantized at the first call."""
        if key not in self._entries:
            with _named():
                self._entries[key] = quantize_layouts(_detached(parts), rows=True, transposed=True)
        return self._entries[key]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(a.q.nbytes + b.q.nbytes for a, b in self._entries.values())


_kept: _Kept | None = None

_UNNAMED = nullcontext()


@contextmanager
def reused_weights(enabled: bool = True) -> Iterator[None]:
    """Quantize every weight at most once until the scope ends.

    Args:
        enabled: False changes nothing, so that callers need no second path.
    """
    global _kept
    before = _kept
    _kept = _Kept() if enabled else before
    try:
        yield
    finally:
        _kept = before


@dataclass(slots=True)
class WeightReuse:
    """Decides for each optimizer step whether its micro-batches share FP8 weights."""

    policy: Literal["auto", "cache", "recompute"]
    nbytes: int
    """What the copies of all FP8 weights take."""
    device: torch.device
    fits: bool | None = None
    """Whether the copies fit beside a step, as found after the first."""

    def scope(self, micro_batches: int) -> AbstractContextManager[None]:
        """What the micro-batches of one step run in."""
        wanted = self.policy == "auto" and micro_batches > 1 and self.fits is True
        return reused_weights(self.policy == "cache" or wanted)

    def after_step(self) -> None:
        """Look once at the highest memory of a step without copies, while it is known."""
        if self.fits is None:
            self.fits = 0 < self.nbytes < self._room()

    def _room(self) -> float:
        """Bytes that stay free at the highest point of a step; a CPU's are not counted."""
        if self.device.type != "cuda":
            return float("inf")
        free, _ = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.max_memory_allocated(self.device)
        idle = torch.cuda.memory_reserved(self.device) - allocated
        return ROOM * (free + idle)


def are_reused() -> bool:
    """Whether a scope of :func:`reused_weights` is open."""
    return _kept is not None


def kept_bytes() -> int:
    """Bytes of FP8 copies that the current scope holds."""
    return 0 if _kept is None else _kept.nbytes


def key_of(layers: Sequence[nn.Linear]) -> Key:
    """The key of the layers' weights, valid as long as the layers live.

    A shallow copy of a layer has the key of the layer if that has an attribute ``fp8_key``.
    """
    return tuple(vars(layer).get("fp8_key", id(layer.weight)) for layer in layers)


def joint(layers: Sequence[nn.Linear]) -> Joint:
    """Layers with the same input as one; the first one's attributes hold for all.

    These are ``fp8_gradients``, the name of a format, and ``fp8_bf16_forward``.
    """
    settings = vars(layers[0])
    return Joint(
        key_of(layers),
        FORMATS[settings.get("fp8_gradients", E5M2.name)],
        settings.get("fp8_bf16_forward", False),
    )


def codes(key: Key, parts: Sequence[Tensor]) -> TensorScaled:
    """Codes [N, K] of weights [n_i, K], one below the other."""
    if _kept is not None:
        rows, _ = _kept.get(key, parts)
    else:
        with _named():
            rows, _ = quantize_layouts(_detached(parts), rows=True, transposed=False)
    monitor.observe_parts("weight", rows, parts)
    return rows


def transposed_codes(key: Key, parts: Sequence[Tensor], scale: Tensor | None) -> TensorScaled:
    """Codes [K, N] of the same matrix, at the scale that :func:`codes` gave it, if it did."""
    if _kept is not None:
        return _kept.get(key, parts)[1]
    with _named():
        if scale is None:
            return quantize_layouts(_detached(parts), rows=False, transposed=True)[1]
        return quantize_transposed(_detached(parts), scale)


def _named() -> AbstractContextManager[object]:
    """A range for the profiler, if one runs: naming it costs as much as an op."""
    return record_function(QUANTIZATION) if autograd_profiler._is_profiler_enabled else _UNNAMED


def _detached(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.detach().contiguous() for part in parts]
