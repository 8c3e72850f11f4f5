"""Saves checkpoints of an engine atomically, while training goes on, and deletes old ones.

A save copies the tensors of each rank to host memory, and a thread of each rank writes them
(:class:`.atomic_folder.FolderSave`). A failure is raised on all ranks when they meet next: at the
next save or at the end of the stage.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from coat_vlm.checkpoint.atomic_folder import (
    Check,
    FolderSave,
    make_temporary,
    remove_folder,
    save_error,
)
from coat_vlm.checkpoint.load import list_checkpoints, path_step
from coat_vlm.checkpoint.manifest import FolderFiles
from coat_vlm.checkpoint.metadata import (
    CONTENTS,
    TRAINER,
    Progress,
    capture_random_state,
    is_spike,
)
from coat_vlm.checkpoint.partitions import (
    describe_contents,
    get_frozen_fragment,
    get_persistent_buffers,
    list_partitions,
)
from coat_vlm.checkpoint.shards import Fragment, ShardWriter
from coat_vlm.distributed import World

logger = logging.getLogger(__name__)


def choose_deletions(spikes: Mapping[int, bool], newest: int, last: int) -> list[int]:
    """Return the steps of the checkpoints to delete; never ``newest``, the one just completed.

    The ``last`` ones stay. ``spikes``: step of each checkpoint -> whether loss or gradient norm had
    diverged then. Such a checkpoint never takes the place of a good one, and stays only while there
    are fewer. Later ones than ``newest`` are another process's.
    """
    earlier = sorted(step for step in spikes if step < newest)
    good = [step for step in earlier if not spikes[step]]
    others = last if spikes[newest] else last - 1
    kept = {newest, *good[max(0, len(good) - others) :]}
    marked = [step for step in reversed(earlier) if spikes[step]]
    kept.update(marked[: max(0, last - len(kept))])
    return [step for step in earlier if step not in kept]


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
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(buffer.data_ptr())
        self._locked.clear()
        self._buffers.clear()

    def _lock(self, buffer: Tensor) -> None:
        """Lock the pages of a buffer; without permission the copy is slower, and still right."""
        # Not pin_memory=True, whose allocator rounds sizes up to a power of two.
        runtime: Any = torch.cuda.cudart()
        if runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0).value == 0:
            self._locked.append(buffer)


class CheckpointSaver:
    """Saves the checkpoints of one stage, and deletes old ones when a new one is complete.

    All ranks must call :meth:`save` and :meth:`finish` at the same steps. ``description``
    has configuration, tokenizer and processor as files by name. ``background`` writes copies of the
    tensors in a thread. ``check`` is called on the main process before it writes, renames or
    deletes.
    """

    def __init__(
        self,
        folder: Path,
        engine: DeepSpeedEngine,
        world: World,
        keep: int,
        *,
        description: Mapping[str, bytes] | None = None,
        background: bool = True,
        check: Check | None = None,
    ) -> None:
        self.folder = folder
        self._engine = engine
        self._world = world
        self._keep = keep
        self._description = description or {}
        self._copies = HostCopies() if background else None
        self._check = check
        self._pending: FolderSave | None = None

    def save(self, progress: Progress) -> Path:
        """Save a checkpoint between two steps; it is complete after :meth:`finish`.

        First waits for the one before. Raises OSError if one of both could not be written.
        """
        self.finish()
        target = self.folder / f"step-{progress.step:08d}"
        temporary = self._world.run_on_rank0(partial(self._begin, target))
        save = self._pending = FolderSave(temporary, target, self._world, self._check)
        try:
            write = self._copy(progress)
        except Exception as error:  # for example no memory for the copies
            save.fail(error)
        else:
            delete_old = partial(self._delete_old, target)
            if self._copies is None:
                save.run(write, delete_old)
            else:
                save.start(write, delete_old)
        if self._copies is None:
            self.finish()
        return target

    def finish(self) -> None:
        """Wait on all ranks until the last checkpoint is complete; OSError if it is not."""
        save, self._pending = self._pending, None
        if save is None:
            return
        save.wait()
        failures = self._world.gather(None if save.failure is None else f"{save.failure}")
        rank = next((rank for rank, failure in enumerate(failures) if failure is not None), None)
        if rank is None:
            return
        if self._world.is_main:
            shutil.rmtree(save.temporary, ignore_errors=True)
        if save.failure is not None and not isinstance(save.failure, OSError | RuntimeError):
            raise save.failure
        where = f"rank {rank}: " if rank else ""  # rank 0 names the rank that reported to it
        reason = f"{where}{failures[rank]}"
        raise save_error(save.target, reason) from save.failure

    def close(self) -> None:
        """Finish this rank's part of a save after an error, and free the host memory."""
        save, self._pending = self._pending, None
        if save is not None:
            save.hurry()
            save.wait()
            if save.failure is not None:
                logger.warning("%s was not saved: %s", save.target, save.failure)
        if self._copies is not None:
            self._copies.close()

    def _begin(self, target: Path) -> Path:
        if self._check is not None:
            self._check()
        return make_temporary(target)

    def _copy(self, progress: Progress) -> Callable[[FolderFiles], None]:
        """Copy what a checkpoint contains; return a function that writes this rank's files."""
        rank = self._world.rank
        shards = ShardWriter(rank, None if self._copies is None else self._copies.copy)
        save_engine_state(self._engine, shards, self._world)
        contents = asdict(describe_contents(self._engine))
        random_state = capture_random_state()
        if self._copies is not None:
            self._copies.wait()

        def write(folder: FolderFiles) -> None:
            shards.write(folder)
            folder.write_json(f"random-{rank:05d}.json", random_state)
            if self._world.is_main:
                folder.write_json(CONTENTS, contents)
                folder.write_json(TRAINER, asdict(progress))
                for name, data in self._description.items():
                    folder.write(f"model/{name}", [data])

        return write

    def _delete_old(self, target: Path) -> None:
        paths = {path_step(path): path for path in list_checkpoints(self.folder)}
        spikes = {step: is_spike(path) for step, path in paths.items()}
        for step in choose_deletions(spikes, path_step(target), self._keep):
            if self._check is not None:
                self._check()
            try:
                remove_folder(paths[step])
            except OSError as error:  # the new checkpoint is complete
                logger.warning("the old checkpoint %s was not deleted: %s", paths[step], error)


def save_engine_state(engine: DeepSpeedEngine, writer: ShardWriter, world: World) -> None:
    """Add this rank's share of weights and optimizer states to a checkpoint.

    Replicated tensors (all at stage 0, frozen parameters below stage 3) are distributed over the
    ranks.
    """
    model: Any = engine.module
    optimizer: Any = engine.basic_optimizer
    replicated = engine.zero_optimization_stage() == 0
    for number, partition in enumerate(list_partitions(engine)):
        if not replicated or number % world.size == world.rank:
            # optimizer.state[...] would insert an empty state.
            state = optimizer.state.get(partition.tensor)
            writer.add(partition.fragments, partition.tensor, state)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if not parameter.requires_grad:
            part = get_frozen_fragment(name, parameter, owner=number % world.size == world.rank)
            if part is not None:
                writer.add((part[1],), part[0])
    if world.is_main:
        for name, buffer in get_persistent_buffers(model).items():
            writer.add((Fragment(name, 0, buffer.numel(), 0),), buffer)
