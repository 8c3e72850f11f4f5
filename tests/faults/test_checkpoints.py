"""Damaged checkpoints: a resume takes the one before, and never crashes."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coat_vlm.checkpoint.load import find_checkpoint
from coat_vlm.checkpoint.manifest import read_manifest

Run = Callable[..., list[Any]]


def test_any_damaged_file_makes_a_resume_fall_back(run_ranks: Run, tmp_path: Path) -> None:
    ranks = 2
    names = ["step-00000004", "step-00000009"]
    assert run_ranks("save", ranks, folder=str(tmp_path), steps=[4, 9]) == [names] * ranks
    results = run_ranks("damage_each_file", ranks, folder=str(tmp_path), newest=names[1])
    files = {*read_manifest(tmp_path / names[1]), "manifest.json"}
    assert {"trainer.json", "contents.json", f"rank-0000{ranks - 1}.json"} <= files
    for result in results:
        assert {name.split()[0] for name in result} == files
        assert len(result) == 5 * len(files)
        assert {key: found for key, found in result.items() if found != [names[0], 4.0]} == {}
    found = run_ranks("find", ranks, views=[str(tmp_path)] * ranks)
    assert found == [[names[1], 9.0]] * ranks


def test_a_checkpoint_of_another_version_is_refused_and_stays(
    run_ranks: Run, tmp_path: Path
) -> None:
    run_ranks("save", 1, folder=str(tmp_path), steps=[4, 9])
    manifest = tmp_path / "step-00000009" / "manifest.json"
    content = {"format_version": 2, "files": json.loads(manifest.read_text())["files"]}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(text.encode()).hexdigest()
    manifest.write_text(json.dumps({**content, "sha256": checksum}))
    with pytest.raises(ValueError, match=r"has format version 2, .* reads version 1"):
        find_checkpoint(tmp_path)


def test_later_checkpoints_of_another_process_stay(run_ranks: Run, tmp_path: Path) -> None:
    """Of two processes in one folder, the one that is behind deleted those of the other."""
    run_ranks("save", 1, folder=str(tmp_path), steps=[30, 36], keep=2)
    found = run_ranks("save", 1, folder=str(tmp_path), steps=[8, 12, 16], keep=2)
    assert found == [["step-00000012", "step-00000016", "step-00000030", "step-00000036"]]


def test_a_model_on_a_full_disk_leaves_the_earlier_one(run_ranks: Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "earlier").write_text("x")
    results = run_ranks("write_model", 2, folder=str(tmp_path), limited_rank=0)
    for result in results:
        assert result.startswith(f"OSError: {tmp_path}/model could not be saved: ")
        assert "File too large" in result
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["earlier"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("action", "values"),
    [("write_model", {}), ("save", {"steps": [*range(1, 20)], "keep": 20})],
)
def test_a_disk_that_is_full(
    run_ranks: Run, small_disk: Path, action: str, values: dict[str, Any]
) -> None:
    (result,) = run_ranks(action, 1, folder=str(small_disk), **values)
    assert isinstance(result, str), result
    assert "No space left on device" in result
    assert not list(small_disk.glob(".tmp-*"))
    if action == "save":
        found = find_checkpoint(small_disk)
        assert found.path is not None
        assert not found.damaged
