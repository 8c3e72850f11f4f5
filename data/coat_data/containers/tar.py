"""Samples of WebDataset tars: members that share a key are one sample.

The key of a member is its path up to the first dot of its file name; what follows the dot is its
field, which may have dots itself (``0001.left.jpg`` is the field ``left.jpg`` of ``0001``). Members
of a sample stand one after the other (webdataset/webdataset, README; tar groups as in
``group_by_keys``). A plain tar is read by number through the offsets of its members; a compressed
one only in order.
"""

import io
import json
import os
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from coat_data.containers.rows import changed, file_state
from coat_data.sample import DataError

KEY = "__key__"
"""The field of a row that holds the sample's key."""


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a tar."""

    field: str
    """What follows the first dot of its name, in lower case."""
    offset: int
    """Where its bytes start in the tar."""
    size: int
    """Bytes."""


class TarRows:
    """The samples of several tars; a row is an object of field to bytes, and the key.

    Attributes:
        files: the tars in order.
        media_root: the folder of the first tar.
        damage: set when a tar breaks off; the samples before are good.

    Args:
        files: see above.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self.media_root = self.files[0].parent
        self.damage: DataError | None = None
        self.random_access = not any(is_compressed(path) for path in files)
        self._block = b""
        self._ends = np.zeros(0, dtype=np.int64)
        self._shards = np.zeros(0, dtype=np.int64)
        self._descriptors: dict[int, tuple[int, int]] = {}
        self._states = [file_state(path) for path in self.files]
        if self.random_access:
            self._index()

    def _index(self) -> None:
        """Keep the members of every sample as JSON in one block: no Python object per row."""
        block, ends, counts = bytearray(), array("q"), []
        for path in self.files:
            before = len(ends)
            try:
                for key, members in _samples(path):
                    fields = [[member.field, member.offset, member.size] for member in members]
                    block += json.dumps([key, fields]).encode("ascii")
                    ends.append(len(block))
            except DataError as error:
                self.damage = self.damage or error
            counts.append(len(ends) - before)
        self._block = bytes(block)
        self._ends = np.array(ends, dtype=np.int64)
        self._shards = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        if not self.random_access:
            raise TypeError(f"{self.files[0]}: the rows of a compressed tar are not counted")
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self._ends[index - 1]) if index else 0
        key, members = json.loads(self._block[start : int(self._ends[index])])
        descriptor = self._open(int(np.searchsorted(self._shards, index, side="right")))
        row: dict[str, Any] = {KEY: key}
        for field, offset, size in members:
            row[field] = os.pread(descriptor, size, offset)
            if len(row[field]) < size:
                where = f"{self.place(index)[0]}:{self.place(index)[1]}"
                raise DataError(where, f"{key}.{field} breaks off", "copy the tar again")
        return row

    def stream(self) -> Iterator[Any]:
        """Rows in order; what stops a compressed tar from being read comes as a DataError."""
        if self.random_access:
            for index in range(len(self)):
                try:
                    yield self[index]
                except DataError as error:
                    yield error
            return
        for path in self.files:
            try:
                yield from _read_in_order(path)
            except DataError as error:
                yield error

    def place(self, index: int) -> tuple[str, int]:
        """The tar and the sample in it; of compressed tars, the first one and ``index``."""
        if not self.random_access:
            return str(self.files[0]), index
        number = int(np.searchsorted(self._shards, index, side="right"))
        before = int(self._shards[number - 1]) if number else 0
        return str(self.files[number]), index - before

    def _open(self, number: int) -> int:
        entry = self._descriptors.get(number)
        if entry is None or entry[0] != os.getpid():
            if len(self._descriptors) >= 64:  # a process may have few files open
                _close(self._descriptors)
            entry = (os.getpid(), os.open(self.files[number], os.O_RDONLY))
            self._descriptors[number] = entry
        if file_state(entry[1]) != self._states[number]:  # also one that is written over in place
            raise changed(self.files[number])
        return entry[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": {}}

    def __del__(self) -> None:
        _close(self.__dict__.get("_descriptors", {}))


def _close(descriptors: dict[int, tuple[int, int]]) -> None:
    for process, descriptor in descriptors.values():
        if process == os.getpid():
            os.close(descriptor)
    descriptors.clear()


def is_compressed(path: Path) -> bool:
    """Whether the tar is compressed as a whole, by its first bytes (gzip, bzip2, xz)."""
    with path.open("rb") as stream:
        return stream.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00"))


def split_key(name: str, where: str) -> tuple[str, str] | None:
    """Key and field of a member, or None for a hidden file, a folder's entry or no field.

    Raises:
        DataError: the name is absolute or leaves the tar.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(
            where, f"the member {name!r} leaves the archive", "do not use this tar; write it again"
        )
    base, dot, field = path.name.partition(".")
    if not base or not dot or path.parts[0] == "__MACOSX":
        return None
    return str(path.parent / base), field.lower()


def refuse_link(info: tarfile.TarInfo, where: str) -> None:
    """Raise DataError for a member that is a link."""
    if info.issym() or info.islnk():
        raise DataError(
            where,
            f"the member {info.name!r} is a link to {info.linkname!r}",
            "do not use this tar; write it again with files only",
        )


def sample_of(data: bytes, where: str) -> dict[str, Any]:
    """The row that the bytes of one sample's members hold, headers included.

    Raises:
        DataError: they are not those of one sample.
    """
    row: dict[str, Any] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for info in archive:
                refuse_link(info, where)
                split = split_key(info.name, where) if info.isfile() else None
                if split is None:
                    continue
                if row and split[0] != row[KEY]:
                    raise DataError(where, f"holds {split[0]} and {row[KEY]}", "copy it again")
                stream = archive.extractfile(info)
                assert stream is not None  # a plain file
                row |= {KEY: split[0], split[1]: stream.read()}
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise DataError(where, f"the sample is damaged: {error}", "copy the tar again") from error
    return row


def _members(path: Path, *, mode: str = "r:") -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The plain files of a tar.

    Raises:
        DataError: the tar is damaged, or a member is a link or leaves the archive.
    """
    try:
        with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
            for info in archive:
                refuse_link(info, str(path))
                if info.isfile():
                    yield archive, info
                # else tarfile keeps every header for the life of the archive
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue]
            if mode == "r:":
                _check_end(archive, path)
    except (tarfile.TarError, EOFError, OSError, UnicodeError) as error:
        raise DataError(str(path), f"the tar is damaged: {error}", "copy it again") from error


