"""Watches loss and gradient norm of a stage, and warns or stops when they diverge.

Steps out of range do not enter the window, so a run that stays diverged stays out of range.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from coat_vlm.checkpoint.atomic_folder import remove_folder
from coat_vlm.checkpoint.load import FoundCheckpoint, find_checkpoint, list_checkpoints
from coat_vlm.checkpoint.manifest import find_problem
from coat_vlm.checkpoint.metadata import read_progress
from coat_vlm.checkpoint.partitions import get_own_values
from coat_vlm.checkpoint.save import CheckpointSaver
from coat_vlm.checkpoint.verify import find_damage
from coat_vlm.config.recipe import DivergenceConfig, Recipe
from coat_vlm.distributed import World
from coat_vlm.train.tracking import Metrics, print_on_main, read_entries

MIN_STEPS = 32
"""Steps in the window before deviations from its median count."""

_LOSS_FLOOR, _NORM_FLOOR = 0.02, 0.1
"""Smallest robust standard deviation of log(1 + loss) and of log(gradient norm)."""


def measure_spread(window: Iterable[float], floor: float) -> tuple[float, float]:
    """Return the median of values and their robust standard deviation, at least ``floor``.

    It is 1.4826 times the median absolute deviation, as for a normal distribution.
    """
    values = np.fromiter(window, dtype=np.float64)
    median = float(np.median(values))
    return median, max(floor, 1.4826 * float(np.median(np.abs(values - median))))


class Detector:
    """Finds steps whose loss or gradient norm is out of the usual range.

    The same entries give the same result, so all ranks and a resumed run agree without
    communication. ``entries`` are metrics of the finished steps. ``first`` is the first step of the
    present spike, None if the last step was in range.
    """

    def __init__(
        self, config: DivergenceConfig, vocab_size: int, entries: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self.first: int | None = None
        self.applied = 0  # steps that changed the weights
        self.skipped = 0  # steps with gradients that were not finite
        self._config = config
        self._guess = math.log(max(2, vocab_size))
        self._limit: float | None = None
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)
        for entry in entries:
            self.add(entry)

    def add(self, entry: Mapping[str, Any]) -> str | None:
        """Add a step's entry of metrics.jsonl; return what is out of range, None if nothing is."""
        loss: float | None = entry["loss"]
        norm: float | None = entry["grad_norm"]
        if loss is None or (norm is None and (entry.get("skipped_steps") or 0) > 0):
            self.skipped += 1
            problem = "loss or gradients are NaN or infinite"
        else:
            self.applied += 1
            self._limit = self._limit or 2 * max(self._guess, loss)
            problem = self._find(loss, norm, self._limit)
            if problem is None:
                self._losses.append(math.log1p(max(0.0, loss)))
                if norm:
                    self._norms.append(math.log(norm))
        if problem is None:
            self.first = None
        elif self.first is None:
            self.first = entry["step"]
        return problem

    def _find(self, loss: float, norm: float | None, limit: float) -> str | None:
        if loss > limit:
            return f"loss {loss:.4g}, above {limit:.4g} (twice the first step's or chance level)"
        if norm == 0:  # diverged until activations saturate: loss at chance level, no gradient
            return "the gradient norm is 0"
        if len(self._losses) < min(MIN_STEPS, self._config.window):
            return None
        threshold = self._config.threshold
        middle, spread = measure_spread(self._losses, _LOSS_FLOOR)
        if (math.log1p(max(0.0, loss)) - middle) / spread > threshold:
            low, high = (math.expm1(middle + side * threshold * spread) for side in (-1, 1))
            return f"loss {loss:.4g}, usual {max(0.0, low):.4g} to {high:.4g}"
        if norm and self._norms:
            middle, spread = measure_spread(self._norms, _NORM_FLOOR)
            if (math.log(norm) - middle) / spread > threshold:
                low, high = (math.exp(middle + side * threshold * spread) for side in (-1, 1))
                return f"gradient norm {norm:.4g}, usual {low:.4g} to {high:.4g}"
        return None


@dataclass(slots=True, kw_only=True)
class Watchdog:
    """Acts on what :class:`Detector` finds in a stage."""

    detector: Detector
    """It has seen the finished steps."""
    config: DivergenceConfig
    saver: CheckpointSaver
    metrics: Metrics
    world: World

    def check(self, entry: Mapping[str, Any]) -> None:
        """Check a step; ValueError if the run has diverged and must stop."""
        before, step = self.detector.first, int(entry["step"])
        problem, first = self.detector.add(entry), self.detector.first
        if problem is None or first is None:
            return
        where = f"stage {entry['stage']}, step {step}"
        if before is None:
            self.metrics.write(
                {"kind": "divergence", "stage": entry["stage"], "step": step, "problem": problem}
            )
            print_on_main(self.world, f"WARNING {where}: {problem}")
        if self.config.action == "warn" or step < first + self.config.patience - 1:
            return
        self.saver.finish()
        good = find_good_checkpoint(self.saver.folder, first - 1, self.world)
        remedy = (
            "lower the learning rates or raise warmup_ratio, and continue from "
            f"{good.name}, saved before that, with --resume auto"
            if good is not None
            else "there is no earlier good checkpoint: lower the learning rates or raise "
            "warmup_ratio, and start over with --overwrite"
        )
        raise ValueError(
            f"{where}: the run has been diverging since step {first} ({problem}); {remedy}"
        )


