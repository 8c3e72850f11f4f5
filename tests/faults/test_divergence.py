"""Divergence is noticed, marks checkpoints, and can stop the run."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import tiny_run
from safetensors.torch import load_file, save_file

from coat_vlm.checkpoint.metadata import read_progress

RESUME = ("--resume", "auto")


def tiny(data: Path, folder: Path, divergence: dict[str, Any] | None = None, **stage: Any) -> Any:
    recipe = tiny_run.tiny_recipe(data, folder / "run", divergence=divergence or {})
    recipe["stages"]["sft"].update(val_data=[], lr_scheduler_type="constant", save_steps=2)
    recipe["stages"]["sft"].update(stage)
    return recipe


def exploding(recipe: dict[str, Any]) -> dict[str, Any]:
    """The same run with a learning rate of 1000."""
    recipe = copy.deepcopy(recipe)
    recipe["stages"]["sft"]["language"] = {"train": True, "lr": 1e3}
    recipe["stages"]["sft"]["max_skipped_steps"] = 1000
    return recipe


def checkpoints(run: Path) -> dict[int, bool]:
    """Steps of the intact checkpoints, and whether they are marked."""
    folders = sorted((run / "sft/checkpoints").glob("step-*"))
    found = [read_progress(path) for path in folders if (path / "manifest.json").is_file()]
    return {progress.step: progress.spike for progress in found}


def kinds(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def test_exploded_checkpoints_push_out_no_good_one(tiny_data: Path, tmp_path: Path) -> None:
    """40 good steps, then a learning rate of 1000 with a checkpoint every second step."""
    recipe, run = tiny(tiny_data, tmp_path, {"window": 16}, max_steps=40), tmp_path / "run"
    assert tiny_run.train(recipe, tmp_path).returncode == 0
    assert checkpoints(run) == {38: False, 40: False}
    shutil.rmtree(run / "sft/model")
    worse = exploding(recipe)
    worse["stages"]["sft"]["max_steps"] = 48
    done = tiny_run.train(worse, tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING stage sft, step 42: " in done.stdout
    assert checkpoints(run) == {38: False, 40: False, 48: True}
    assert kinds(run, "divergence")[0]["step"] == 42
    # The remedy: a lower learning rate, from before the spike.
    shutil.rmtree(run / "sft/model")
    recipe["stages"]["sft"]["max_steps"] = 48
    recipe["divergence"] = {"action": "stop", "window": 16}
    done = tiny_run.train(recipe, tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "continues from" in done.stdout
    assert "step-00000040\n" in done.stdout
    assert max(tiny_run.losses(run)[40:]) < 5
    assert checkpoints(run) == {46: False, 48: False}


def test_stop_ends_the_run_and_names_the_good_checkpoint(tiny_data: Path, tmp_path: Path) -> None:
    recipe = tiny(
        tiny_data, tmp_path, {"action": "stop", "patience": 2, "window": 16}, max_steps=40
    )
    assert tiny_run.train(recipe, tmp_path).returncode == 0
    shutil.rmtree(tmp_path / "run/sft/model")
    worse = exploding(recipe)
    worse["stages"]["sft"]["max_steps"] = 48
    done = tiny_run.train(worse, tmp_path, *RESUME)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "step 43: the run has been diverging since step 42" in done.stderr
    assert "continue from step-00000040, saved before that, with --resume auto" in done.stderr


def test_a_stage_of_skipped_steps_saves_no_model(tiny_data: Path, tmp_path: Path) -> None:
    first = tiny(tiny_data, tmp_path / "first", max_steps=1)
    (tmp_path / "first").mkdir()
    assert tiny_run.train(first, tmp_path).returncode == 0
    start = tmp_path / "first/run/sft/model"
    weights = load_file(start / "model.safetensors")
    name = "language_model.model.norm.weight"
    weights[name][3] = 3e38  # what it multiplies is infinite
    save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    (start / "manifest.json").unlink()
    recipe = tiny(tiny_data, tmp_path, max_steps=6, max_skipped_steps=1000)
    recipe["init_from"] = str(start)
    done = tiny_run.train(recipe, tmp_path)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "no model is saved, because gradients were NaN or infinite in every step" in done.stderr
    assert not (tmp_path / "run/sft/model").exists()
    assert all(checkpoints(tmp_path / "run").values())


def test_a_missing_validation_image_loses_no_step(tiny_data: Path, tmp_path: Path) -> None:
    data = shutil.copytree(tiny_data, tmp_path / "data")
    held_out = shutil.copytree(tiny_data, tmp_path / "val")
    recipe = tiny(data, tmp_path, max_steps=8, save_steps=4, eval_steps=4)
    recipe["stages"]["sft"]["val_data"] = [{"name": "v", "path": str(held_out / "data.json")}]
    whole = {**recipe, "output_dir": str(tmp_path / "whole")}
    assert tiny_run.train(whole, tmp_path).returncode == 0
    hidden = (held_out / "5.png").rename(tmp_path / "5.png")
    done = tiny_run.train(recipe, tmp_path)
    assert done.returncode == 2
    assert "5.png" in done.stderr
    run = tmp_path / "run"
    assert checkpoints(run) == {4: False}
    assert kinds(run, "val") == []
    hidden.rename(held_out / "5.png")
    done = tiny_run.train(recipe, tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    for kind, key in (("val", "losses"), ("step", "loss"), ("step", "grad_norm")):
        ours, expected = (
            [(row["step"], row[key]) for row in kinds(tmp_path / name, kind)]
            for name in ("run", "whole")
        )
        assert ours == expected
