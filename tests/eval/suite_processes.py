"""Runs `coat-vlm eval --tasks` in processes of its own: ``suite_processes.py MODEL DATA OUT``.

OUT/killed gets a run that was killed in the middle, OUT/ranks one of two ranks. The processes are
forked from this one, which has imported everything and run nothing: it has no threads yet, whose
locks a fork would leave closed for ever.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coat_cli.main import main
from coat_eval import runner  # noqa: F401 - imported before the forks
from coat_eval.own_model import CoatAdapter

SLOW_S = 0.05
PATIENCE_S = 120.0
OPTIONS = ["--max-new-tokens", "1", "--batch-size", "4"]


def slowly(answer: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """So that a run can be killed in the middle."""

    def slow(*args: Any) -> list[str]:
        time.sleep(SLOW_S)
        return answer(*args)

    return slow


def start(out: Path, tasks: str, environment: dict[str, str]) -> int:
    child = os.fork()
    if not child:
        os.environ.update(environment)
        words = ["--model", sys.argv[1], "--data", sys.argv[2], "--to", str(out)]
        os._exit(main(["eval", *words, "--tasks", *tasks.split(","), *OPTIONS]))
    return child


def wait_for(what: Callable[[], bool], child: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            raise SystemExit(f"process {child} did not do in {PATIENCE_S} s what it was to do")
        time.sleep(0.005)


def kill_one(out: Path) -> None:
    child = start(out, "pope", {})
    path = out / "pope" / "predictions.rank0.jsonl"
    wait_for(lambda: path.is_file() and path.read_bytes().count(b"\n") >= 4, child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def run_ranks(out: Path) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = [
        start(out, "seedbench,videomme", {**common, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    statuses: dict[int, int] = {}

    def ended() -> bool:
        for child in children:
            if child not in statuses:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    statuses[child] = os.waitstatus_to_exitcode(status)
        return len(statuses) == len(children)

    for child in children:
        wait_for(ended, child)
    return list(statuses.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    CoatAdapter.answer = slowly(CoatAdapter.answer)
    kill_one(Path(sys.argv[3]) / "killed")
    sys.exit(any(run_ranks(Path(sys.argv[3]) / "ranks")))
