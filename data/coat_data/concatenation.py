"""Several sources one after the other, each with the rows and repeats that a list asks for."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from coat_data.lists.entry import SourceEntry
from coat_data.sample import DataError, Sample
from coat_data.selection import select_rows

_SEED = 0
"""Of ``random`` selections without a seed: a list names the same rows whenever it is opened."""


class Samples(Protocol):
    """What a concatenation needs of its parts."""

    name: str
    format: str
    random_access: bool

    @property
    def media_root(self) -> Path | str:
        """Where relative media paths start."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """One sample."""
        ...

    def stream(self) -> Iterator[Sample | DataError]:
        """All samples in order, errors in the place of bad ones."""
        ...


class Concatenation:
    """The samples of a list of sources.

    Attributes:
        format: the formats of the sources.
        media_root: the deepest folder above those of all sources, for relative paths in an
            ingested folder.
        random_access: whether all sources can be read by number.

    Args:
        entries: the list.
        parts: its sources, opened.

    Raises:
        ValueError: an entry selects nothing, or more than there is; or has a weight.
    """

    damage: DataError | None = None

    def __init__(self, entries: Sequence[SourceEntry], parts: Sequence[Samples]) -> None:
        self._parts = list(parts)
        self.format = "+".join(dict.fromkeys(part.format for part in parts))
        self.media_root = _common_root([part.media_root for part in parts])
        self.random_access = all(part.random_access for part in parts)
        self._whole = [_is_whole(entry) for entry in entries]
        self._chosen = [
            _rows(entry, len(part)) if part.random_access else np.zeros(0, dtype=np.int64)
            for entry, part in zip(entries, parts, strict=True)
        ]
        self._ends = np.cumsum([len(rows) for rows in self._chosen], dtype=np.int64)
        for entry, part in zip(entries, parts, strict=True):
            if entry.weight is not None or not (part.random_access or _is_whole(entry)):
                what = "weight" if entry.weight is not None else "select and repeat"
                raise ValueError(
                    f"{entry.name}: {what} has no meaning when a list is read as one source: "
                    "in another list, or with a select; give its sources to a recipe's data, or "
                    "ingest them first"
                )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sample(self, index: int) -> Sample:
        """The sample at ``index``, in the order of the list."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return self._parts[number][int(self._chosen[number][index - before])]

    def stream(self) -> Iterator[Sample | DataError]:
        """All samples in order, errors in the place of bad ones."""
        for part, rows, whole in zip(self._parts, self._chosen, self._whole, strict=True):
            if whole:
                yield from part.stream()
                continue
            for row in rows:
                try:
                    yield part[int(row)]
                except DataError as error:
                    yield error


def _common_root(given: Sequence[Path | str]) -> Path | str:
    """The deepest folder that holds all roots, also where links among them lead.

    Addresses are no part of it: what lies below one is stored with its whole address.
    """
    roots = [root for root in given if isinstance(root, Path)]
    if not roots:
        return given[0]
    common = os.path.commonpath(roots)
    real = os.path.realpath(common)
    if any(os.path.commonpath([os.path.realpath(root), real]) != real for root in roots):
        return Path(Path(common).anchor)  # a source's folder is a link to elsewhere
    return Path(common)


def _is_whole(entry: SourceEntry) -> bool:
    return entry.select is None and entry.repeat is None


def _rows(entry: SourceEntry, size: int) -> np.ndarray:
    """The rows that an entry asks for: int64, repeats one after the other."""
    rows = select_rows(size, entry.select, entry.seed or _SEED, entry.name)
    copies, rest = divmod(entry.repeat or 1.0, 1.0)
    part = round(rest * len(rows))
    if not copies and not part:
        raise ValueError(
            f"{entry.name}: repeat={entry.repeat} of {len(rows)} rows is no row; raise repeat, or "
            "remove the source"
        )
    return np.concatenate([np.tile(rows, int(copies)), rows[:part]])
