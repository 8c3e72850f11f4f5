"""Kills runs at random moments and resumes them until they end: ``killed_runs.py --help``.

Launchers and ranks are real processes, but forked from this one, which has imported everything and
has no threads: here and in the launchers, ``Popen`` of a Python program forks and runs the program
(:func:`fork_python`). All processes are descendants of this one (a subreaper, which adopts
orphans), and it signals no others.

The draws depend on the seed, the configuration and the number of kills alone; the moments also on
the speed of the machine.
"""

import argparse
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fault_runs import (
    ENV,
    count_steps,
    descendants,
    find_port,
    losses,
    read_folder,
    tiny_recipe,
    write_data,
    write_programs,
    write_recipe,
)
from started import exit_with, import_all

from coat_vlm.checkpoint.load import find_checkpoint, list_checkpoints, path_step
from coat_vlm.run.lock import LOCK

LIMIT_S = 60.0
"""Within this, all processes must have ended after a kill."""
START_S = 300.0
"""Within this, a start must train, on a loaded machine."""
STEPS = 24
"""Every checkpoint of so many steps is kept for good."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux's prctl."""
LAUNCHERS = ("torch.distributed.run", "deepspeed.launcher.runner", "deepspeed.launcher.launch")

_start_program = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]


def fork_python(self: Any, args: Any, *values: Any) -> None:
    """Start a process for ``Popen``; a Python program is forked from this process."""
    words = [] if isinstance(args, str | bytes) else [os.fspath(word) for word in args]
    if words[:1] != [sys.executable]:
        _start_program(self, args, *values)
        return
    _, _, _, _, cwd, env, _, _, _, stdin, _, _, stdout, _, stderr, *_ = values
    pipes, new_session = values[9:15], values[20]
    self.pid = os.fork()
    if self.pid:
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        if descriptor != -1:
            os.dup2(descriptor, number)
    os.closerange(3, 1024)
    if new_session:
        os.setsid()
    for number in signal.valid_signals():  # as exec does
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd or ".")
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    exit_with(run_python, words[1:])


def run_python(words: list[str]) -> int:
    """Do what ``python WORDS`` does."""
    words = words[1:] if words[0] == "-u" else words
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    return 0


@dataclasses.dataclass(frozen=True)
class Setup:
    """Ranks, ZeRO stage and precision of a run, written ``2:3:coat``."""

    ranks: int
    zero_stage: int
    precision: str

    @classmethod
    def parse(cls, text: str) -> "Setup":
        ranks, zero_stage, precision = text.split(":")
        return cls(int(ranks), int(zero_stage), precision)

    def __str__(self) -> str:
        return f"{self.ranks}:{self.zero_stage}:{self.precision}"

    def write(self, data: Path, run_dir: Path) -> Path:
        """Write a recipe that saves every third step."""
        stage = {"max_steps": STEPS, "save_steps": 3, "micro_batch_size": 1}
        recipe = {
            **tiny_recipe(data, run_dir, **stage),
            "zero_stage": self.zero_stage,
            "precision": self.precision,
            "save_total_limit": 2,
        }
        return write_recipe(recipe, run_dir.with_suffix(".yaml"))

    def words(self, launcher: str, recipe: Path, program: Path) -> list[str]:
        """The command line that trains or resumes; ``program`` is ``coat-vlm``."""
        train = ["train", str(recipe), "--resume", "auto"]
        python = [sys.executable, "-u"]
        if launcher == "none":
            return [*python, "-m", "coat_cli.main", *train]
        if launcher == "torchrun":
            torchrun = [*python, "-m", "torch.distributed.run", "--standalone"]
            return [*torchrun, f"--nproc-per-node={self.ranks}", "-m", "coat_cli.main", *train]
        deepspeed = [*python, "-m", "deepspeed.launcher.runner", f"--num_gpus={self.ranks}"]
        return [*deepspeed, f"--master_port={find_port()}", f"{program}", *train]


class Processes:
    """The processes of one start, in a tree below this one."""

    def __init__(self, words: list[str], log: Path, depth: int) -> None:
        self.log = log
        self.begun = time.time()
        self._depth = depth
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words, env=ENV, stdout=file, stderr=file, start_new_session=True
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def find(self, target: str, draw: random.Random) -> list[int]:
        """The processes to kill; ``middle`` is the second one of DeepSpeed's launcher."""
        levels = [[self.process.pid]]
        while levels[-1]:
            levels.append([child for pid in levels[-1] for child in children(pid)])
        if target == "all":
            return [pid for level in levels for pid in level]
        number = {"launcher": 0, "middle": 1, "rank": self._depth}[target]
        level = levels[number] if number < len(levels) else []
        return [draw.choice(level)] if level else [self.process.pid]

    def wait_for_end(self, what: str) -> float:
        """Wait until no process is left, also no orphan; returns the seconds."""
        begun = time.monotonic()
        while left := descendants(os.getpid()):
            reap(self.process)
            if time.monotonic() - begun > LIMIT_S:
                fail(f"{what}: after {LIMIT_S:.0f} s there are still {left}", self)
            time.sleep(0.02)
        reap(self.process)
        return time.monotonic() - begun


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(word) for word in path.read_text().split()]
    except OSError:
        return []


