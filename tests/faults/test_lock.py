"""Two processes in one folder: one works on untouched, the other one says who has the folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_runs import (
    COMMAND,
    ENV,
    Run,
    alive,
    count_steps,
    losses,
    read_folder,
    tiny_recipe,
    write_recipe,
)

from coat_data.folder_lock import LockError
from coat_vlm.checkpoint.load import find_checkpoint
from coat_vlm.run.lock import lock_folder

Start = Callable[..., Run]


def train(recipe: dict[str, Any], tmp_path: Path, *options: str) -> list[str]:
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    return [*COMMAND, "train", str(path), *options]


def hold_lock(path: Path) -> "subprocess.Popen[str]":
    """Start a process that holds a lock until its standard input is closed."""
    code = """
import sys
from pathlib import Path
from coat_data.folder_lock import LockError, hold_lock
try:
    with hold_lock(Path(sys.argv[1]), "test", limit_s=2.0):
        print("held", flush=True)
        sys.stdin.read()
except LockError as error:
    print(error, flush=True)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV,
    )  # fmt: skip


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def make_foreign(path: Path, age_s: float = 0.0) -> None:
    """Change the lock as if its holder ran on another host and renewed it ``age_s`` ago."""
    holder = json.loads(path.read_text())
    holder["host"] = ["another-host", "", ""]
    path.write_text(json.dumps(holder))
    moment = time.time() - age_s
    os.utime(path, (moment, moment))


@pytest.fixture
def holder(tmp_path: Path):
    process = hold_lock(tmp_path / ".lock")
    assert read_line(process) == "held"
    yield process
    process.kill()
    process.communicate()


def test_a_live_holder_is_named_and_a_dead_one_replaced(
    holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    path = tmp_path / ".lock"
    with pytest.raises(LockError, match=rf"coat-vlm test \(process {holder.pid} on \S+, since 2"):
        lock_folder(path, "train").__enter__()
    holder.send_signal(signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)  # until it has stopped
    with pytest.raises(LockError, match=rf"it is stopped \(kill -CONT {holder.pid} "):
        lock_folder(path, "train").__enter__()
    holder.kill()
    while alive(holder.pid):  # it stays a zombie, whose number is still taken
        time.sleep(0.02)
    with lock_folder(path, "train") as lock:
        lock.check()
    assert not list(tmp_path.iterdir())


def test_the_number_of_a_dead_holder_may_be_another_process(
    holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    path = tmp_path / ".lock"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "process_start": content["process_start"] - 1}))
    with lock_folder(path, "train") as lock:
        lock.check()


def test_a_lock_of_another_host_is_judged_by_its_renewals(
    holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    path = tmp_path / ".lock"
    make_foreign(path)
    with pytest.raises(LockError, match=r"is in use by .* on another-host"):
        # Its process renews it every five seconds.
        lock_folder(path, "train", limit_s=300.0).__enter__()
    holder.kill()
    holder.wait()
    before = time.monotonic()
    with lock_folder(path, "train", limit_s=2.0):
        assert time.monotonic() - before < 60
    assert not list(tmp_path.iterdir())


def test_a_clock_that_is_wrong_does_not_matter(tmp_path: Path) -> None:
    """An advancing time of another host's lock is a renewal, wherever its clock stands."""
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"host": ["elsewhere", "", ""], "pid": 1, "token": "x"}))
    stop, now = threading.Event(), time.time() + 3600

    def renew() -> None:
        seconds = 0.0
        while not stop.wait(0.2):
            seconds += 0.2
            os.utime(path, (now + seconds, now + seconds))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(LockError, match="elsewhere"):
            lock_folder(path, "train", limit_s=60.0).__enter__()
    finally:
        stop.set()
        thread.join()


def test_one_of_many_takes_a_stale_lock_over(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    for _ in range(2):
        path.write_text(json.dumps({"host": ["elsewhere", "", ""], "token": "stale"}))
        os.utime(path, (time.time() + 1.5, time.time() + 1.5))  # stale for all at the same moment
        processes = [hold_lock(path) for _ in range(4)]
        said = [read_line(process) for process in processes]
        assert said.count("held") == 1, said
        assert sum("is in use by coat-vlm test" in line for line in said) == 3, said
        for process in processes:
            process.communicate()
        assert not list(tmp_path.iterdir())


def test_a_lost_lock_is_noticed_and_left_to_its_new_holder(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with lock_folder(path, "train") as old:
        path.unlink()
        with pytest.raises(LockError, match="is gone"):
            old.check()
        with lock_folder(path, "other") as new:
            with pytest.raises(LockError, match="is held by coat-vlm other"):
                old.check()
            old.release()
            new.check()
    assert not list(tmp_path.iterdir())


def test_a_stopped_run_that_wakes_up_writes_nothing(
    text_data: Path, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    recipe = tiny_recipe(text_data, run_dir, max_steps=100_000, save_steps=20)
    first = start(train(recipe, tmp_path))
    first.wait_for(lambda: find_checkpoint(run_dir / "sft/checkpoints").path, "a checkpoint")
    first.send(signal.SIGSTOP)
    refused = start(train(recipe, tmp_path, "--resume", "auto"))
    assert refused.end() == 2
    assert "it is stopped (kill -CONT" in refused.output()
    make_foreign(run_dir / ".lock", age_s=1000)
    before = count_steps(run_dir)
    second = start(train(recipe, tmp_path, "--resume", "auto"))
    second.wait_for(lambda: count_steps(run_dir) > before + 20, "training on")
    second.send(signal.SIGSTOP)  # the folder is compared while its owner is alive
    while Path(f"/proc/{second.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.02)
    left = read_folder(run_dir)
    first.send(signal.SIGCONT)
    assert first.end() == 2, first.output()[-2000:]
    assert "this process lost its lock" in first.output()
    assert read_folder(run_dir) == left
    second.send(signal.SIGCONT)
    second.send(signal.SIGTERM)
    assert second.end() == 75
    losses(run_dir)  # every step once
