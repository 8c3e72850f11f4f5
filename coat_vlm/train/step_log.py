"""Makes the entry of a step in metrics.jsonl: counts of all ranks, results, times, memory."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from coat_data.load.loader import LoadedBatch
from coat_vlm.fp8 import captured_bytes
from coat_vlm.train.bad_samples import BadSamples
from coat_vlm.train.passes import Results, record_event
from coat_vlm.train.steady_rates import average_rates
from coat_vlm.train.throughput import PeakMemory, Throughput, round_digits
from coat_vlm.train.tracking import Metrics


@dataclass(slots=True, kw_only=True)
class StepLog:
    """Counts and times the steps of one stage."""

    metrics: Metrics
    throughput: Throughput
    bad_samples: BadSamples
    memory: PeakMemory
    world_size: int
    row_tokens: int | None
    """Token budget of a packed row; None without packing."""
    read_at: float = -math.inf
    """``time.perf_counter()`` when results were read last."""
    waited: float = 0.0
    """Seconds of waiting for micro-batches since the latest step was launched. If the results of
    the previous step are still pending, this wait is in that step's entry, as in ``step_s``."""
    begun: torch.cuda.Event | None = None
    """When the step that is being launched began on the GPU."""
    captured: int = field(default_factory=captured_bytes)
    """Bytes of CUDA graphs when results were read last."""

    def begin(self, data_wait: float, device: torch.device) -> None:
        """Note that a step begins."""
        self.waited += data_wait
        self.begun = record_event(device)

    def count(
        self, micro_batches: Sequence[LoadedBatch], micro_steps: int, step: int
    ) -> dict[str, float]:
        """Count tokens, samples and bad samples of this rank, to be summed over the ranks."""
        return {
            **self.throughput.count(micro_batches, micro_steps),
            **self.bad_samples.note(micro_batches, step),
        }

    def start_entry(
        self, counts: dict[str, float], batch_size: int, *, measured: bool
    ) -> dict[str, Any]:
        """Return what is known of a launched step; ``measured`` if FP8 needed more memory."""
        if measured:
            self.memory.reset()
        entry = {
            **self.throughput.entry(counts),
            "peak_memory_mb": None if measured else self.memory.read(),
        }
        if self.row_tokens is not None:
            budget = batch_size * self.row_tokens
            entry["packing_fill"] = round(entry["tokens"] / budget, 4)
        return entry | {"bad_samples": self.bad_samples.total}

    def launch(self) -> float:
        """Note that a step was launched; return the seconds of waiting for its micro-batches."""
        waited, self.waited, self.begun = self.waited, 0.0, None
        return waited

    def finish_entry(
        self, entry: dict[str, Any], started: float, waited: float, results: Results
    ) -> None:
        """Add the times of a step whose results were read, and write its entry."""
        now = time.perf_counter()
        # A step that overlaps with the previous one takes the time since that one was read.
        seconds, self.read_at = now - max(started, self.read_at), now
        idle, self.waited = self.waited, 0.0
        if self.begun is not None and results.done is not None:
            # What counts is the GPU's idle time: from the end of this step to the next one's start.
            self.begun.synchronize()
            idle = min(idle, results.done.elapsed_time(self.begun) / 1e3)
        waited += idle
        captured, self.captured = self.captured, captured_bytes()
        if self.captured > captured:
            entry["captured"] = True
        rates = average_rates([{**entry, "step_s": seconds}], self.world_size)
        entry |= {name: round_digits(rate) for name, rate in rates.items() if "_per_" in name}
        entry |= {"step_s": round(seconds, 4), "data_wait_s": round(waited, 4)}
        self.metrics.write(entry)
