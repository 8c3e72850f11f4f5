"""metrics.jsonl, TensorBoard and Weights & Biases."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coat_vlm.config import STAGES, TrackingConfig


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
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8") if enabled else None
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


def rewind(run_dir: Path, stage: str, step: int) -> None:
    """Drop the rows after ``step`` of ``stage``, which a resumed run will write again.

    Args:
        run_dir: the run folder.
        stage: the stage that is resumed.
        step: the step of its checkpoint; later rows of it and of later stages go.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off when the run was killed
        order = STAGES.index(row["stage"]) - STAGES.index(stage)
        is_new = order > 0 or (order == 0 and row.get("step", 0) > step)
        if not is_new and not (order == 0 and row.get("status") == "end"):
            kept.append(line)
    new = path.with_suffix(".tmp")
    with new.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


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
