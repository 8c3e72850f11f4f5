"""Watches loss and gradient norm of a stage, and warns, stops or goes back when they diverge.

Steps out of range do not enter the window, so a run that stays diverged stays out of range.

``rollback`` follows PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) and OLMo 2
(arXiv:2501.00656): it loads a checkpoint from before the spike and skips the batches in between.
The skips are in ``rollbacks.json`` of the stage, so that a resumed run skips the same batches.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from coat_data.mixture.sampler import SamplerState
from coat_data.saved_files import write_text
from coat_vlm.checkpoint.atomic_folder import read_json, remove_folder
from coat_vlm.checkpoint.load import FoundCheckpoint, find_checkpoint, list_checkpoints
from coat_vlm.checkpoint.manifest import find_problem
from coat_vlm.checkpoint.metadata import read_progress
from coat_vlm.checkpoint.verify import find_damage
from coat_vlm.config.recipe import DivergenceConfig
from coat_vlm.distributed import World
from coat_vlm.train.tracking import Metrics, read_entries

ROLLBACKS = "rollbacks.json"
"""File in a stage's folder."""

MIN_STEPS = 32
"""Steps in the window before deviations from its median count."""

_LOSS_FLOOR, _NORM_FLOOR = 0.02, 0.1
"""Smallest robust standard deviation of log(1 + loss) and of log(gradient norm)."""


def robust_z(window: Iterable[float], value: float, floor: float) -> float:
    """Return the distance of a value from the median in robust standard deviations.

    The standard deviation is 1.4826 times the median absolute deviation, as for a normal
    distribution, and at least ``floor``.
    """
    values = np.fromiter(window, dtype=np.float64)
    return (value - float(np.median(values))) / _spread(values, floor)


def _spread(values: np.ndarray, floor: float) -> float:
    return max(floor, 1.4826 * float(np.median(np.abs(values - np.median(values)))))


class Detector:
    """Finds steps whose loss or gradient norm is out of the usual range.

    The same entries give the same result, so all ranks and a resumed run agree without
    communication.

    Attributes:
        first: first step of the present spike; None if the last step was in range.
        applied: number of steps that changed the weights.
        skipped: number of steps that were skipped because of non-finite gradients.
    """

    def __init__(self, config: DivergenceConfig, vocab_size: int) -> None:
        self.first: int | None = None
        self.applied = 0
        self.skipped = 0
        self._config = config
        self._guess = math.log(max(2, vocab_size))
        self._limit: float | None = None
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)

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
            return (
                f"loss {loss:.4g}, above {limit:.4g} (twice that of guessing or of the first step)"
            )
        if norm == 0:  # an exploded model whose activations saturate: loss of guessing, no gradient
            return "the gradient norm is 0"
        if len(self._losses) < min(MIN_STEPS, self._config.window):
            return None
        threshold = self._config.threshold
        if robust_z(self._losses, math.log1p(max(0.0, loss)), _LOSS_FLOOR) > threshold:
            low, high = (math.expm1(x) for x in _range(self._losses, _LOSS_FLOOR, threshold))
            return f"loss {loss:.4g}, usual {max(0.0, low):.4g} to {high:.4g}"
        if norm and self._norms and robust_z(self._norms, math.log(norm), _NORM_FLOOR) > threshold:
            low, high = (math.exp(x) for x in _range(self._norms, _NORM_FLOOR, threshold))
            return f"gradient norm {norm:.4g}, usual {low:.4g} to {high:.4g}"
        return None


def _range(window: Iterable[float], floor: float, threshold: float) -> tuple[float, float]:
    values = np.fromiter(window, dtype=np.float64)
    middle, reach = float(np.median(values)), threshold * _spread(values, floor)
    return middle - reach, middle + reach


