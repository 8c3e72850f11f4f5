"""Samples of WebDataset tars: members that share a key are one sample.

The key of a member is its path up to the first dot of its file name; the text behind the dot is the
field and may have dots (``0001.left.jpg`` is the field ``left.jpg`` of ``0001``). The members of a
sample are adjacent (webdataset/webdataset, README; grouped as in ``group_by_keys``). A plain tar
has random access, as a sample is a byte range; a compressed one is read in order.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from coat_data.containers.compressed import UnpackedStream, compression
from coat_data.containers.rows import IndexedFiles
from coat_data.limits import Limits
from coat_data.sample import KEY, DataError, printable

_HEADER_TYPES = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_MAX_HEADER_BYTES = 1 << 20

_DAMAGE = (tarfile.TarError, EOFError, UnicodeError)


class _Header(tarfile.TarInfo):
    """Refuses names and attributes of more than 1 MiB, which tarfile would read at once."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        header = super().frombuf(buf, encoding, errors)
        if header.type in _HEADER_TYPES and header.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {header.size} bytes")
        return header


class TarRows(IndexedFiles):
    """The samples of several tars; a row is an object of field -> bytes, and the key.

    Attributes:
        files: the tars in order.
        media_root: folder of the first tar.
        damage: set if a tar is truncated or damaged; the samples before the damage can be read.

    Args:
        files: the tars, in order.
        limits: limits of compressed tars.
    """

    def __init__(self, files: Sequence[Path], limits: Limits = Limits()) -> None:  # noqa: B008
        self._limits = limits
        self.random_access = self.reuses_index = not any(compression(path) for path in files)
        super().__init__(files)

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield the spans of the samples of a tar; none for compressed tars."""
        if not self.random_access:
            return
        try:
            with path.open("rb") as stream:
                yield from sample_spans(stream, str(path), path.stat().st_size)
        except OSError as error:
            raise _damaged(str(path), error) from error

    def parse(self, data: bytes, index: int) -> dict[str, Any]:
        """Parse a sample."""
        return sample_of(data, self.where(index))

    def __len__(self) -> int:
        if not self.random_access:
            raise TypeError(f"{self.files[0]}: the rows of a compressed tar are not counted")
        return super().__len__()

    def stream(self) -> Iterator[Any]:
        """Yield rows in order; damage of a compressed tar is yielded as a DataError."""
        if self.random_access:
            yield from super().stream()
            return
        for path in self.files:
            try:
                yield from self._unpacked(path)
            except (*_DAMAGE, OSError) as error:
                yield _damaged(str(path), error)
            except DataError as error:
                yield error

    def _unpacked(self, path: Path) -> Iterator[dict[str, Any]]:
        if not compression(path):
            with tarfile.open(path, "r|", encoding="utf-8", tarinfo=_Header) as archive:
                yield from _samples(archive, str(path))
            return
        with (
            UnpackedStream(path, self._limits) as stream,
            tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", tarinfo=_Header) as archive,
        ):
            for row in _samples(archive, str(path), self._limits):
                yield row
                stream.progress()

    def place(self, index: int) -> tuple[str, int]:
        """Return the tar and the sample in it; for compressed tars the first one and ``index``."""
        return super().place(index) if self.random_access else (str(self.files[0]), index)


def sample_of(data: bytes, where: str) -> dict[str, Any]:
    """Parse the bytes of one sample's members, headers included.

    Raises:
        DataError: the bytes are not those of one sample.
    """
    try:
        with tarfile.open(
            fileobj=io.BytesIO(data), mode="r:", encoding="utf-8", tarinfo=_Header
        ) as archive:
            rows = list(_samples(archive, where))
    except _DAMAGE as error:
        problem = f"the sample is damaged: {error}"
        raise DataError(where, problem, "copy the tar again") from error
    if len(rows) > 1:
        raise DataError(where, f"holds {rows[1][KEY]} and {rows[0][KEY]}", "copy it again")
    return rows[0] if rows else {}


def sample_spans(stream: BinaryIO, where: str, size: int) -> Iterator[tuple[int, int]]:
    """Yield start (first header) and end (last block of the last member) of each sample.

    Args:
        stream: a plain tar.
        where: name of the tar, for messages.
        size: size of the tar in bytes.

    Raises:
        DataError: the tar is damaged, or a member is a link or leaves the archive.
    """
    current: str | None = None
    start = end = 0
    try:
        with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", tarinfo=_Header) as archive:
            for info, key, _ in _members(archive, where):
                if info.offset_data + info.size > size:
                    raise DataError(
                        where, f"the tar breaks off in {printable(info.name)!r}", "copy it again"
                    )
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


def _samples(
    archive: tarfile.TarFile, where: str, limits: Limits | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of an archive that is read in order; with limits for a compressed one.

    A field that a sample has twice is a DataError in its place, which the reader of the row raises.
    """
    row: dict[str, Any] = {}
    row_bytes = 0
    for number, (info, key, field) in enumerate(_members(archive, where), 1):
        if row and key != row[KEY]:
            yield row
            row, row_bytes = {}, 0
        row_bytes += info.size
        if limits is not None:
            _check_limit(limits, "archive_sample_bytes", row_bytes, where, key)
            _check_limit(limits, "archive_members", number, where, key)
        stream = archive.extractfile(info)
        assert stream is not None  # a plain file
        data = stream.read()
        row |= {KEY: key, field: _twice(where, key, field) if field in row else data}
    if row:
        yield row


def _check_limit(limits: Limits, name: str, value: int, where: str, key: str) -> None:
    most = getattr(limits, name)
    if value > most:
        raise DataError(
            where,
            f"the sample {key!r} exceeds limits.{name}: {value}, allowed are {most}",
            f"raise it (--limit {name}=NUMBER) if you trust the file",
        )


def _twice(where: str, key: str, field: str) -> DataError:
    problem = f"the sample {key} has two members {field} (names differ in case, or are equal)"
    return DataError(where, problem, "rename or remove one of them")


def _members(archive: tarfile.TarFile, where: str) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """The plain files that belong to samples, with their keys and fields in lower case.

    Hidden files and names without a field belong to no sample. Bytes of a name that are not UTF-8
    are escaped.

    Raises:
        DataError: a member is a link, or its name is absolute or leaves the tar.
    """
    for info in archive:
        name = printable(info.name)
        if info.issym() or info.islnk():
            raise DataError(
                where,
                f"the member {name!r} is a link to {info.linkname!r}",
                "do not use this tar; write it again with files only",
            )
        if info.issparse():
            raise DataError(
                where,
                f"the member {name!r} is a sparse file of {info.size} bytes",
                "do not use this tar, or write it again without sparse files",
            )
        path = PurePosixPath(name)
        if info.isfile() and (path.is_absolute() or ".." in path.parts):
            raise DataError(
                where,
                f"the member {name!r} leaves the archive",
                "do not use this tar; write it again",
            )
        base, dot, field = path.name.partition(".")
        if info.isfile() and base and dot and path.parts[0] != "__MACOSX":
            yield info, str(path.parent / base), field.lower()
        # else tarfile keeps every header for the life of the archive
        archive.members = []  # pyright: ignore[reportAttributeAccessIssue]


def _damaged(where: str, error: Exception) -> DataError:
    return DataError(where, f"the tar is damaged: {error}", "copy it again")
