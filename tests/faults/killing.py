"""Kills processes while they save checkpoints: ``killing.py FOLDER TIMES SEED [background]``.

Each process is forked from this one, which has imported everything. It saves one state per step,
twice: the second time in the place of a whole checkpoint. After each kill the newest whole one
must be of the last step reported, or of the next. Prints JSON: what the kills left behind.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from coat_vlm.checkpoint.atomic_folder import recover_folders
from coat_vlm.checkpoint.load import find_checkpoint
from coat_vlm.checkpoint.metadata import Progress, read_progress
from coat_vlm.checkpoint.save import CheckpointSaver
from coat_vlm.checkpoint.shards import Shards
from coat_vlm.distributed import ALONE
from coat_vlm.optim import CoatAdamW

SHAPE = (96, 64)
BACKGROUND = "background" in sys.argv
"""Whether a thread writes the checkpoints."""


def engine_of(step: int) -> Any:
    """What CheckpointSaver needs of an engine at stage 0, every number of it that of a step."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    optimizer = CoatAdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(step))
        parameter.grad = torch.full_like(parameter, float(step))
    optimizer.step()
    return SimpleNamespace(
        module=model,
        optimizer=optimizer,
        basic_optimizer=optimizer,
        zero_optimization_stage=lambda: 0,
    )


def save_for_ever(folder: Path, step: int, report: int) -> None:
    while True:
        step += 1
        progress = Progress(
            stage="sft", step=step, world_size=1, zero_stage=0, precision="coat", bad_samples=0,
            sampler_state=(step, 0),
        )  # fmt: skip
        engine = engine_of(step)
        os.write(report, b"+")  # begins
        saver = CheckpointSaver(folder, engine, ALONE, 2, background=BACKGROUND)
        for _ in range(2):
            saver.save(progress)
        saver.finish()
        os.write(report, b".")  # ends


def kill_one(folder: Path, step: int, delay_s: float | None) -> tuple[int, bool, float]:
    """Start a process that saves, and kill it.

    Args:
        folder: the checkpoints.
        step: the newest of them.
        delay_s: between the beginning of its first save and its death; None waits for the end.

    Returns:
        Steps that it saved, whether it died during a save, and the seconds that it had.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        save_for_ever(folder, step, writing)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as file:
        reported = file.read(1)
        begin = time.perf_counter()
        if delay_s is None:
            reported += file.read(1)
        else:
            time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        seconds = time.perf_counter() - begin
        os.waitpid(child, 0)
        reported += file.read()
    return reported.count(b"."), reported.endswith(b"+"), seconds


def check(folder: Path, expected: set[int]) -> int:
    """The newest step, whose files hold what they should."""
    recover_folders(folder)
    found = find_checkpoint(folder).path
    step = read_progress(found).step if found is not None else 0
    assert step in expected, (step, expected)
    assert all(path.name.startswith("step-") for path in folder.iterdir())
    if found is not None:
        weight = Shards(found).read_parameter("0.weight", SHAPE)
        assert (weight == step).all(), (step, weight)
    return step


def main() -> None:
    folder, times, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    folder.mkdir()
    left: dict[str, int] = {"inside a save": 0}
    saved, inside, step_s = kill_one(folder, 0, None)
    step = check(folder, {saved, saved + inside})
    for _ in range(times):
        saved, inside, _ = kill_one(folder, step, draw.uniform(0.0, 2 * step_s))
        left["inside a save"] += inside
        for prefix in {path.name.split("step")[0] for path in folder.iterdir()}:
            left[prefix] = left.get(prefix, 0) + 1
        step = check(folder, {step + saved, step + saved + inside})
    left["steps"] = step
    sys.stdout.write("\n" + json.dumps(left))


if __name__ == "__main__":
    main()
