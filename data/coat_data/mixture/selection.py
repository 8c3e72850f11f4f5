"""Selects rows of a source: first, last or random rows, without those in a bad_samples.jsonl."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from coat_data.mixture.sampler import Stream, generator
from coat_data.sample import DataError, Sample, hide_secrets, row_name

ANY_SOURCE = ""
"""Stands for the source of listed rows that name only their file."""

_SELECT = re.compile(r"(first|last|random) (\d+(?:\.\d+)?)(%?)")


class Rows(Protocol):
    """Samples by row: a :class:`~coat_data.load.dataset.SampleDataset` or a selection of rows."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class SelectedRows:
    """A subset of the rows of a dataset: ``rows``, (n,) int64."""

    def __init__(self, dataset: Rows, rows: np.ndarray) -> None:
        self.name = dataset.name
        self.rows = rows
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[int(self.rows[index])]


def original_row(dataset: Rows, index: int) -> int:
    """Return the row of ``dataset[index]`` in the source's file or folder."""
    return int(dataset.rows[index]) if isinstance(dataset, SelectedRows) else index


def describe_row(dataset: Rows, index: int) -> str:
    """Name source, file and row of ``dataset[index]`` for a message; nothing is read."""
    whole = dataset.dataset if isinstance(dataset, SelectedRows) else dataset
    paths = getattr(whole, "paths", ())
    file = f" ({paths[0]})" if paths else ""
    return f"source {dataset.name}{file}, row {original_row(dataset, index) + 1}"


def select_rows(size: int, select: str | None, seed: int, name: str) -> np.ndarray:
    """Return the rows that ``select`` selects, in ascending order; None selects all.

    ``select`` is ``first``, ``last`` or ``random``, then a number of rows or a percentage. ``seed``
    of ``random`` is combined with ``name``, so that sources differ. ValueError if it does not
    parse, or selects no row, a part of a row or more rows than there are.
    """
    if select is None:
        return np.arange(size)
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
    if not percent:
        number = int(amount)
    elif kind == "last":  # the complement of ``first (100 - amount)%``
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


def read_excluded_rows(path: Path, source: str, file: str, size: int) -> set[int]:
    """Return the rows of one source that a bad_samples.jsonl, or a list of overlaps, lists.

    The list must name a file with the name of ``file``; rows of overlaps count in this file.
    DataError if the list is missing or damaged, has no row of this source, or is of another file.
    """
    listed = read_bad_samples(path)
    if not lists_rows_of(listed, source, file):
        files = sorted({name for _, name, _ in listed.get(ANY_SOURCE, [])})
        others = [repr(name) for name in sorted(listed) if name != ANY_SOURCE] + files
        raise DataError(
            str(path),
            f"lists no row of source {source!r} ({file}), only of {', '.join(others) or 'none'}",
            "name source and file as in the command that wrote the list, or remove exclude",
        )
    of_file = [entry for entry in listed.get(ANY_SOURCE, []) if _is_same_file(entry[1], file)]
    excluded = [*listed.get(source, []), *of_file]
    for number, name, row in excluded:
        if Path(name).name != Path(hide_secrets(file)).name or not 0 <= row < size:
            problem = (
                f"row {row + 1} of {name} is not of source {source!r}, {file} with {size} rows"
            )
            remedy = "use the list of a run on this file, or remove exclude"
            raise DataError(row_name(str(path), number), problem, remedy)
    return {row for _, _, row in excluded}


def lists_rows_of(
    listed: Mapping[str, Sequence[tuple[int, str, int]]], source: str, file: str
) -> bool:
    """Return whether the result of :func:`read_bad_samples` has this source or its file."""
    return source in listed or any(
        _is_same_file(name, file) for _, name, _ in listed.get(ANY_SOURCE, ())
    )


def _is_same_file(name: str, file: str) -> bool:
    return name == hide_secrets(file) or Path(name).absolute() == Path(file).absolute()


def read_bad_samples(path: Path) -> dict[str, list[tuple[int, str, int]]]:
    """Read a bad_samples.jsonl: for each source, tuples of line number, file name and row.

    Rows with transient I/O errors are left out; a source with only such rows maps to an empty
    list. The rows of a list of overlaps have :data:`ANY_SOURCE`, and the whole path of the file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise DataError(str(path), problem, "fix exclude, or remove it") from error
    found: dict[str, list[tuple[int, str, int]]] = {}
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            rows = found.setdefault(str(entry.get("source", ANY_SOURCE)), [])
            name = Path(entry["file"]).name if "source" in entry else str(entry["file"])
            if not entry.get("transient"):
                rows.append((number, name, int(entry["row"]) - 1))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                row_name(str(path), number),
                f"not a line of bad_samples.jsonl ({type(error).__name__}: {error})",
                "each line is a JSON object with file and row, and with source if a run wrote it",
            ) from error
    return found
