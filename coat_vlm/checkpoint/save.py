"""Saves checkpoints of an engine atomically, while training goes on, and deletes old ones.

A save copies the tensors of each rank to host memory, and a thread of each rank writes them
(:class:`.atomic_folder.FolderSave`). A failure is raised on all ranks when they meet next: at the
next save or at the end of the stage.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from coat_vlm.checkpoint.atomic_folder import (
    Check,
    FolderSave,
    make_temporary,
    remove_folder,
    save_error,
)
from coat_vlm.checkpoint.folder_files import FolderFiles
from coat_vlm.checkpoint.host_copies import HostCopies
from coat_vlm.checkpoint.keep import KeepRule, choose_deletions
from coat_vlm.checkpoint.load import list_checkpoints, path_step
from coat_vlm.checkpoint.manifest import list_files
from coat_vlm.checkpoint.metadata import (
    CONTENTS,
    TRAINER,
    Progress,
    capture_random_state,
    describe_contents,
    is_spike,
)
from coat_vlm.checkpoint.partitions import (
    Fragment,
    get_frozen_fragment,
    get_persistent_buffers,
    list_partitions,
)
from coat_vlm.checkpoint.shards import ShardWriter
from coat_vlm.distributed import World

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves the checkpoints of one stage, and deletes old ones when a new one is complete.

    All ranks must call :meth:`save` and :meth:`finish` at the same steps. ``describe`` writes
    configuration, tokenizer and processor into a folder, once. ``background`` writes copies of the
    tensors in a thread. ``losses`` returns validation losses by step, for ``keep.best``. ``check``
    is called on the main process before it writes, renames or deletes.
    """

    def __init__(
        self,
        folder: Path,
        engine: DeepSpeedEngine,
        world: World,
        keep: KeepRule,
        *,
        describe: Callable[[Path], None] | None = None,
        background: bool = True,
        losses: Callable[[], Mapping[int, float]] | None = None,
        check: Check | None = None,
    ) -> None:
        self.folder = folder
        self._engine = engine
        self._world = world
        self._keep = keep
        self._describe = describe
        self._description: dict[str, bytes] | None = None
        self._copies = HostCopies() if background else None
        self._losses = losses
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
        description = self._get_description() if self._world.is_main else {}
        if self._copies is not None:
            self._copies.wait()

        def write(folder: FolderFiles) -> None:
            shards.write(folder)
            folder.write_json(f"random-{rank:05d}.json", random_state)
            if self._world.is_main:
                folder.write_json(CONTENTS, contents)
                folder.write_json(TRAINER, asdict(progress))
                for name, data in description.items():
                    folder.write(f"model/{name}", [data])

        return write

    def _get_description(self) -> dict[str, bytes]:
        """Return the files of ``describe`` by name; the stage does not change them."""
        if self._description is None:
            self._description = {}
            if self._describe is not None:
                with tempfile.TemporaryDirectory(dir=self.folder, prefix=".tmp-model.") as name:
                    self._describe(Path(name))
                    for file in list_files(Path(name)):
                        self._description[file] = (Path(name) / file).read_bytes()
        return self._description

    def _delete_old(self, target: Path) -> None:
        """Delete the checkpoints that the rule does not keep; ``target`` is the newest one."""
        paths = {path_step(path): path for path in list_checkpoints(self.folder)}
        spikes = {step: is_spike(path) for step, path in paths.items()}
        losses = self._losses() if self._losses is not None else {}
        for step in choose_deletions(spikes, path_step(target), self._keep, losses):
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
