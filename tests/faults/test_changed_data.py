"""Data that changed between start and resume is found; a copy of the data is not a change."""

import json
import os
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coat_vlm.config import SourceConfig
from coat_vlm.train import data_record
from coat_vlm.train.data_record import (
    build_source_record,
    describe_contents,
    find_source_changes,
)
from coat_vlm.train.open_sources import open_sources

training = runpy.run_path(str(Path(__file__).parents[1] / "e2e" / "test_training.py"))
RESUME = ("--resume", "auto")


def edit_answer(data: Path) -> None:
    """One that is not among the sampled rows, without another size."""
    file = data / "data.json"
    rows = json.loads(file.read_text())
    rows[2]["conversations"][1]["value"] = rows[2]["conversations"][1]["value"][::-1]
    file.write_text(json.dumps(rows))


def shuffle_rows(data: Path) -> None:
    file = data / "data.json"
    rows = json.loads(file.read_text())
    file.write_text(json.dumps(rows[::-1]))


def replace_image(data: Path) -> None:
    Image.new("RGB", (16, 16), (1, 2, 3)).save(data / "23.png")


def add_row(data: Path) -> None:
    file = data / "data.json"
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([*rows, rows[0]]))


def record_of(data: Path, path: str = "data.json") -> list[dict[str, Any]]:
    configs, datasets = open_sources([SourceConfig(name="tiny", path=str(data / path))], 0)
    return build_source_record(configs, [len(d) for d in datasets], describe_contents(datasets))


@pytest.fixture
def data(tiny_data: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_data, tmp_path / "data")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edit_answer, ["tiny has another data.json: another content of the same size"]),
        (shuffle_rows, ["tiny has another text and media in ", "data.json:0"]),
        (replace_image, ["tiny has another media in ", "data.json:23"]),
        (add_row, ["tiny has rows 25, had 24", "tiny has another data.json: "]),
        (lambda data: (data / "23.png").unlink(), ["tiny has another media in "]),
    ],
)
def test_a_change_is_found_and_named(
    data: Path, tmp_path: Path, edit: Callable[[Path], None], words: list[str]
) -> None:
    path = tmp_path / "sources.json"
    path.write_text(json.dumps(record_of(data)))
    assert find_source_changes(path, record_of(data)) == []
    edit(data)
    changes = "; ".join(find_source_changes(path, record_of(data)))
    assert all(word in changes for word in words), changes


def test_a_copy_elsewhere_is_the_same_data(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "sources.json"
    path.write_text(json.dumps(record_of(data)))
    for file in data.rglob("*"):
        os.utime(file, (1, 1))
    moved = data.rename(tmp_path / "elsewhere")
    assert find_source_changes(path, record_of(moved)) == []


def test_large_files_are_hashed_in_blocks(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_record, "WHOLE_BYTES", 100)
    monkeypatch.setattr(data_record, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(data_record, "_BLOCKS", 8)
    assert (data / "data.json").stat().st_size > 8 * 64
    path = tmp_path / "sources.json"
    path.write_text(json.dumps(record_of(data)))
    assert find_source_changes(path, record_of(data)) == []
    text = (data / "data.json").read_bytes()
    (data / "data.json").write_bytes(text.replace(b'blue"}]}]', b'red!"}]}]'))
    (change, *_) = find_source_changes(path, record_of(data))
    assert "another content of the same size" in change


def test_ingested_folders_are_recorded(tiny_data: Path, tmp_path: Path) -> None:
    from coat_cli.main import main

    assert (
        main(["data", "ingest", str(tiny_data / "data.json"), "--out", str(tmp_path / "in")]) == 0
    )
    (record,) = record_of(tmp_path, "in")
    assert {Path(name).suffix for name in record["files"]} == {".json", ".parquet"}
    assert len(record["samples"]) == data_record.SAMPLED_ROWS


def test_remote_shards_are_recorded_by_version(data: Path, tmp_path: Path) -> None:
    rows = json.loads((data / "data.json").read_text())
    shard = tmp_path / "rows.jsonl"

    def record() -> list[dict[str, Any]]:
        url = f"file://{shard}"
        configs, datasets = open_sources(
            [SourceConfig(name="far", path=url, media_root=str(data))], 0
        )
        return build_source_record(configs, [24], describe_contents(datasets))

    shard.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "sources.json"
    path.write_text(json.dumps(record()))
    assert find_source_changes(path, record()) == []
    shard.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    (change,) = find_source_changes(path, record())
    assert change.startswith(f"far has another file://{shard}")


def interrupted(data: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    recipe = training["tiny_recipe"](data, folder / "run", **changes)
    recipe["stages"]["sft"].update(max_steps=4, save_steps=2, val_data=[])
    done = training["train"](recipe, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "run/sft/model/manifest.json").unlink()
    (folder / "run/sft/checkpoints/step-00000004/manifest.json").unlink()
    return recipe


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_resume_refuses_changed_data_unless_allowed(data: Path, tmp_path: Path, ranks: int) -> None:
    recipe = interrupted(data, tmp_path)
    tokenizer = (tmp_path / "run/tokenizer/tokenizer.json").read_bytes()
    saved = (tmp_path / "run/sft/sources.json").read_bytes()
    edit_answer(data)
    done = training["train"](recipe, tmp_path, *RESUME, ranks=ranks)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "tiny has another data.json: another content of the same size" in done.stderr
    assert "--allow-changed-data" in done.stderr
    assert (tmp_path / "run/sft/sources.json").read_bytes() == saved
    done = training["train"](recipe, tmp_path, *RESUME, "--allow-changed-data", ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "continues with changed data:\n  tiny has another data.json" in done.stdout
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    (row,) = [row for row in map(json.loads, lines) if row["kind"] == "resume"]
    assert (row["step"], len(row["changed_data"])) == (2, 1)
    # The tokenizer is the one of the checkpoint, although the texts are others.
    assert (tmp_path / "run/tokenizer/tokenizer.json").read_bytes() == tokenizer
    (tmp_path / "run/sft/model/manifest.json").unlink()
    assert training["train"](recipe, tmp_path, *RESUME, ranks=ranks).returncode == 0


def test_a_moved_data_set_continues_exactly(data: Path, tmp_path: Path) -> None:
    recipe = interrupted(data, tmp_path)
    whole = training["losses"](tmp_path / "run")
    moved = data.rename(tmp_path / "moved")
    recipe["stages"]["sft"]["data"][0]["path"] = str(moved / "data.json")
    done = training["train"](recipe, tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    assert training["losses"](tmp_path / "run") == whole


def test_packed_rows_continue_with_fewer_samples(data: Path, tmp_path: Path) -> None:
    """``exclude``, ``select`` and removed rows are remedies for bad data."""
    recipe = training["tiny_recipe"](data, tmp_path / "run")
    recipe["model"]["max_length"] = 128
    stage = recipe["stages"]["sft"]
    stage.update(max_steps=4, save_steps=2, val_data=[], packing=True, batch_size=1)
    stage["micro_batch_size"] = 1
    assert training["train"](recipe, tmp_path).returncode == 0
    (tmp_path / "run/sft/model/manifest.json").unlink()
    (tmp_path / "run/sft/checkpoints/step-00000004/manifest.json").unlink()
    stage["data"] = [{**stage["data"][0], "select": "first 3"}]
    done = training["train"](recipe, tmp_path, *RESUME)
    assert done.returncode == 2
    assert "stages.sft.data.tiny.select: not set -> first 3: it changes the samples" in done.stderr
    done = training["train"](recipe, tmp_path, *RESUME, "--allow-changed-data")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(training["losses"](tmp_path / "run")) == 4
