"""Ranks die with their launcher, and its signals end with a checkpoint and a status to requeue."""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_runs import (
    ENV,
    TORCHRUN,
    Run,
    alive,
    children,
    count_steps,
    descendants,
    find_port,
    losses,
    tiny_recipe,
    write_programs,
    write_recipe,
)

from coat_vlm.checkpoint.load import find_checkpoint

Start = Callable[..., Run]
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ORPHAN_S = 60.0


def write(tmp_path: Path, text_data: Path) -> tuple[Path, Path]:
    run_dir = tmp_path / "run"
    recipe = tiny_recipe(text_data, run_dir, max_steps=100_000)
    return run_dir, write_recipe(recipe, tmp_path / "recipe.yaml")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_programs(tmp_path_factory.mktemp("programs") / "bin")


def wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + ORPHAN_S
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"orphans: {left}"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        pytest.param("torchrun", signal.SIGKILL, id="torchrun-SIGKILL"),
        pytest.param("torchrun", signal.SIGUSR1, id="torchrun-SIGUSR1"),
        pytest.param("deepspeed", signal.SIGKILL, id="deepspeed-SIGKILL"),
    ],
)
def test_a_killed_launcher_leaves_no_orphan(
    launcher: str,
    number: signal.Signals,
    programs: Path,
    text_data: Path,
    start: Start,
    tmp_path: Path,
) -> None:
    run_dir, recipe = write(tmp_path, text_data)
    deepspeed = [programs / "deepspeed", "--num_gpus=2", f"--master_port={find_port()}"]
    words = TORCHRUN if launcher == "torchrun" else deepspeed
    run = start([*words, programs / "coat-vlm", "train", recipe])
    run.wait_for(lambda: count_steps(run_dir) > 3, "training")
    ranks = descendants(run.pid)
    assert len(ranks) >= 2
    run.send(number)
    assert run.end() == -number
    wait_until_dead(ranks)
    if launcher == "deepspeed":  # whose ranks notice it themselves, and can still save
        assert find_checkpoint(run_dir / "sft/checkpoints").path is not None


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("script", signal.SIGUSR1),
        ("torchrun", signal.SIGTERM),
        ("torchrun", signal.SIGUSR1),
        ("torchrun", signal.SIGHUP),
    ],
)
def test_a_signal_of_torchrun_is_a_status_to_requeue(
    target: str,
    number: signal.Signals,
    programs: Path,
    text_data: Path,
    start: Start,
    tmp_path: Path,
) -> None:
    run_dir, recipe = write(tmp_path, text_data)
    path = f"{programs}:{os.environ['PATH']}"
    run = start([SCRIPTS / "train_one_node.sh", recipe], {**ENV, "GPUS": "2", "PATH": path})
    run.wait_for(lambda: count_steps(run_dir) > 3, "training")
    processes = descendants(run.pid)
    os.kill(run.pid if target == "script" else processes[0], number)
    assert run.end() == 75, run.output()[-3000:]
    assert f"[rank 1] {number.name} received; stops after this step" in run.output()
    wait_until_dead(processes)
    assert find_checkpoint(run_dir / "sft/checkpoints").path is not None
    losses(run_dir)


@pytest.mark.skipif(shutil.which("pkill") is None, reason="needs pkill")
def test_a_signal_of_deepspeeds_launcher_is_a_status_to_requeue(
    programs: Path, text_data: Path, start: Start, tmp_path: Path
) -> None:
    run_dir, recipe = write(tmp_path, text_data)
    environment = {**ENV, "GPUS": "2", "LAUNCHER": "deepspeed"}
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    run = start([SCRIPTS / "train_one_node.sh", recipe], environment)
    run.wait_for(lambda: count_steps(run_dir) > 3, "training")
    processes = descendants(run.pid)
    run.send(signal.SIGUSR1)
    assert run.end() == 75, run.output()[-3000:]
    wait_until_dead(processes)
    assert find_checkpoint(run_dir / "sft/checkpoints").path is not None


SRUN = """#!/usr/bin/env bash
# Starts the tasks of a job on this machine, and returns their highest status.
while [[ "$1" == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do
  wait "$task" || { code=$?; ((code <= ${status:-0})) || status=$code; }
done
exit "${status:-0}"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo 127.0.0.1; echo node-b; else echo "scontrol $*"; fi
"""


def test_a_slurm_job_trains_is_requeued_and_continues(
    programs: Path, text_data: Path, start: Start, tmp_path: Path
) -> None:
    run_dir, recipe = write(tmp_path, text_data)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NTASKS": "2"}
    job["PATH"] = f"{tmp_path}:{programs}:{os.environ['PATH']}"
    steps = 0
    for _ in range(2):  # the second time as the queue starts it again
        run = start(["bash", SCRIPTS / "train_slurm.sbatch", recipe], {**ENV, **job})
        run.wait_for(lambda least=steps + 3: count_steps(run_dir) > least, "training")
        (srun,) = children(run.pid)
        tasks = children(srun)
        assert len(tasks) == 2
        for task in tasks:  # as SLURM does, five minutes before the time limit
            os.kill(task, signal.SIGUSR1)
        assert run.end() == 75, run.output()[-3000:]
        assert "[rank 1] SIGUSR1 received; stops after this step" in run.output()
        assert "scontrol requeue 7" in run.output()
        steps = len(losses(run_dir))


def test_torchrun_on_each_machine_as_the_script_says(
    programs: Path, text_data: Path, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    recipe = write_recipe(tiny_recipe(text_data, run_dir, max_steps=4), tmp_path / "recipe.yaml")
    text = (SCRIPTS / "train_multi_node.sh").read_text()
    found = re.search(r"^#   (torchrun --nnodes 2 .*)\\\n# +(.*)$", text, re.M)
    assert found is not None
    changes = {"node-a:29500": f"127.0.0.1:{find_port()}", "8": "1", "RECIPE": str(recipe)}
    words = [changes.get(word, word) for word in f"{found[1]} {found[2]}".split()]
    environment = {**ENV, "PATH": f"{programs}:{os.environ['PATH']}"}
    machines = [start([programs / "torchrun", *words[1:]], environment) for _ in range(2)]
    # Two runs of one process each would find the folder locked.
    assert [run.end() for run in machines] == [0, 0], machines[0].output()[-3000:]
    assert len(losses(run_dir)) == 4
