"""A pool of FP32 scale buffers, preset to the smallest scale by one launch for many of them.

A kernel raises the scale that it finds from the least one (``tile.publish_scale``). To set each in
a launch of its own takes a CPU as long as the kernel's launch, so a chunk of them is set at a time.
Each is handed out once; a chunk's memory lives as long as one of its scales.

What somebody else orders or looks at gets memory of its own: in a CUDA graph, whose replay must set
the scale anew, and behind torch's dispatcher, which allows no result that shares an argument's
memory.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from coat_kernels.formats import MIN_SCALE
from coat_kernels.launch import current_stream

CHUNK = 256
"""Scales of a chunk: 4 KiB."""

_APART = 4
"""FP32 numbers from one to the next: ``launch`` knows kernels for multiples of 16 bytes."""

_free: dict[tuple[torch.device, int], list[Tensor]] = {}
"""By device and stream: a chunk is set in the order of its stream."""


class _Here(threading.local):
    """Of a thread: backward passes have threads of their own."""

    apart = False


_here = _Here()


@contextmanager
def memory_of_their_own() -> Iterator[None]:
    """Let new scales of this thread share no memory."""
    before, _here.apart = _here.apart, True
    try:
        yield
    finally:
        _here.apart = before


def new_scale(device: torch.device) -> Tensor:
    """A scale [], FP32, that of zeros, for the programs of a launch to raise together.

    See :func:`coat_kernels.device.publish_scale`. To be used on the current stream of ``device``,
    which is the current device.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _least((), device)
        stream = current_stream(device.index)
    if _here.apart:
        return _least((), device)
    try:
        return _free[device, stream].pop()
    except (KeyError, IndexError):  # not asked before: another thread may take the last one
        free = _chunk(device)
        scale = free.pop()
        _free[device, stream] = free
        return scale


def _least(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, MIN_SCALE, dtype=torch.float32, device=device)


def _chunk(device: torch.device) -> list[Tensor]:
    # Made while evaluating, they must still be good for training.
    with torch.inference_mode(False), torch.no_grad():
        scales = _least((CHUNK, _APART), device)[:, 0].unbind()
        # As data each has a version of its own: one that is changed spoils no other that autograd
        # has saved.
        return [scale.data for scale in scales]
