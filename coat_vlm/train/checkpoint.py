"""Checkpoints of a stage: everything that a continuation needs, at any number of ranks.

``RUN/<stage>/checkpoints/step-00000100/`` holds

- ``trainer.json``: how far the stage had got (:class:`Progress`);
- ``contents.json``: names, shapes and dtypes of all parameters, settings of the parameter groups;
- ``rank-*.json`` and ``rank-*.safetensors``: weights and optimizer states (:mod:`.shards`);
- ``random-*.json``: each rank's random generators;
- ``model/``: configuration, tokenizer and processor, for ``coat-vlm export``;
- ``manifest.json``: the size and SHA-256 of each of these files.

At the same number of ranks and ZeRO stage a run continues bit for bit. Of the order of data only
the cursor is saved; it follows from the seed and holds for any number of ranks.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from coat_vlm.optim.moments import codec
from coat_vlm.train.contents import Contents, SavedParameter, read_contents, write_contents
from coat_vlm.train.engine_state import load_engine, save_engine
from coat_vlm.train.folder import problem_inside, remove_folder, write_folder
from coat_vlm.train.partitions import (
    full_shape,
    groups_by_name,
    model_of,
    optimizer_of,
    persistent_buffers,
)
from coat_vlm.train.random_state import random_state, set_random_state
from coat_vlm.train.shards import Shards, ShardWriter
from coat_vlm.train.world import ALONE, World

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a stage has got; trainer.json."""

    stage: str
    step: int
    world_size: int
    zero_stage: int
    precision: str
    bad_samples: int
    cursor: tuple[int, int]
    """How far the order of data is used: :class:`coat_data.order.Cursor`."""
    bf16_blocks: list[str] = field(default_factory=list)
    """FP8 blocks that the monitor sent back to BF16."""


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
        _write_json(temporary / f"random-{world.rank:05d}.json", random_state())
        if world.is_main:
            write_contents(temporary, _contents(engine))
            _write_json(temporary / "trainer.json", asdict(progress))
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


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a stage, newest first; some may be damaged."""
    return sorted(folder.glob("step-*"), reverse=True)


def latest_checkpoint(folder: Path, world: World = ALONE) -> Path | None:
    """The newest whole checkpoint of a stage; damaged ones are passed over with a warning.

    Every file of it is read and compared with its SHA-256.

    Args:
        folder: the stage's checkpoints folder.
        world: the processes that share the reading; all must call this.

    Returns:
        None where no checkpoint was saved yet.

    Raises:
        ValueError: there are checkpoints, but all are damaged.
    """
    problems = []
    for path in checkpoints_in(folder):
        problem = problem_inside(path, world)
        if problem is None:
            return path
        problems.append(f"{path.name}: {problem}")
        if world.is_main:
            logger.warning(
                "checkpoint %s is not used: %s; it is deleted when the next one is saved",
                path,
                problem,
            )
    if problems:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(problems)}; put whole copies there, "
            "or delete the folder to start the stage again"
        )
    return None


def read_progress(checkpoint: Path) -> Progress:
    """trainer.json of a checkpoint."""
    return Progress(**json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8")))


def load_checkpoint(
    checkpoint: Path, engine: DeepSpeedEngine, expected: Progress, world: World
) -> Progress:
    """Put engine and random generators into the checkpoint's state.

    The number of ranks and the ZeRO stage may be others than those that saved: then FP8 moments are
    rounded once more, to the groups of the new partitions; weights and FP32 moments stay exact.

    Args:
        checkpoint: a whole checkpoint.
        engine: built for the same stage of the same recipe, before its first step.
        expected: what this run is; only stage and precision are compared.
        world: the processes of the run.

    Returns:
        How far the stage had got.

    Raises:
        ValueError: the checkpoint is of another stage, precision, model or optimizer.
    """
    contents = read_contents(checkpoint)  # first: it says so if an earlier version wrote this
    progress = read_progress(checkpoint)
    for name in ("stage", "precision"):
        saved, wanted = getattr(progress, name), getattr(expected, name)
        if saved != wanted:
            raise ValueError(
                f"{checkpoint} was saved with {name}={saved}, this run has {name}={wanted}; resume "
                f"with {name}={saved}, or start a new run with init_from"
            )
    contents.check(_contents(engine), str(checkpoint))
    load_engine(engine, Shards(checkpoint))
    for group, settings in zip(_groups(engine), contents.groups, strict=True):
        _set_lr(group, settings["lr"])
    path = checkpoint / f"random-{world.rank:05d}.json"
    if path.is_file():
        set_random_state(json.loads(path.read_text(encoding="utf-8")))
    else:  # more ranks than saved: dropout must not repeat what it drew in the first steps
        torch.manual_seed(torch.initial_seed() + 1_000_003 * progress.step)
    return progress


def _contents(engine: DeepSpeedEngine) -> Contents:
    groups = groups_by_name(engine)
    parameters = {
        name: SavedParameter(
            shape=full_shape(parameter),
            dtype=str(parameter.dtype).removeprefix("torch."),
            group=groups.get(name),
        )
        for name, parameter in model_of(engine).named_parameters()
    }
    settings = [
        {"codec": codec(optimizer_of(engine), group), "lr": float(group["lr"])}
        for group in _groups(engine)
    ]
    buffers = {
        name: tuple(buffer.shape) for name, buffer in persistent_buffers(model_of(engine)).items()
    }
    return Contents(parameters=parameters, buffers=buffers, groups=settings)


def _groups(engine: DeepSpeedEngine) -> list[dict[str, Any]]:
    return optimizer_of(engine).param_groups


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)  # an optimizer that is captured in a CUDA graph keeps its tensor
    else:
        group["lr"] = lr


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
