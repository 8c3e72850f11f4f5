"""Where the time of a step goes, on request (``log_phases``).

On a GPU a phase is what passes there between two events in the stream: the CPU runs ahead and its
clock would measure launches alone. Events are asked for their times when the loop has read the
step's loss, which waits for the GPU in any case and comes after the optimizer's work in the stream.
So the step has not one wait more than without this. On a CPU the clock is ``perf_counter``.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Phase = Literal["to_device", "forward", "backward", "optimizer"]

PHASES = ("data_wait", "to_device", "forward", "backward", "optimizer", "rest")
"""All of a step, in its order: waiting for data; copying batches to the device; the forward pass
with the loss; the backward pass with what ZeRO communicates in it; clipping and the optimizer's
step; whatever is left, such as sums over the ranks. Validation and saving are between steps."""


class PhaseClock:
    """Times the phases of one process's steps, summed over micro-batches.

    Args:
        device: where the work is done.
        enabled: False times nothing.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._on_gpu = device.type == "cuda"
        self._enabled = enabled
        self._in_step = False
        self._spans: list[tuple[Phase, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """A step begins."""
        self._in_step = True

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Time a part of a phase; outside of steps, as in validation, nothing is timed."""
        if not (self._enabled and self._in_step):
            yield
            return
        begin = self._now()
        yield
        self._spans.append((phase, begin, self._now()))

    def row(self, data_wait: float, seconds: float) -> dict[str, dict[str, float]]:
        """``phases`` as metrics.jsonl has them: seconds that add up to those of the step.

        Args:
            data_wait: seconds that the step waited for its data.
            seconds: of the whole step, whose loss has been read.
        """
        if not self._enabled:
            return {}
        found = dict.fromkeys(PHASES, 0.0) | {"data_wait": data_wait}
        for phase, begin, end in self._spans:
            found[phase] += _seconds(begin, end)
        self._spans.clear()
        self._in_step = False
        found["rest"] = max(0.0, seconds - sum(found.values()))
        return {"phases": {phase: round(value, 5) for phase, value in found.items()}}

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin
