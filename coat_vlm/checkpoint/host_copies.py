"""Copies of tensors in host memory, so that training goes on while they are written."""

from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """Copies tensors into host memory that is allocated once and used again by later saves.

    The memory for tensors of a GPU is page-locked, so that the copies run at the speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._locked: list[Tensor] = []

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy in host memory; complete after :meth:`wait`, valid until the next one.

        Later copies of this name use the same memory.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._buffers[name] = buffer
            if tensor.is_cuda and buffer.numel():
                self._lock(buffer)
        return buffer.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait for the copies from a GPU."""
        if self._locked:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Free the memory."""
        for buffer in self._locked:
            _runtime().cudaHostUnregister(buffer.data_ptr())
        self._locked.clear()
        self._buffers.clear()

    def _lock(self, buffer: Tensor) -> None:
        """Lock the pages of a buffer; without permission the copy is slower, and still right."""
        # Not pin_memory=True, whose allocator rounds sizes up to a power of two.
        size = buffer.numel() * buffer.element_size()
        if _runtime().cudaHostRegister(buffer.data_ptr(), size, 0).value == 0:
            self._locked.append(buffer)


def _runtime() -> Any:
    return torch.cuda.cudart()
