"""The processes of an evaluation. They share no weights: each has the whole model.

What they tell one another are small objects, over gloo, also on GPUs: then a rank that waits for a
slower one does not hold a NCCL kernel, and no rank needs another's GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from coat_vlm.distributed import ALONE, World

__all__ = ["ALONE", "World", "joined_ranks", "own_device"]

_PATIENCE = timedelta(days=2)
"""How long a rank waits for the slowest: the ranks meet only before and after a benchmark."""


@contextmanager
def joined_ranks() -> Iterator[World]:
    """The processes that torchrun started; one process that nobody launched is alone.

    ``device`` of the world is the CPU, over which the ranks talk; see :func:`own_device`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def own_device(name: str | None = None) -> torch.device:
    """The device of this process's model: ``name``, or its own GPU, or the CPU.

    ``cuda`` without a number is the process's own GPU: the first one would be everybody's.

    Raises:
        ValueError: there is no such device, no GPU, or there are more processes on this machine
            than GPUs.
    """
    if name is not None:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(
                f"unknown device {name!r}; allowed: cpu, cuda (each process's own GPU), cuda:N"
            ) from error
        if device != torch.device("cuda"):
            return device
    if not torch.cuda.is_available():
        if name is not None:
            raise ValueError(f"device {name!r}, but PyTorch finds no GPU here; use --device cpu")
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()}; start as "
            "many processes per machine as there are GPUs"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
