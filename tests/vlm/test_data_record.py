"""Changed data is found by sizes, hashes and sampled rows; a copy of the data is not a change."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from shared_run import make_data
from tiny_run import edit_answer

from coat_vlm.config import SourceConfig
from coat_vlm.train.data_record import describe_sources, find_source_changes
from coat_vlm.train.open_sources import open_sources


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
    return describe_sources(configs, datasets)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    make_data(folder)
    return folder


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edit_answer, ["tiny has a different data.json: different content of the same size"]),
        (shuffle_rows, ["tiny has different text and media in ", "data.json:1"]),
        (replace_image, ["tiny has different media in ", "data.json:24"]),
        (add_row, ["tiny has rows 25, had 24", "tiny has a different data.json: "]),
        (lambda data: (data / "23.png").unlink(), ["tiny has different media in "]),
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


def test_remote_files_are_recorded_by_content(data: Path, tmp_path: Path) -> None:
    rows = json.loads((data / "data.json").read_text())
    shard = tmp_path / "rows.jsonl"

    def record() -> list[dict[str, Any]]:
        url = f"file://{shard}"
        configs, datasets = open_sources(
            [SourceConfig(name="far", path=url, media_root=str(data))], 0
        )
        return describe_sources(configs, datasets)

    shard.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "sources.json"
    path.write_text(json.dumps(record()))
    assert find_source_changes(path, record()) == []
    shard.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    change, *_ = find_source_changes(path, record())
    assert "rows.jsonl" in change
