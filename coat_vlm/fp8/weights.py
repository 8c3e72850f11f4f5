"""FP8 weights: quantized for each GEMM, or cached for the micro-batches of a step.

Outside of :func:`reused_weights` nothing is cached: the forward pass quantizes a weight row-major,
and the backward pass quantizes it again, transposed, with the forward's scale (with a new scale if
the forward GEMM is BF16). Inside, the first use writes both layouts, and later uses read them
(2 bytes per parameter): the weights must not change until the scope ends. Weights with the same
input are one fused matrix with one scale.
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

MAX_SHARE = 0.8
"""Largest share of the free memory for FP8 weights: steps differ, and memory fragments."""

QUANTIZATION = "coat: quantization of weights"
"""Name of the profiler range: kernels in it also quantize gradients and activations elsewhere."""

Key = tuple[Hashable, ...]
"""Identifies weights. Addresses do not: ZeRO-3 gathers one weight where another was. Neither do the
tensors that a backward pass unpacks: under checkpointing those are other objects."""


_cache: dict[Key, tuple[TensorScaled, TensorScaled]] | None = None
"""Both layouts of the weights of the current scope; None outside of a scope."""

_UNNAMED = nullcontext()


@contextmanager
def reused_weights(enabled: bool = True) -> Iterator[None]:
    """Quantize every weight at most once until the scope ends.

    Args:
        enabled: if False, the context has no effect.
    """
    global _cache
    before = _cache
    _cache = {} if enabled else before
    try:
        yield
    finally:
        _cache = before


@dataclass(slots=True)
class WeightReuse:
    """Decides for each optimizer step whether its micro-batches share FP8 weights."""

    policy: Literal["auto", "cache", "recompute"]
    nbytes: int
    """Bytes of both layouts of all FP8 weights."""
    device: torch.device
    fits: bool | None = None
    """Whether the cache fits into the memory that a step leaves; None before the second step."""
    steps: int = 0
    """Steps until ``fits`` is known."""

    def scope(self, micro_batches: int) -> AbstractContextManager[None]:
        """Return the context for the micro-batches of one step."""
        wanted = self.policy == "auto" and micro_batches > 1 and self.fits is True
        return reused_weights(self.policy == "cache" or wanted)

    def after_step(self) -> None:
        """After the second step, check whether the cache fits beside the step's peak memory.

        In the first one the optimizer creates its states after the passes, so that they are not in
        memory together with the activations.
        """
        self.steps += 1
        if self.fits is not None or self.steps < 2:
            return
        available = float("inf")  # on a CPU
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            allocated = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            limit = total * torch.cuda.get_per_process_memory_fraction(self.device)
            available = MAX_SHARE * (min(free, limit - reserved) + reserved - allocated)
        self.fits = 0 < self.nbytes < available


def are_reused() -> bool:
    """Whether a scope of :func:`reused_weights` is open."""
    return _cache is not None


def saved_bytes() -> int:
    """Return the bytes of FP8 weights that the current scope has saved."""
    return sum(rows.q.nbytes + other.q.nbytes for rows, other in (_cache or {}).values())


def key_of(layers: Sequence[nn.Linear]) -> Key:
    """Return the key of the layers' weights, valid during the lifetime of the layers.

    A shallow copy has the key of its original if the original has an attribute ``fp8_key``.
    """
    return tuple(vars(layer).get("fp8_key", id(layer.weight)) for layer in layers)


def quantize_weight(key: Key, parts: Sequence[Tensor]) -> TensorScaled:
    """Return E4M3 [N, K] of weights [n_i, K], concatenated along N."""
    rows, _ = _quantize(key, parts, rows=True)
    saturation.observe("weight", rows.q, lambda: torch.cat([part.detach() for part in parts]))
    return rows


def quantize_weight_transposed(
    key: Key, parts: Sequence[Tensor], scale: Tensor | None
) -> TensorScaled:
    """Return E4M3 [K, N] of the same matrix, with the scale of :func:`quantize_weight` if given."""
    if _cache is not None or scale is None:
        return _quantize(key, parts, rows=False)[1]
    with _profiler_range():
        return quantize_transposed(_detached(parts), scale)


def _quantize(key: Key, parts: Sequence[Tensor], rows: bool) -> tuple[TensorScaled, TensorScaled]:
    """Return one layout, the other is empty; in a scope both, quantized by the first call."""
    if _cache is not None and key in _cache:
        return _cache[key]
    both = _cache is not None
    with _profiler_range():
        found = quantize_layouts(_detached(parts), rows=rows or both, transposed=not rows or both)
    if _cache is not None:
        _cache[key] = found
    return found


def _profiler_range() -> AbstractContextManager[object]:
    """Return a named range if a profiler runs: naming costs as much as an op."""
    return record_function(QUANTIZATION) if autograd_profiler._is_profiler_enabled else _UNNAMED


def _detached(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.detach().contiguous() for part in parts]
