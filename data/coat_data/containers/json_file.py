"""Rows of a JSON array, of an object of rows, or of a JSONL file, read by byte offsets.

In an object of rows, ``{"id1": {...}, "id2": {...}}``, a name is the ``id`` of its row, unless the
row has its own. The end of an element is found by parsing it in a buffer of a few rows, decoded as
Latin-1: every byte is one character, so that character positions are byte offsets.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from coat_data.containers.rows import NO_ROW, IndexedFiles, locate
from coat_data.sample import DataError

MAX_ROW_BYTES = 256 << 20
"""Maximum length of a row; in a broken file the search for its end stops there."""

BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8, before the text of a file."""

_WINDOW_BYTES = 1 << 20
_REMEDY = "the file must be a JSON array or object of rows, or JSONL with one row per line"
_GAP = re.compile(r"[ \t\r\n]*")
_NUMBER_PART = re.compile(r"[0-9.eE+-]*")
_FIELDS_PROBED = 64
"""Members of the first object that must be objects, so that the object is taken for one of rows."""
_NEAR_END = 16
"""Maximum length of a token that the end of the buffer cuts without an error at that end."""


class JsonRows(IndexedFiles):
    """The rows of JSON or JSONL files; blank lines are skipped."""

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield the rows; a DataError ends a damaged array."""
        with path.open("rb") as stream:
            yield from _row_spans(stream, str(path))

    def parse(self, data: bytes, index: int) -> Any:
        """Parse a row."""
        try:
            return _loads(data.decode("utf-8"))
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
        except (ValueError, RecursionError) as error:  # an infinite number, or too many brackets
            problem = f"is not usable JSON: {error}"
            raise DataError(self.where(index), problem, _REMEDY) from error

    def _line(self, index: int) -> int:
        """Return the line, from 1, at which row ``index`` starts; reads the file up to there."""
        left, lines = int(self._starts[index]), 1
        with self.files[locate(self._file_ends, index)[0]].open("rb") as stream:
            while left > 0 and (chunk := stream.read(min(left, 1 << 20))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
        return lines


def _loads(text: str) -> Any:
    if text.startswith('"'):
        try:
            ((name, row),) = json.loads(f"{{{text}}}").items()
        except ValueError:
            return json.loads(text)  # a line that is a string; the reader refuses it
        return {"id": name, **row} if isinstance(row, dict) else row
    return json.loads(text)


def _row_spans(stream: "io.BufferedReader[Any]", where: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of every element of an array or object, or of every non-blank line."""
    if stream.peek(len(BOM)).startswith(BOM):
        stream.read(len(BOM))
    start = stream.tell()
    while (head := stream.peek(1)) and head.isspace():
        stream.read(len(head))
    first = head.lstrip()[:1]
    is_object = first == b"{" and _holds_rows(Window(stream, where))
    stream.seek(start)
    if first == b"[" or is_object:
        yield from _element_spans(stream, where, is_object=is_object)
        return
    while line := stream.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            problem = f"the line at byte {start} has no end within {MAX_ROW_BYTES} bytes"
            raise DataError(where, problem, _REMEDY)
        if not line.isspace():
            yield start, start + len(line.rstrip(b"\r\n"))
        else:
            yield start, NO_ROW
        start += len(line)


