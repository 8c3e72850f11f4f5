"""Prepares a run folder: which recipe keys may change when a run continues, and what is removed.

A key may change freely (:data:`MAY_CHANGE`), only with ``--allow-changed-data``
(:data:`CHANGES_DATA`), or not at all (:data:`FIXED`, with the reason). In a stage that has
saved nothing yet every key may change; in a finished stage none.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from coat_data.folder_lock import hold_lock
from coat_data.mixture.packing import Sampler
from coat_data.mixture.sampler import SamplerState
from coat_vlm.checkpoint.atomic_folder import recover_folders, remove_folder
from coat_vlm.checkpoint.load import list_checkpoints
from coat_vlm.checkpoint.manifest import find_problem
from coat_vlm.config import STAGES, Fp8Config, Recipe
from coat_vlm.config.load import (
    ENVIRONMENT,
    ReadRecipe,
    compute_digests,
    describe_recipe,
    load_run_recipe,
    save_recipe,
)
from coat_vlm.run.lock import LOCK
from coat_vlm.train.model_setup import check_run_folder
from coat_vlm.train.step_log import BAD_SAMPLES
from coat_vlm.train.tracking import METRICS, append_entry, rewind

RECIPE = "recipe.yaml"
"""The recipe of a run; a folder that has one contains a run."""

_DATA = "it changes the samples or their order"

_MODULES = ("vision", "projector", "language")

MAY_CHANGE = (
    *("name", "output_dir", "num_workers", "log_every_steps", "tracking.**", "eval_sets.**"),
    *("eval_every", "eval_samples", "async_save"),
    *("data_timeout_s", "collective_timeout_s", "save_total_limit", "zero_stage"),
    *("master_weights", "monitor.**", "divergence.**", "memory.**", "cudnn_attention"),
    *("fp8.weights", "fp8.cuda_graphs", "fp8.recompute_qkv", "network", "network.**", "limits.**"),
    *("model.image.max_pixels", "model.video.max_frame_pixels", "model.video.max_total_pixels"),
    *("model.video.backend", "stages.*.val_data.**"),
    *(f"stages.*.{name}.lr" for name in _MODULES),
    *(f"stages.*.{key}" for key in ("lr_scheduler_type", "warmup_ratio", "min_lr_ratio")),
    *(f"stages.*.{key}" for key in ("max_grad_norm", "weight_decay", "max_skipped_steps")),
    *(f"stages.*.{key}" for key in ("max_bad_samples", "save_steps", "eval_steps", "balance")),
    *(f"stages.*.{key}" for key in ("gradient_checkpointing", "micro_batch_size")),
    "stages.*.sequence_parallel",
    # The rows themselves are compared with the start's.
    *(f"stages.*.data.*.{key}" for key in ("path", "media_root", "format", "follow_links")),
)
"""Keys that may change at a resume (``*`` matches one part, ``**`` all that follow)."""

CHANGES_DATA = (
    "stages.*.data.**",
    f"{ENVIRONMENT}.*",
    "stages.*.packing.images",
    "model.max_length",
    "model.max_pixels",
    "model.image.max_tiles",
    "model.video.num_frames",
    "model.video.fps",
    "model.video.max_frames",
)
"""Keys that change the samples or their order: only with ``--allow-changed-data``."""

FIXED: Mapping[str, str] = {
    "seed": "it seeds the initialization and the order of samples",
    "init_from": "training started from these weights",
    "precision": "the saved weights and optimizer states belong to this precision",
    "fp8.**": "it selects what is quantized, and the saved states depend on it",
    "model.**": "the weights in the checkpoint belong to this model and its inputs",
    "stages.*.lora.**": "the adapters in the checkpoint have this shape and scale",
    "stages.*.dpo.**": "the finished steps minimized this loss",
    **dict.fromkeys(
        [f"stages.*.{name}.train" for name in _MODULES],
        "the optimizer states belong to the modules that train",
    ),
    "stages.*.betas": "the saved moments are averages over these horizons",
    "stages.*.eps": "the saved moments were scaled for it",
    "stages.*.template": "it determines the tokens of every sample",
    "stages.*.batch_size": "finished steps and the learning rate schedule count batches of it",
    "stages.*.packing.**": "it determines the order of samples",
}
"""Keys that may not change, with the reason; the first pattern that matches gives it."""

State = Literal["finished", "started"]


@dataclass(frozen=True, slots=True)
class Change:
    """A recipe key with another value than at the start of the run."""

    key: tuple[str, ...]
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{'.'.join(self.key)}: {_format(self.before)} -> {_format(self.after)}"


def prepare_run_folder(
    run_dir: Path,
    recipe: Recipe,
    *,
    continues: bool,
    overwrite: bool,
    restarted: str | None = None,
    allow_changed_data: bool = False,
) -> None:
    """Prepare the run folder, on the main process; save the recipe.

    ``restarted`` is the stage that starts over although it is finished. Raises ValueError if the
    folder contains a run that this one must not use.
    """
    saved = run_dir / RECIPE
    if overwrite and saved.is_file():
        _empty_folder(run_dir)
    check_run_folder(run_dir, continues=continues)
    run_dir.mkdir(parents=True, exist_ok=True)
    recover_folders(run_dir)
    for stage in STAGES:
        recover_folders(run_dir / stage)
        recover_folders(run_dir / stage / "checkpoints")
    if saved.is_file():
        changes = find_changes(load_run_recipe(saved), recipe)
        states = find_stage_states(run_dir)
        if restarted is not None:
            states.pop(restarted, None)
        check_changes(changes, states, saved, allow_changed_data=allow_changed_data)
        apply_changes(run_dir, changes, states)
    save_recipe(recipe, saved)


def reset_stage(run_dir: Path, name: str, finished: int, *, fresh: bool) -> None:
    """Remove what a stage wrote after its finished steps.

    If it starts over (``fresh``), its old model and checkpoints must not pass for new ones.
    """
    for file in (METRICS, BAD_SAMPLES):
        rewind(run_dir / file, name, finished)
    if not fresh:
        return
    for old in (run_dir / name / "model", *list_checkpoints(run_dir / name / "checkpoints")):
        if old.exists():
            remove_folder(old)


def find_stage_states(run_dir: Path) -> dict[str, State]:
    """Return the stages that are finished, or started and have a checkpoint."""
    states: dict[str, State] = {}
    for name in STAGES:
        if find_problem(run_dir / name / "model") is None:
            states[name] = "finished"
        elif list_checkpoints(run_dir / name / "checkpoints"):
            states[name] = "started"
    return states


def find_changes(old: Recipe, new: Recipe) -> list[Change]:
    """Return all keys that differ, in the order of the recipe.

    ``master_weights`` is compared by what ``auto`` means on this machine, and an environment
    variable by its digest.
    """
    changes = [*_compare((), _settings(old), _settings(new))]
    saved, now = old.digests if isinstance(old, ReadRecipe) else {}, compute_digests(old)
    changes += _compare((ENVIRONMENT,), {**now, **saved}, {**saved, **now})
    gpu = torch.cuda.is_available()
    stored = ["low_bits" if one.has_low_bits(gpu=gpu) else "fp32" for one in (old, new)]
    if stored[0] != stored[1]:
        changes.append(Change(("master_weights",), *stored))
    return changes


def check_changes(
    changes: Sequence[Change], states: Mapping[str, State], path: Path, *, allow_changed_data: bool
) -> None:
    """Raise ValueError if a key changed that must not; the message names each with its reason.

    ``path`` is the recipe.yaml of the run, for the message.
    """
    objections = [(change, _find_objection(change, states)) for change in changes]
    data = any(objection == _DATA for _, objection in objections)
    lines = [
        f"  {change}: {objection}"
        for change, objection in objections
        if objection is not None and not (allow_changed_data and objection == _DATA)
    ]
    if not lines:
        return
    flag = "; --allow-changed-data accepts the keys that change samples or their order"
    remedy = f"restore these keys{flag if data else ''}, or start a new run in another output_dir"
    shown = "\n".join(lines)
    raise ValueError(
        f"the recipe differs from {path}, which this run continues, in keys that must not change:\n"
        f"{shown}\n{remedy}; a new run can start from saved weights with init_from"
    )


def check_length(stage: str, total_steps: int, finished: int) -> None:
    """Raise ValueError if a stage has finished more steps than it is to have."""
    if total_steps < finished:
        raise ValueError(
            f"stage {stage} would have {total_steps} steps, but {finished} are finished; raise "
            f"max_steps or epochs to at least {finished} steps"
        )


def continue_sampler(
    sampler: Sampler, state: SamplerState, allow_changed_data: bool
) -> SamplerState:
    """Return the state at which a sampler continues.

    With changed data, the packing window may have fewer sequences than were used; it then starts
    over, or ValueError is raised if changed data is not allowed.
    """
    try:
        sampler.step(state)
    except ValueError:
        if not (allow_changed_data and state.rows):
            raise
        return SamplerState(state.position)
    return state


def apply_changes(run_dir: Path, changes: Sequence[Change], states: Mapping[str, State]) -> None:
    """Print the changes, record them in metrics.jsonl (``kind: resume``), remove what is stale.

    Stale are the measured lengths and split positions of rows (coat_vlm/train/data.py) if a key
    changed that may change the samples.
    """
    if not changes:
        return
    lines = [f"  {change}" for change in changes]
    tqdm.write("\n".join([f"changed since {run_dir / 'recipe.yaml'} was written:", *lines]))
    names = [name for name in STAGES if states.get(name) == "started"] or [*states][-1:]
    if names:
        saved = list_checkpoints(run_dir / names[0] / "checkpoints")
        intact = [path.name for path in saved if find_problem(path) is None]
        step = int(intact[0].removeprefix("step-")) if intact else 0
        entry = {"kind": "resume", "stage": names[0], "step": step, "changes": [*map(str, changes)]}
        append_entry(run_dir / METRICS, entry)
    if all(_matches_any(change.key, MAY_CHANGE) for change in changes):
        return
    for name in STAGES:
        if states.get(name) != "finished":
            for path in (run_dir / name).glob("*.npz"):
                path.unlink()


def _empty_folder(folder: Path) -> None:
    """Delete an earlier run, but not the lock that this process holds.

    The recipe is deleted last: without it, what a killed process left would not pass for a run.
    LockError if another process writes into a folder of the run, as an evaluation with --to.
    """
    for lock in [path for path in folder.rglob(LOCK) if path.parent != folder]:
        with hold_lock(lock, "train"):
            pass
    for path in sorted(folder.iterdir(), key=lambda path: path.name == RECIPE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not path.name.startswith(LOCK):
            path.unlink()


def _find_objection(change: Change, states: Mapping[str, State]) -> str | None:
    if change.key[0] == "stages":
        name, *rest = change.key[1:]
        state = states.get(name)
        if state == "finished":
            return f"stage {name} is finished"
        if state is None:
            position = [*STAGES].index(name)
            later = next((other for other in STAGES[position:] if other in states), None)
            return later and f"stage {later}, which comes after {name}, has begun"
        if not rest:
            return f"stage {name} has begun"
        if rest in (["max_steps"], ["epochs"]):
            before, after = change.before, change.after
            numbers = {type(before), type(after)} <= {int, float}  # no ${NAME}
            lowered = numbers and after < before
            return "it may only be raised" if lowered else None
    elif not states:
        return None  # nothing is saved
    if _matches_any(change.key, MAY_CHANGE):
        return None
    if _matches_any(change.key, CHANGES_DATA):
        return _DATA
    reasons = (reason for pattern, reason in FIXED.items() if _matches(change.key, pattern))
    return next(reasons, "finished steps depend on it")


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as nested mappings; lists of sources become mappings by name."""
    settings = describe_recipe(recipe)
    settings["fp8"] = dataclasses.asdict(recipe.fp8 or Fp8Config())
    del settings["master_weights"]
    for stage in settings["stages"].values():
        for key in ("data", "val_data"):
            stage[key] = {source["name"]: source for source in stage[key]}
    return settings


def _compare(key: tuple[str, ...], before: Any, after: Any) -> Iterator[Change]:
    """Yield the leaves that differ; an absent section has only absent keys."""
    if before == after:
        return
    named = key[:1] == ("stages",) and (len(key) == 2 or key[2:-1] in (("data",), ("val_data",)))
    if named and None in (before, after):
        yield Change(key, before and "present", after and "added")
    elif isinstance(before, Mapping) or isinstance(after, Mapping):
        before, after = before or {}, after or {}
        for name in dict.fromkeys((*before, *after)):
            yield from _compare((*key, str(name)), before.get(name), after.get(name))
    else:
        yield Change(key, before, after)


def _matches_any(key: tuple[str, ...], patterns: Iterable[str]) -> bool:
    return any(_matches(key, pattern) for pattern in patterns)


def _matches(key: tuple[str, ...], pattern: str) -> bool:
    parts = pattern.split(".")
    if parts[-1] == "**":
        parts.pop()
        key = key[: len(parts)]
    return len(parts) == len(key) and all(
        part in ("*", name) for part, name in zip(parts, key, strict=True)
    )


def _format(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value)
