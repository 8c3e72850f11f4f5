"""Rows that a run had to replace: listed, counted by source, and too many of them an error."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coat_data.load.loader import BadSample
from coat_vlm.config import STAGES, SourceConfig, StageConfig

FILE = "bad_samples.jsonl"


class Quarantine:
    """The bad samples of one stage.

    ``RUN/bad_samples.jsonl`` has a line per replaced row: ``stage``, ``step``, ``source``,
    ``file``, ``row`` (in the file or folder), ``where``, ``problem`` and ``position``; and
    ``outage``, if a network or server failed, which says nothing about the row. A source's
    ``exclude`` takes the list as it is, and passes over outages. They are counted by themselves.

    Attributes:
        total: bad samples so far over all ranks.
        outages: samples that were out of reach, likewise, since the run was started or continued.

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
        self._path = run_dir / FILE
        self._name = name
        self._stage = stage
        self._sources = sources
        self._counts = _listed(self._path, name, [source.name for source in self._sources])

    def note(self, bad: Sequence[BadSample], step: int) -> list[int]:
        """List this rank's bad samples of a step.

        Returns:
            How many there are of each source, and then how many were out of reach.
        """
        counts = [0] * (len(self._sources) + 1)
        if bad:
            with self._path.open("a", encoding="utf-8") as file:
                for sample in bad:
                    counts[-1 if sample.outage else sample.source] += 1
                    file.write(json.dumps(self._row(sample, step)) + "\n")
        return counts

    def count(self, counts: Sequence[float], met: Callable[[], np.ndarray]) -> dict[str, Any]:
        """Add a step's bad samples of all ranks.

        Args:
            counts: of the step, as :meth:`note` has them.
            met: samples of each source so far; asked only when there are bad ones.

        Returns:
            Number and share of the bad ones of each source that has any, for metrics.jsonl. On
            other ranks than the main one it can lack those of before a resume.

        Raises:
            ValueError: there are too many, of one kind or the other.
        """
        *by_source, outages = counts
        self.outages += int(outages)
        self.total += int(sum(by_source))
        self._counts = [a + int(b) for a, b in zip(self._counts, by_source, strict=True)]
        if not (self.total or self.outages):
            return {}
        samples = met()
        rates = {
            source.name: {"rows": bad, "rate": round(bad / max(1, int(number)), 6)}
            for source, bad, number in zip(self._sources, self._counts, samples, strict=True)
            if bad
        }
        self._check(int(samples.sum()), rates)
        return rates

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
            f"allow; {self._path} lists them: mend the data, give that file to the sources as "
            "exclude, or raise the limit"
        )

    def _row(self, sample: BadSample, step: int) -> dict[str, Any]:
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


def rewind_quarantine(run_dir: Path, stage: str, step: int) -> None:
    """Drop what was listed after ``step`` of ``stage``; a resumed run will list it again."""
    path = run_dir / FILE
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = _parsed(line)
        if row is None:
            continue  # cut off when the run was killed
        order = STAGES.index(row["stage"]) - STAGES.index(stage)
        if order < 0 or (order == 0 and row["step"] <= step):
            kept.append(line + "\n")
    new = path.with_suffix(".tmp")
    new.write_text("".join(kept), encoding="utf-8")
    new.replace(path)


def _listed(path: Path, stage: str, names: Sequence[str]) -> list[int]:
    """Rows of ``stage`` in the list, by source."""
    counts = [0] * len(names)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        row = _parsed(line)
        if row is None or row.get("outage"):
            continue
        if row["stage"] == stage and row["source"] in names:
            counts[names.index(row["source"])] += 1
    return counts


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
