"""Rows of remote shards: JSONL, JSON arrays, WebDataset tars, Parquet.

Each shard is scanned once for the offsets of its rows; the index is cached on this machine. A row
is then a byte range (Parquet: a row group), and any row can be read at any time, so that a run
resumes from a position alone.
"""

import hashlib
import io
import tarfile
import zipfile
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm

from coat_data.containers.http_client import check_host
from coat_data.containers.json_file import parse_row, row_spans
from coat_data.containers.remote_file import (
    Blocks,
    RangeFile,
    RemoteFile,
    cache_folder,
    expand_urls,
)
from coat_data.containers.rows import Rows, Shards, locate
from coat_data.containers.tar import sample_of, sample_spans
from coat_data.limits import Network
from coat_data.sample import DataError

Kind = Literal["json", "tar", "parquet"]

_SCAN_BYTES = 8 << 20
"""Bytes per request while a shard is scanned for its rows."""

_INDEX_VERSION = 2
"""Version 1 knew no objects of rows."""

WINDOW_ROWS = 256
"""Consecutive rows that are read at about the same time."""

_GROUPS_BYTES = 256 << 20
"""Cache of decoded row groups per process and source: packing windows use several at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Offsets of the rows of a shard."""

    starts: NDArray[np.int64]
    """(rows,) first byte of each row; for Parquet the first row of each row group."""
    ends: NDArray[np.int64]
    """(rows,) the byte after each row; for Parquet the row after each row group."""
    damage: str
    """Why the shard cannot be read to its end; empty for an intact one."""
    path: Path
    """The cached index; its name depends on the content of the shard."""


def shard_index(file: RemoteFile, kind: Kind) -> ShardIndex:
    """Return the cached index of a shard; scan the shard if there is none.

    Raises:
        DataError: the shard has another format than its name, cannot be scanned, or the cache
            folder cannot be used.
        OSError: the network fails.
    """
    key = hashlib.sha256(f"{_INDEX_VERSION} {kind} {file.url} {file.version}".encode()).hexdigest()[
        :32
    ]
    path = cache_folder() / "index" / f"{key}.npz"
    found = _read_index(path)
    if found is not None:
        return found
    lock = FileLock(path.with_suffix(".lock"))
    with _usable_cache():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:  # the other ranks of a host wait for the first one
        return _read_index(path) or _make_index(file, kind, path)
    finally:
        lock.release()


def _read_index(path: Path) -> ShardIndex | None:
    """Read a cached index; None if it is missing or truncated."""
    with _usable_cache():
        if not path.is_file():
            return None
        try:
            with np.load(path) as saved:
                starts, ends, damage = saved["starts"], saved["ends"], str(saved["damage"])
        except (zipfile.BadZipFile, ValueError, KeyError, EOFError):
            return None  # truncated while it was written or copied
    return ShardIndex(starts=starts, ends=ends, damage=damage, path=path)


@contextmanager
def _usable_cache() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            str(cache_folder()),
            f"cannot cache the indices of shards: {type(error).__name__}: {error}",
            "set COAT_VLM_CACHE to a folder that can be written",
        ) from error


def _make_index(file: RemoteFile, kind: Kind, path: Path) -> ShardIndex:
    starts, ends = array("q"), array("q")
    damage = ""
    energon = _read_energon_index(file) if kind == "tar" else None
    spans = energon or (_row_groups(file) if kind == "parquet" else _scan(file, kind))
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


def _read_energon_index(file: RemoteFile) -> list[tuple[int, int]] | None:
    """Read ``NAME.tar.idx``, which Energon writes beside a tar; None if it does not fit the tar.

    It holds the first byte of each sample and the end of the last one, in 8 bytes each,
    little-endian (NVIDIA/Megatron-Energon, itar.py and the preparation of shards).
    """
    if not file.url.endswith(".tar"):
        return None
    try:
        index = RemoteFile(f"{file.url}.idx", Blocks(), network=file.network)
        data = index.read(0, index.size or 0)
    except DataError:
        return None  # missing
    if len(data) < 16 or len(data) % 8:
        return None
    offsets = np.frombuffer(data, dtype="<u8").astype(np.int64)
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    fits = (np.diff(offsets) > 0).all() and offsets[0] >= 0 and offsets[-1] <= (file.size or 0)
    if not fits:
        return None
    try:
        rows = [sample_of(file.read(a, b - a), file.url) for a, b in (spans[0], spans[-1])]
    except DataError:
        return None
    is_end = not file.read(spans[-1][1], tarfile.BLOCKSIZE).strip(b"\0")
    return spans if all(rows) and is_end else None