class Watchdog:
    """Acts on what :class:`Detector` finds in a stage.

    ``entries`` are the stage's of metrics.jsonl (:func:`read_step_entries`), on all ranks; those
    after the finished steps are not used.

    Attributes:
        skips: finished steps -> where the sampler continues after them, because of a rollback.
        finish_save: waits on all ranks for a checkpoint that is being written; called before
            training goes back.
    """

    def __init__(
        self,
        config: DivergenceConfig,
        folder: Path,
        world: World,
        vocab_size: int,
        entries: Sequence[Mapping[str, Any]],
        finished: int,
    ) -> None:
        self.skips: dict[int, SamplerState] = {}
        self.finish_save: Callable[[], None] = lambda: None
        self._config = config
        self._folder = folder
        self._world = world
        self._vocab_size = vocab_size
        self._rollbacks: list[dict[str, Any]] = world.gather(_read_rollbacks(folder))[0]
        for rollback in self._rollbacks:
            self._skip(rollback)
        self._entries = [_shorten(entry) for entry in entries if entry["step"] <= finished]
        self._detector = self._replay(self._entries)

    @property
    def spiking(self) -> bool:
        """Whether the last step was out of range; a checkpoint written now is marked."""
        return self._detector.first is not None

    def check(self, entry: Mapping[str, Any], state: SamplerState, metrics: Metrics) -> Path | None:
        """Check a step; return the checkpoint to which training goes back, if it must.

        Raises ValueError: ``stop``, too many rollbacks, or no checkpoint to go back to.
        """
        before = self._detector.first
        problem = self._detector.add(entry)
        self._entries.append(_shorten(entry))
        first, step = self._detector.first, int(entry["step"])
        if problem is None or first is None:
            return None
        if before is None:
            metrics.write(
                {"kind": "divergence", "stage": entry["stage"], "step": step, "problem": problem}
            )
            self._print(f"WARNING stage {entry['stage']}, step {step}: {problem}")
        if self._config.action == "warn" or step < first + self._config.patience - 1:
            return None
        words = (
            f"stage {entry['stage']}, step {step}: the run has been diverging since step {first} "
            f"({problem})"
        )
        self.finish_save()
        good = find_good_checkpoint(self._folder / "checkpoints", first - 1, self._world)
        number = len(self._rollbacks)
        if good is None:
            raise ValueError(
                f"{words}, and there is no earlier good checkpoint; lower the learning rates or "
                "raise warmup_ratio, and start over with --overwrite"
            )
        if self._config.action == "stop" or number >= self._config.max_rollbacks:
            done = f", after {number} rollbacks" if number else ""
            raise ValueError(
                f"{words}{done}; lower the learning rates or raise warmup_ratio, and continue from "
                f"{good.name}, saved before that, with --resume auto"
            )
        rollback = {
            "step": read_progress(good).step,
            "from": step,
            "sampler_state": list(state),
            "problem": problem,
        }
        self._rollbacks.append(rollback)
        self._skip(rollback)
        if self._world.is_main:
            write_text(self._folder / ROLLBACKS, json.dumps(self._rollbacks, indent=1))
        _remove_later(good, self._world)
        metrics.write({"kind": "rollback", "stage": entry["stage"], **rollback})
        self._print(f"{words}; back to {good.name}, skipping the batches up to step {step}")
        self._entries = [one for one in self._entries if one["step"] <= rollback["step"]]
        self._detector = self._replay(self._entries)
        return good

    def check_weights(self, model: nn.Module, stage: str) -> None:
        """Check the result of the stage before it is saved; all ranks must call this.

        Raises ValueError if every step was skipped, or weights are not finite.
        """
        bad = _find_bad_weight(model, self._world)
        where = f"; {bad} is NaN or infinite" if bad else ""
        if self._detector.skipped and not self._detector.applied:
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

    def _replay(self, entries: Iterable[Mapping[str, Any]]) -> Detector:
        detector = Detector(self._config, self._vocab_size)
        for entry in entries:
            detector.add(entry)
        return detector

    def _skip(self, rollback: Mapping[str, Any]) -> None:
        step = rollback["step"]
        self.skips = {at: state for at, state in self.skips.items() if at < step}
        self.skips[step] = SamplerState(*rollback["sampler_state"])

    def _print(self, text: str) -> None:
        if self._world.is_main:
            tqdm.write(text)


def read_step_entries(path: Path, stage: str, world: World) -> list[dict[str, Any]]:
    """Return what :class:`Detector` needs of a stage's entries in metrics.jsonl, on all ranks."""
    entries = [
        _shorten(entry)
        for entry in (read_entries(path) if world.is_main else ())
        if entry.get("kind") == "step" and entry.get("stage") == stage
    ]
    return world.gather(entries)[0]


def find_good_checkpoint(folder: Path, before: int, world: World) -> Path | None:
    """Return the newest intact checkpoint of an earlier step that is not marked."""
    candidates: list[Path] = []
    if world.is_main:
        for path in list_checkpoints(folder):
            if find_problem(path) is None:
                progress = read_progress(path)
                if progress.step < before and not progress.spike:
                    candidates.append(path)
    for path in world.gather(candidates)[0]:
        if find_damage(path, world) is None:
            return path
    return None


def choose_start(
    folder: Path,
    config: DivergenceConfig,
    entries: Sequence[Mapping[str, Any]],
    vocab_size: int,
    world: World,
) -> FoundCheckpoint:
    """Find the checkpoint from which a resumed stage continues.

    This is the newest one, unless the last step was out of range and ``action`` is not ``warn``:
    then it is one from before the spike, and later ones are deleted. Raises ValueError if all
    checkpoints are damaged.
    """
    detector = Detector(config, vocab_size)
    for entry in entries:
        detector.add(entry)
    if config.action != "warn" and detector.first is not None:
        good = find_good_checkpoint(folder, detector.first - 1, world)
        if good is not None:
            _remove_later(good, world)
            return FoundCheckpoint(path=good)
    return find_checkpoint(folder, world)


def _remove_later(checkpoint: Path, world: World) -> None:
    """Delete the checkpoints after one to which training goes back."""
    world.barrier()  # all ranks have read what they compare
    for path in list_checkpoints(checkpoint.parent) if world.is_main else ():
        if path > checkpoint:
            remove_folder(path)
    world.barrier()


def _shorten(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry.get(key) for key in ("step", "loss", "grad_norm", "skipped_steps")}


def _read_rollbacks(folder: Path) -> list[dict[str, Any]]:
    return read_json(folder / ROLLBACKS) if (folder / ROLLBACKS).is_file() else []


def _find_bad_weight(model: nn.Module, world: World) -> str | None:
    """Return the first parameter that is not finite on some rank; None if all are finite."""
    names, flags = [], []
    for name, parameter in model.named_parameters():
        own = getattr(parameter, "ds_tensor", parameter)  # this rank's part under ZeRO stage 3
        names.append(name)
        flags.append(own.detach().isfinite().all().to(world.device))
    bad = [name for name, good in zip(names, torch.stack(flags).tolist(), strict=True) if not good]
    found = [ranks[0] for ranks in world.gather(bad[:1]) if ranks]
    return min(found, key=names.index) if found else None
