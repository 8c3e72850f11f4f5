"""Checkpoints that are written while training goes on."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_vlm.checkpoint.atomic_folder import FolderSave, make_temporary
from coat_vlm.distributed import World

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_has_the_values_of_its_step(
    run_ranks: Run, tmp_path: Path, ranks: int, background: bool
) -> None:
    """The worker changes all weights as soon as a save returns."""
    run = {"folder": str(tmp_path), "steps": [4, 9, 12], "keep": 2, "background": background}
    names = ["step-00000009", "step-00000012"]
    assert run_ranks("save", ranks, **run) == [names] * ranks
    found = run_ranks("find", ranks, views=[str(tmp_path)] * ranks)
    assert found == [[names[1], 12.0]] * ranks


@pytest.mark.parametrize("background", [True, False])
def test_a_rank_that_cannot_write_ends_all_of_them(
    run_ranks: Run, tmp_path: Path, background: bool
) -> None:
    run_ranks("save", 2, folder=str(tmp_path), steps=[4])
    results = run_ranks(
        "save", 2, folder=str(tmp_path), steps=[9, 12], limited_rank=1, background=background
    )
    for result in results:
        assert f"OSError: {tmp_path}/step-00000009 could not be saved: " in result
        assert "rank 1: [Errno 27] File too large: " in result
        assert re.search(r"-00001\S*'", result), result
        assert "--resume auto continues from the last one" in result
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_rank_0_may_rename_the_folder_as_soon_as_the_lists_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are then done, although they may be in the last call of their thread."""
    replace, target = Path.replace, tmp_path / "step-00000004"

    def wait_for_rank_0(self: Path, new: Path) -> Path:
        replaced = replace(self, new)
        deadline = time.monotonic() + 60
        while ".written-" in new.name and not target.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return replaced

    monkeypatch.setattr(Path, "replace", wait_for_rank_0)
    temporary, cpu = make_temporary(target), torch.device("cpu")
    saves = [FolderSave(temporary, target, World(rank, 2, cpu)) for rank in range(2)]
    for rank, save in enumerate(saves):
        save.start(lambda files, rank=rank: files.write(f"rank-{rank}", [b"x"]), lambda: None)
    for save in saves:
        save.wait()
    assert [save.failure for save in saves] == [None, None]
    files = sorted(path.name for path in target.iterdir())
    assert files == ["manifest.json", "rank-0", "rank-1"]


def test_rank_0_does_not_wait_for_a_dead_rank(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks("save", 2, folder=str(tmp_path), steps=[4])
    seconds, dead = run_ranks("lose_a_rank", 2, folder=str(tmp_path), step=9)
    assert dead is None
    assert seconds < 60
    assert run_ranks("find", 2, views=[str(tmp_path)] * 2) == [["step-00000004", 4.0]] * 2


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_process_that_may_not_write_any_more_commits_nothing(
    run_ranks: Run, tmp_path: Path, fails_at: int
) -> None:
    """The check before writing and the one before the rename."""
    run = {"folder": str(tmp_path), "keep": 1}
    assert run_ranks("save_checked", 1, **run, step=4, fails_at=9) == ["2 calls"]
    (result,) = run_ranks("save_checked", 1, **run, step=9, fails_at=fails_at)
    assert "the lock was taken over" in result
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert run_ranks("save_checked", 1, **run, step=9, fails_at=9) == ["3 calls"]  # a deletion
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000009"]
