"""Weights, outputs and gradients that are not finite are named, and change nothing."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from family_folders import publish, settings_of
from safetensors.torch import load_file, save_file

from coat_cli.main import main
from coat_vlm.model.families import FAMILIES


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_bad_gradients_are_counted_and_then_stop_the_run(
    tiny_data: Path, tmp_path: Path, zero_stage: int
) -> None:
    recipe = tiny_run.tiny_recipe(tiny_data, tmp_path / "run", zero_stage=zero_stage)
    stage = recipe["stages"]["sft"]
    stage["language"] = {"train": True, "lr": 1e30}  # after the first step nothing is finite
    stage.update(max_skipped_steps=2, save_steps=1, lr_scheduler_type="constant", val_data=[])
    recipe["save_total_limit"] = 9
    done = tiny_run.train(recipe, tmp_path)
    assert done.returncode == 2, done.stderr[-3000:]
    assert re.search(
        r"step 4: gradients are NaN or infinite \(first in (language_model|projector)\S+, one of "
        r"\d+.*no weight was changed. 3 steps.*max_skipped_steps is 2",
        done.stderr,
    )
    steps = tiny_run.steps(tmp_path / "run")
    assert [row["skipped_steps"] for row in steps] == [0, 1, 2]
    assert [row["grad_norm"] is None for row in steps] == [False, True, True]
    # Skipped steps leave weights and states as they were.
    saved = sorted((tmp_path / "run/sft/checkpoints").glob("step-*/rank-00000-000.safetensors"))
    first, *others = (load_file(path) for path in saved)
    assert len(others) == 2
    for other in others:
        for name, value in first.items():
            assert value.equal(other[name]), name


def test_a_recipe_may_not_offload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "offload_optimizer=cpu"]) == 2
    assert "CPU Adam would replace the FP8 optimizer" in capsys.readouterr().err


FIRST = "qwen3_vl"
OTHERS = [
    pytest.param(name, r"(\S*(language|text)_model\S*\.)?layers\.1", 1, marks=pytest.mark.slow)
    for name in sorted(FAMILIES.keys() - {FIRST})
]
OTHERS.append(pytest.param(FIRST, r"model\.visual\.blocks\.1", 1, marks=pytest.mark.slow))


def start_from(kind: str, run: Path, folder: Path, data: Path) -> tuple[dict[str, Any], Path]:
    """A recipe that starts from a trained composed model or a published one, and its weights."""
    recipe = tiny_run.tiny_recipe(data, folder / "run", precision="coat")
    stage = recipe["stages"]["sft"]
    stage["data"][0]["select"] = "first 20"  # without the video
    stage |= {"val_data": [], "batch_size": 4, "micro_batch_size": 1}
    start = folder / kind
    if kind == "composed":
        shutil.copytree(run / "sft" / "model", start)
        (start / "manifest.json").unlink()
        recipe["init_from"] = str(start)
    else:
        publish(kind, start)
        recipe["model"], recipe["fp8"] = settings_of(start), {"bf16_forward": []}
    return recipe, start / "model.safetensors"


@pytest.mark.parametrize(
    ("kind", "value", "ranks"), [("composed", math.nan, 1), (FIRST, -math.inf, 2)]
)
def test_a_weight_that_is_not_finite_ends_before_training(
    kind: str, value: float, ranks: int, small_run: Path, tiny_data: Path, tmp_path: Path
) -> None:
    recipe, file = start_from(kind, small_run, tmp_path, tiny_data)
    weights = load_file(file)
    name = sorted(name for name, weight in weights.items() if weight.ndim == 2)[-1]
    weights[name][1, 2] = value
    save_file(weights, file, {"format": "pt"})
    done = tiny_run.train(recipe, tmp_path, ranks=ranks)
    assert done.returncode == 2, done.stderr[-3000:]
    assert f"{file.parent}: the weight {name} is NaN or infinite; start from" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("kind", "module", "ranks"),
    [
        ("composed", r"vision_tower\S*\.layers\.0", 2),
        ("composed", r"projector", 1),
        (FIRST, r"model\.language_model\.layers\.1", 1),
        *OTHERS,
    ],
)
def test_an_output_beyond_the_range_of_bf16_is_named(
    kind: str, module: str, ranks: int, small_run: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """In the first step, whose weights are finite."""
    recipe, file = start_from(kind, small_run, tmp_path, tiny_data)
    weights = load_file(file)
    large = [name for name in weights if re.match(rf"(model\.)?{module}\b.*weight", name)]
    assert large
    for name in large:
        if weights[name].ndim > 1:
            weights[name] = torch.where(weights[name] < 0, -3e37, 3e37).to(weights[name].dtype)
    save_file(weights, file, {"format": "pt"})
    done = tiny_run.train(recipe, tmp_path, ranks=ranks)
    assert done.returncode == 2, done.stderr[-3000:]
    assert re.search(
        rf"stage sft, step 1: the loss is (nan|inf), because the output of (model\.)?{module}\S* "
        r"is NaN or infinite \(above 3\.4e38 in BF16 and FP32\); no weight was changed",
        done.stderr,
    ), done.stderr[-2000:]
    assert not tiny_run.steps(tmp_path / "run")
    assert not list((tmp_path / "run/sft").glob("checkpoints/step-*"))
