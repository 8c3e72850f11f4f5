"""Base classes of containers: raw rows by number, and files whose rows are at byte offsets."""

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coat_data.sample import DataError

_MOST_OPEN = 64
"""Files of a source that a process holds open."""


class Rows:
    """The raw rows of one source, not yet checked.

    Attributes:
        media_root: folder or address that relative media paths start from unless the user names
            another.
        damage: why the container cannot be read to its end; None for a whole one.
        random_access: whether ``rows[i]`` works; else the rows can only be read in order.
        shards: how the rows lie in shards, for an order that reads them side by side; None where
            any row is as near as any other.
        replayed: rows of this process that lay before the first one wanted of a shard that can
            only be read from its beginning.
        unseekable: the first shard whose server does not answer ranges, if any.
    """

    media_root: Path | str
    damage: DataError | None = None
    random_access: bool = True
    shards: "Shards | None" = None
    replayed: int = 0
    unseekable: str | None = None

    def __len__(self) -> int:
        """Number of rows; raises TypeError where only a full read can tell."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """The raw row, or :class:`DataError` if it does not parse."""
        raise NotImplementedError

    def stream(self) -> Iterator[Any]:
        """Raw rows in order, a :class:`DataError` in the place of one that does not parse."""
        for index in range(len(self)):
            try:
                yield self[index]
            except DataError as error:
                yield error

    def place(self, index: int) -> tuple[str, int]:
        """File and row in that file of row ``index``, for messages."""
        raise NotImplementedError


def locate(ends: NDArray[np.int64], index: int) -> tuple[int, int]:
    """Which part holds row ``index``, and the row in it; ``ends`` are the row after each part."""
    number = int(np.searchsorted(ends, index, side="right"))
    return number, index - (int(ends[number - 1]) if number else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How the rows of a source lie that is read from shards: neighbours are used together.

    In each pass the shards come in a new order. A shard is cut into windows of consecutive rows;
    its windows are shuffled, and so are the rows within each. Which row stands where is computed
    from the seed and the pass: nothing is buffered, and a saved position is enough to continue.
    """

    sizes: tuple[int, ...]
    """Rows of each shard, in the order of the source's rows."""
    window: int
    """Consecutive rows of a shard that are shuffled among themselves."""
    jumps: bool = True
    """Whether a shard can be read from any window on; else its windows keep their order."""

    kept: np.ndarray | None = None
    """(n,) int64, ascending: the rows that take part; None for all. They are numbered anew."""

    def order(self, rng: np.random.Generator) -> np.ndarray:
        """The rows of one pass: a permutation of all that take part, (n,) int64."""
        starts = np.cumsum([0, *self.sizes])
        windows: list[np.ndarray] = []
        for shard in rng.permutation(len(self.sizes)):
            first, stop = int(starts[shard]), int(starts[shard + 1])
            begins = np.arange(first, stop, self.window)
            for begin in rng.permutation(begins) if self.jumps else begins:
                rows = np.arange(begin, min(begin + self.window, stop))
                windows.append(rng.permutation(rows))
        rows = np.concatenate([np.empty(0, dtype=np.int64), *windows])
        if self.kept is None:
            return rows
        return np.searchsorted(self.kept, rows[np.isin(rows, self.kept)])


class IndexedFiles(Rows):
    """Rows of files found by their byte offsets: 16 bytes of memory per row, whatever their size.

    Files are opened anew in each process, so an instance is cheap to send to workers. A subclass
    says where rows are (:meth:`spans`) and what their bytes mean (:meth:`parse`).

    Attributes:
        files: in order.
        media_root: the folder of the first file.
        damage: set when a file breaks off; the rows before are good.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self.media_root = self.files[0].parent
        self._states = [_state(path) for path in self.files]
        self._descriptors: dict[int, tuple[int, int]] = {}
        starts, ends, counts = array("q"), array("q"), array("q")
        for path in self.files:
            try:
                for start, end in self.spans(path):
                    starts.append(start)
                    ends.append(end)
            except DataError as error:
                self.damage = self.damage or error
            counts.append(len(starts))
        self._starts = np.array(starts, dtype=np.int64)
        self._ends = np.array(ends, dtype=np.int64)
        self._file_ends = np.array(counts, dtype=np.int64)

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """First byte of each row of a file, and the byte after it; a DataError ends the file."""
        raise NotImplementedError

    def parse(self, data: bytes, index: int) -> Any:
        """The raw row ``index``, which is stored as ``data``."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        return self.parse(self.read(index), index)

    def place(self, index: int) -> tuple[str, int]:
        """The file and the row in it."""
        number, row = locate(self._file_ends, index)
        return str(self.files[number]), row

    def where(self, index: int) -> str:
        """``file:row`` for messages."""
        return "{}:{}".format(*self.place(index))

    def read(self, index: int) -> bytes:
        """The bytes of a row.

        Raises:
            DataError: the file is not the one that was indexed.
        """
        number, _ = locate(self._file_ends, index)
        start, end = int(self._starts[index]), int(self._ends[index])
        descriptor = self._open(number)
        data = os.pread(descriptor, end - start, start)
        if _state(descriptor) != self._states[number]:  # also one that is written over in place
            raise DataError(
                str(self.files[number]),
                "the file has changed since it was opened",
                "start again with it",
            )
        return data

    def _open(self, number: int) -> int:
        process, descriptor = self._descriptors.get(number, (0, -1))
        if process != os.getpid():
            if len(self._descriptors) >= _MOST_OPEN:
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
    """Bytes and time of change in nanoseconds of a path or descriptor: others in another file."""
    status = os.stat(file)  # noqa: PTH116 - a descriptor has no path
    return status.st_size, status.st_mtime_ns
