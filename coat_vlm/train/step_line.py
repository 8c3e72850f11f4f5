"""The line of numbers that a user reads while a stage trains: behind a bar, or in a log file."""

import math
import sys
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

from tqdm import tqdm

from coat_vlm.train.world import World


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
        self._forget()

    def __enter__(self) -> "StepLine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def show(self, row: Mapping[str, Any]) -> None:
        """Take in a step's row of metrics.jsonl, and show a line where one is due."""
        self._peak_mb = row["peak_memory_mb"] or self._peak_mb
        self._steps += 1
        self._seconds += row["step_s"]
        self._waited += row["data_wait_s"]
        self._tokens += row["tokens"]
        self._vision_tokens += row["vision_tokens"]
        self._tflop += sum(row.get("tflop", {}).values())
        self._bar.update()
        step = row["step"]
        if step % self._every and step != self._total:
            return
        if self._lines:
            tqdm.write(self._line(row))
            sys.stdout.flush()
        else:
            self._bar.set_postfix_str(self._postfix(row))
        self._forget()

    def _forget(self) -> None:
        self._steps = self._tokens = self._vision_tokens = 0
        self._seconds = self._waited = self._tflop = 0.0

    def _line(self, row: Mapping[str, Any]) -> str:
        norm, rates = row["grad_norm"], dict.fromkeys(row["lr"].values())
        shown = [
            f"{self._stage} step {row['step']}/{self._total}",
            f"loss {_loss(row)}",
            f"grad {'not finite' if norm is None else f'{norm:.3g}'}",
            f"lr {'/'.join(f'{rate:.1e}' for rate in rates)}",
            f"tokens/s {self._tokens / self._seconds:,.0f}",
        ]
        if self._vision_tokens:
            shown.append(f"(vision {self._vision_tokens / self._seconds:,.0f})")
        if self._tflop:
            shown.append(f"TFLOP/s {self._tflop_rate()}")
        shown.append(f"wait {self._waited / self._seconds:.1%}")
        if self._peak_mb is not None:
            shown.append(f"mem {self._peak_mb / 1e3:.1f} GB")
        left = math.ceil((self._total - row["step"]) * self._seconds / self._steps)
        return " ".join([*shown, f"eta {timedelta(seconds=left)}"])

    def _postfix(self, row: Mapping[str, Any]) -> str:
        shown = [f"loss {_loss(row)}", f"{self._tokens / self._seconds:,.0f} tokens/s"]
        if self._tflop:
            shown.append(f"{self._tflop_rate()} TFLOP/s")
        shown.append(f"wait {self._waited / self._seconds:.1%}")
        if self._peak_mb is not None:
            shown.append(f"{self._peak_mb / 1e3:.1f} GB")
        return ", ".join(shown)

    def _tflop_rate(self) -> str:
        """Per GPU."""
        rate = self._tflop / self._seconds / self._ranks
        return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _loss(row: Mapping[str, Any]) -> str:
    return "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
