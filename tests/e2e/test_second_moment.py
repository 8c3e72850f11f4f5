"""A run whose second moments are rounded otherwise than today's default would: what resume says."""

import json
import runpy
from pathlib import Path

import yaml

training = runpy.run_path(str(Path(__file__).with_name("test_training.py")))


def test_a_run_from_before_the_default_changed_is_told_what_to_set(
    tiny_data: Path, tmp_path: Path
) -> None:
    train, losses = training["train"], training["losses"]
    recipe = training["tiny_recipe"](tiny_data, tmp_path / "run", precision="coat")
    stage = recipe["stages"]["sft"]
    stage.update(max_steps=4, save_steps=2, betas=[0.9, 0.999], val_data=[])
    done = train(recipe, tmp_path, "fp8.second_moment=nearest")
    assert done.returncode == 0, done.stderr[-3000:]
    whole = losses(tmp_path / "run")
    # As the earlier version left it: no fp8 section, killed while the last step was written.
    saved = tmp_path / "run" / "recipe.yaml"
    saved.write_text(yaml.safe_dump({**yaml.safe_load(saved.read_text()), "fp8": None}))
    (tmp_path / "run/sft/model/manifest.json").unlink()
    (tmp_path / "run/sft/checkpoints/step-00000004/manifest.json").unlink()
    done = train(recipe, tmp_path, "--resume", "auto")
    assert done.returncode == 2
    assert "dre_e4m3 fp32, this run has CoatAdamW dre_e4m3_stochastic fp32" in done.stderr
    assert "resume with fp8.second_moment=nearest" in done.stderr
    done = train(recipe, tmp_path, "--resume", "auto", "fp8.second_moment=nearest")
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == whole
    groups = json.loads((tmp_path / "run/sft/checkpoints/step-00000004/contents.json").read_text())
    assert {group["codec"] for group in groups["groups"]} == {"CoatAdamW dre_e4m3 fp32"}
