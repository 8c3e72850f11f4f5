"""Rows of shards that are read over a network: JSONL, JSON arrays, WebDataset tars, Parquet.

Where the rows of a shard are is found by one pass over it and kept on this machine. Then a row is a
range of bytes, and of Parquet a row group; any row can be read at any time, so that a run continues
from a position alone. A server that does not answer ranges can only be read from the beginning:
such a source reads on to the window of rows that is wanted, keeps that window, and counts the rows
that it had to read over.
"""

import hashlib
import io
import os
import tarfile
import zipfile
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm

from coat_data.containers.json_file import parse_row, row_spans
from coat_data.containers.remote_file import (
    Blocks,
    RangeFile,
    RemoteFile,
    cache_folder,
    expand_urls,
    read_whole,
)
from coat_data.containers.rows import Rows, Shards, locate
from coat_data.containers.tar import sample_of, sample_spans
from coat_data.sample import DataError

Kind = Literal["json", "tar", "parquet"]

_BUFFER_BYTES = 1 << 20


WINDOW_ROWS = 256
"""Consecutive rows that are read at about the same time."""

_GROUPS_BYTES = 256 << 20
"""Of a process and a source, decoded: a window of packing asks for rows of several row groups."""
_WINDOWS_KEPT = 8
"""Of a server without ranges: twice what a window of packing (1,000 samples) can ask for."""


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
    spans = beside or (_row_groups(file) if kind == "parquet" else _passed(file, kind))
    try:
        for start, end in spans:
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
        if kind == "tar":
            yield from sample_spans(counted, file.url, None)
        else:
            yield from row_spans(counted, file.url)


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

    ranges = RangeFile(file.size or 0, lambda start, stop: file.read(start, stop - start))
    try:
        yield ParquetFile(ranges)
    except (ArrowException, OSError) as error:
        if ranges.failure is not None:
            raise ranges.failure from None
        raise DataError(file.url, f"{problem}: {error}", "copy the file again") from error


class RemoteRows(Rows):
    """The rows of remote shards of one kind.

    Attributes:
        media_root: the current folder; a remote source has none of its own.
        damage: set when a shard breaks off; the rows before are good.
        paths: the kept indices, one of each shard; a changed shard has another one.

    Args:
        pattern: address of a shard, or of several (braces; ``*`` but for http).

    Raises:
        DataError: a shard is missing, of no known kind, or cannot be read.
    """

    def __init__(self, pattern: str) -> None:
        blocks = Blocks()
        self._files = [RemoteFile(url, blocks) for url in expand_urls(pattern)]
        kinds: list[Kind] = sorted({_kind(file) for file in self._files})
        if len(kinds) > 1:
            raise DataError(pattern, f"matches {', '.join(kinds)}", "name files of one kind")
        self._kind = kinds[0]
        self._indices = [shard_index(file, self._kind) for file in self._files]
        if self._kind == "parquet":  # a row group is read as a whole
            sizes = [int(n) for index in self._indices for n in index.ends - index.starts]
            counts = [int((index.ends - index.starts).sum()) for index in self._indices]
        else:
            sizes = counts = [len(index.starts) for index in self._indices]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.media_root = Path.cwd()
        broken = (
            DataError(file.url, index.damage, "copy the shard again")
            for file, index in zip(self._files, self._indices, strict=True)
            if index.damage
        )
        self.damage = next(broken, None)
        self.paths = tuple(index.path for index in self._indices)
        self.unseekable = next((file.url for file in self._files if not file.seekable), None)
        window = max([1, *sizes]) if self._kind == "parquet" else WINDOW_ROWS
        self.shards = Shards(sizes=tuple(sizes), window=window, jumps=self.unseekable is None)
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], list[bytes]] = OrderedDict()
        self._reader: _Forward | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        number, row = locate(self._ends, index)
        if self._kind == "parquet":
            return self._parquet_row(number, row)
        file, shard = self._files[number], self._indices[number]
        if file.seekable:
            start, end = int(shard.starts[row]), int(shard.ends[row])
            data = file.read(start, end - start)
            if len(data) < end - start:
                raise DataError(file.url, "has changed since it was indexed", "start again with it")
        else:
            data = self._read_forward(number, row)
        return (sample_of if self._kind == "tar" else parse_row)(data, f"{file.url}:{row}")

    def stream(self) -> Iterator[Any]:
        """Rows in order; a DataError in the place of a row that does not parse."""
        try:
            yield from super().stream()
        finally:
            self._reader = None
            self._windows.clear()

    def place(self, index: int) -> tuple[str, int]:
        """The shard's address and the row in it."""
        number, row = locate(self._ends, index)
        return self._files[number].url, row

    def _read_forward(self, number: int, row: int) -> bytes:
        window, place = divmod(row, WINDOW_ROWS)
        kept = self._windows.get((number, window))
        if kept is None:
            reader = self._reader
            if reader is None or not reader.reaches(number, window):
                reader = self._reader = _Forward(self._files[number], self._indices[number], number)
                self.replayed += window * WINDOW_ROWS
            while reader.window < window:
                # Those passed, too: packing and workers ask a little out of order.
                kept = reader.next_window()
                self._windows[number, reader.window] = kept
                while len(self._windows) > _WINDOWS_KEPT:
                    self._windows.popitem(last=False)
        assert kept is not None  # it lay ahead of the reader
        return kept[place]

    def _parquet_row(self, number: int, row: int) -> Any:
        index = self._indices[number]
        group = int(np.searchsorted(index.ends, row, side="right"))
        table = self._groups.pop((number, group), None)
        if table is None:
            table = _row_group(self._files[number], group)
        self._groups[number, group] = table
        kept_bytes = sum(kept.nbytes for kept in self._groups.values())
        while kept_bytes > _GROUPS_BYTES and len(self._groups) > 1:
            kept_bytes -= self._groups.popitem(last=False)[1].nbytes
        return table.slice(row - int(index.starts[group]), 1).to_pylist()[0]

    def __getstate__(self) -> dict[str, Any]:
        own = {"_groups": OrderedDict(), "_windows": OrderedDict(), "_reader": None, "replayed": 0}
        return {**self.__dict__, **own}


