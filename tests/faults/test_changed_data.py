"""Data that changed between start and resume is found; a copy of the data is not a change."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from tiny_run import edit_answer

RESUME = ("--resume", "auto")


@pytest.fixture
def data(tiny_data: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_data, tmp_path / "data")


def interrupted(small_run: Path, data: Path, folder: Path) -> dict[str, Any]:
    tiny_run.forget_after(tiny_run.copy_run(small_run, folder / "run"), 2)
    return tiny_run.small_recipe(data, folder / "run")


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_refuses_changed_data_unless_allowed(
    small_run: Path, data: Path, tmp_path: Path, ranks: int
) -> None:
    recipe = interrupted(small_run, data, tmp_path)
    tokenizer = (tmp_path / "run/tokenizer/tokenizer.json").read_bytes()
    saved = (tmp_path / "run/sft/sources.json").read_bytes()
    edit_answer(data)
    done = tiny_run.train(recipe, tmp_path, *RESUME, ranks=ranks)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "tiny has a different data.json: different content of the same size" in done.stderr
    assert "--allow-changed-data" in done.stderr
    assert (tmp_path / "run/sft/sources.json").read_bytes() == saved
    done = tiny_run.train(recipe, tmp_path, *RESUME, "--allow-changed-data", ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "continues with changed data:\n  tiny has a different data.json" in done.stdout
    changes = tiny_run.entries(tmp_path / "run", "resume")
    (entry,) = [entry for entry in changes if "changed_data" in entry]
    assert (entry["step"], len(entry["changed_data"])) == (2, 1)
    # The tokenizer is the one of the checkpoint, although the texts are others.
    assert (tmp_path / "run/tokenizer/tokenizer.json").read_bytes() == tokenizer
    (tmp_path / "run/sft/model/manifest.json").unlink()
    assert tiny_run.train(recipe, tmp_path, *RESUME, ranks=ranks).returncode == 0


def test_a_moved_data_set_continues_exactly(small_run: Path, data: Path, tmp_path: Path) -> None:
    done = tiny_run.train(interrupted(small_run, data, tmp_path), tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tiny_run.losses(tmp_path / "run") == tiny_run.losses(small_run)


def test_packed_rows_continue_with_fewer_samples(data: Path, tmp_path: Path) -> None:
    """``exclude``, ``select`` and removed rows are remedies for bad data."""
    recipe = tiny_run.tiny_recipe(data, tmp_path / "run")
    recipe["model"]["max_length"] = 128
    stage = recipe["stages"]["sft"]
    stage.update(max_steps=4, save_steps=2, val_data=[], packing=True, batch_size=1)
    stage["micro_batch_size"] = 1
    assert tiny_run.train(recipe, tmp_path).returncode == 0
    tiny_run.forget_after(tmp_path / "run", 2)
    stage["data"] = [{**stage["data"][0], "select": "first 3"}]
    done = tiny_run.train(recipe, tmp_path, *RESUME)
    assert done.returncode == 2
    assert "stages.sft.data.tiny.select: not set -> first 3: it changes the samples" in done.stderr
    done = tiny_run.train(recipe, tmp_path, *RESUME, "--allow-changed-data")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(tiny_run.losses(tmp_path / "run")) == 4
