"""Rows of plain text files: a file is one document, read in blocks.

A block is at most 64 KiB. It ends after the last blank line in its second half, else after the
last line end, space or character there. All blocks of a file except the last are marked as
continued, so that no end token is supervised inside a document.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coat_data.containers.json_file import BOM
from coat_data.containers.rows import IndexedFiles
from coat_data.sample import DataError

BLOCK_BYTES = 64 << 10

_ENDS = (b"\n\n", b"\n", b" ")


class TextRows(IndexedFiles):
    """``{"text": ..., "continues": ...}`` for each block of each file."""

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield the byte offsets of the blocks that have more than white space."""
        with path.open("rb") as stream:
            start = len(BOM) if stream.read(len(BOM)) == BOM else 0
            while True:
                stream.seek(start)
                data = stream.read(BLOCK_BYTES)
                if not data:
                    return
                size = len(data) if len(data) < BLOCK_BYTES else _cut(data)
                if data[:size].strip():
                    yield start, start + size
                start += size

    def parse(self, data: bytes, index: int) -> Any:
        """The row, or DataError if its bytes are not UTF-8."""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 text: {error}"
            raise DataError(self.where(index), problem, "convert it") from error
        return {"text": text, "continues": index + 1 not in self._file_ends}


def _cut(data: bytes) -> int:
    for end in _ENDS:
        found = data.rfind(end, len(data) // 2)
        if found >= 0:
            return found + len(end)
    size = len(data)
    while size > 1 and data[size - 1] & 0xC0 == 0x80:  # inside a character
        size -= 1
    return size - 1 if data[size - 1] >= 0xC0 else len(data)
