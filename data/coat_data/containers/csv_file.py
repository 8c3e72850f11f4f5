"""Rows of a CSV or TSV file with a header line, read by byte offsets."""

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coat_data.containers.json_file import BOM
from coat_data.containers.rows import NO_ROW, IndexedFiles
from coat_data.sample import DataError, row_name


class CsvRows(IndexedFiles):
    """Records as objects of column name -> text; a record may span several lines."""

    def __init__(self, path: Path) -> None:
        csv.field_size_limit(min(sys.maxsize, 1 << 30))
        self._delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        header = next(self._records(path), None)
        if header is None:
            raise DataError(str(path), "the file is empty", "write a header line and rows")
        self._header_end = header[1]
        with path.open("rb") as stream:
            first = stream.read(header[1]).removeprefix(BOM)
        self.columns = self._record(first, row_name(str(path), 0))
        if len(set(self.columns)) < len(self.columns):
            problem = f"the header names a column twice: {self.columns}"
            raise DataError(str(path), problem, "rename one")
        super().__init__([path])

    def parse(self, data: bytes, index: int) -> dict[str, Any]:
        """Parse a record."""
        fields = self._record(data, self.where(index))
        if len(fields) != len(self.columns):
            problem = f"has {len(fields)} fields, but the header has {len(self.columns)}"
            remedy = "put fields with commas, quotes or line ends into quotes"
            raise DataError(self.where(index), problem, remedy)
        return dict(zip(self.columns, fields, strict=True))

    def _record(self, data: bytes, where: str) -> list[str]:
        try:
            text = io.StringIO(data.decode("utf-8"), newline="")
            return next(csv.reader(text, delimiter=self._delimiter))
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 ({error.reason})"
            raise DataError(where, problem, "save the file as UTF-8") from error
        except csv.Error as error:
            raise DataError(where, f"is not CSV: {error}", "fix it") from error

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield start and end of the records; the header is none."""
        for start, end in self._records(path):
            yield start, end if start >= self._header_end else NO_ROW

    def _records(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield start and end of every non-blank record."""
        taken = 0

        def lines() -> Iterator[str]:
            nonlocal taken
            with path.open("rb") as stream:
                for line in stream:
                    taken += len(line)  # csv takes as many lines as a record has
                    yield line.decode("latin-1")  # as long as its bytes

        start = 0
        records = csv.reader(lines(), delimiter=self._delimiter)
        while True:
            try:
                record = next(records, None)
            except csv.Error:  # reported when the record is read
                record = [""]
            if record is None:
                return
            if record:
                yield start, taken
            start = taken
