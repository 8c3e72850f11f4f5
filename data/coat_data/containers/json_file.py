"""Rows of a JSON array or a JSONL file, read by byte offsets.

The file is scanned once for the offsets of its rows. A JSONL row is a line. In an array the end of
an element is found by parsing it in a window of the file that holds a few rows; the window is read
as Latin-1, in which every byte is one character, so that characters count bytes (all of JSON's own
characters are ASCII, and no byte of a longer UTF-8 character is). Memory does not grow with the
file: 16 bytes per row and the window.
"""

import contextlib
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from coat_data.containers.rows import IndexedFiles
from coat_data.sample import DataError

MAX_ROW_BYTES = 256 << 20
"""The longest row of an array; a broken file is not read further to find a row's end."""

BOM = b"\xef\xbb\xbf"
"""Of UTF-8, before the text of a file."""

_LOOKED_AT = 16
_WINDOW_BYTES = 1 << 20
_REMEDY = "the file must be a JSON array of rows, or JSONL with one row per line"
_GAP = re.compile(r"[ \t\r\n]*")
_NUMBER_PART = re.compile(r"[0-9.eE+-]*")
_NEAR_END = 16
"""The longest token that the end of a window can cut without the parser pointing at the end."""


class JsonRows(IndexedFiles):
    """The rows of a JSON array or JSONL file; blank lines are not rows and are not counted.

    Args:
        path: the file.

    Raises:
        DataError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(str(path), "there is no such file", "give a .json or .jsonl file")
        self._path = path
        super().__init__([path])

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """The rows, up to where an array is broken."""
        with path.open("rb") as stream:
            yield from row_spans(stream, str(path))

    def parse(self, data: bytes, index: int) -> Any:
        """The value of a row."""
        try:
            return json.loads(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            problem = (
                f"byte {int(self._starts[index]) + error.start} of the file is not UTF-8 "
                f"({error.reason})"
            )
            raise DataError(self.where(index), problem, "save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            line = self._line(index) + error.lineno - 1
            problem = f"is not JSON: {error.msg} (line {line}, column {error.colno})"
            raise DataError(self.where(index), problem, _REMEDY) from error
        except (ValueError, RecursionError) as error:  # an endless number, or too many brackets
            problem = f"is not usable JSON: {error}"
            raise DataError(self.where(index), problem, _REMEDY) from error

    def _line(self, index: int) -> int:
        """The line, from 1, on which row ``index`` starts; reads the file up to there."""
        left, lines = int(self._starts[index]), 1
        with self._path.open("rb") as stream:
            while left > 0 and (chunk := stream.read(min(left, 1 << 20))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
        return lines


def has_rows(path: Path) -> bool:
    """Whether one of the first 16 rows (lines that are not blank, or elements) is an object.

    A text may begin with ``{"`` or ``[{"`` too; and the first row may be the damaged one.
    """
    with path.open("rb") as stream, path.open("rb") as read:
        try:
            for start, end in itertools.islice(row_spans(stream, str(path)), _LOOKED_AT):
                read.seek(start)
                with contextlib.suppress(DataError):  # that is for whoever reads this row
                    if isinstance(parse_row(read.read(end - start), str(path)), dict):
                        return True
        except DataError:  # an array that ends early, of whose elements none is an object
            return False
    return False


def parse_row(data: bytes, where: str) -> Any:
    """The value of a row.

    Raises:
        DataError: it is not JSON in UTF-8.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # of the text or of the JSON in it
        raise DataError(where, f"is not usable JSON: {error}", _REMEDY) from error


def row_spans(stream: "io.BufferedReader[Any]", where: str) -> Iterator[tuple[int, int]]:
    """Start and end of every element of a JSON array, or of every line that is not blank.

    Raises:
        DataError: the text is an array and breaks off or is no JSON; names the line.
    """
    if stream.peek(len(BOM)).startswith(BOM):
        stream.read(len(BOM))
    while (head := stream.peek(1)) and head.isspace():
        stream.read(len(head))
    if head.lstrip()[:1] == b"[":
        yield from _array_spans(stream, where)
        return
    start = stream.tell()
    for line in stream:
        if not line.isspace():
            yield start, start + len(line.rstrip(b"\r\n"))
        start += len(line)


class _Window:
    """A part of the file as text, with one character per byte."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self._stream = stream
        self._path = path
        self.text = ""
        self.start = stream.tell()
        """Offset of the window in the file."""
        self.whole = False
        """Whether the file ends with the window."""
        self._lines = 1

    def more(self) -> None:
        """Read on: at least as much again as the window holds."""
        data = self._stream.read(max(_WINDOW_BYTES, len(self.text)))
        self.whole = not data
        self.text += data.decode("latin-1")

    def forget(self, position: int) -> None:
        """Drop what stands before ``position``."""
        self._lines += self.text.count("\n", 0, position)
        self.text = self.text[position:]
        self.start += position

    def gap(self, position: int) -> int:
        """The next position at or behind ``position`` that is not white space."""
        while True:
            gap = _GAP.match(self.text, position)
            assert gap is not None  # it may be empty
            position = gap.end()
            if position < len(self.text) or self.whole:
                return position
            self.more()

    def error(self, message: str, position: int) -> DataError:
        """What is wrong at ``position``, with the line of the file."""
        line = self._lines + self.text.count("\n", 0, position)
        column = position - self.text.rfind("\n", 0, position)
        problem = f"is not JSON: {message} (line {line}, column {column})"
        return DataError(f"{self._path}:{line}", problem, _REMEDY)


def _array_spans(stream: BinaryIO, path: str) -> Iterator[tuple[int, int]]:
    window = _Window(stream, path)
    position = window.gap(0) + 1  # behind the bracket
    position = window.gap(position)
    if window.text[position : position + 1] == "]":
        _check_rest(window, position + 1)
        return
    while True:
        end = _element_end(window, position)
        yield window.start + position, window.start + end
        position = window.gap(end)
        mark = window.text[position : position + 1]
        if mark == "]":
            _check_rest(window, position + 1)
            return
        if mark != ",":
            raise window.error("Expecting ',' delimiter", position)
        position = window.gap(position + 1)
        if position > _WINDOW_BYTES:
            window.forget(position)
            position = 0


def _element_end(window: _Window, position: int) -> int:
    """Where the element that starts at ``position`` ends; reads on as far as needed."""
    decoder = json.JSONDecoder()
    while True:
        try:
            _, end = decoder.raw_decode(window.text, position)
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated string")
            if not (cut or error.pos >= len(window.text) - _NEAR_END) or window.whole:
                raise window.error(error.msg, error.pos) from error
            if len(window.text) - position > MAX_ROW_BYTES:
                message = f"this row has no end within {MAX_ROW_BYTES} bytes"
                raise window.error(message, position) from error
        except (ValueError, RecursionError) as error:
            raise window.error(str(error), position) from error
        else:
            if window.whole or not _NUMBER_PART.fullmatch(window.text, end):  # a number may go on
                return end
        window.more()


def _check_rest(window: _Window, position: int) -> None:
    position = window.gap(position)
    if position < len(window.text):
        raise window.error("Extra data", position)
