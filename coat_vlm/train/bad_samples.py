"""The bad-sample log: rows that a run had to replace, listed and counted; too many are an error."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coat_data.load.loader import BadSample, LoadedBatch
from coat_vlm.config import SourceConfig, StageConfig
from coat_vlm.train.tracking import read_rows

BAD_SAMPLES = "bad_samples.jsonl"
"""File in a run folder."""


class BadSamples:
    """The bad samples of one stage.

    ``RUN/bad_samples.jsonl`` has a line per replaced row: ``stage``, ``step``, ``source``,
    ``file``, ``row`` (in the file or folder), ``where``, ``problem`` and ``position``; and
    ``outage``, if a network or server failed, which says nothing about the row. A source's
    ``exclude`` takes the list as it is, and passes over outages. They are counted by themselves.

    Attributes:
        total: bad samples so far over all ranks.
        outages: samples that were out of reach, over all ranks, since the run was started or
            continued.

    Args:
        run_dir: the run folder.
        name: the stage's name.
        stage: its limits.
        sources: its sources, in the order of the mixture.
        total: see above, when a run is continued.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        stage: StageConfig,
        sources: Sequence[SourceConfig],
        total: int = 0,
    ) -> None:
        self.total = total
        self.outages = 0
        self._path = run_dir / BAD_SAMPLES
        self._name = name
        self._stage = stage
        self._sources = sources
        self._counts = dict.fromkeys((source.name for source in sources), 0)
        for row in read_rows(self._path):
            if row["stage"] == name and row["source"] in self._counts and not row.get("outage"):
                self._counts[row["source"]] += 1

    def note(self, micro_batches: Sequence[LoadedBatch], step: int) -> dict[str, float]:
        """List this rank's bad samples of a step.

        Returns:
            How many there are, to be summed over the ranks: ``bad/SOURCE``, and ``outages``.
        """
        counts = {**{f"bad/{name}": 0.0 for name in self._counts}, "outages": 0.0}
        bad = [sample for loaded in micro_batches for sample in loaded.bad]
        if bad:
            with self._path.open("a", encoding="utf-8") as file:
                for sample in bad:
                    name = self._sources[sample.source].name
                    counts["outages" if sample.outage else f"bad/{name}"] += 1
                    file.write(json.dumps(self._listed(sample, step)) + "\n")
        return counts

    def row(self, counts: Mapping[str, float], met: Callable[[], np.ndarray]) -> dict[str, Any]:
        """Add a step's bad samples of all ranks.

        Args:
            counts: sums of :meth:`note`.
            met: samples of each source so far; asked only when there are bad ones.

        Returns:
            For metrics.jsonl: ``bad_by_source``, number and share of the bad ones of each source
            that has any, and ``outages``, if there were any. On other ranks than the main one
            sources can lack those of before a resume.

        Raises:
            ValueError: there are too many, of one kind or the other.
        """
        self.outages += int(counts["outages"])
        for name in self._counts:
            self._counts[name] += int(counts[f"bad/{name}"])
            self.total += int(counts[f"bad/{name}"])
        if not (self.total or self.outages):
            return {"bad_by_source": {}}
        samples = met()
        rates = {
            name: {"rows": bad, "rate": round(bad / max(1, int(number)), 6)}
            for (name, bad), number in zip(self._counts.items(), samples, strict=True)
            if bad
        }
        self._check(int(samples.sum()), rates)
        return {"bad_by_source": rates, **({"outages": self.outages} if self.outages else {})}

    def _check(self, met: int, rates: dict[str, Any]) -> None:
        fraction = self._stage.max_bad_fraction
        allowed = max(self._stage.max_bad_samples, int((fraction or 0.0) * met))
        if max(self.total, self.outages) <= allowed:
            return
        limit = f"max_bad_samples={self._stage.max_bad_samples}"
        if fraction is not None:
            limit += f" and max_bad_fraction={fraction} of {met} samples"
        if self.outages > allowed:
            raise ValueError(
                f"stage {self._name}: {self.outages} samples could not be reached, which is more "
                f"than {limit} allow; {self._path} lists them (outage): continue with --resume "
                "auto when their hosts answer, or download the media"
            )
        by_source = ", ".join(f"{name} {found['rows']}" for name, found in rates.items())
        raise ValueError(
            f"stage {self._name}: {self.total} bad samples ({by_source}) are more than {limit} "
            f"allow; {self._path} lists them: fix the data, give that file to the sources as "
            "exclude, or raise the limit"
        )

    def _listed(self, sample: BadSample, step: int) -> dict[str, Any]:
        source = self._sources[sample.source]
        return {
            "stage": self._name,
            "step": step,
            "source": source.name,
            "file": source.path,
            "row": sample.row,
            "where": sample.where,
            "problem": sample.problem,
            "position": sample.position,
            **({"outage": True} if sample.outage else {}),
        }
