"""Base classes of containers: raw rows by number, and files whose rows have byte offsets."""

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coat_data.sample import DataError

_MAX_OPEN = 64
"""Maximum number of open files of a source per process."""


class Rows:
    """The raw rows of one source, before validation.

    Attributes:
        media_root: folder or address that relative media paths start from, unless the user gives
            another one.
        damage: why the container cannot be read to its end; None for an intact one.
        random_access: whether ``rows[i]`` works; otherwise the rows can only be read in order.
        in_parallel: whether processes that read different ranges of rows (:meth:`read_range`) do
            not fetch the same bytes several times.
        shards: sizes of the shards, for a sampler that reads neighboring rows together; None for
            containers with equally fast access to all rows.
        field_map: the reader's field names -> field names of the rows, if the folder has such a map
            (Energon).
        paths: files that the rows come from; a folder stands for all files below it.
        versions: addresses of remote shards -> what changes with their content (ETag or date,
            size); empty for local files.
    """

    media_root: Path | str
    damage: DataError | None = None
    random_access: bool = True
    in_parallel: bool = True
    shards: "Shards | None" = None
    field_map: Mapping[str, str] = MappingProxyType({})
    paths: tuple[Path, ...] = ()
    versions: Mapping[str, str] = MappingProxyType({})

    def __len__(self) -> int:
        """Return the number of rows; TypeError if only a full read can count them."""
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


def locate(ends: NDArray[np.int64], index: int) -> tuple[int, int]:
    """Return the part with row ``index``, and the row in it; ``ends``: rows up to each part."""
    number = int(np.searchsorted(ends, index, side="right"))
    return number, index - (int(ends[number - 1]) if number else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Sizes of the shards of a source, and the order in which a pass reads them.

    Each pass shuffles the shards. A shard is split into windows of consecutive rows; the windows
    are shuffled, then the rows within each window. The order is computed from the seed and the
    pass: there is no shuffle buffer, and a position is enough to resume.
    """

    sizes: tuple[int, ...]
    """Rows of each shard, in the order of the source's rows."""
    window: int
    """Number of consecutive rows that are shuffled among themselves."""
    selected: np.ndarray | None = None
    """(n,) int64, ascending: the selected rows, renumbered from 0; None selects all rows."""

    def order(self, rng: np.random.Generator) -> np.ndarray:
        """Return the rows of one pass: a permutation of the selected rows, (n,) int64."""
        starts = np.cumsum([0, *self.sizes])
        windows: list[np.ndarray] = []
        for shard in rng.permutation(len(self.sizes)):
            first, stop = int(starts[shard]), int(starts[shard + 1])
            begins = np.arange(first, stop, self.window)
            for begin in rng.permutation(begins):
                rows = np.arange(begin, min(begin + self.window, stop))
                windows.append(rng.permutation(rows))
        rows = np.concatenate([np.empty(0, dtype=np.int64), *windows])
        if self.selected is None:
            return rows
        return np.searchsorted(self.selected, rows[np.isin(rows, self.selected)])


class _Index(NamedTuple):
    """Offsets of the rows of a file."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    damage: DataError | None


_SCANNED: dict[tuple[type, Path, tuple[int, int]], _Index] = {}
"""Indices of the files that this process has scanned, by kind of file, path and state."""
_MAX_REMEMBERED = 1 << 24
"""Rows in :data:`_SCANNED` above which it is emptied; 256 MiB."""


class IndexedFiles(Rows):
    """Rows of files by byte offset: 16 bytes of memory per row, for files of any size.

    Every process opens the files itself, so an instance is cheap to pickle. A subclass finds the
    rows of a file (:meth:`spans`) and parses their bytes (:meth:`parse`).

    Attributes:
        files: the files, in order.
        media_root: folder of the first file.
        damage: set if a file is truncated or damaged; the rows before the damage can be read.
    """

    reuses_index = False
    """Whether :meth:`spans` depends on the file alone, and the same file need not be scanned again:
    the checks before training open the sources of all stages, and each stage opens its own."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self.media_root = self.files[0].parent
        self._states = [_state(path) for path in self.files]
        self._descriptors: dict[int, tuple[int, int]] = {}
        if sum(len(one.starts) for one in _SCANNED.values()) > _MAX_REMEMBERED:
            _SCANNED.clear()
        found = [self._index(*one) for one in zip(self.files, self._states, strict=True)]
        self.damage = next((one.damage for one in found if one.damage is not None), self.damage)
        self._starts, self._ends = (
            columns[0] if len(columns) == 1 else np.concatenate(columns)
            for columns in ([one.starts for one in found], [one.ends for one in found])
        )
        self._file_ends = np.cumsum([len(one.starts) for one in found], dtype=np.int64)

    def _index(self, path: Path, state: tuple[int, int]) -> _Index:
        """Return the index of a file; scan the file unless this process has scanned it before."""
        key = (type(self), path, state)
        if self.reuses_index and key in _SCANNED:
            return _SCANNED[key]
        starts, ends, damage = array("q"), array("q"), None
        try:
            for start, end in self.spans(path):
                starts.append(start)
                ends.append(end)
        except DataError as error:
            damage = error
        index = _Index(np.array(starts, np.int64), np.array(ends, np.int64), damage)
        if self.reuses_index:
            _SCANNED[key] = index
        return index

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield start and stop byte of each row of a file; a DataError ends the file."""
        raise NotImplementedError

    def parse(self, data: bytes, index: int) -> Any:
        """Parse row ``index`` from its bytes ``data``."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        return self.parse(self.read(index), index)

    def place(self, index: int) -> tuple[str, int]:
        """Return the file of a row, and the row in it."""
        number, row = locate(self._file_ends, index)
        return str(self.files[number]), row

    def where(self, index: int) -> str:
        """Return ``file:row`` for messages."""
        return "{}:{}".format(*self.place(index))

    def read(self, index: int) -> bytes:
        """Return the bytes of a row.

        Raises:
            DataError: the file has changed since it was indexed.
        """
        number, _ = locate(self._file_ends, index)
        start, end = int(self._starts[index]), int(self._ends[index])
        descriptor = self._open(number)
        data = os.pread(descriptor, end - start, start)
        if _state(descriptor) != self._states[number]:  # also if it was overwritten in place
            raise DataError(
                str(self.files[number]),
                "the file has changed since it was opened",
                "start again with it",
            )
        return data

    def _open(self, number: int) -> int:
        process, descriptor = self._descriptors.get(number, (0, -1))
        if process != os.getpid():
            if len(self._descriptors) >= _MAX_OPEN:
                self._close()
            descriptor = os.open(self.files[number], os.O_RDONLY)
            self._descriptors[number] = (os.getpid(), descriptor)
        return descriptor

    def _close(self) -> None:
        for process, descriptor in self.__dict__.get("_descriptors", {}).values():
            if process == os.getpid():
                os.close(descriptor)
        self._descriptors = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": {}}

    def __del__(self) -> None:
        self._close()


def _state(file: Path | int) -> tuple[int, int]:
    """Return size and modification time in nanoseconds; another file has other values."""
    status = os.stat(file)  # noqa: PTH116 - a descriptor has no path
    return status.st_size, status.st_mtime_ns