def _check_end(archive: tarfile.TarFile, path: Path) -> None:
    """Raise if the tar goes on where tarfile stopped: it takes a damaged header for the end."""
    with path.open("rb") as stream:
        stream.seek(archive.offset)  # pyright: ignore[reportAttributeAccessIssue]
        if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise DataError(
                str(path),
                f"the header at byte {archive.offset} is damaged",  # pyright: ignore[reportAttributeAccessIssue]
                "copy the tar again",
            )


def _samples(path: Path) -> Iterator[tuple[str, list[Member]]]:
    """Key and members of every sample of a plain tar."""
    size = path.stat().st_size
    current, members = None, []
    for _, info in _members(path):
        split = split_key(info.name, str(path))
        if split is None:
            continue
        if info.offset_data + info.size > size:
            raise DataError(str(path), f"the tar breaks off in {info.name!r}", "copy it again")
        key, field = split
        if key != current and current is not None:
            yield current, members
            members = []
        current = key
        members.append(Member(field, info.offset_data, info.size))
    if current is not None:
        yield current, members


def _read_in_order(path: Path) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {}
    for archive, info in _members(path, mode="r|*"):
        split = split_key(info.name, str(path))
        if split is None:
            continue
        key, field = split
        if row and key != row[KEY]:
            yield row
            row = {}
        stream = archive.extractfile(info)
        assert stream is not None  # a plain file
        row[KEY] = key
        row[field] = stream.read()
    if row:
        yield row
