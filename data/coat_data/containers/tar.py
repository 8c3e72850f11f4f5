"""Samples of WebDataset tars: members that share a key are one sample.

The key of a member is its path up to the first dot of its file name; what follows the dot is its
field, which may have dots itself (``0001.left.jpg`` is the field ``left.jpg`` of ``0001``). Members
of a sample stand one after the other (webdataset/webdataset, README; tar groups as in
``group_by_keys``). A plain tar is read by number, as a sample is a range of its bytes; a compressed
one only in order.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from coat_data.containers.rows import IndexedFiles
from coat_data.sample import DataError

KEY = "__key__"
"""The field of a row that holds the sample's key."""

_DAMAGE = (tarfile.TarError, EOFError, UnicodeError)


class TarRows(IndexedFiles):
    """The samples of several tars; a row is an object of field to bytes, and the key.

    Attributes:
        files: the tars in order.
        media_root: the folder of the first tar.
        damage: set when a tar breaks off; the samples before are good.

    Args:
        files: see above.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.random_access = not any(is_compressed(path) for path in files)
        super().__init__(files)

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """The samples of a tar; of compressed tars none."""
        if not self.random_access:
            return
        try:
            with path.open("rb") as stream:
                yield from sample_spans(stream, str(path), path.stat().st_size)
        except OSError as error:
            raise _damaged(str(path), error) from error

    def parse(self, data: bytes, index: int) -> dict[str, Any]:
        """The sample."""
        return sample_of(data, self.where(index))

    def __len__(self) -> int:
        if not self.random_access:
            raise TypeError(f"{self.files[0]}: the rows of a compressed tar are not counted")
        return super().__len__()

    def stream(self) -> Iterator[Any]:
        """Rows in order; what stops a compressed tar from being read comes as a DataError."""
        if self.random_access:
            yield from super().stream()
            return
        for path in self.files:
            try:
                with tarfile.open(path, "r|*") as archive:
                    yield from _samples(archive, str(path))
            except (*_DAMAGE, OSError) as error:
                yield _damaged(str(path), error)
            except DataError as error:
                yield error

    def place(self, index: int) -> tuple[str, int]:
        """The tar and the sample in it; of compressed tars, the first one and ``index``."""
        return super().place(index) if self.random_access else (str(self.files[0]), index)


def is_compressed(path: Path) -> bool:
    """Whether the tar is compressed as a whole, by its first bytes (gzip, bzip2, xz)."""
    with path.open("rb") as stream:
        return stream.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00"))


def sample_of(data: bytes, where: str) -> dict[str, Any]:
    """The row that the bytes of one sample's members hold, headers included.

    Raises:
        DataError: they are not those of one sample.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            rows = list(_samples(archive, where))
    except _DAMAGE as error:
        problem = f"the sample is damaged: {error}"
        raise DataError(where, problem, "copy the tar again") from error
    if len(rows) > 1:
        raise DataError(where, f"holds {rows[1][KEY]} and {rows[0][KEY]}", "copy it again")
    return rows[0] if rows else {}


def sample_spans(stream: BinaryIO, where: str, size: int | None) -> Iterator[tuple[int, int]]:
    """From the first header of each sample to the end of its last member's last block.

    Args:
        stream: a plain tar.
        where: its name.
        size: its bytes, if the stream can seek; None reads all of it.

    Raises:
        DataError: the tar is damaged, or a member is a link or leaves the archive.
    """
    last = _LastBlock(stream)
    current: str | None = None
    start = end = 0
    try:
        # Blocks of 512 bytes: the last one read is the one at which tarfile stopped.
        mode = "r|" if size is None else "r:"
        with tarfile.open(fileobj=last, mode=mode, bufsize=tarfile.BLOCKSIZE) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
            for info, key, _ in _members(archive, where):
                if size is not None and info.offset_data + info.size > size:
                    raise DataError(where, f"the tar breaks off in {info.name!r}", "copy it again")
                if key != current:
                    if current is not None:
                        yield start, end
                    current, start = key, info.offset
                blocks = -(-info.size // tarfile.BLOCKSIZE)
                end = info.offset_data + blocks * tarfile.BLOCKSIZE
            if last.block.strip(b"\0"):  # tarfile takes a damaged header for the end
                problem = f"the header at byte {archive.offset} is damaged"  # pyright: ignore[reportAttributeAccessIssue]
                raise DataError(where, problem, "copy the tar again")
    except _DAMAGE as error:
        raise _damaged(where, error) from error
    if current is not None:
        yield start, end


class _LastBlock:
    """A stream that remembers what it gave last."""

    def __init__(self, stream: BinaryIO) -> None:
        self.block = b""
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        self.block = self._stream.read(size)
        return self.block


def _samples(archive: tarfile.TarFile, where: str) -> Iterator[dict[str, Any]]:
    """The rows of an archive that is read in order."""
    row: dict[str, Any] = {}
    for info, key, field in _members(archive, where):
        if row and key != row[KEY]:
            yield row
            row = {}
        stream = archive.extractfile(info)
        assert stream is not None  # a plain file
        row |= {KEY: key, field: stream.read()}
    if row:
        yield row


def _members(archive: tarfile.TarFile, where: str) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """The plain files that belong to samples, with their keys and fields in lower case.

    Raises:
        DataError: a member is a link, or its name is absolute or leaves the tar.
    """
    for info in archive:
        if info.issym() or info.islnk():
            raise DataError(
                where,
                f"the member {info.name!r} is a link to {info.linkname!r}",
                "do not use this tar; write it again with files only",
            )
        split = _split_key(info.name, where) if info.isfile() else None
        if split is not None:
            yield info, *split
        # else tarfile keeps every header for the life of the archive
        archive.members = []  # pyright: ignore[reportAttributeAccessIssue]


def _split_key(name: str, where: str) -> tuple[str, str] | None:
    """Key and field of a member, or None for a hidden file, a folder's entry or no field."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(
            where, f"the member {name!r} leaves the archive", "do not use this tar; write it again"
        )
    base, dot, field = path.name.partition(".")
    if not base or not dot or path.parts[0] == "__MACOSX":
        return None
    return str(path.parent / base), field.lower()


def _damaged(where: str, error: Exception) -> DataError:
    return DataError(where, f"the tar is damaged: {error}", "copy it again")
