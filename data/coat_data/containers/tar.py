"""Samples of WebDataset tars: members that share a key are one sample.

The key of a member is its path up to the first dot of its file name; the text after the dot is the
field and may have dots (``0001.left.jpg`` is the field ``left.jpg`` of ``0001``). The members of a
sample are adjacent (webdataset/webdataset, README; grouped as in ``group_by_keys``), so a sample is
a byte range.
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from coat_data.containers.rows import IndexedFiles
from coat_data.sample import KEY, DataError, printable

_DAMAGE = (tarfile.TarError, EOFError, UnicodeError)


class TarRows(IndexedFiles):
    """The samples of several plain tars; a row is an object of field -> bytes, and the key."""

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield the spans of the samples of a tar."""
        try:
            with path.open("rb") as stream:
                yield from _sample_spans(stream, str(path), path.stat().st_size)
        except OSError as error:
            raise _damaged(str(path), error) from error

    def parse(self, data: bytes, index: int) -> dict[str, Any]:
        """Parse the bytes of one sample's members, headers included."""
        where = self.where(index)
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8") as archive:
                return _read_sample(archive, where)
        except _DAMAGE as error:
            problem = f"the sample is damaged: {error}"
            raise DataError(where, problem, "copy the tar again") from error


def _sample_spans(stream: BinaryIO, where: str, size: int) -> Iterator[tuple[int, int]]:
    """Yield start (first header) and end (last block of the last member) of each sample."""
    current: str | None = None
    start = end = 0
    try:
        with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8") as archive:
            for info, key, _ in _members(archive, where):
                if info.offset_data + info.size > size:
                    problem = f"the tar is truncated in {printable(info.name)!r}"
                    raise DataError(where, problem, "copy it again")
                if key != current:
                    if current is not None:
                        yield start, end
                    current, start = key, info.offset
                blocks = -(-info.size // tarfile.BLOCKSIZE)
                end = info.offset_data + blocks * tarfile.BLOCKSIZE
            stop: int = archive.offset  # pyright: ignore[reportAttributeAccessIssue]
            stream.seek(stop)
            if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes it for the end
                problem = f"the header at byte {stop} is damaged"
                raise DataError(where, problem, "copy the tar again")
    except _DAMAGE as error:
        raise _damaged(where, error) from error
    if current is not None:
        yield start, end


def _read_sample(archive: tarfile.TarFile, where: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for info, key, field in _members(archive, where):
        stream = archive.extractfile(info)
        assert stream is not None  # a plain file
        data: Any = stream.read()
        if field in row:
            problem = (
                f"the sample {key} has two members {field} (names differ in case, or are equal)"
            )
            data = DataError(where, problem, "rename or remove one of them")
        row |= {KEY: key, field: data}
    return row


def _members(archive: tarfile.TarFile, where: str) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """Yield the plain files that belong to samples, with key, and field in lower case."""
    for info in archive:
        name = printable(info.name)
        path = PurePosixPath(name)
        problem = None
        if info.issym() or info.islnk():
            problem = f"is a link to {info.linkname!r}"
        elif info.issparse():
            problem = f"is a sparse file of {info.size} bytes"
        elif info.isfile() and (path.is_absolute() or ".." in path.parts):
            problem = "leaves the archive"
        if problem is not None:
            problem = f"the member {name!r} {problem}"
            raise DataError(where, problem, "write the tar again, or do not use it")
        base, dot, field = path.name.partition(".")
        if info.isfile() and base and dot and path.parts[0] != "__MACOSX":
            yield info, str(path.parent / base), field.lower()
        # else tarfile keeps every header for the life of the archive
        archive.members = []  # pyright: ignore[reportAttributeAccessIssue]


def _damaged(where: str, error: Exception) -> DataError:
    return DataError(where, f"the tar is damaged: {error}", "copy it again")
