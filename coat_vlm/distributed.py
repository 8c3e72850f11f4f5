"""The processes of a run: their ranks, their device, and sums over them.

Tells the C library to keep freed memory, which speeds up training on a CPU.
"""

import ctypes
import gc
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt (glibc, malloc/malloc.h)."""

_MIB = 2**20


def keep_freed_memory() -> bool:
    """Make glibc reuse freed blocks of up to 32 MiB; returns whether it took the settings.

    By default glibc returns memory to the system when much of it is free, as it is after every
    backward pass, and the next forward pass pays for a page fault per 4 KiB of its results: about
    a third of the time of a small model's step (docs/results.md). Kept memory serves later tensors
    of the process; up to 1 GiB of it may lie idle. Larger blocks are mapped one by one as before.
    Without glibc (macOS, musl) nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    # 32 MiB is the largest threshold that mallopt's manual allows.
    settings = ((_MMAP_THRESHOLD, 32), (_TRIM_THRESHOLD, 1024), (_TOP_PAD, 64))
    taken = [mallopt(parameter, mib * _MIB) for parameter, mib in settings]
    return all(taken)


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class World:
    """This process among the data parallel processes."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over all ranks, in FP64."""
        if self.size == 1:
            return [float(value) for value in values]
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.sum([float(flag)])[0] > 0

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks in order; small ones, as they are pickled on the way."""
        if self.size == 1:
            return [value]
        values: list[_T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum([0.0])


ALONE = World(rank=0, size=1, device=torch.device("cpu"))
"""One process that was not launched as a rank: no process group is needed."""


_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Where processes meet: what a launcher sets, and one process alone sets for itself."""


@contextmanager
def joined_world() -> Iterator[World]:
    """Join the processes that torchrun, deepspeed or SLURM started; one process needs no launcher.

    On a CPU also sets how the process keeps memory and how many threads it takes.

    The processes are left again at the end: a thread of gloo that lets go of a tensor while the
    interpreter shuts down aborts the process (status -6 where a launcher waits for 0 or 75). After
    an error NCCL's are not: it would wait for ranks that may still work.

    Raises:
        ValueError: a rank has no GPU of its own.
    """
    joined_before = dist.is_initialized()
    environment = {name: os.environ.get(name) for name in _RENDEZVOUS}
    world = _start()
    orderly = False
    try:
        yield world
        orderly = True
    except BaseException as error:
        orderly = isinstance(error, SystemExit)
        # The engine, which holds process groups, lives on in the frames that the error keeps.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        if not joined_before and (orderly or world.device.type == "cpu"):
            gc.collect()
            _leave()
        # Processes that this one starts later must not meet at a port that it may still hold.
        for name in _RENDEZVOUS:
            if environment[name] is None:
                os.environ.pop(name, None)


def _start() -> World:
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # On a CPU DeepSpeed compiles a shared-memory all-reduce at every first start (20 to 50 s, and
    # an error without a compiler); plain gloo does.
    __compatible_ops__["deepspeed_shm_comm"] = False
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    local_rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()}; start "
                "as many processes per node as there are GPUs"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        if size > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)


def _leave() -> None:
    from deepspeed import comm

    comm.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
