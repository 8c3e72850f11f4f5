"""Rows of plain text files: a file is one document, read in blocks.

A block is at most 64 KiB. It ends behind the last blank line in its second half, else behind the
last line end, space or character there. Every block but a file's last says that its text goes on,
so that no end of a document is learned where there is none.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from coat_data.containers.rows import IndexedFile
from coat_data.sample import DataError

BLOCK_BYTES = 64 << 10

_BOM = b"\xef\xbb\xbf"
_ENDS = (b"\n\n", b"\n", b" ")


class TextRows:
    """``{"text": ..., "continues": ...}`` for each block of each file.

    Attributes:
        media_root: the folder of the first file.

    Args:
        files: in order; a file of white space alone has no rows.
    """

    random_access = True
    damage: DataError | None = None

    def __init__(self, files: Sequence[Path]) -> None:
        self.media_root = files[0].parent
        self._files = [_TextFile(path) for path in files]
        self._ends = np.cumsum([len(file) for file in self._files], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        file, own = self._locate(index)
        return file[own]

    def stream(self) -> Iterator[Any]:
        """Blocks in order; a DataError in the place of one that is not UTF-8."""
        for file in self._files:
            yield from file.stream()

    def place(self, index: int) -> tuple[str, int]:
        """The file, and the block in it."""
        file, own = self._locate(index)
        return str(file.path), own

    def _locate(self, index: int) -> "tuple[_TextFile, int]":
        number = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return self._files[number], index - before


class _TextFile(IndexedFile):
    """The blocks of one file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            spans = np.array(list(_blocks(stream)), dtype=np.int64).reshape(-1, 2)
        super().__init__(path, spans[:, 0], spans[:, 1])

    def parse(self, data: bytes, index: int) -> Any:
        """The row, or DataError if its bytes are not UTF-8."""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}:{index}", f"is not UTF-8 text: {error}", "convert it"
            ) from error
        return {"text": text, "continues": index < len(self) - 1}


def _blocks(stream: BinaryIO) -> Iterator[tuple[int, int]]:
    """Byte offsets of the blocks, those of white space alone left out."""
    start = len(_BOM) if stream.read(len(_BOM)) == _BOM else 0
    while True:
        stream.seek(start)
        data = stream.read(BLOCK_BYTES)
        if not data:
            return
        size = len(data) if len(data) < BLOCK_BYTES else _cut(data)
        if data[:size].strip():
            yield start, start + size
        start += size


def _cut(data: bytes) -> int:
    """Bytes of a block at the beginning of ``data``."""
    for end in _ENDS:
        found = data.rfind(end, len(data) // 2)
        if found >= 0:
            return found + len(end)
    size = len(data)
    while size > 1 and data[size - 1] & 0xC0 == 0x80:  # inside a character
        size -= 1
    return size - 1 if data[size - 1] >= 0xC0 else len(data)
