"""Metric loggers (metrics.jsonl, TensorBoard, Weights & Biases) and the printed progress line.

A user reads a line of numbers while a stage trains: behind a bar, or in a log file.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coat_vlm.config import STAGES, TrackingConfig
from coat_vlm.distributed import World

METRICS = "metrics.jsonl"
"""File in a run folder."""


class Metrics:
    """Writes what happens in a run; only the main process has one that writes.

    Args:
        run_dir: the run folder.
        tracking: where metrics go besides metrics.jsonl.
        run_name: name of the run in Weights & Biases.
        enabled: False on other ranks: nothing is written.

    Raises:
        ValueError: Weights & Biases is asked for but not installed.
    """

    def __init__(
        self, run_dir: Path, tracking: TrackingConfig, run_name: str, enabled: bool
    ) -> None:
        self._file = (run_dir / METRICS).open("a", encoding="utf-8") if enabled else None
        self._board = None
        self._wandb = None
        if enabled and tracking.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"))
        if enabled and tracking.wandb_project:
            self._wandb = _start_wandb(tracking.wandb_project, run_name, run_dir)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row with the time in seconds since 1970, flushed at once."""
        if self._file is None:
            return
        self._file.write(json.dumps({**row, "time": round(time.time(), 3)}) + "\n")
        self._file.flush()
        if row["kind"] in {"step", "val", "eval", "monitor"}:
            numbers = dict(_numbers(row["stage"], row))
            if self._board is not None:
                for name, value in numbers.items():
                    self._board.add_scalar(name, value, row["step"])
            if self._wandb is not None:
                # Not as W&B's own step, which must grow: every stage counts from 1.
                self._wandb.log({**numbers, f"{row['stage']}/step": row["step"]})

    def close(self) -> None:
        """Flush and close all."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl file that may not be there, but for one that a killed run cut off."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def rewind(path: Path, stage: str, step: int) -> None:
    """Drop the rows after ``step`` of ``stage``, which a resumed run will write again.

    Args:
        path: metrics.jsonl or bad_samples.jsonl, whose rows name their stage and step.
        stage: the stage that is resumed.
        step: the step of its checkpoint; later rows of it and of later stages go.
    """
    if not path.is_file():
        return
    kept = []
    for row in read_rows(path):
        order = STAGES.index(row["stage"]) - STAGES.index(stage)
        of_stage = row.get("step", 0) <= step and row.get("status") != "end"
        if order < 0 or (order == 0 and of_stage):
            kept.append(json.dumps(row) + "\n")
    new = path.with_suffix(".tmp")
    with new.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def say(world: World, text: str) -> None:
    """Print on the main process, above a progress bar."""
    if world.is_main:
        tqdm.write(text)


def _start_wandb(project: str, run_name: str, run_dir: Path) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"tracking.wandb_project={project!r} needs the wandb package; install coat-vlm[wandb] "
            "or remove the key"
        ) from error
    run = wandb.init(project=project, name=run_name, dir=str(run_dir))
    for stage in STAGES:
        run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
    return run


def _numbers(prefix: str, row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row by path, ``sft/lr/vision``."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and name not in {"step", "total_steps", "time"}:
            yield f"{prefix}/{name}", value


class StepLine:
    """Shows the steps of a stage on the main process.

    In a terminal there is a progress bar on stderr with the numbers behind it. Where stderr is a
    file or a pipe, a bar would fill it with carriage returns: there a whole line is printed, at
    once, to stdout, where the tables and warnings of the stage are. Either shows the loss, the
    gradient norm and the learning rates of its step, and rates of the steps since the last time.

    Args:
        stage: its name.
        total_steps: all its steps.
        done: those that an earlier process has done.
        every: steps between two lines; the last step has one, too.
        world: the processes of the run.
    """

    def __init__(self, stage: str, total_steps: int, done: int, every: int, world: World) -> None:
        self._stage, self._total, self._every = stage, total_steps, every
        self._ranks = world.size
        self._lines = world.is_main and not sys.stderr.isatty()
        self._bar = tqdm(
            total=total_steps,
            initial=done,
            desc=stage,
            unit="step",
            disable=self._lines or not world.is_main,
            mininterval=1.0,
        )
        self._peak_mb: float | None = None
        self._rows: list[Mapping[str, Any]] = []

    def __enter__(self) -> "StepLine":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, row: Mapping[str, Any]) -> None:
        """Take in a step's row of metrics.jsonl, and show a line where one is due."""
        self._rows.append(row)
        self._peak_mb = row["peak_memory_mb"] or self._peak_mb
        self._bar.update()
        step = row["step"]
        if step % self._every and step != self._total:
            return
        seconds = sum(one["step_s"] for one in self._rows)
        tokens, vision = (
            f"{sum(one[name] for one in self._rows) / seconds:,.0f}"
            for name in ("tokens", "vision_tokens")
        )
        work = sum(sum(one.get("tflop", {}).values()) for one in self._rows)
        per_gpu = work / seconds / self._ranks
        tflop = f"{per_gpu:,.0f}" if per_gpu >= 100 else f"{per_gpu:.3g}"
        wait = f"wait {sum(one['data_wait_s'] for one in self._rows) / seconds:.1%}"
        memory = self._peak_mb and f"{self._peak_mb / 1e3:.1f} GB"
        loss = "loss not finite" if row["loss"] is None else f"loss {row['loss']:.4f}"
        if self._lines:
            norm, rates = row["grad_norm"], dict.fromkeys(row["lr"].values())
            left = math.ceil((self._total - step) * seconds / len(self._rows))
            parts = [
                f"{self._stage} step {step}/{self._total}",
                loss,
                f"grad {'not finite' if norm is None else f'{norm:.3g}'}",
                f"lr {'/'.join(f'{rate:.1e}' for rate in rates)}",
                f"tokens/s {tokens}",
                f"(vision {vision})" if any(one["vision_tokens"] for one in self._rows) else None,
                f"TFLOP/s {tflop}" if work else None,
                wait,
                memory and f"mem {memory}",
                f"eta {timedelta(seconds=left)}",
            ]
            tqdm.write(" ".join(filter(None, parts)))
            sys.stdout.flush()
        else:
            parts = [loss, f"{tokens} tokens/s", f"{tflop} TFLOP/s" if work else None, wait, memory]
            self._bar.set_postfix_str(", ".join(filter(None, parts)))
        self._rows.clear()