class Window:
    """A position in a JSON file, over a part of it as text with one character per byte.

    Only the ASCII characters of parsed strings are right. All methods raise a DataError with the
    line if the file is not JSON there.
    """

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self._stream = stream
        self._path = path
        self._text = ""
        self._position = 0
        self._start = stream.tell()  # offset of the window in the file
        self._whole = False  # whether the file ends with the window
        self._lines = 1

    @property
    def offset(self) -> int:
        """Return the offset of the position in the file."""
        return self._start + self._position

    def mark(self) -> str:
        """Skip white space; return the next character, or an empty text at the end of the file."""
        while True:
            gap = _GAP.match(self._text, self._position)
            assert gap is not None  # it may be empty
            self._position = gap.end()
            if self._position < len(self._text) or self._whole:
                return self._text[self._position : self._position + 1]
            self._more()

    def skip(self, mark: str) -> None:
        """Skip white space and ``mark``, which must be there."""
        if self.mark() != mark:
            raise self.error(f"Expecting {mark!r} delimiter")
        self._position += 1

    def goes_on(self, end: str) -> bool:
        """Skip the comma before another element; return False at ``end``, which is skipped."""
        if self._position > _WINDOW_BYTES:
            self._lines += self._text.count("\n", 0, self._position)
            self._text = self._text[self._position :]
            self._start, self._position = self.offset, 0
        found = self.mark()
        self.skip("," if found != end else end)
        return found != end

    def opens(self, begin: str, end: str) -> bool:
        """Skip ``begin``, and ``end`` if it follows directly; return whether an element follows."""
        self.skip(begin)
        empty = self.mark() == end
        self._position += empty
        return not empty

    def value(self) -> Any:
        """Parse the value at the position and move past it; reads more if needed."""
        self.mark()
        decoder = json.JSONDecoder()
        while True:
            try:
                found, end = decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string")
                if not (cut or error.pos >= len(self._text) - _NEAR_END) or self._whole:
                    raise self.error(error.msg, error.pos) from error
                if len(self._text) - self._position > MAX_ROW_BYTES:
                    message = f"this row has no end within {MAX_ROW_BYTES} bytes"
                    raise self.error(message) from error
            except (ValueError, RecursionError) as error:
                raise self.error(str(error)) from error
            else:
                if self._whole or not _NUMBER_PART.fullmatch(self._text, end):  # a number goes on
                    self._position = end
                    return found
            self._more()

    def elements(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each element of the array here; ends after the array."""
        more = self.opens("[", "]")
        while more:
            self.mark()
            start = self.offset
            self.value()
            yield start, self.offset
            more = self.goes_on("]")

    def members(self) -> Iterator[int]:
        """Yield the start of each member; the caller reads the value, which comes next."""
        more = self.opens("{", "}")
        while more:
            if self.mark() != '"':
                raise self.error("Expecting property name enclosed in double quotes")
            start = self.offset
            self.value()
            self.skip(":")
            yield start
            more = self.goes_on("}")

    def error(self, message: str, position: int | None = None) -> DataError:
        """Return the error at ``position`` of the window, by default the current one."""
        position = self._position if position is None else position
        line = self._lines + self._text.count("\n", 0, position)
        column = position - self._text.rfind("\n", 0, position)
        problem = f"is not JSON: {message} (line {line}, column {column})"
        return DataError(f"{self._path}:{line}", problem, _REMEDY)

    def _more(self) -> None:
        data = self._stream.read(max(_WINDOW_BYTES, len(self._text)))
        self._whole = not data
        self._text += data.decode("latin-1")


def _holds_rows(window: Window) -> bool:
    """Whether the file is one object whose members are objects; a line of JSONL has other ones."""
    number = 0
    try:
        for number, _ in enumerate(window.members(), 1):
            if window.mark() != "{":
                return False
            window.value()
            if number == _FIELDS_PROBED:
                return True
        return number > 0 and not window.mark()
    except DataError:
        return False  # reported when the rows are read


def _element_spans(stream: BinaryIO, path: str, *, is_object: bool) -> Iterator[tuple[int, int]]:
    window = Window(stream, path)
    if is_object:
        for start in window.members():
            row = window.value()
            if isinstance(row, dict) and "split" in row:  # ScienceQA
                problem = "is an object whose rows have a split"
                remedy = "write the rows of one split as JSONL, or use Parquet files from the Hub"
                raise DataError(path, problem, remedy)
            yield start, window.offset
    else:
        yield from window.elements()
    if window.mark():
        raise window.error("Extra data")
