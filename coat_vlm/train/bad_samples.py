"""The bad-sample log: rows that a run had to replace, listed and counted; too many are an error."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coat_data.load.loader import LoadedBatch
from coat_vlm.config import SourceConfig, StageConfig
from coat_vlm.train.tracking import read_entries

BAD_SAMPLES = "bad_samples.jsonl"
"""File in a run folder."""
_TRANSIENTS = "transient_errors"
"""Their number in metrics.jsonl."""


class BadSamples:
    """The bad samples of one stage, over all ranks.

    ``RUN/bad_samples.jsonl`` has a line per replaced row. Rows that were not read because of an I/O
    error that may pass have ``transient: true``; they are counted separately, and a source's
    ``exclude`` ignores them. ``sources`` are in the order of the mixture; ``total`` are the bad
    samples before a resume; ``check`` raises an error if this run must write no more.
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
            if entry["stage"] == self._name and not entry.get("transient"):
                source = entry.get("source")
                if source in self._counts:
                    self._counts[source] += 1

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
                    file.write(json.dumps(row) + "\n")
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
