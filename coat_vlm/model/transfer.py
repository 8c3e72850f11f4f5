"""From the CPU to the model's device without a wait."""

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; the CPU does not wait for the work that is queued there.

    An ordinary copy to a GPU returns when the GPU has done it, and so all that was queued before
    it. A copy from pinned memory is queued as a kernel is; torch's allocator keeps that memory
    until the copy has run.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