class _Forward:
    """One shard read from its beginning, window after window, in one process.

    Attributes:
        window: the one that was read last; -1 before the first.
    """

    def __init__(self, file: RemoteFile, index: ShardIndex, number: int) -> None:
        self.window = -1
        self._file = file
        self._index = index
        self._number = number
        self._process = os.getpid()
        self._offset = 0
        self._stream: BinaryIO | None = None

    def reaches(self, number: int, window: int) -> bool:
        """Whether the window lies ahead in this process's own stream."""
        same = (number, os.getpid()) == (self._number, self._process)
        return same and window > self.window

    def next_window(self) -> list[bytes]:
        """The bytes of each row of the next window."""
        self.window += 1
        rows = slice(self.window * WINDOW_ROWS, (self.window + 1) * WINDOW_ROWS)
        found: list[bytes] = []
        spans = zip(self._index.starts[rows], self._index.ends[rows], strict=True)
        for start, end in spans:
            while self._offset < start:
                self._take(min(int(start) - self._offset, 1 << 20))
            found.append(self._take(int(end) - self._offset))
        return found

    def _take(self, size: int) -> bytes:
        self._stream = self._stream or self._file.stream()
        data = read_whole(self._stream, size)
        self._offset += len(data)
        if len(data) < size:
            raise ConnectionError(f"{self._file.url}: broke off at byte {self._offset}")
        return data

    def __del__(self) -> None:
        if self._stream is not None and self._process == os.getpid():
            self._stream.close()


def _kind(file: RemoteFile) -> Kind:
    """What a shard is, by its first bytes or its name."""
    if file.seekable:
        head = file.read(0, 512)
    else:
        with file.stream() as stream:
            head = read_whole(stream, 512)
    name = file.url.partition("?")[0].lower()
    if head[:4] == b"PAR1":
        return "parquet"
    if head[257:262] == b"ustar" or name.endswith(".tar"):
        return "tar"
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first in (b"[", b"{") or name.endswith((".json", ".jsonl", ".ndjson")):
        return "json"
    raise DataError(
        file.url,
        "is not JSON, JSONL, Parquet or a plain tar",
        "other files are read from this machine only: download it first",
    )


def _row_group(file: RemoteFile, group: int) -> Any:
    """A row group as a table of Arrow."""
    with open_parquet(file, f"row group {group} is damaged") as parquet:
        return parquet.read_row_group(group)
