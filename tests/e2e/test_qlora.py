"""QLoRA as a user runs it: two ranks at ZeRO-2, exports, and recipes that cannot work."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from coat_cli.main import main


def make_recipe(data: Path, run: Path, **changes: Any) -> dict[str, Any]:
    recipe = tiny_run.tiny_recipe(data, run, save_total_limit=9, **changes)
    recipe["stages"]["sft"].update(vision={"train": False}, max_steps=4, save_steps=2)
    recipe["stages"]["sft"]["lora"] = {"rank": 4, "alpha": 8, "quantize": "nf4"}
    return recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "coat"}, "coat stores frozen weights in FP8"),
        ({"precision": "bf16", "zero_stage": 3}, "set zero_stage to 0, 1 or 2"),
    ],
)
def test_recipes_that_are_refused(
    tiny_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(make_recipe(tiny_data, tmp_path / "run", **changes)))
    assert main(["train", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_does_not_count_nf4(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(make_recipe(tiny_data, tmp_path / "run", precision="bf16")))
    assert main(["plan", str(path)]) == 2
    assert "does not know the memory" in capsys.readouterr().err


def test_a_run_resumes_and_exports_the_original_weights(tiny_data: Path, tmp_path: Path) -> None:
    """Two ranks; a resumed stage ends with the same losses; merged: the start's weights + BA."""
    pytest.importorskip("bitsandbytes")
    recipe = make_recipe(tiny_data, tmp_path / "run", zero_stage=2, precision="bf16")
    done = tiny_run.train(recipe, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    shutil.rmtree(again / "sft/model")
    shutil.rmtree(again / "sft/checkpoints/step-00000004")
    text = (again / "recipe.yaml").read_text()
    (again / "recipe.yaml").write_text(text.replace(str(tmp_path / "run"), str(again)))
    done = tiny_run.train(
        {**recipe, "output_dir": str(again)}, tmp_path, "--resume", "auto", ranks=2
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = tiny_run.losses(tmp_path / "run")
    assert tiny_run.losses(again) == losses
    del recipe["stages"]["sft"]["lora"]["quantize"]
    recipe["stages"]["sft"]["max_steps"] = 1
    done = tiny_run.train({**recipe, "output_dir": str(tmp_path / "plain")}, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tiny_run.losses(tmp_path / "plain")[0] != losses[0]
    model = load_file(tmp_path / "run/sft/model/model.safetensors")
    adapters = load_file(tmp_path / "run/sft/model/adapter/adapter_model.safetensors")
    step = tmp_path / "run/sft/checkpoints/step-00000002"
    exported = tmp_path / "exported"
    assert main(["export", "--model", str(step), "--to", str(exported), "--format", "adapter"]) == 0
    base = load_file(exported / "base/model.safetensors")
    layers = [n.removesuffix(".lora_A.weight") for n in adapters if n.endswith("lora_A.weight")]
    assert layers
    for layer in layers:
        a, b = (adapters[f"{layer}.lora_{side}.weight"] for side in "AB")
        name = layer.removeprefix("base_model.model.") + ".weight"
        assert torch.allclose(model[name], base[name] + 2 * (b @ a), atol=1e-7, rtol=0), name
        assert b.abs().max() > 1e-5
