"""Joins the processes of a run: ranks, device and small collectives.

On a CPU this module also configures malloc to keep freed memory, which speeds up training.
"""

import ctypes
import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt (glibc, malloc/malloc.h)."""


def keep_freed_memory() -> None:
    """Make glibc reuse freed blocks of up to 32 MiB, if this is glibc, and keep up to 1 GiB free.

    By default it returns memory to the system after every backward pass, and the next forward pass
    causes a page fault per 4 KiB of results: about a third of the step time of a small model
    (docs/experiments/data_speed.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        # 32 MiB is the largest threshold that mallopt's manual allows.
        for parameter, mib in ((_MMAP_THRESHOLD, 32), (_TRIM_THRESHOLD, 1024), (_TOP_PAD, 64)):
            mallopt(parameter, mib * 2**20)


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class World:
    """Rank and device of this process, and collectives over the data parallel processes."""

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
        """Return whether the flag is set on any rank."""
        return self.sum([float(flag)])[0] > 0

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks in order; for small values, since they are pickled."""
        if self.size == 1:
            return [value]
        values: list[_T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def run_on_rank0(self, function: Callable[[], _T]) -> _T:
        """Call a function on rank 0 only, and return its result on every rank.

        If it raises, the other ranks raise an OSError or ValueError with the same text, or
        RuntimeError for an exception that is neither.
        """
        if self.size == 1:
            return function()
        outcome: tuple[_T | None, tuple[type[Exception], str] | None] = (None, None)
        failure: Exception | None = None
        if self.is_main:
            try:
                outcome = (function(), None)
            except Exception as error:
                failure = error
                kinds = (kind for kind in (OSError, ValueError) if isinstance(error, kind))
                outcome = (None, (next(kinds, RuntimeError), f"{error}"))
        outcomes = [outcome]
        dist.broadcast_object_list(outcomes, src=0, device=self.device)
        value, raised = outcomes[0]
        if failure is not None:
            raise failure
        if raised is not None:
            raise raised[0](raised[1])
        return value  # pyright: ignore[reportReturnType]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum([0.0])


class Stopped(SystemExit):
    """Raised on all ranks after a signal, when the checkpoint is saved, with the exit status."""


ALONE = World(rank=0, size=1, device=torch.device("cpu"))
"""A single process without a process group."""


_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of the rendezvous, set by a launcher or by :func:`_start`."""


@contextmanager
def join_world(timeout_s: float | None = None) -> Iterator[World]:
    """Initialize the process group of torchrun, deepspeed or SLURM, or of a single process.

    On a CPU this also configures malloc and the number of threads. ``timeout_s`` limits a
    collective operation; by default DeepSpeed's limit. ValueError if there is no GPU for this rank.
    """
    joined_before = dist.is_initialized()
    environment = {name: os.environ.get(name) for name in _RENDEZVOUS}
    world = _start(timeout_s)
    orderly = False
    try:
        yield world
        orderly = True
    except BaseException as error:
        orderly = isinstance(error, Stopped)
        # The frames of the error refer to the engine, which refers to process groups.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        # A gloo thread that frees a tensor while the interpreter shuts down aborts the process
        # (status -6). Destroying NCCL's group would wait for ranks that may still be working, after
        # an error or a signal to this rank only.
        if not joined_before and (orderly or world.device.type == "cpu"):
            from deepspeed import comm

            gc.collect()
            comm.destroy_process_group()
        # Child processes that start later must not use a port that this one may still hold.
        for name in _RENDEZVOUS:
            if environment[name] is None:
                os.environ.pop(name, None)


def _start(timeout_s: float | None) -> World:
    import deepspeed
    from deepspeed.constants import default_pg_timeout
    from deepspeed.ops import __compatible_ops__

    # On a CPU DeepSpeed compiles a shared-memory all-reduce at the first start (20 to 50 s, and an
    # error without a compiler); gloo is sufficient.
    __compatible_ops__["deepspeed_shm_comm"] = False
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:  # finds a free port
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    local_rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"no GPU for local rank {local_rank}: this node has {torch.cuda.device_count()}; "
                "start at most one process per GPU"
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
        limit = default_pg_timeout if timeout_s is None else timedelta(seconds=timeout_s)
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=limit
        )
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
