"""A run continues with the recipe keys that messages name as remedies, and refuses the others."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from coat_vlm.config.load import load_recipe
from coat_vlm.train.resume import (
    check_changes,
    find_changes,
    find_stage_states,
)

RESUME = ("--resume", "auto")


def interrupted(small_run: Path, data: Path, folder: Path) -> dict[str, Any]:
    """The recipe of a run of 6 steps of which 4 are saved, as if it was killed at the sixth."""
    tiny_run.forget_after(tiny_run.copy_run(small_run, folder / "run"), 4)
    return tiny_run.small_recipe(data, folder / "run")


def test_remedies_reach_optimizer_and_schedule(
    small_run: Path, tiny_data: Path, tmp_path: Path
) -> None:
    recipe = interrupted(small_run, tiny_data, tmp_path)
    before = tiny_run.entries(tmp_path / "run", "step")
    stage = recipe["stages"]["sft"]
    stage["language"] = {"train": True, "lr": 1e-3}
    stage.update(max_steps=10, min_lr_ratio=0.5, lr_scheduler_type="linear", max_grad_norm=0.5)
    stage["warmup_ratio"] = 0.6  # six steps
    stage.update(weight_decay=0.5, max_skipped_steps=3, max_bad_samples=2, save_steps=3)
    stage.update(gradient_checkpointing=True, micro_batch_size=4)
    recipe.update(save_total_limit=5, log_every_steps=1, num_workers=1)
    done = tiny_run.train(recipe, tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stages.sft.language.lr: 0.003 -> 0.001\n" in done.stdout
    after = tiny_run.entries(tmp_path / "run", "step")
    assert [row["step"] for row in after] == [*range(1, 11)]
    assert after[:4] == before[:4]
    for row in after[4:]:
        before_it = row["step"] - 1
        warm = 0.5 + 0.5 * (1 - (before_it - 6) / 4)
        factor = row["step"] / 6 if before_it < 6 else warm
        assert row["lr"]["language"] == pytest.approx(1e-3 * factor)
        assert row["lr"]["vision"] == pytest.approx(3e-3 * factor)
    (resume,) = tiny_run.entries(tmp_path / "run", "resume")
    assert resume["step"] == 4
    assert {change.partition(":")[0] for change in resume["changes"]} == {
        *(
            f"stages.sft.{key}"
            for key in ("max_steps", "min_lr_ratio", "lr_scheduler_type", "max_grad_norm")
        ),
        "stages.sft.warmup_ratio",
        *(f"stages.sft.{key}" for key in ("weight_decay", "max_skipped_steps", "language.lr")),
        *(f"stages.sft.{key}" for key in ("max_bad_samples", "save_steps")),
        *(f"stages.sft.{key}" for key in ("gradient_checkpointing", "micro_batch_size")),
        *("save_total_limit", "log_every_steps", "num_workers"),
    }
    saved = sorted(path.name for path in (tmp_path / "run/sft/checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (2, 4, 6, 9, 10)]


def test_fixed_keys_are_named_one_by_one(small_run: Path, tiny_data: Path, tmp_path: Path) -> None:
    recipe = interrupted(small_run, tiny_data, tmp_path)
    recipe["seed"] = 5
    recipe["model"]["max_length"] = 1024
    stage = recipe["stages"]["sft"]
    stage.update(batch_size=4, max_steps=5, betas=[0.9, 0.99])
    stage["data"] = [*stage["data"], {**stage["data"][0], "name": "more"}]
    before = (tmp_path / "run/recipe.yaml").read_bytes()
    done = tiny_run.train(recipe, tmp_path, *RESUME)
    assert done.returncode == 2, done.stderr[-3000:]
    for line in (
        "  seed: 0 -> 5: it seeds the initialization and the order of samples",
        "  model.max_length: 2048 -> 1024: it changes the samples or their order",
        "  stages.sft.data.more: not set -> added: it changes the samples or their order",
        "  stages.sft.batch_size: 8 -> 4: finished steps",
        "  stages.sft.max_steps: 6 -> 5: it may only be raised",
        "  stages.sft.betas: [0.9, 0.95] -> [0.9, 0.99]: the saved moments",
    ):
        assert line in done.stderr
    assert "{" not in done.stderr.partition("the recipe differs")[2]
    assert "--allow-changed-data" in done.stderr
    assert (tmp_path / "run/recipe.yaml").read_bytes() == before


def test_no_file_of_a_run_has_the_value_of_a_variable(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "secret-a1b2"
    shutil.copytree(tiny_data, folder)
    values = {"FOLDER": str(folder), "TOKEN": "token-c3d4"}
    monkeypatch.setattr(tiny_run, "ENV", {**tiny_run.ENV, **values})
    recipe = tiny_run.tiny_recipe(Path("${FOLDER}"), tmp_path / "run", name="${TOKEN}")
    recipe["stages"]["sft"]["max_steps"] = 2
    done = tiny_run.train(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"recipe": "${TOKEN}"' in (tmp_path / "run/sft/model/training.json").read_text()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"token-c3d4" not in content, path
            names_rows = path.name in ("metrics.jsonl", "sources.json")  # by their files
            assert names_rows or b"secret-a1b2" not in content, path


def test_finished_stages_stay_and_later_ones_are_free(tiny_data: Path, tmp_path: Path) -> None:
    recipe = tiny_run.tiny_recipe(tiny_data, tmp_path / "run")
    sft = {**recipe["stages"]["sft"], "max_steps": 2, "val_data": []}
    align = {**sft, "vision": {"train": False}, "language": {"train": False}}
    recipe["stages"] = {"align": align, "sft": sft}
    assert tiny_run.train(recipe, tmp_path, "--stage", "align").returncode == 0
    align["projector"] = {"train": True, "lr": 1e-3}
    sft["batch_size"] = 4
    done = tiny_run.train(recipe, tmp_path, *RESUME)
    assert done.returncode == 2
    assert "stages.align.projector.lr: 0.003 -> 0.001: stage align is finished" in done.stderr
    assert "batch_size" not in done.stderr
    align["projector"] = {"train": True, "lr": 3e-3}
    done = tiny_run.train(recipe, tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stages.sft.batch_size: 8 -> 4" in done.stdout
    assert [row["samples"] for row in tiny_run.steps(tmp_path / "run")] == [4, 4]


@pytest.mark.parametrize(
    ("states", "change", "words"),
    [
        ({}, "seed=3", None),  # nothing is saved
        ({"sft": "started"}, "stages.align.max_steps=30", "stage sft, which comes after align"),
        ({"align": "finished"}, "stages.sft.betas=[0.9,0.95]", None),
        ({"align": "finished"}, "model.max_length=512", "--allow-changed-data"),
        ({"align": "started"}, "monitor={every: 5}", None),
    ],
)
def test_what_is_saved_decides(states: dict[str, Any], change: str, words: str | None) -> None:
    before, after = load_recipe("quickstart"), load_recipe("quickstart", [change])
    changes = find_changes(before, after)
    assert changes
    if words is None:
        check_changes(changes, states, Path("recipe.yaml"), allow_changed_data=False)
    else:
        with pytest.raises(ValueError, match=words):
            check_changes(changes, states, Path("recipe.yaml"), allow_changed_data=False)


def test_an_empty_folder_has_no_stages(tmp_path: Path) -> None:
    assert find_stage_states(tmp_path) == {}
