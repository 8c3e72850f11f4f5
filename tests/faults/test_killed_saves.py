"""``kill -9`` at random moments of a save, and files that were damaged afterwards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def kill(folder: Path, times: int, seed: int, *words: str) -> dict[str, int]:
    script = Path(__file__).with_name("killing.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(times), str(seed), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # DeepSpeed prints, too


def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    left = kill(tmp_path / "folder", 6, 1, "background")
    assert left["inside a save"]
    assert left["steps"]


@pytest.mark.parametrize("words", [(), ("background",)])
def test_fifty_kills(tmp_path: Path, words: tuple[str, ...]) -> None:
    left = kill(tmp_path / "folder", 50, 3, *words)
    assert left[".tmp-"]  # half written
    assert left["steps"]
