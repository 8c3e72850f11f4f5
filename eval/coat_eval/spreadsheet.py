"""Reads tables with a header line: CSV, TSV and XLSX; every cell becomes a text.

VLMEvalKit's TSV files contain images in base64, up to hundreds of megabytes. In the rows, such a
cell is replaced by its hash, mostly before the text is decoded and split into cells;
:class:`coat_eval.data_folder.TableImage` reads the image itself.
"""

import csv
import hashlib
import io
import sys
import zipfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from coat_data.sample import DataError

ZIP = b"PK\x03\x04"
IMAGE_COLUMN = "image"
IMAGE_HASH = "sha256:"
"""Beginning of the cell that stands for an image."""
_LONGEST_NAME = 64
"""Longer cells of the image column are images; others name the row with the image (VLMEvalKit,
``ImageBaseDataset``)."""
_LONGEST_HEADER = 1 << 16
_REMEDY = "write the table again, for example with pandas"


def has_header(text: str, fields: Collection[str]) -> bool:
    """Return whether a text is CSV or TSV: its first line has one of ``fields`` among others."""
    names = next(csv.reader([_first_line(text)], delimiter=_find_delimiter(text)), [])
    return len(names) > 1 and not set(fields).isdisjoint(names)


def read_without_images(file: IO[bytes]) -> bytes:
    """Read a file; in CSV and TSV the images of the image column are replaced by their hashes.

    Images in quotes stay (:func:`read_delimited` replaces them), as do all other files.
    """
    head = file.readline(_LONGEST_HEADER)
    mark = b"\t" if b"\t" in head else b","
    names = [name.strip(b'"') for name in head.removeprefix(b"\xef\xbb\xbf").rstrip().split(mark)]
    if IMAGE_COLUMN.encode() not in names:
        file.seek(0)
        return file.read()
    wanted = names.index(IMAGE_COLUMN.encode())
    lines, column, quoted = [head], 0, False  # quoted cells may contain line breaks
    for line in file:
        body = line.rstrip(b"\r\n")
        pieces = body.split(mark)
        for place, piece in enumerate(pieces):
            column += place > 0 and not quoted
            if b'"' in piece:
                if quoted or piece.startswith(b'"'):  # otherwise the quote has no meaning
                    quoted ^= piece.count(b'"') % 2 == 1
            elif column == wanted and not quoted and len(piece) > _LONGEST_NAME and piece.isascii():
                pieces[place] = _hash_image(piece).encode()
        lines += [mark.join(pieces), line[len(body) :]]
        column = column if quoted else 0
    return b"".join(lines)


def _hash_image(cell: bytes) -> str:
    return f"{IMAGE_HASH}{hashlib.sha256(cell).hexdigest()}"


def read_delimited(path: Path, text: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Read CSV or TSV.

    Args:
        path: the file, for messages.
        text: its content.

    Returns:
        The rows, and the line at which each ends.

    Raises:
        DataError: a row has more or fewer cells than the header, or a quote is not closed.
    """
    csv.field_size_limit(sys.maxsize)  # cells may contain images as text
    reader = csv.reader(_split_lines(text), delimiter=_find_delimiter(text), strict=True)
    rows, lines = [], []
    try:
        header = next(reader)
        images = [place for place, name in enumerate(header) if name == IMAGE_COLUMN]
        for cells in reader:
            if cells:
                for place in (one for one in images if one < len(cells)):
                    if len(cells[place]) > _LONGEST_NAME and not cells[place].startswith(
                        IMAGE_HASH
                    ):
                        cells[place] = _hash_image(cells[place].encode())
                rows.append(_make_row(header, cells, f"{path}:{reader.line_num}"))
                lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}", f"not CSV: {error}", _REMEDY) from error
    return rows, lines


def read_columns(path: Path, text: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Read lines of tab-separated cells without a header; quotes have no meaning (MME's results).

    Returns:
        The rows, with the keys ``column_1``, ``column_2``, ..., and the line of each.

    Raises:
        DataError: a line has more or fewer cells than the first.
    """
    lines = {
        number: line.rstrip("\r").split("\t")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    }
    names = [f"column_{place}" for place in range(1, len(next(iter(lines.values()))) + 1)]
    rows = [_make_row(names, cells, f"{path}:{number}") for number, cells in lines.items()]
    return rows, list(lines)


def read_workbook(path: Path, data: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """Read the first sheet of an XLSX file: its rows, and their numbers in the sheet.

    Raises:
        DataError: openpyxl is not installed, the file is no workbook, or it has no row.
    """
    try:
        import openpyxl
    except ImportError as error:
        remedy = "pip install -e '.[xlsx]', or save the table as CSV"
        raise DataError(str(path), "XLSX files need openpyxl", remedy) from error
    try:
        book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        cells: Iterable[tuple[Any, ...]] = book.worksheets[0].iter_rows(values_only=True)
        found = [[_to_text(cell) for cell in row] for row in cells]
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, IndexError) as error:
        raise DataError(str(path), f"not an XLSX workbook: {error}", _REMEDY) from error
    if not found:
        raise DataError(str(path), "the first sheet is empty", _REMEDY)
    # Programs leave out empty cells at the end of a row, or store formatted ones.
    header = _cut(found[0], 0)
    rows = {number: _cut(row, len(header)) for number, row in enumerate(found[1:], start=2)}
    numbers = [number for number, row in rows.items() if any(row)]
    return [_make_row(header, rows[i], f"{path}:{i}") for i in numbers], numbers


def _split_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text; io.StringIO would copy it with four bytes per character."""
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield text[start:end]
        start = end


def _make_row(header: list[str], cells: list[str], where: str) -> dict[str, Any]:
    if len(cells) != len(header):
        raise DataError(where, f"{len(cells)} cells under {len(header)} names", _REMEDY)
    return dict(zip(header, cells, strict=True))


def _cut(cells: list[str], width: int) -> list[str]:
    """Return the cells without empty ones at the end, but at least ``width``."""
    last = max((number for number, cell in enumerate(cells, start=1) if cell), default=0)
    return [*cells[: max(last, width)], *[""] * (width - len(cells))]


def _to_text(cell: Any) -> str:
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return "" if cell is None else str(cell)


def _first_line(text: str) -> str:
    return next(_split_lines(text.lstrip("\r\n")), "").rstrip("\r\n")


def _find_delimiter(text: str) -> str:
    return "\t" if "\t" in _first_line(text) else ","
