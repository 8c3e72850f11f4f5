"""The files of a run folder before training: what an earlier run left, and what must be removed."""

import shutil
from pathlib import Path

from coat_data.saved_files import FormatVersionError
from coat_vlm.checkpoint.atomic_folder import recover_folders, remove_folder
from coat_vlm.checkpoint.load import list_checkpoints
from coat_vlm.config import STAGES, Recipe
from coat_vlm.config.load import load_recipe, save_recipe
from coat_vlm.run.lock import LOCK
from coat_vlm.train.bad_samples import BAD_SAMPLES
from coat_vlm.train.model_setup import check_run_folder
from coat_vlm.train.resume import apply_changes, check_changes, find_changes, find_stage_states
from coat_vlm.train.tracking import METRICS, rewind

RECIPE = "recipe.yaml"
"""The recipe of a run; a folder that has one contains a run."""


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
        changes = find_changes(_load_saved_recipe(saved), recipe)
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


def _empty_folder(folder: Path) -> None:
    """Delete an earlier run, but not the lock that this process holds.

    The recipe is deleted last: without it, what a killed process left would not pass for a run.
    """
    for path in sorted(folder.iterdir(), key=lambda path: path.name == RECIPE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not path.name.startswith(LOCK):
            path.unlink()


def _load_saved_recipe(path: Path) -> Recipe:
    """Read a run's recipe.yaml; a damaged one is a ValueError that says how to continue."""
    try:
        return load_recipe(str(path))
    except FormatVersionError:
        raise
    except ValueError as error:
        raise ValueError(
            f"{error}\n{path} is the recipe with which this run started; if it is damaged, delete "
            "it and continue with the same recipe and --resume auto"
        ) from error
