"""Random kills of launchers and ranks: see killed_runs.py, which can also be run by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_runs import ENV

HERE = Path(__file__).parent
SHORT = "2:2:coat"
LONG = (
    *("1:0:coat", "1:1:fp32", "1:2:bf16", "1:3:coat"),
    *("2:0:bf16", "2:1:coat", "2:2:fp32", "2:3:coat"),
    *("4:0:fp32", "4:1:bf16", "4:2:coat", "4:3:fp32"),
)
SEED = 23


def kill_runs(folder: Path, setup: str, kills: int) -> None:
    words = [str(HERE / "killed_runs.py"), str(folder), setup, "--kills", f"{kills}"]
    words += ["--seed", f"{SEED}", "--launchers", "torchrun,deepspeed"]
    path = os.pathsep.join([str(HERE.parent / "e2e"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words], env={**ENV, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    repeat = f"PYTHONPATH={path} python {' '.join(words)}"
    assert done.returncode == 0, f"{repeat}\n{done.stdout[-20_000:]}\n{done.stderr[-3000:]}"
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sum(row["signal"] is not None for row in rows) == kills


def test_three_kills(tmp_path: Path) -> None:
    kill_runs(tmp_path / "runs", SHORT, 3)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LONG)
def test_two_hundred_kills(setup: str, tmp_path: Path) -> None:
    """Of ranks and launchers, 17 per setup."""
    kill_runs(tmp_path / "runs", setup, 17)