def _row_groups(file: RemoteFile) -> Iterator[tuple[int, int]]:
    with open_parquet(file, "is not Parquet") as parquet:
        metadata = parquet.metadata
    row = 0
    for number in range(metadata.num_row_groups):
        rows = metadata.row_group(number).num_rows
        yield row, row + rows
        row += rows


def _scan(file: RemoteFile, kind: Kind) -> Iterator[tuple[int, int]]:
    """Yield the spans of the rows in one pass over the file, with a progress bar."""
    name = file.url.rpartition("/")[2]
    size = file.size or 0
    with tqdm(
        total=size, desc=f"indexing {name}", unit="B", unit_scale=True, mininterval=1.0
    ) as bar:

        def read_at(start: int, stop: int) -> bytes:
            data = file.range(start, stop - start)
            if len(data) < stop - start:
                raise ConnectionError(
                    f"{file.url}: broke off at byte {start + len(data)} of {size}"
                )
            bar.update(stop - bar.n)
            return data

        stream = io.BufferedReader(RangeFile(size, read_at), _SCAN_BYTES)
        if kind == "tar":
            yield from sample_spans(stream, file.url, size)
        else:
            yield from row_spans(stream, file.url)


@contextmanager
def open_parquet(file: RemoteFile, problem: str) -> Iterator[Any]:
    """Open a remote ``pyarrow.parquet.ParquetFile``.

    Args:
        file: a file with byte ranges.
        problem: message of the DataError if pyarrow cannot read the file.

    Raises:
        DataError: ``problem``; pyarrow also raises OSError for a corrupt page.
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
        media_root: the current folder, as a remote source has none.
        damage: set if a shard is truncated or damaged; the rows before the damage can be read.
        paths: the cached index of each shard; a changed shard has another one.

    Args:
        pattern: address of a shard, or a pattern of several (braces; ``*`` but not over http).
        network: hosts that may be asked besides those of ``pattern``.

    Raises:
        DataError: a shard is missing, has an unknown format, or cannot be read.
    """

    def __init__(self, pattern: str, network: Network = Network()) -> None:  # noqa: B008 - frozen
        check_host(pattern, network.with_hosts_of(pattern))
        blocks = Blocks()
        self._files = [
            RemoteFile(url, blocks, network=network.with_hosts_of(url))
            for url in expand_urls(pattern)
        ]
        kinds: list[Kind] = sorted({_kind(file) for file in self._files})
        if len(kinds) > 1:
            raise DataError(pattern, f"matches {', '.join(kinds)}", "name files of one kind")
        self._kind = kinds[0]
        self._indices = [shard_index(file, self._kind) for file in self._files]
        self.in_parallel = self._kind != "parquet"
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
        self.versions = {file.url: file.version for file in self._files}
        window = max([1, *sizes]) if self._kind == "parquet" else WINDOW_ROWS
        self.shards = Shards(sizes=tuple(sizes), window=window)
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        number, row = locate(self._ends, index)
        if self._kind == "parquet":
            return self._parquet_row(number, row)
        file, shard = self._files[number], self._indices[number]
        start, end = int(shard.starts[row]), int(shard.ends[row])
        data = file.read(start, end - start)
        if len(data) < end - start:
            raise DataError(file.url, "has changed since it was indexed", "start again with it")
        return (sample_of if self._kind == "tar" else parse_row)(data, f"{file.url}:{row}")

    def place(self, index: int) -> tuple[str, int]:
        """Return the address of the shard, and the row in it."""
        number, row = locate(self._ends, index)
        return self._files[number].url, row

    def _parquet_row(self, number: int, row: int) -> Any:
        index = self._indices[number]
        group = int(np.searchsorted(index.ends, row, side="right"))
        table = self._groups.pop((number, group), None)
        if table is None:
            table = _row_group(self._files[number], group)
        self._groups[number, group] = table
        cached_bytes = sum(group.nbytes for group in self._groups.values())
        while cached_bytes > _GROUPS_BYTES and len(self._groups) > 1:
            cached_bytes -= self._groups.popitem(last=False)[1].nbytes
        return table.slice(row - int(index.starts[group]), 1).to_pylist()[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": OrderedDict()}


def _kind(file: RemoteFile) -> Kind:
    """Return the format of a shard, from its first bytes or its name."""
    if not file.seekable:
        raise DataError(
            file.url, "lies on a server that does not answer ranges", "download it first"
        )
    head = file.read(0, 512)
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
    """Read a row group as an Arrow table."""
    with open_parquet(file, f"row group {group} is damaged") as parquet:
        return parquet.read_row_group(group)
