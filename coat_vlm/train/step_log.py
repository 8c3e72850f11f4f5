"""Makes the entry of a step in metrics.jsonl, and the bad-sample log: rows that a run replaced."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coat_data.load.loader import LoadedBatch
from coat_data.sample import hide_secrets
from coat_vlm.config import SourceConfig, StageConfig
from coat_vlm.fp8 import captured_bytes
from coat_vlm.train.passes import Results, record_event
from coat_vlm.train.throughput import PeakMemory, Throughput, round_digits
from coat_vlm.train.tracking import Metrics, average_rates, read_entries

BAD_SAMPLES = "bad_samples.jsonl"
"""File in a run folder."""
_TRANSIENTS = "transient_errors"
"""Their number in metrics.jsonl."""


class BadSamples:
    """The bad samples of one stage, over all ranks.

    ``RUN/bad_samples.jsonl`` has a line per replaced row. Rows that were not read because of a
    transient I/O error have ``transient: true``; they are counted separately, and a source's
    ``exclude`` ignores them. ``sources`` are in the order of the mixture; ``total`` are the bad
    samples before a resume; ``check`` raises an error if this run must not write any more.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        stage: StageConfig,
        sources: Sequence[SourceConfig],
        total: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = run_dir / BAD_SAMPLES
        self._check = check
        self._name = name
        self._stage = stage
        self._sources = sources
        self.total = total
        self.transient = 0
        self._counts = dict.fromkeys((source.name for source in self._sources), 0)
        for entry in read_entries(self.path):
            ours = entry["stage"] == self._name and not entry.get("transient")
            if ours and entry.get("source") in self._counts:
                self._counts[entry["source"]] += 1

    def note(self, micro_batches: Sequence[LoadedBatch], step: int) -> dict[str, float]:
        """List this rank's bad samples of a step; return counts to sum over the ranks."""
        counts = {**{f"bad/{name}": 0.0 for name in self._counts}, _TRANSIENTS: 0.0}
        bad = [sample for loaded in micro_batches for sample in loaded.bad]
        if bad:
            self._check()
            with self.path.open("a", encoding="utf-8") as file:
                for sample in bad:
                    source = self._sources[sample.source]
                    counts[_TRANSIENTS if sample.transient else f"bad/{source.name}"] += 1
                    row: dict[str, Any] = {
                        "stage": self._name,
                        "step": step,
                        "source": source.name,
                        "file": source.path,
                        "row": sample.row + 1,
                        "where": sample.where,
                        "problem": sample.problem,
                        "position": sample.position,
                        **({"transient": True} if sample.transient else {}),
                    }
                    file.write(hide_secrets(json.dumps(row)) + "\n")
        return counts

    def entry(
        self, counts: Mapping[str, float], count_by_source: Callable[[], np.ndarray]
    ) -> dict[str, Any]:
        """Add a step's bad samples of all ranks; return the entries for metrics.jsonl.

        ``counts`` are sums of :meth:`note`; ``count_by_source`` returns the samples of each source
        so far. Raises ValueError if there are too many bad samples or transient errors.
        """
        self.transient += int(counts[_TRANSIENTS])
        for name in self._counts:
            self._counts[name] += int(counts[f"bad/{name}"])
            self.total += int(counts[f"bad/{name}"])
        if not (self.total or self.transient):
            return {"bad_by_source": {}}
        samples = count_by_source()
        rates = {
            name: {"rows": bad, "rate": round(bad / max(1, int(number)), 6)}
            for (name, bad), number in zip(self._counts.items(), samples, strict=True)
            if bad
        }
        allowed = self._stage.max_bad_samples
        if max(self.total, self.transient) <= allowed:
            transient = {_TRANSIENTS: self.transient} if self.transient else {}
            return {"bad_by_source": rates, **transient}
        limit = f"max_bad_samples={allowed}"
        if self.transient > allowed:
            raise ValueError(
                f"stage {self._name}: {self.transient} samples could not be reached, more than "
                f"{limit} allows; {self.path} lists them with transient=true: continue with "
                "--resume auto when their hosts answer, or download the media"
            )
        by_source = ", ".join(f"{name} {rate['rows']}" for name, rate in rates.items())
        raise ValueError(
            f"stage {self._name}: {self.total} bad samples ({by_source}) are more than {limit} "
            f"allows; {self.path} lists them: raise the limit and continue with --resume auto; "
            "or fix the data, or give that file to the sources as exclude, and continue with "
            "--resume auto --allow-changed-data"
        )


@dataclass(slots=True, kw_only=True)
class StepLog:
    """Counts and times the steps of one stage."""

    metrics: Metrics
    throughput: Throughput
    bad_samples: BadSamples
    memory: PeakMemory
    world_size: int
    row_tokens: int | None
    """Token budget of a packed sequence; None without packing."""
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
