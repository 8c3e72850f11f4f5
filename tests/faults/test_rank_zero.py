"""Rank 0 decides which checkpoint is loaded; the others must see the same files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., list[Any]]
NEWEST = "step-00000009"


@pytest.fixture
def views(run_ranks: Run, tmp_path: Path) -> list[str]:
    """The folder of rank 0, and a copy of it that rank 1 sees instead."""
    run_ranks("save", 2, folder=str(tmp_path / "a"), steps=[4, 9])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_a_stale_listing_ends_all_ranks(run_ranks: Run, views: list[str]) -> None:
    """Rank 1 would resume the checkpoint before, and train other steps than rank 0."""
    shutil.rmtree(Path(views[1]) / NEWEST)
    for result in run_ranks("find", 2, views=views, wait_s=1.0):
        assert result.startswith("ValueError: rank 1 does not see the files that rank 0 sees")
        assert f"{NEWEST}/manifest.json: No such file" in result


def test_other_bytes_on_one_rank_are_no_damage(run_ranks: Run, views: list[str]) -> None:
    """They must not delete a checkpoint that is good on rank 0's disk."""
    changed = 0
    for path in (Path(views[1]) / NEWEST).iterdir():
        if path.name != "manifest.json":
            path.write_bytes(bytes(path.stat().st_size))
            changed += 1
    assert changed >= 4
    for result in run_ranks("find", 2, views=views, wait_s=1.0):
        assert "ValueError: rank 1 reads different bytes in" in result


def test_a_rank_waits_for_a_listing_that_is_refreshed(run_ranks: Run, views: list[str]) -> None:
    (Path(views[1]) / NEWEST).rename(Path(views[1]) / "later")
    assert run_ranks("find", 2, views=views, late=NEWEST) == [[NEWEST, 9.0]] * 2


def test_damage_on_the_disk_of_all_ranks_falls_back(run_ranks: Run, views: list[str]) -> None:
    for view in views:
        path = Path(view) / NEWEST / "rank-00001-000.safetensors"
        path.write_bytes(bytes(path.stat().st_size))
    assert run_ranks("find", 2, views=views) == [["step-00000004", 4.0]] * 2
