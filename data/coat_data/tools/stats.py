"""Counts what a source holds: rows, media, turns, lengths of text, sizes of images."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from coat_data.load.dataset import SampleDataset
from coat_data.media.image import image_size
from coat_data.sample import DataError, Sample
from coat_data.tools.source import walk

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
"""What is shown of a distribution: minimum, 10%, median, 90%, 99%, maximum."""


@dataclass(slots=True, kw_only=True)
class SourceStats:
    """What one source holds."""

    name: str
    format: str
    rows: int = 0
    """Good rows."""
    bad: int = 0
    media: Counter[str] = field(default_factory=Counter)
    """Number of images and videos."""
    text_only: int = 0
    """Rows without media."""
    unreadable_images: int = 0
    """Images whose header cannot be read; they have no size below."""
    measured: "defaultdict[str, array[int]]" = field(
        default_factory=lambda: defaultdict(lambda: array("q"))
    )
    """Turns and characters of text per row; with a tokenizer its text tokens, without template and
    media; width and height of images in pixels."""

    def add(self, sample: Sample, count: Callable[[str], int] | None, *, sizes: bool) -> None:
        """Count a sample."""
        self.rows += 1
        self.media.update(medium.kind for medium in sample.media)
        self.text_only += not sample.media
        self.measured["turns"].append(len(sample.turns))
        texts = [turn.text for turn in sample.turns]
        self.measured["text characters"].append(sum(map(len, texts)))
        if count is not None:
            self.measured["text tokens"].append(sum(map(count, texts)))
        for medium in sample.media if sizes else ():
            if medium.kind == "image":
                try:
                    width, height = image_size(medium)
                except DataError:
                    self.unreadable_images += 1
                else:
                    self.measured["image width"].append(width)
                    self.measured["image height"].append(height)

    def distributions(self) -> dict[str, list[float]]:
        """:data:`QUANTILES` of everything that was measured, by name."""
        return {
            name: np.quantile(np.asarray(values), QUANTILES).tolist()
            for name, values in self.measured.items()
        }


def collect(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    sizes: bool = True,
    progress: bool = True,
    **options: Any,
) -> list[SourceStats]:
    """Count every source of ``path``; of a list one entry per source, each read as a whole.

    Args:
        path: as :class:`SampleDataset` takes it.
        tokenizer: folder with a ``tokenizer.json``; None counts no tokens.
        sizes: read the header of every image.
        progress: show a progress bar.
        options: further arguments of :class:`SampleDataset`.

    Raises:
        DataError: a source cannot be opened; the tokenizer is missing.
    """
    count = token_counter(tokenizer) if tokenizer is not None else None
    found: list[SourceStats] = []
    for dataset in SampleDataset(path, in_order=True, **options).sources():
        stats = SourceStats(name=dataset.name, format=dataset.format)
        for sample in walk(dataset, "stats", progress=progress):
            if isinstance(sample, DataError):
                stats.bad += 1
            else:
                stats.add(sample, count, sizes=sizes)
        found.append(stats)
    return found


def token_counter(folder: str | Path) -> Callable[[str], int]:
    """A function that counts the tokens of a text.

    Raises:
        DataError: the folder has no readable ``tokenizer.json``.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise DataError(
            str(path), f"cannot be read: {error}", "give a folder with a tokenizer.json"
        ) from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def as_text(found: list[SourceStats]) -> list[str]:
    """Lines of a table per source."""
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
