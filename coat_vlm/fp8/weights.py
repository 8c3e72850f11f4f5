"""FP8 weights, and whether they are cached: made when a GEMM needs them, or once for a step.

Outside of :func:`reused_weights` nothing is saved: the forward pass quantizes a weight row-major,
the backward pass quantizes it again, transposed, at the forward's scale (at its own where the
forward GEMM is BF16). Inside, both layouts are written at the first use and serve all later ones
(2 bytes per parameter): the weights must not change until the scope ends. Several weights with the
same input are one matrix under one scale.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from coat_kernels import TensorScaled, quantize_layouts, quantize_transposed
from coat_vlm.fp8 import saturation

ROOM = 0.8
"""Share of the free memory that FP8 weights may take: steps differ, and memory fragments."""

QUANTIZATION = "coat: quantization of weights"
"""The name of that range in a profile: its kernels also quantize gradients and activations."""

Key = tuple[Hashable, ...]
"""Says which weights are meant. Not an address: ZeRO-3 gathers one weight where another was. Nor
the tensors that a backward pass unpacks: under checkpointing those are other objects."""


_kept: dict[Key, tuple[TensorScaled, TensorScaled]] | None = None
"""Both layouts of the weights of the current scope; None outside of one."""

_UNNAMED = nullcontext()


@contextmanager
def reused_weights(enabled: bool = True) -> Iterator[None]:
    """Quantize every weight at most once until the scope ends.

    Args:
        enabled: False changes nothing, so that callers need no second path.
    """
    global _kept
    before = _kept
    _kept = {} if enabled else before
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
    return sum(rows.q.nbytes + other.q.nbytes for rows, other in (_kept or {}).values())


def key_of(layers: Sequence[nn.Linear]) -> Key:
    """The key of the layers' weights, valid as long as the layers live.

    A shallow copy of a layer has the key of the layer if that has an attribute ``fp8_key``.
    """
    return tuple(vars(layer).get("fp8_key", id(layer.weight)) for layer in layers)


def codes(key: Key, parts: Sequence[Tensor]) -> TensorScaled:
    """E4M3 [N, K] of weights [n_i, K], one below the other."""
    rows, _ = _quantize(parts, rows=True, transposed=False) if _kept is None else _both(key, parts)
    saturation.observe("weight", rows.q, lambda: torch.cat([part.detach() for part in parts]))
    return rows


def transposed_codes(key: Key, parts: Sequence[Tensor], scale: Tensor | None) -> TensorScaled:
    """E4M3 [K, N] of the same matrix, at the scale that :func:`codes` gave it, if it did."""
    if _kept is not None:
        return _both(key, parts)[1]
    if scale is None:
        return _quantize(parts, rows=False, transposed=True)[1]
    with _named():
        return quantize_transposed(_detached(parts), scale)


def _both(key: Key, parts: Sequence[Tensor]) -> tuple[TensorScaled, TensorScaled]:
    """Both layouts, quantized at the first call in a scope."""
    assert _kept is not None
    if key not in _kept:
        _kept[key] = _quantize(parts, rows=True, transposed=True)
    return _kept[key]


def _quantize(
    parts: Sequence[Tensor], rows: bool, transposed: bool
) -> tuple[TensorScaled, TensorScaled]:
    with _named():
        return quantize_layouts(_detached(parts), rows=rows, transposed=transposed)


def _named() -> AbstractContextManager[object]:
    """A range for the profiler, if one runs: naming it costs as much as an op."""
    return record_function(QUANTIZATION) if autograd_profiler._is_profiler_enabled else _UNNAMED


def _detached(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.detach().contiguous() for part in parts]
