"""Each signal in each phase of each command: acknowledged, status 75, nothing damaged."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_runs import (
    COMMAND,
    ENV,
    TORCHRUN,
    Run,
    count_steps,
    descendants,
    losses,
    tiny_recipe,
    write_recipe,
)

from coat_vlm.checkpoint.load import find_checkpoint
from coat_vlm.checkpoint.manifest import find_problem
from coat_vlm.checkpoint.metadata import read_progress

Start = Callable[..., Run]
SIGNALS = [
    pytest.param(number, id=number.name)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
]


def handles_signals(run: Run) -> bool:
    """Whether the process has replaced the default action of SIGTERM."""
    status = Path(f"/proc/{run.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def train(recipe: dict[str, Any], tmp_path: Path, *options: str) -> list[str]:
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    return [*COMMAND, "train", str(path), *options]


def stop(run: Run, number: signal.Signals) -> None:
    run.send(number)
    assert run.end() == 75, run.output()[-3000:]
    assert f"{number.name} received; stops" in run.output()


@pytest.mark.parametrize("number", SIGNALS)
def test_in_the_start(number: signal.Signals, text_data: Path, start: Start, tmp_path: Path):
    run_dir = tmp_path / "run"
    words = train(tiny_recipe(text_data, run_dir, max_steps=2), tmp_path)
    run = start(words)
    run.wait_for(lambda: handles_signals(run), "handlers")
    stop(run, number)
    if number == signal.SIGTERM:
        assert start([*words, "--resume", "auto"]).end() == 0
        assert len(losses(run_dir)) == 2


@pytest.mark.parametrize("number", SIGNALS)
def test_in_a_step(number: signal.Signals, text_data: Path, start: Start, tmp_path: Path):
    run_dir = tmp_path / "run"
    run = start(train(tiny_recipe(text_data, run_dir, max_steps=100_000), tmp_path))
    run.wait_for(lambda: count_steps(run_dir) > 3, "training")
    stop(run, number)
    assert "stops after this step" in run.output()
    checkpoint = find_checkpoint(run_dir / "sft/checkpoints").path
    assert checkpoint is not None
    assert read_progress(checkpoint).step == len(losses(run_dir))


def test_while_rank_1_waits_for_data(text_data: Path, start: Start, tmp_path: Path):
    """The other rank is in the step's all-reduce; both stop at the last finished step."""
    run_dir = tmp_path / "run"
    recipe = {**tiny_recipe(text_data, run_dir, max_steps=100_000), "num_workers": 1}
    run = start([*TORCHRUN, *COMMAND[1:], *train(recipe, tmp_path)[len(COMMAND) :]])
    run.wait_for(lambda: count_steps(run_dir) > 3, "training")
    (rank_1,) = [pid for pid in children(run.pid) if b"\0LOCAL_RANK=1\0" in environment(pid)]
    (worker,) = children(rank_1)
    os.kill(worker, signal.SIGSTOP)
    wait_until_it_stands(run, run_dir)
    before = count_steps(run_dir)
    run.send(signal.SIGTERM)
    run.wait_for(lambda: run.output().count("SIGTERM received; stops") == 2, "two lines")
    assert run.end() == 1
    checkpoint = find_checkpoint(run_dir / "sft/checkpoints").path
    assert checkpoint is not None
    assert read_progress(checkpoint).step == before == len(losses(run_dir))


def children(pid: int) -> list[int]:
    return [
        child
        for child in descendants(pid)
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1] == str(pid)
    ]


def environment(pid: int) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


def wait_until_it_stands(run: Run, run_dir: Path) -> None:
    """Wait until no step was finished for five seconds."""
    seen, since = -1, time.monotonic()

    def stands() -> bool:
        nonlocal seen, since
        if (number := count_steps(run_dir)) != seen:
            seen, since = number, time.monotonic()
        return time.monotonic() - since > 5

    run.wait_for(stands, "waiting for data")


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_in_validation(zero_stage: int, text_data: Path, start: Start, tmp_path: Path):
    run_dir = tmp_path / "run"
    validation = [{"name": "long", "path": str(text_data / "validation.json")}]
    recipe = tiny_recipe(text_data, run_dir, max_steps=100_000, val_data=validation, eval_steps=3)
    run = start(train({**recipe, "zero_stage": zero_stage}, tmp_path))
    run.wait_for(lambda: count_steps(run_dir) == 3, "validation")
    stop(run, signal.SIGUSR1)
    checkpoint = find_checkpoint(run_dir / "sft/checkpoints").path
    assert checkpoint is not None
    assert read_progress(checkpoint).step == 3
    assert '"val"' not in (run_dir / "metrics.jsonl").read_text()


@pytest.fixture(scope="module")
def model(text_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    words = train(tiny_recipe(text_data, folder / "run", max_steps=2), folder)
    subprocess.run(words, env=ENV, check=True, timeout=300)
    return folder / "run" / "sft" / "model"


def test_in_an_evaluation_and_an_export(
    model: Path, text_data: Path, start: Start, tmp_path: Path
) -> None:
    out = tmp_path / "out" / text_data.name
    words = [*COMMAND, "eval", "--model", model, "--tasks", f"short_answer={text_data}"]
    words += ["--to", tmp_path / "out", "--batch-size", "1"]
    answers = out / "predictions.rank0.jsonl"
    run = start(words)
    run.wait_for(lambda: answers.is_file() and b"\n" in answers.read_bytes(), "answers")
    stop(run, signal.SIGTERM)
    assert not (out / "report.json").exists()
    again = start(words)
    assert again.end() == 0, again.output()[-3000:]
    assert len((out / "predictions.jsonl").read_text().splitlines()) == 400

    target = tmp_path / "exported"
    run = start([*COMMAND, "export", "--model", model, "--to", target])
    run.wait_for(lambda: handles_signals(run), "handlers")
    stop(run, signal.SIGUSR1)
    assert not target.exists()


def test_in_an_atomic_save(tmp_path: Path, start: Start) -> None:
    """The folder is completed first."""
    code = """
import os, signal, sys, time
from pathlib import Path
from coat_vlm.checkpoint.atomic_folder import write_folder
from coat_vlm.distributed import ALONE
from coat_vlm.run.signals import SIGNALS

def write(folder):
    (folder / "first").write_text("1")
    os.kill(os.getpid(), signal.SIGTERM)
    (folder / "second").write_text("2")

with SIGNALS.handle():
    with SIGNALS.hold("when it is complete"):
        write_folder(Path(sys.argv[1]), ALONE, write)
    Path(sys.argv[1], "after").touch()
"""
    run = start([sys.executable, "-c", code, tmp_path / "folder"])
    assert run.end() == 75, run.output()
    assert "SIGTERM received; stops when it is complete" in run.output()
    assert find_problem(tmp_path / "folder") is None
    assert not (tmp_path / "folder" / "after").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_while_ranks_connect(number: signal.Signals, status: int, tmp_path: Path, start: Start):
    """Torch retries for minutes, in native code, until rank 0 listens."""
    code = """
import sys
from torch.distributed import TCPStore
from coat_vlm.run.signals import SIGNALS

with SIGNALS.handle():
    print("connects", flush=True)
    TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=False)
"""
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        run = start([sys.executable, "-c", code, taken.getsockname()[1]])
        run.wait_for(lambda: "connects" in run.output(), "the start")
        time.sleep(1.0)
        run.send(number)
        assert run.end(20) == status, run.output()
    assert f"{number.name} received; stops now" in run.output()
