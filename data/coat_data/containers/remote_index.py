"""Where the rows of a remote shard are: found once by reading it, and kept on this machine."""

import hashlib
import io
import tarfile
import zipfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm

from coat_data.containers.json_file import array_spans, line_spans
from coat_data.containers.remote_file import Blocks, RemoteFile, cache_folder
from coat_data.containers.tar import refuse_link, sample_of, split_key
from coat_data.sample import DataError

Kind = Literal["json", "tar", "parquet"]

_BUFFER_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Where the rows of a shard are."""

    starts: NDArray[np.int64]
    """(rows,) first byte of each; of Parquet the first row of each row group."""
    ends: NDArray[np.int64]
    """(rows,) the byte after each; of Parquet the row after each row group."""
    damage: str
    """Why the shard breaks off; empty for a whole one."""
    path: Path
    """Where the index is kept; another one for other content."""


def shard_index(file: RemoteFile, kind: Kind) -> ShardIndex:
    """The index of a shard, made by one pass over it if this machine has none.

    Raises:
        DataError: the shard is not what its name says, or cannot be searched, or the folder of
            indices cannot be used.
        OSError: the network fails.
    """
    key = hashlib.sha256(f"1 {kind} {file.url} {file.version}".encode()).hexdigest()[:32]
    path = cache_folder() / "index" / f"{key}.npz"
    found = _kept(path)
    if found is not None:
        return found
    lock = FileLock(path.with_suffix(".lock"))
    with _usable_cache():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:  # ranks of a host wait for the first one
        return _kept(path) or _make(file, kind, path)
    finally:
        lock.release()


def _kept(path: Path) -> ShardIndex | None:
    """The index that this machine has; None if it has none, or only a part of one."""
    with _usable_cache():
        if not path.is_file():
            return None
        try:
            with np.load(path) as saved:
                starts, ends, damage = saved["starts"], saved["ends"], str(saved["damage"])
        except (zipfile.BadZipFile, ValueError, KeyError, EOFError):
            return None  # cut while it was written or copied
    return ShardIndex(starts=starts, ends=ends, damage=damage, path=path)


@contextmanager
def _usable_cache() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            str(cache_folder()),
            f"cannot keep indices of shards: {type(error).__name__}: {error}",
            "set COAT_VLM_CACHE to a folder that can be written",
        ) from error


def _make(file: RemoteFile, kind: Kind, path: Path) -> ShardIndex:
    starts, ends = array("q"), array("q")
    damage = ""
    beside = _beside(file) if kind == "tar" else None
    try:
        for start, end in beside or _spans(file, kind):
            starts.append(start)
            ends.append(end)
    except DataError as error:
        if kind == "parquet":
            raise
        damage = error.problem
    index = ShardIndex(
        starts=np.array(starts, dtype=np.int64),
        ends=np.array(ends, dtype=np.int64),
        damage=damage,
        path=path,
    )
    temporary = path.with_suffix(".new.npz")
    with _usable_cache():
        np.savez(temporary, starts=index.starts, ends=index.ends, damage=np.array(damage))
        temporary.replace(path)
    return index


def _spans(file: RemoteFile, kind: Kind) -> Iterator[tuple[int, int]]:
    return _row_groups(file) if kind == "parquet" else _passed(file, kind)


def _beside(file: RemoteFile) -> list[tuple[int, int]] | None:
    """What ``NAME.tar.idx`` says, as Energon writes it beside a tar; None if it is not of this one.

    It holds the first byte of each sample and the end of the last, in 8 bytes each, little-endian
    (NVIDIA/Megatron-Energon, itar.py and the preparation of shards, which writes them).
    """
    if not (file.seekable and file.url.endswith(".tar")):
        return None
    try:
        index = RemoteFile(f"{file.url}.idx", Blocks())
        data = index.read(0, index.size or 0)
    except DataError:
        return None  # there is none
    if len(data) < 16 or len(data) % 8:
        return None
    offsets = np.frombuffer(data, dtype="<u8").astype(np.int64)
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    fits = (np.diff(offsets) > 0).all() and offsets[0] >= 0 and offsets[-1] <= (file.size or 0)
    return spans if fits and _are_samples(file, [spans[0], spans[-1]]) else None


def _are_samples(file: RemoteFile, spans: list[tuple[int, int]]) -> bool:
    """Whether there is one sample in each of the spans, and the archive ends behind the last."""
    try:
        found = [sample_of(file.read(start, end - start), file.url) for start, end in spans]
    except DataError:
        return False
    return all(found) and not file.read(spans[-1][1], tarfile.BLOCKSIZE).strip(b"\0")


def _row_groups(file: RemoteFile) -> Iterator[tuple[int, int]]:
    if not file.seekable:
        raise DataError(
            file.url, "is Parquet on a server that does not answer ranges", "download it first"
        )
    with open_parquet(file, "is not Parquet") as parquet:
        metadata = parquet.metadata
    row = 0
    for number in range(metadata.num_row_groups):
        rows = metadata.row_group(number).num_rows
        yield row, row + rows
        row += rows


def _passed(file: RemoteFile, kind: Kind) -> Iterator[tuple[int, int]]:
    """The spans of one pass over the file, with a bar of its bytes."""
    name = file.url.rpartition("/")[2]
    bar = tqdm(total=file.size, desc=f"indexing {name}", unit="B", unit_scale=True, mininterval=1.0)
    with bar, file.stream() as raw:
        counted = io.BufferedReader(_Counted(raw, bar), _BUFFER_BYTES)
        yield from _tar_spans(counted, file) if kind == "tar" else _json_spans(counted, file.url)


class _Counted(io.RawIOBase):
    """A stream that moves a bar; it can be read forward and says where it is."""

    def __init__(self, stream: BinaryIO, bar: "tqdm[Any]") -> None:
        self._stream = stream
        self._bar = bar
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True  # for tell(), which a buffer asks it for

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != io.SEEK_CUR or offset:
            raise io.UnsupportedOperation("this stream is read forward only")
        return self._position

    def readinto(self, buffer: "memoryview[int]") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        self._bar.update(len(data))
        return len(data)


def _json_spans(stream: "io.BufferedReader[Any]", url: str) -> Iterator[tuple[int, int]]:
    """Rows of a JSON array or of JSONL."""
    if stream.peek(len(_BOM)).startswith(_BOM):
        stream.read(len(_BOM))
    is_array = stream.peek(4096).lstrip()[:1] == b"["
    return array_spans(stream, url) if is_array else line_spans(stream)


def _tar_spans(stream: "io.BufferedReader[Any]", file: RemoteFile) -> Iterator[tuple[int, int]]:
    """From the first header of a sample to the end of its last member's last block."""
    last = _LastBlock(stream)
    current: str | None = None
    start = end = 0
    try:
        # Blocks of 512 bytes: the last one read is the one at which tarfile stopped.
        with tarfile.open(fileobj=last, mode="r|", bufsize=tarfile.BLOCKSIZE) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
            for info in archive:
                refuse_link(info, file.url)
                split = split_key(info.name, file.url) if info.isfile() else None
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue]
                if split is None:
                    continue
                if split[0] != current:
                    if current is not None:
                        yield start, end
                    current, start = split[0], info.offset
                blocks = -(-info.size // tarfile.BLOCKSIZE)
                end = info.offset_data + blocks * tarfile.BLOCKSIZE
            if last.block.strip(b"\0"):
                problem = f"the header at byte {archive.offset} is damaged"  # pyright: ignore[reportAttributeAccessIssue]
                raise DataError(file.url, problem, "copy the tar again")
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise DataError(file.url, f"the tar is damaged: {error}", "copy it again") from error
    if current is not None:
        yield start, end


class _LastBlock:
    """A stream that remembers what it gave last."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.block = b""

    def read(self, size: int) -> bytes:
        self.block = self._stream.read(size)
        return self.block


class _Ranges(io.RawIOBase):
    """A file that pyarrow can read in places, over ranges.

    Attributes:
        failure: why a range could not be read, if so; not the fault of what is in the file.
    """

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._position = 0
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size or 0}
        self._position = base[whence] + offset
        return self._position

    def readinto(self, buffer: "memoryview[int]") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            data = self._file.read(self._position, len(buffer))
        except Exception as error:
            self.failure = error
            raise
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextmanager
def open_parquet(file: RemoteFile, problem: str) -> Iterator[Any]:
    """A Parquet file over ranges, as a ``pyarrow.parquet.ParquetFile``.

    Args:
        file: its ranges can be read.
        problem: what is wrong if pyarrow cannot read it.

    Raises:
        DataError: ``problem``; pyarrow raises OSError, too, for a corrupt page.
        OSError: the network fails.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    ranges = _Ranges(file)
    try:
        yield ParquetFile(ranges)
    except (ArrowException, OSError) as error:
        if ranges.failure is not None:
            raise ranges.failure from None
        raise DataError(file.url, f"{problem}: {error}", "copy the file again") from error
