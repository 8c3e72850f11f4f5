"""Statistics of a source: rows, media, turns, lengths of text, sizes of images."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coat_data.load.dataset import SampleDataset
from coat_data.media.image import image_size
from coat_data.sample import DataError, Sample
from coat_data.tools.workers import Chunk, map_chunks, map_samples

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
"""Quantiles of each distribution: minimum, 10%, median, 90%, 99%, maximum."""


@dataclass(slots=True, kw_only=True)
class SourceStats:
    """Statistics of one source."""

    name: str
    format: str
    rows: int = 0  # good rows
    bad: int = 0
    media: Counter[str] = field(default_factory=Counter)
    text_only: int = 0
    unreadable_images: int = 0  # images whose header cannot be read; their sizes are not counted
    measured: "defaultdict[str, array[int]]" = field(
        default_factory=lambda: defaultdict(partial(array, "q"))
    )
    """Turns and characters of text per row; width and height of images in pixels."""

    def add(self, sample: Sample, sizes: Sequence[tuple[int, int] | None]) -> None:
        """Count a sample; ``sizes`` has the (width, height) of its images, None if unreadable."""
        self.rows += 1
        self.media.update(medium.kind for medium in sample.media)
        self.text_only += not sample.media
        self.measured["turns"].append(len(sample.turns))
        self.measured["text characters"].append(sum(len(turn.text) for turn in sample.turns))
        for size in sizes:
            if size is None:
                self.unreadable_images += 1
            else:
                self.measured["image width"].append(size[0])
                self.measured["image height"].append(size[1])

    def merge(self, later: "SourceStats") -> None:
        """Add the statistics of later rows of the same source."""
        self.rows += later.rows
        self.bad += later.bad
        self.media.update(later.media)
        self.text_only += later.text_only
        self.unreadable_images += later.unreadable_images
        for name, values in later.measured.items():
            self.measured[name].extend(values)

    def distributions(self) -> dict[str, list[float]]:
        """Return the :data:`QUANTILES` of every measured distribution, by name."""
        return {
            name: np.quantile(np.asarray(values), QUANTILES).tolist()
            for name, values in self.measured.items()
        }


def collect(
    path: str | Path, *, sizes: bool = True, workers: int | None = None, **options: Any
) -> list[SourceStats]:
    """Return the statistics of every source of ``path``: one entry for each source of a list."""
    found: list[SourceStats] = []
    for dataset in SampleDataset(path, in_order=True, **options).sources():
        stats = SourceStats(name=dataset.name, format=dataset.format)
        work = partial(_count_chunk, sizes)
        for part in map_chunks(dataset, work, "stats", workers=workers):
            stats.merge(part)
        found.append(stats)
    return found


def _count_chunk(sizes: bool, samples: Chunk) -> SourceStats:
    stats = SourceStats(name="", format="")
    for result in map_samples(samples, partial(_measure, sizes)):
        if isinstance(result, DataError):
            stats.bad += 1
        else:
            stats.add(*result)
    return stats


def _measure(sizes: bool, sample: Sample) -> tuple[Sample, list[tuple[int, int] | None]]:
    found: list[tuple[int, int] | None] = []
    for medium in sample.media if sizes else ():
        if medium.kind == "image":
            try:
                found.append(image_size(medium))
            except DataError:
                found.append(None)
    return sample, found


def as_text(found: list[SourceStats]) -> list[str]:
    """Return the lines of a table per source."""
    lines: list[str] = []
    for stats in found:
        lines.append(f"{stats.name} ({stats.format})")
        counts = {
            "rows": stats.rows,
            "bad rows": stats.bad,
            "rows without media": stats.text_only,
            "images": stats.media["image"],
            "videos": stats.media["video"],
            "unreadable images": stats.unreadable_images,
        }
        lines += [f"  {name:<18} {number:>12,}" for name, number in counts.items()]
        head = "".join(f"{name:>10}" for name in ("min", "10%", "median", "90%", "99%", "max"))
        lines.append(f"  {'':<18} {head}")
        for name, values in stats.distributions().items():
            lines.append(f"  {name:<18} " + "".join(f"{value:>10,.0f}" for value in values))
    return lines
