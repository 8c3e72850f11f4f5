"""Faults of the machine and of impatient users end with one line, never with a traceback."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_runs import COMMAND, Run, count_steps, descendants, tiny_recipe, write_recipe

import coat_eval.runner
from coat_cli.main import main
from coat_data.folder_lock import LockError, hold_lock
from coat_vlm.config.load import load_recipe, save_recipe
from coat_vlm.train.resume import prepare_run_folder

Start = Callable[..., Run]


def train(text_data: Path, tmp_path: Path, workers: int) -> list[str]:
    recipe = tiny_recipe(text_data, tmp_path / "run", max_steps=100_000)
    path = write_recipe({**recipe, "num_workers": workers}, tmp_path / "recipe.yaml")
    return [*COMMAND, "train", str(path)]


def check_one_line(run: Run, words: str) -> None:
    """Check the status, and that the last lines are the message and how to see more."""
    assert run.end() == 2, run.output()[-3000:]
    assert "Traceback" not in run.output(), run.output()[-3000:]
    *_, message, debug = run.output().splitlines()
    assert debug == "(--debug shows the traceback)"
    assert words in message


def test_a_killed_worker(text_data: Path, start: Start, tmp_path: Path) -> None:
    run = start(train(text_data, tmp_path, workers=2))
    run.wait_for(lambda: count_steps(tmp_path / "run") > 3, "training")
    os.kill(descendants(run.pid)[0], signal.SIGKILL)
    check_one_line(run, "use fewer workers (num_workers)")


SHARED = "mount -t tmpfs -o size=64k none /dev/shm"


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [("ulimit -n 64", "(ulimit -n)"), ("ulimit -n 32", "(ulimit -n)"), (SHARED, "(--shm-size=8g)")],
    ids=["files-64", "files-32", "shared memory"],
)
def test_too_little_for_workers(
    limit: str, remedy: str, text_data: Path, start: Start, tmp_path: Path
) -> None:
    """With 32 files already the start of the workers fails, and leaves none behind."""
    namespace = ["unshare", "--map-root-user", "--mount"] if limit == SHARED else []
    if namespace and subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no mounts are allowed here")
    command = shlex.join(train(text_data, tmp_path, workers=8))
    run = start([*namespace, shutil.which("bash") or "bash", "-c", f"{limit} && exec {command}"])
    check_one_line(run, remedy)
    assert not descendants(run.pid)


IMPATIENT = """
import atexit, os, sys, time
from coat_cli import main, train

def say(moment):  # at once with its line end: messages to stderr cannot come between
    os.write(1, f"{moment}\\n".encode())

def wait(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # a signal must not make it shorter
        time.sleep(0.01)

def train_until_signal(_):
    try:
        say("trains")
        time.sleep(60)
    finally:
        say("cleans")
        wait(CLEANUP_S)
        say("cleaned")

def at_exit():
    say("exits")
    wait(0.5)
    say("exited")

atexit.register(at_exit)
train._run = train_until_signal
sys.argv[1:] = ["train", "quickstart"]
sys.exit(main.main())
"""


def impatient(cleanup_s: float) -> str:
    return IMPATIENT.replace("CLEANUP_S", f"{cleanup_s}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals(number: signal.Signals, start: Start) -> None:
    """Neither the cleanup nor the end of the interpreter is interrupted by the next one."""
    run = start([sys.executable, "-c", impatient(0.5)])
    for moment in ("trains", "cleans", "exits"):
        run.wait_for(lambda moment=moment: f"{moment}\n" in run.output(), moment)
        run.send(number if moment == "trains" else signal.SIGINT)
    assert run.end() == (130 if number == signal.SIGINT else 75), run.output()
    output = run.output()
    assert "cleaned\n" in output
    assert "exited\n" in output
    assert "Traceback" not in output
    assert "checkpoint" not in output  # there is none
    lines = [line for line in output.splitlines() if "coat-vlm: " in line]
    assert all(line.startswith("coat-vlm: ") and line.count("coat-vlm") == 1 for line in lines)


def test_an_impatient_user_does_not_wait_for_a_cleanup(start: Start) -> None:
    run = start([sys.executable, "-c", impatient(60.0)])
    for moment in ("trains", "cleans"):
        run.wait_for(lambda moment=moment: f"{moment}\n" in run.output(), moment)
        run.send(signal.SIGINT)
    assert run.end(20) == 130, run.output()
    assert run.output().splitlines()[-1] == "coat-vlm: does not wait for the cleanup"


def test_overwriting_a_run_that_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = load_recipe("quickstart", [f"output_dir={run}"])
    save_recipe(recipe, run / "recipe.yaml")

    def evaluate(*_: object, **__: object) -> None:
        with hold_lock(run / ".lock", "train"):  # as training does
            pass

    monkeypatch.setattr(coat_eval.runner, "evaluate_run", evaluate)
    assert main(["eval", "--model", str(run)]) == 2
    assert "run is in use by coat-vlm eval" in capsys.readouterr().err
    # An evaluation with --to has the lock of its own folder.
    answers = run / "answers" / "own" / "predictions.jsonl"
    with hold_lock(answers.with_name(".lock"), "eval"):
        answers.write_text("{}\n")
        with pytest.raises(LockError, match="own is in use by coat-vlm eval"):
            prepare_run_folder(run, recipe, continues=False, overwrite=True)
    assert answers.is_file()
    prepare_run_folder(run, recipe, continues=False, overwrite=True)
    assert not answers.parent.exists()
