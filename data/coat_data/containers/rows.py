"""What every container of raw rows offers, and the file whose rows are found by byte offsets."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coat_data.sample import DataError


class Rows(Protocol):
    """The raw rows of one source, not yet checked.

    Attributes:
        damage: why the container cannot be read to its end; None for a whole one.
        random_access: whether ``rows[i]`` works; else the rows can only be read in order.
    """

    damage: DataError | None
    random_access: bool

    @property
    def media_root(self) -> Path | str:
        """Folder or address that relative media paths start from unless the user names another."""
        ...

    def __len__(self) -> int:
        """Number of rows; raises TypeError where only a full read can tell."""
        ...

    def __getitem__(self, index: int) -> Any:
        """The raw row, or :class:`DataError` if it does not parse."""
        ...

    def stream(self) -> Iterator[Any]:
        """Raw rows in order, a :class:`DataError` in the place of one that does not parse."""
        ...

    def place(self, index: int) -> tuple[str, int]:
        """File and row in that file of row ``index``, for messages."""
        ...


class IndexedFile:
    """Rows of a file found by their byte offsets: 16 bytes of memory per row, whatever their size.

    The file is opened anew in each process, so an instance is cheap to send to workers.

    Attributes:
        media_root: the file's folder.
        damage: set when the file breaks off; the rows before are good.
    """

    random_access = True

    def __init__(
        self,
        path: Path,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        damage: DataError | None = None,
    ) -> None:
        self.path = path
        self.media_root = path.parent
        self.damage = damage
        self._starts = starts
        self._ends = ends
        self._state = file_state(path)
        self._descriptor: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        return self.parse(self.read(index), index)

    def stream(self) -> Iterator[Any]:
        """Rows in order; a DataError in the place of a row that does not parse."""
        for index in range(len(self)):
            try:
                yield self[index]
            except DataError as error:
                yield error

    def place(self, index: int) -> tuple[str, int]:
        """The file and ``index``."""
        return str(self.path), index

    def parse(self, data: bytes, index: int) -> Any:
        """The raw row stored as ``data``."""
        raise NotImplementedError

    def read(self, index: int) -> bytes:
        """The bytes of a row.

        Raises:
            DataError: the file has changed since it was opened.
        """
        start, end = int(self._starts[index]), int(self._ends[index])
        data = os.pread(self._open(), end - start, start)
        if len(data) < end - start:
            raise self._changed()
        return data

    def line(self, index: int) -> int:
        """The line, from 1, on which row ``index`` starts; reads the file up to there."""
        left, lines = int(self._starts[index]), 1
        with self.path.open("rb") as stream:
            while left > 0 and (chunk := stream.read(min(left, 1 << 20))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
        return lines

    def _open(self) -> int:
        if self._descriptor is None or self._descriptor[0] != os.getpid():
            if file_state(self.path) != self._state:
                raise self._changed()
            self._descriptor = (os.getpid(), os.open(self.path, os.O_RDONLY))
        return self._descriptor[1]

    def _changed(self) -> DataError:
        return changed(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self) -> None:
        descriptor = self.__dict__.get("_descriptor")
        if descriptor is not None and descriptor[0] == os.getpid():
            os.close(descriptor[1])


def file_state(file: Path | int) -> tuple[int, int]:
    """Bytes and time of change in nanoseconds of a path or descriptor: others in another file."""
    status = os.stat(file)  # noqa: PTH116 - a descriptor has no path
    return status.st_size, status.st_mtime_ns


def changed(path: Path) -> DataError:
    """What to raise for a file that is not the one that was indexed."""
    return DataError(str(path), "the file has changed since it was opened", "start again with it")
