"""Saves a checkpoint: what the engine holds, into an atomic folder; old checkpoints are deleted."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from coat_vlm.checkpoint.atomic_folder import remove_folder, write_folder, write_json
from coat_vlm.checkpoint.load import checkpoints_in
from coat_vlm.checkpoint.metadata import Progress, contents_of, random_state, write_contents
from coat_vlm.checkpoint.partitions import Piece, frozen_piece, partitions, persistent_buffers
from coat_vlm.checkpoint.shards import ShardWriter
from coat_vlm.distributed import World


def save_checkpoint(
    folder: Path,
    engine: DeepSpeedEngine,
    progress: Progress,
    world: World,
    keep: int,
    describe: Callable[[Path], None] | None = None,
) -> Path:
    """Save a checkpoint, then delete the oldest ones beyond ``keep``.

    Later steps are deleted, too: this run was continued from before them because they are damaged.

    Args:
        folder: the stage's checkpoints folder.
        engine: model and optimizer, between two steps.
        progress: written as trainer.json.
        world: the processes of the run.
        keep: complete checkpoints to keep.
        describe: writes configuration, tokenizer and processor into a folder; for the main process.

    Raises:
        OSError: the checkpoint could not be written; earlier ones are untouched.
    """
    target = folder / f"step-{progress.step:08d}"

    def write(temporary: Path) -> None:
        writer = ShardWriter(temporary, world.rank)
        save_engine(engine, writer, world)
        writer.close()
        write_json(temporary / f"random-{world.rank:05d}.json", random_state())
        if world.is_main:
            write_contents(temporary, contents_of(engine))
            write_json(temporary / "trainer.json", asdict(progress))
            if describe is not None:
                (temporary / "model").mkdir()
                describe(temporary / "model")

    write_folder(target, world, write)
    if world.is_main:
        steps = checkpoints_in(folder)
        place = steps.index(target)
        for path in [*steps[:place], *steps[place + keep :]]:
            remove_folder(path)
    return target


def save_engine(engine: DeepSpeedEngine, writer: ShardWriter, world: World) -> None:
    """Hand this rank's share of weights and optimizer states to a writer.

    What all ranks have alike (all at stage 0, frozen parameters below stage 3) is shared out.

    Args:
        engine: the engine, between two steps.
        writer: where they go.
        world: the processes of the run.

    Raises:
        OSError: a file could not be written.
    """
    model: Any = engine.module
    optimizer: Any = engine.basic_optimizer
    alike = engine.zero_optimization_stage() == 0
    for number, partition in enumerate(partitions(engine)):
        if not alike or number % world.size == world.rank:
            # Not optimizer.state[...], which would leave an empty state behind.
            state = optimizer.state.get(partition.tensor)
            writer.add(partition.pieces, partition.tensor, state)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if not parameter.requires_grad:
            part = frozen_piece(name, parameter, owner=number % world.size == world.rank)
            if part is not None:
                writer.add((part[1],), part[0])
    if world.is_main:
        for name, buffer in persistent_buffers(model).items():
            writer.add((Piece(name, 0, buffer.numel(), 0),), buffer)