def check_initial_weights(
    model: nn.Module, recipe: Recipe, start: Path | None, world: World
) -> None:
    """Raise ValueError if a weight from which a stage starts is not finite; all ranks call this.

    ``start`` is the folder of the model, None for the recipe's own.
    """
    bad = _find_bad_weight(model, world, equal=True)
    if bad is not None:
        part = getattr(recipe.model, bad.partition("_")[0], None)  # vision_tower, language_model
        source = start or recipe.model.pretrained or getattr(part, "name_or_path", None)
        raise ValueError(
            f"{source}: the weight {bad} is NaN or infinite; start from another checkpoint"
        )


def check_weights(model: nn.Module, detector: Detector, stage: str, world: World) -> None:
    """Check the result of a stage before it is saved; all ranks must call this.

    Raises ValueError if every step was skipped, or weights are not finite.
    """
    bad = _find_bad_weight(model, world)
    where = f"; {bad} is NaN or infinite" if bad else ""
    if detector.skipped and not detector.applied:
        raise ValueError(
            f"stage {stage}: no model is saved, because gradients were NaN or infinite in "
            f"every step{where}; check the weights that the stage starts from, or lower the "
            "learning rates, and start over with --overwrite"
        )
    if bad:
        raise ValueError(
            f"stage {stage}: no model is saved{where}; lower the learning rates, and continue "
            "from before the spike with --resume auto divergence.action=stop"
        )


def read_step_entries(path: Path, stage: str, world: World) -> list[dict[str, Any]]:
    """Return what :class:`Detector` needs of a stage's entries in metrics.jsonl, on all ranks."""
    entries = [
        {key: entry.get(key) for key in ("step", "loss", "grad_norm", "skipped_steps")}
        for entry in (read_entries(path) if world.is_main else ())
        if entry.get("kind") == "step" and entry.get("stage") == stage
    ]
    return world.gather(entries)[0]


def find_good_checkpoint(folder: Path, before: int, world: World) -> Path | None:
    """Return the newest intact checkpoint of an earlier step that was not saved during a spike."""

    def list_candidates() -> list[Path]:
        intact = [path for path in list_checkpoints(folder) if find_problem(path) is None]
        saved = [(path, read_progress(path)) for path in intact]
        return [path for path, done in saved if done.step < before and not done.spike]

    candidates = world.run_on_rank0(list_candidates)
    return next((path for path in candidates if find_damage(path, world) is None), None)


def choose_start(
    folder: Path,
    config: DivergenceConfig,
    entries: Sequence[Mapping[str, Any]],
    vocab_size: int,
    world: World,
) -> FoundCheckpoint:
    """Find the checkpoint from which a resumed stage continues.

    This is the newest one, unless the last step was out of range and ``action`` is ``stop``: then
    it is one from before the spike, and later ones are deleted. Raises ValueError if all
    checkpoints are damaged.
    """
    first = None if config.action == "warn" else Detector(config, vocab_size, entries).first
    good = None if first is None else find_good_checkpoint(folder, first - 1, world)
    if good is None:
        return find_checkpoint(folder, world)
    world.barrier()  # all ranks have read what they compare

    def remove_later() -> None:
        for path in list_checkpoints(folder):
            if path > good:
                remove_folder(path)

    world.run_on_rank0(remove_later)
    return FoundCheckpoint(path=good)


def _find_bad_weight(model: nn.Module, world: World, *, equal: bool = False) -> str | None:
    """Return the first weight that is not finite; ``equal``: all ranks have all weights."""
    names, flags = [name for name, _ in model.named_parameters()], []
    mine = slice(world.rank if equal else 0, None, world.size if equal else 1)
    for parameter in [*model.parameters()][mine]:
        part = get_own_values(parameter)
        # On a CPU 16 times as fast as isfinite, which makes copies; NaN propagates.
        ends = torch.stack(part.aminmax()) if part.numel() else part
        flags.append(ends.isfinite().all().to(world.device))
    found = torch.stack(flags).tolist()
    bad = [name for name, good in zip(names[mine], found, strict=True) if not good]
    first = [ranks[0] for ranks in world.gather(bad[:1]) if ranks]
    return min(first, key=names.index, default=None)
