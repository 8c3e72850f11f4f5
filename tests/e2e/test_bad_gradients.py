"""Gradients that are not finite are counted to a limit and named; their steps change nothing."""

import re
from pathlib import Path

import pytest
import tiny_run
from safetensors.torch import load_file

from coat_cli.main import main


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
