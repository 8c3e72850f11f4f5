"""Base classes of containers: raw rows by number, and files whose rows have byte offsets."""

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coat_data.sample import DataError, row_name

NO_ROW = -1
_MAX_OPEN = 64  # maximum number of open files of a source per process


class Rows:
    """The raw rows of one source, before validation."""

    media_root: Path | str
    """Folder or URL that relative media paths start from, unless the user gives another."""
    damage: DataError | None = None
    """Why the container cannot be read to its end; the rows before the damage can be read."""
    paths: tuple[Path, ...] = ()
    """Files that the rows come from; a folder means all files below it."""
    names: Mapping[Path, str] = MappingProxyType({})
    """Files in the cache folder -> the URL or compressed file that each is a copy of."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """Return the raw row; :class:`DataError` if it does not parse."""
        raise NotImplementedError

    def read_range(self, rows: range) -> Iterator[tuple[int, Any]]:
        """Yield number and raw row of consecutive rows; a :class:`DataError` for a bad row."""
        for index in rows:
            try:
                yield index, self[index]
            except DataError as error:
                yield index, error

    def stream(self) -> Iterator[Any]:
        """Yield raw rows in order, and a :class:`DataError` for each row that does not parse."""
        for _, row in self.read_range(range(len(self))):
            yield row

    def place(self, index: int) -> tuple[str, int]:
        """Return the file of row ``index`` and the row in that file, for messages."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Return ``file:row`` for messages, counted from 1."""
        return row_name(*self.place(index))

    def name(self, path: Path) -> str:
        """Return the name of a file for messages."""
        return self.names.get(path, str(path))


def locate(ends: NDArray[np.int64], index: int) -> tuple[int, int]:
    """Return the part with row ``index``, and the row in it; ``ends``: rows up to each part."""
    number = int(np.searchsorted(ends, index, side="right"))
    return number, index - (int(ends[number - 1]) if number else 0)


class _Index(NamedTuple):
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    skipped: list[int]
    """Row that follows each line that is not a row."""
    damage: DataError | None


_SCANNED: dict[tuple[type, Path, tuple[int, int]], _Index] = {}
"""Indices of the files that this process has scanned, by class, path and state of the file."""
_MAX_REMEMBERED = 1 << 24  # rows in _SCANNED above which it is emptied; 256 MiB


class IndexedFiles(Rows):
    """Rows of ``files`` by byte offset: 16 bytes of memory per row, for files of any size.

    A subclass finds the rows of a file (:meth:`spans`) and parses their bytes (:meth:`parse`).
    A process scans a file once: the checks before training open the sources of all stages, and
    each stage opens its own.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self.media_root = self.files[0].parent
        self._states = [_state(path) for path in self.files]
        self._descriptors: dict[int, int] = {}
        if sum(len(index.starts) for index in _SCANNED.values()) > _MAX_REMEMBERED:
            _SCANNED.clear()
        indices = [self._index(*file) for file in zip(self.files, self._states, strict=True)]
        self.damage = next((index.damage for index in indices if index.damage), self.damage)
        # A single column is not copied: it may have gigabytes.
        self._starts, self._ends = (
            columns[0] if len(columns) == 1 else np.concatenate(columns)
            for columns in ([i.starts for i in indices], [i.ends for i in indices])
        )
        self._skipped = [index.skipped for index in indices]
        self._file_ends = np.cumsum([len(index.starts) for index in indices], dtype=np.int64)

    def _index(self, path: Path, state: tuple[int, int]) -> _Index:
        key = (type(self), path, state)
        if key in _SCANNED:
            return _SCANNED[key]
        starts, ends, damage = array("q"), array("q"), None
        skipped: list[int] = []
        try:
            for start, end in self.spans(path):
                if end == NO_ROW:
                    skipped.append(len(starts))
                    continue
                starts.append(start)
                ends.append(end)
        except DataError as error:
            damage = error
        _SCANNED[key] = _Index(
            np.array(starts, np.int64), np.array(ends, np.int64), skipped, damage
        )
        return _SCANNED[key]

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield start and stop byte of each row of a file; a DataError ends the file.

        The stop is :data:`NO_ROW` for a line that is counted but is not a row, such as a blank one.
        """
        raise NotImplementedError

    def parse(self, data: bytes, index: int) -> Any:
        """Parse row ``index`` from its bytes ``data``."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        return self.parse(self._read(index), index)

    def place(self, index: int) -> tuple[str, int]:
        """Return the file of a row, and the row in it; lines that are not rows count."""
        number, row = locate(self._file_ends, index)
        return self.name(self.files[number]), row + bisect_right(self._skipped[number], row)

    def _read(self, index: int) -> bytes:
        number, _ = locate(self._file_ends, index)
        start, end = int(self._starts[index]), int(self._ends[index])
        descriptor = self._open(number)
        data = os.pread(descriptor, end - start, start)
        if _state(descriptor) != self._states[number]:  # also if it was overwritten in place
            problem = "the file has changed since it was opened"
            raise DataError(self.name(self.files[number]), problem, "start again with it")
        return data

    def _open(self, number: int) -> int:
        if number not in self._descriptors:  # a forked process may share it: pread has no position
            if len(self._descriptors) >= _MAX_OPEN:
                self._close()
            self._descriptors[number] = os.open(self.files[number], os.O_RDONLY)
        return self._descriptors[number]

    def _close(self) -> None:
        for descriptor in self.__dict__.get("_descriptors", {}).values():
            os.close(descriptor)
        self._descriptors = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": {}}

    def __del__(self) -> None:
        self._close()


def _state(file: Path | int) -> tuple[int, int]:
    status = os.stat(file)  # noqa: PTH116 - a descriptor has no path
    return status.st_size, status.st_mtime_ns
