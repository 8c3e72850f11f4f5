"""A rank that stops is named, and no process waits for ever."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tiny_run import ENV, TRAIN, tiny_recipe, wait_for, write_recipe

from coat_vlm.report.run_folder import describe_run
from coat_vlm.run.heartbeat import FOLDER


def test_a_stopped_rank_ends_the_run_within_the_time_limit_and_is_named(
    tiny_data: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tiny_data, tmp_path / "run", collective_timeout_s=8)
    recipe["stages"]["sft"]["max_steps"] = 100_000
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [sys.executable, *torchrun, *TRAIN[1:], str(path)],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        run = tmp_path / "run"
        files = [run / FOLDER / f"rank-0000{rank}.json" for rank in range(2)]
        wait_for(
            lambda: all(file.is_file() and json.loads(file.read_text())["step"] for file in files)
        )
        os.kill(json.loads(files[1].read_text())["pid"], signal.SIGSTOP)
        output, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    # gloo's own limit may be reached first, and its error names the rank as well.
    assert "collective_timeout_s" in output
    assert re.search(r"rank 1 \(process \d+ on ", output)
    assert all(files[rank].is_file() for rank in range(2)), "they say where each rank was"
    text, _ = describe_run(run)
    assert "stage sft is not finished" in text
    assert "rank 1 (process " in text