def reap(process: "subprocess.Popen[bytes]") -> None:
    """Take the status of ended processes; orphans have become children of this process."""
    process.poll()
    for pid in children(os.getpid()):
        if pid != process.pid:
            os.waitpid(pid, os.WNOHANG)


def send(pid: int, number: int) -> None:
    """Signal a process, if it is still a descendant of this one; its number is not taken anew."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if pid in descendants(os.getpid()):
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def read_state(pid: int) -> list[str]:
    """What a process does, unless it has ended."""
    try:
        return [Path(f"/proc/{pid}/stat").read_text()]
    except OSError:
        return []


def fail(message: str, processes: Processes) -> NoReturn:
    left = descendants(os.getpid())
    states = [line for pid in left for line in read_state(pid)]
    for pid in left:
        send(pid, signal.SIGKILL)
    output = processes.output()[-4000:]
    raise AssertionError(f"{message}\n{states}\n{processes.log}:\n{output}")


@dataclasses.dataclass
class Campaign:
    """The kills of one setup."""

    setup: Setup
    folder: Path
    data: Path
    program: Path
    draw: random.Random
    starts: int = 0
    start_s: float = 0.0

    def start(self, run_dir: Path, launcher: str) -> Processes:
        self.starts += 1
        recipe = self.setup.write(self.data, run_dir)
        log = self.folder / f"{self.starts:03d}-{launcher}.log"
        depth = ("none", "torchrun", "deepspeed").index(launcher)
        words = self.setup.words(launcher, recipe, self.program)
        return Processes(words, log, depth)

    def train_undisturbed(self) -> None:
        run_dir = self.folder / "reference"
        begun = time.monotonic()
        processes = self.start(run_dir, self.plain_launcher)
        self.wait_for(processes, lambda: count_steps(run_dir) > 0)
        self.start_s = time.monotonic() - begun
        self.wait_for_success(processes, "the undisturbed run")

    @property
    def plain_launcher(self) -> str:
        return "none" if self.setup.ranks == 1 else "torchrun"

    def wait_for(self, processes: Processes, condition: Callable[[], Any]) -> bool:
        """Wait for a condition; returns whether it holds before the launcher ends."""
        deadline = time.monotonic() + START_S
        while not condition():
            if processes.process.poll() is not None:
                return bool(condition())
            if time.monotonic() > deadline:
                fail(f"nothing happens in {START_S:.0f} s", processes)
            time.sleep(0.005)
        return True

    def wait_for_success(self, processes: Processes, what: str) -> None:
        self.wait_for(processes, lambda: processes.process.poll() is not None)
        if processes.process.returncode:
            fail(f"{what} failed", processes)
        processes.wait_for_end(what)

    def run(self, kills: int) -> None:
        self.train_undisturbed()
        done = number = 0
        while done < kills:
            run_dir, killed = self.folder / f"run-{number}", False
            while find_model(run_dir) is None:
                killed = self.kill_once(run_dir, done, last=done == kills)
                done += killed
            if killed and (run_dir / LOCK).exists():  # killed after the model was saved
                again = self.start(run_dir, self.plain_launcher)
                self.wait_for_success(again, "the start that takes the lock over")
            self.compare(run_dir)
            number += 1

    def kill_once(self, run_dir: Path, number: int, *, last: bool) -> bool:
        """Start or resume, kill, and look at what is left; returns whether a process was killed."""
        draw = self.draw
        launcher = draw.choice(["torchrun", "deepspeed", *["none"] * (self.setup.ranks == 1)])
        target = draw.choice(["launcher", "middle", "rank", "rank", "all"])
        how = draw.choices(["SIGKILL", "SIGTERM", "SIGSTOP"], [7, 2, 1])[0]
        moment = draw.choices(["start", "step", "end"], [3, 6, 1])[0]
        part, steps = draw.random(), draw.randint(1, 7)
        resumed, before = newest(run_dir), count_steps(run_dir)
        processes = self.start(run_dir, launcher)
        if last:
            self.wait_for(processes, lambda: processes.process.poll() is not None)
        elif moment == "start" and (target, launcher) != ("launcher", "deepspeed"):
            time.sleep(part * self.start_s)
        else:
            # Before its ranks run, the end of `deepspeed` is seen by nobody.
            wanted = STEPS if moment == "end" else min(STEPS, resumed + steps)
            reached = self.wait_for(processes, lambda: trained(processes, run_dir) >= wanted)
            time.sleep(part * 0.15 if reached else 0.0)
        kept = newest(run_dir)
        killed = processes.process.poll() is None
        name = f"{self.setup} kill {number + 1}: {how} of {target} under {launcher}"
        if killed:
            victims = processes.find(target, draw)
            for pid in victims:
                send(pid, getattr(signal, how))
            if how == "SIGSTOP":
                time.sleep(part)
                for pid in victims:
                    send(pid, signal.SIGKILL)
        elif processes.process.returncode:
            fail(f"{name}: it failed before, with {processes.process.returncode}", processes)
        seconds = processes.wait_for_end(name)
        found = newest(run_dir)
        if found < kept or damaged(run_dir):
            fail(f"{name}: the newest checkpoint was {kept} and is {found}", processes)
        text = processes.output()
        if "continues from" in text and f"step-{resumed:08d}" not in text:
            fail(f"{name}: it did not continue from {resumed}", processes)
        row = {"setup": f"{self.setup}", "kill": number + 1, "launcher": launcher}
        row |= {"moment": moment, "target": target, "signal": how if killed else None}
        row |= {"steps": [before, count_steps(run_dir)], "checkpoint": [resumed, kept, found]}
        sys.stdout.write(json.dumps({**row, "ended_s": round(seconds, 2)}) + "\n")
        return killed

    def compare(self, run_dir: Path) -> None:
        """Compare a finished run with the undisturbed one."""
        reference = self.folder / "reference"
        assert losses(run_dir) == losses(reference), f"{run_dir}: other losses"
        own, other = (read_model(folder / "sft/model") for folder in (run_dir, reference))
        different = {name for name in own | other if own.get(name) != other.get(name)}
        assert not different, f"{run_dir}: {different}"
        saved, expected = (
            {path_step(path) for path in list_checkpoints(folder / "sft/checkpoints")}
            for folder in (run_dir, reference)
        )
        # The one before the last may be a checkpoint that a signal saved at another step.
        assert STEPS in expected & saved, f"{run_dir}: {saved}, reference {expected}"
        assert len(saved) >= len(expected), f"{run_dir}: {saved} instead of {expected}"
        left = [path.name for path in run_dir.rglob(".*")]
        assert not left, f"{run_dir}: {left}"
        shutil.rmtree(run_dir)


def read_model(folder: Path) -> dict[str, Any]:
    """The files of a model, without the commit of the working tree, which may change meanwhile."""
    files: dict[str, Any] = read_folder(folder)
    files["training.json"] = {**json.loads(files["training.json"]), "commit": None}
    del files["manifest.json"]
    return files


def find_model(run_dir: Path) -> Path | None:
    model = run_dir / "sft" / "model"
    return model if model.is_dir() else None


def newest(run_dir: Path) -> int:
    """The step of the newest checkpoint, whether or not its files are as they were written."""
    return max(map(path_step, list_checkpoints(run_dir / "sft/checkpoints")), default=0)


def damaged(run_dir: Path) -> bool:
    found = find_checkpoint(run_dir / "sft/checkpoints").path
    return newest(run_dir) != (0 if found is None else path_step(found))


def trained(processes: Processes, run_dir: Path) -> int:
    """Finished steps, once the process that was just started is training."""
    metrics = run_dir / "metrics.jsonl"
    begun = metrics.is_file() and metrics.stat().st_mtime > processes.begun
    return count_steps(run_dir) if begun else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill runs at random moments and resume them.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("setups", nargs="+", type=Setup.parse, metavar="RANKS:ZERO:PRECISION")
    parser.add_argument("--kills", type=int, default=4, help="per setup")
    parser.add_argument("--seed", type=int, default=0)
    # Ranks look for the word in the command line of the process that may be DeepSpeed's runner.
    parser.add_argument("--launchers", choices=["torchrun,deepspeed"], required=True)
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.write(f"seed {args.seed}\n")
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    os.environ["OMP_NUM_THREADS"] = "1"
    import_all()
    for name in (*LAUNCHERS, "coat_cli.main"):
        importlib.import_module(name)
    gc.freeze()
    subprocess.Popen._execute_child = fork_python  # pyright: ignore[reportAttributeAccessIssue]
    args.folder.mkdir(parents=True, exist_ok=True)
    data = write_data(args.folder)
    program = write_programs(args.folder / "programs") / "coat-vlm"
    failures = 0
    for setup in args.setups:
        folder = args.folder / str(setup).replace(":", "-")
        folder.mkdir()
        draw = random.Random(f"{args.seed} {setup}")
        campaign = Campaign(setup, folder, data, program, draw)
        try:
            campaign.run(args.kills)
        except AssertionError as error:
            failures += 1
            sys.stdout.write(f"FAILED {setup} (its folder stays: {folder}): {error}\n")
        else:
            shutil.rmtree(folder)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
