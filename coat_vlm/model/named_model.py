"""Finds the model that a path refers to: a run, a checkpoint, an adapter or a model folder."""

from dataclasses import dataclass, replace
from pathlib import Path

from coat_vlm.config import STAGES, Recipe
from coat_vlm.config.load import load_run_recipe
from coat_vlm.model.adapter_folder import ADAPTER_CONFIG, read_adapter_config


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """The parts of a model, wherever they are; see :func:`find_model`."""

    path: Path
    """The weights, or what is added to the weights of a base."""
    folder: Path
    """config.json, tokenizer and processor, and the weights unless ``checkpoint`` has them."""
    checkpoint: Path | None = None
    adapter: Path | None = None
    """An adapter in peft's layout, to be merged into the other weights."""
    recipe: Recipe | None = None
    """The recipe of a run."""


def find_model(path: Path) -> NamedModel:
    """Return what ``path`` names.

    A run folder names the model of its last stage, ``RUN/STAGE/checkpoints/step-...`` the model
    with the weights of that step, and an adapter folder its base with the adapter. Everything else
    is returned as a model folder. FileNotFoundError: the run has not finished, or the base is
    missing.
    """
    if (path / "recipe.yaml").is_file():
        recipe = load_run_recipe(path / "recipe.yaml", unset_variables=True)
        folder = find_final_model(path, recipe)
        return NamedModel(path=folder, folder=folder, recipe=recipe)
    if (path / "trainer.json").is_file():
        return NamedModel(path=path, folder=path / "model", checkpoint=path)
    if not (path / ADAPTER_CONFIG).is_file() or (path / "config.json").is_file():
        return NamedModel(path=path, folder=path)
    base: str | None = read_adapter_config(path).get("base_model_name_or_path")
    files = (Path(base or "") / name for name in ("config.json", "trainer.json", "recipe.yaml"))
    if base is None or not any(file.is_file() for file in files):
        raise FileNotFoundError(
            f"{path} is an adapter of {base!r}, which is not a folder with a model; download it, "
            f"and write its folder into base_model_name_or_path of {path / ADAPTER_CONFIG}"
        )
    return replace(find_model(Path(base)), path=path, adapter=path, recipe=None)


def find_final_model(run_dir: Path, recipe: Recipe) -> Path:
    """Return ``run_dir/<last stage>/model``; FileNotFoundError if that stage has not finished."""
    stage = [stage for stage in STAGES if stage in recipe.stages][-1]
    model_dir = run_dir / stage / "model"
    if not (model_dir / "config.json").is_file():
        raise FileNotFoundError(
            f"{model_dir} does not exist: stage {stage!r} of this run has not finished; "
            "continue it with coat-vlm train ... --resume auto, or give a checkpoint "
            f"({run_dir / stage / 'checkpoints'}/step-...)"
        )
    return model_dir
