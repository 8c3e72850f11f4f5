"""Rows of shards that are read over a network: JSONL, JSON arrays, WebDataset tars, Parquet.

Where rows are is found by one pass over a shard and kept on this machine
(:mod:`coat_data.containers.remote_index`). Then a row is a range of bytes, and of Parquet a row
group; any row can be read at any time, so that a run continues from a position alone. A server that
does not answer ranges can only be read from the beginning: such a source reads on to the window of
rows that is wanted, keeps that window, and counts the rows that it had to read over.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from coat_data.containers.json_file import parse_row
from coat_data.containers.remote_file import Blocks, RemoteFile, expand_urls, read_whole
from coat_data.containers.remote_index import Kind, ShardIndex, open_parquet, shard_index
from coat_data.containers.tar import sample_of
from coat_data.sample import DataError
from coat_data.stream_order import Shards

WINDOW_ROWS = 256
"""Consecutive rows that are read at about the same time."""

_GROUPS_BYTES = 256 << 20
"""Of a process and a source, decoded: a window of packing asks for rows of several row groups."""
_WINDOWS_KEPT = 8
"""Of a server without ranges: twice what a window of packing (1,000 samples) can ask for."""


class RemoteRows:
    """The rows of remote shards of one kind.

    Attributes:
        media_root: the current folder; a remote source has none of its own.
        damage: set when a shard breaks off; the rows before are good.
        shards: how the rows lie in shards, for an order that reads them side by side.
        paths: the kept indices, one of each shard; a changed shard has another one.
        replayed: rows of this process that lay before the first one wanted of a shard that can
            only be read from its beginning.
        unseekable: the first shard whose server does not answer ranges, if any.

    Args:
        pattern: address of a shard, or of several (braces; ``*`` but for http).

    Raises:
        DataError: a shard is missing, of no known kind, or cannot be read.
    """

    random_access = True

    def __init__(self, pattern: str) -> None:
        blocks = Blocks()
        self._files = [RemoteFile(url, blocks) for url in expand_urls(pattern)]
        self._kinds: list[Kind] = [_kind(file) for file in self._files]
        if len(set(self._kinds)) > 1:
            raise DataError(
                pattern, f"matches {', '.join(sorted(set(self._kinds)))}", "name files of one kind"
            )
        self._indices = [
            shard_index(file, kind) for file, kind in zip(self._files, self._kinds, strict=True)
        ]
        counts = [_rows(index, self._kinds[0]) for index in self._indices]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.media_root = Path.cwd()
        self.damage = self._first_damage()
        self.paths = tuple(index.path for index in self._indices)
        self.unseekable = next((file.url for file in self._files if not file.seekable), None)
        self.shards = self._shards(counts)
        self.replayed = 0
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], list[bytes]] = OrderedDict()
        self._reader: _Forward | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        number, row = self._locate(index)
        if self._kinds[number] == "parquet":
            return self._parquet_row(number, row)
        return self._parsed(self._read(number, row), number, row)

    def stream(self) -> Iterator[Any]:
        """Rows in order; a DataError in the place of a row that does not parse."""
        try:
            for index in range(len(self)):
                try:
                    yield self[index]
                except DataError as error:
                    yield error
        finally:
            self._reader = None
            self._windows.clear()

    def place(self, index: int) -> tuple[str, int]:
        """The shard's address and the row in it."""
        number, row = self._locate(index)
        return self._files[number].url, row

    def _locate(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - (int(self._ends[number - 1]) if number else 0)

    def _shards(self, counts: Sequence[int]) -> Shards:
        if self._kinds[0] == "parquet":  # a row group is read as a whole
            sizes = [int(n) for index in self._indices for n in index.ends - index.starts]
            return Shards(sizes=tuple(sizes), window=max([1, *sizes]))
        return Shards(sizes=tuple(counts), window=WINDOW_ROWS, jumps=self.unseekable is None)

    def _first_damage(self) -> DataError | None:
        for file, index in zip(self._files, self._indices, strict=True):
            if index.damage:
                return DataError(file.url, index.damage, "copy the shard again")
        return None

    def _parsed(self, data: bytes, number: int, row: int) -> Any:
        where = f"{self._files[number].url}:{row}"
        return sample_of(data, where) if self._kinds[number] == "tar" else parse_row(data, where)

    def _read(self, number: int, row: int) -> bytes:
        file, index = self._files[number], self._indices[number]
        start, end = int(index.starts[row]), int(index.ends[row])
        if not file.seekable:
            return self._read_forward(number, row)
        data = file.read(start, end - start)
        if len(data) < end - start:
            raise DataError(file.url, "has changed since it was indexed", "start again with it")
        return data

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
            self._skip(int(start))
            found.append(self._take(int(end) - self._offset))
        return found

    def _skip(self, offset: int) -> None:
        while self._offset < offset:
            self._take(min(offset - self._offset, 1 << 20))

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


def _rows(index: ShardIndex, kind: Kind) -> int:
    if kind == "parquet":
        return int(index.ends[-1]) if len(index.ends) else 0
    return len(index.starts)


def _row_group(file: RemoteFile, group: int) -> Any:
    """A row group as a table of Arrow."""
    with open_parquet(file, f"row group {group} is damaged") as parquet:
        return parquet.read_row_group(group)
