"""Ranks die with their launcher, and its signals end with a checkpoint and a status to requeue."""

import os
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
