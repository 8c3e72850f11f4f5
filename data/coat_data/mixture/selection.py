"""Which rows of a source take part: first, last or random ones, less those of bad_samples.jsonl."""

import dataclasses
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from coat_data.containers.rows import Shards
from coat_data.mixture.sampler import Stream, generator
from coat_data.sample import DataError, Sample

_SELECT = re.compile(r"(first|last|random) (\d+(?:\.\d+)?)(%?)")


class Rows(Protocol):
    """Samples by row, as a :class:`~coat_data.load.dataset.SampleDataset` has them."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


_LOOKED_AT = 16
"""Rows that tell what a source holds."""


class SelectedRows:
    """Some rows of a dataset.

    Attributes:
        name: the dataset's.
        dataset: the source.
        rows: (n,) int64, the dataset's row of each row here.

        in_shards: whether the order of the dataset's shards can be kept.

    Args:
        dataset: see above.
        rows: see above.
    """

    in_shards = True

    def __init__(self, dataset: Rows, rows: np.ndarray) -> None:
        self.name = dataset.name
        self.rows = rows
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """The sample in row ``index`` of these; DataError and IndexError as the dataset's."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: row {index} of {len(self)} selected rows")
        return self.dataset[int(self.rows[index])]


def shards_of(dataset: Rows) -> Shards | None:
    """How the rows lie in shards that are read over a network; None for all others."""
    if not isinstance(dataset, SelectedRows):
        return getattr(dataset, "shards", None)
    if not dataset.in_shards:
        return None
    whole: Shards | None = getattr(dataset.dataset, "shards", None)
    return None if whole is None else dataclasses.replace(whole, kept=dataset.rows)


def rows_to_look_at(dataset: Rows) -> Iterator[Sample]:
    """The good ones of 16 rows that stand for a source: at even distances, the first among them.

    Of shards read over a network the first 16 rows, as others may take long to reach.
    """
    size = len(dataset)
    number = min(size, _LOOKED_AT)
    near = shards_of(dataset) is not None
    for place in range(number):
        try:
            yield dataset[place if near else place * size // number]
        except DataError:
            continue


def replayed_rows(dataset: Rows) -> int:
    """Rows that this process read over to get to others; see :class:`SampleDataset`."""
    whole = dataset.dataset if isinstance(dataset, SelectedRows) else dataset
    return getattr(whole, "replayed", 0)


def unseekable(dataset: Rows) -> str | None:
    """The address of the source that can only be read from its beginning, if there is one."""
    whole = dataset.dataset if isinstance(dataset, SelectedRows) else dataset
    return getattr(whole, "unseekable", None)


def original_row(dataset: Rows, index: int) -> int:
    """The row in the source's file or folder that ``dataset[index]`` is."""
    return int(dataset.rows[index]) if isinstance(dataset, SelectedRows) else index


def parse_select(select: str) -> tuple[str, float, bool]:
    """What ``first 1000`` or ``random 10%`` asks for: where, how much, and whether in percent.

    Raises:
        ValueError: it is something else, nothing, part of a row, or more than 100%.
    """
    found = _SELECT.fullmatch(select.strip())
    if found is None:
        raise ValueError(
            f"select={select!r} is not understood; write first, last or random and a number of "
            "rows or a percentage, such as 'first 1000' or 'random 10%'"
        )
    kind, amount, percent = found[1], float(found[2]), bool(found[3])
    if not amount > 0 or (percent and amount > 100) or not (percent or amount.is_integer()):
        raise ValueError(
            f"select={select!r}: ask for a whole number of rows above 0, or more than 0% and at "
            "most 100%"
        )
    return kind, amount, percent


def select_rows(size: int, select: str | None, seed: int, name: str) -> np.ndarray:
    """The rows of a source that ``select`` asks for, in ascending order.

    Args:
        size: rows of the source.
        select: see :func:`parse_select`; None for all.
        seed: of ``random``, together with the name, so that sources differ.
        name: the source's.

    Returns:
        (n,) int64.

    Raises:
        ValueError: it asks for more rows than there are, or for a percentage that is no row.
    """
    if select is None:
        return np.arange(size)
    kind, amount, percent = parse_select(select)
    if not percent:
        number = int(amount)
    elif kind == "last":  # what the first rows leave, so that both together are all, each once
        number = size - round(size * (100 - amount) / 100)
    else:
        number = round(size * amount / 100)
    if not 0 < number <= size:
        raise ValueError(
            f"{name}: select={select!r} is {number} of its {size} rows; choose 1 to {size} rows, "
            "or remove the source"
        )
    if kind == "first":
        return np.arange(number)
    if kind == "last":
        return np.arange(size - number, size)
    rng = generator(seed, Stream.SELECTION, zlib.crc32(name.encode()))
    return np.sort(rng.permutation(size)[:number])


def read_quarantine(path: Path, source: str, file: str, size: int) -> set[int]:
    """The rows of one source that a run listed in its bad_samples.jsonl.

    Args:
        path: the list; JSON lines with ``source``, ``file`` and ``row``. Those of other sources
            are passed over.
        source: name of the source.
        file: the source's file or folder; its last part has to be the one that was listed.
        size: rows of the source.

    Raises:
        DataError: the list is missing or damaged, names no row of this source, or was made with
            another file under this name.
    """
    rows: set[int] = set()
    others: set[str] = set()
    named = False
    for number, name, listed, row in _quarantined(path):
        named = named or name == source
        if name != source:
            others.add(name)
        elif row is None:
            continue
        elif listed != Path(file).name or not 0 <= row < size:
            raise DataError(
                f"{path}:{number}",
                f"row {row} of {listed} is not of source {source!r}, {Path(file).name} with "
                f"{size} rows",
                "take the list of a run on this file, or remove exclude",
            )
        else:
            rows.add(row)
    if not named:
        raise DataError(
            str(path),
            f"lists no row of source {source!r}, only of {sorted(others) or 'none'}",
            "name the source as the run did that wrote the list, or remove exclude",
        )
    return rows


def listed_sources(path: Path) -> set[str]:
    """The names of the sources that a bad_samples.jsonl has rows of.

    Raises:
        DataError: the list is missing or damaged.
    """
    return {source for _, source, _, _ in _quarantined(path)}


def _quarantined(path: Path) -> Iterator[tuple[int, str, str, int | None]]:
    """Number, source, last part of the file, and row of each line of a bad_samples.jsonl.

    The row of an outage is None: nothing is known to be wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            str(path), f"cannot be read: {error.strerror}", "fix exclude, or remove it"
        ) from error
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            row = None if entry.get("outage") else int(entry["row"])
            yield number, str(entry["source"]), Path(entry["file"]).name, row
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path}:{number}",
                f"not a line of bad_samples.jsonl ({type(error).__name__}: {error})",
                "each line is a JSON object with source, file and row",
            ) from error


def without(rows: np.ndarray, excluded: Sequence[int] | set[int]) -> np.ndarray:
    """``rows`` (n,) that are not excluded, in order."""
    return rows[~np.isin(rows, np.fromiter(excluded, dtype=np.int64, count=len(excluded)))]
