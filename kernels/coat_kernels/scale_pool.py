"""A pool of FP32 scale buffers; one launch initializes many of them to the smallest scale.

A kernel raises a scale from the smallest one (``device.publish_scale``). Initializing each scale
with its own launch takes the CPU as long as the kernel's launch, so a chunk is initialized at a
time. Each scale is used once; a chunk's memory lives as long as any of its scales.

Two kinds of scales are allocated separately: in a CUDA graph, whose replay must initialize the
scale again, and behind torch's dispatcher, where no result may share memory with an argument.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from coat_kernels.formats import MIN_SCALE
from coat_kernels.launch import current_stream

CHUNK = 256
"""Scales per chunk: 4 KiB."""

_STRIDE = 4
"""Stride in FP32 elements: ``launch`` caches kernels for 16-byte aligned addresses only."""

_free: dict[tuple[torch.device, int], list[Tensor]] = {}
"""(device, stream) -> unused scales: a chunk is initialized in the order of its stream."""


class _ThreadState(threading.local):
    """Thread-local settings: backward passes run in their own threads."""

    apart = False


_state = _ThreadState()


@contextmanager
def allocate_separately() -> Iterator[None]:
    """Allocate new scales of this thread separately, outside the pool."""
    before, _state.apart = _state.apart, True
    try:
        yield
    finally:
        _state.apart = before


def new_scale(device: torch.device) -> Tensor:
    """Return a scale [], FP32, with the smallest value, for the programs of a launch to raise.

    Use it on the current stream of ``device``, which must be the current device.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _smallest((), device)
        stream = current_stream(device.index)
    if _state.apart:
        return _smallest((), device)
    try:
        return _free[device, stream].pop()
    except (KeyError, IndexError):  # no check before: another thread may take the last one
        free = _chunk(device)
        scale = free.pop()
        _free[device, stream] = free
        return scale


def _smallest(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, MIN_SCALE, dtype=torch.float32, device=device)


def _chunk(device: torch.device) -> list[Tensor]:
    # A chunk created in inference mode must support training.
    with torch.inference_mode(False), torch.no_grad():
        scales = _smallest((CHUNK, _STRIDE), device)[:, 0].unbind()
        # With .data each scale has its own version counter: changing one does not invalidate
        # others that autograd has saved.
        return [scale.data for scale in scales]
