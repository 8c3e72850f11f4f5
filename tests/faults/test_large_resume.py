"""Kill and resume of a whole run, whose states are compared bit by bit: see large_resume.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import ENV

HERE = Path(__file__).parent
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of 80 GB")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "size", ["tiny", pytest.param("2b", marks=[pytest.mark.multi_gpu, TWO_GPUS])]
)
def test_the_loaded_state_is_the_saved_one_and_trains_on_as_it_did(
    size: str, tmp_path: Path
) -> None:
    words = [str(HERE / "large_resume.py"), str(tmp_path / "runs"), "--size", size]
    # The tiny one is that of a CPU, also on a machine with GPUs.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if size == "tiny" else {}
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words], env={**ENV, **hidden, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-5000:]}"
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for zero_stage in (2, 3):
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row.get("zero_stage") == zero_stage:
                found.setdefault(row["measured"], []).append(row)
        assert all(row["different"] == 0 for row in found["state"] if row["other"] == "loaded")
        assert found["later steps"][-1]["identical"]  # of the deterministic mode, if it was needed
        assert {row["async_save"] for row in found["save"]} == {True, False}
