"""Checkpoints of a stage: everything that a bit-exact continuation needs.

``RUN/<stage>/checkpoints/step-00000100/`` holds DeepSpeed's state (weights, optimizer), the random
generators of every rank and trainer.json. Of the order of data only the cursor is saved; it follows
from the seed and holds for any number of ranks.
"""

import json
import logging
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine

from coat_vlm.train.folder import problem_with, write_folder
from coat_vlm.train.world import World

logger = logging.getLogger(__name__)

_STATE = "state"


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


def save_checkpoint(
    folder: Path, engine: DeepSpeedEngine, progress: Progress, world: World, keep: int
) -> Path:
    """Save a checkpoint, then delete the oldest ones beyond ``keep``.

    Args:
        folder: the stage's checkpoints folder.
        engine: model and optimizer.
        progress: written as trainer.json.
        world: the processes of the run.
        keep: complete checkpoints to keep.

    Raises:
        OSError: the checkpoint could not be written; earlier ones are untouched.
    """
    target = folder / f"step-{progress.step:08d}"

    def write(temporary: Path) -> None:
        engine.save_checkpoint(str(temporary), tag=_STATE, save_latest=False)
        torch.save(_random_state(), temporary / f"random-{world.rank:05d}.pt")
        if world.is_main:
            text = json.dumps(asdict(progress), indent=1)
            (temporary / "trainer.json").write_text(text, encoding="utf-8")

    write_folder(target, world, write)
    if world.is_main:
        for path in _steps(folder)[keep:]:
            shutil.rmtree(path)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a stage; damaged ones are passed over with a warning."""
    for path in _steps(folder):
        problem = problem_with(path)
        if problem is None:
            return path
        logger.warning("checkpoint %s is not used: %s", path, problem)
    return None


def read_progress(checkpoint: Path) -> Progress:
    """trainer.json of a checkpoint."""
    return Progress(**json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8")))


def load_checkpoint(
    checkpoint: Path, engine: DeepSpeedEngine, expected: Progress, world: World
) -> Progress:
    """Put engine and random generators into the checkpoint's state.

    Args:
        checkpoint: a whole checkpoint.
        engine: built for the same stage of the same recipe.
        expected: what this run is; its step and bad samples are not compared.
        world: the processes of the run.

    Returns:
        How far the stage had got.

    Raises:
        ValueError: the checkpoint is of another stage, world size, ZeRO stage or precision.
    """
    progress = read_progress(checkpoint)
    for name in ("stage", "world_size", "zero_stage", "precision"):
        saved, wanted = getattr(progress, name), getattr(expected, name)
        if saved != wanted:
            raise ValueError(
                f"{checkpoint} was saved with {name}={saved}, this run has {name}={wanted}; resume "
                f"with {name}={saved}, or start a new run with init_from"
            )
    engine.load_checkpoint(str(checkpoint), tag=_STATE, load_module_strict=True)
    path = checkpoint / f"random-{world.rank:05d}.pt"
    _set_random_state(torch.load(path, weights_only=True))
    return progress


def _steps(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def _random_state() -> dict[str, Any]:
    version, keys, gauss = random.getstate()
    numpy_state: Mapping[str, Any] = np.random.get_state(legacy=False)
    state = numpy_state["state"]
    return {
        "python": [version, list(keys), gauss],
        "numpy": [state["key"].tolist(), state["pos"]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_state(saved: Mapping[str, Any]) -> None:
    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    keys, position = saved["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
