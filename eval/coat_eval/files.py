"""Reads files of rows in their published formats, and writes JSON files atomically.

The content decides the format, not the name: POPE's ``.json`` files are JSON lines. Only MME's
results, tab-separated without a header, are recognized by their name (``.txt``). Images in base64
in VLMEvalKit's TSV files are replaced by their hash; :class:`data_folder.TableImage` reads them.
"""

import csv
import gzip
import hashlib
import io
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from coat_data.sample import DataError
from coat_data.saved_files import hash_file, write_text

REPORT_FILE = "report.json"
IMAGE_COLUMN = "image"
IMAGE_HASH = "sha256:"
"""Beginning of the cell that represents an image."""
_MAX_NAME = 64
"""Longer cells of the image column are images; others name the row with the image."""
_GZIP, _PARQUET, _ZIP = b"\x1f\x8b", b"PAR1", b"PK\x03\x04"
_LISTS = ("annotations", "questions", "data")
"""Keys of the rows in files of VQA v2 (the first two), SEED-Bench (the second) and TextVQA."""
_COLUMNS = frozenset(
    {"question_id", "questionId", "id", "index", "qid", "image", "video_id", "prediction"}
)
"""One of these is in the header line of a CSV or TSV file."""
_ROW_FIELDS = _COLUMNS | {"pid", "question", "answer", "text", "video", "video_name"}
"""A JSON object with one of these keys is itself a row: JSON lines with a single line."""
_IDS = ("question_id", "questionId", "id", "index", "qid", "pid")
_LINE_END = re.compile("\r\n?|\n")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")
_File = IO[bytes] | gzip.GzipFile
_REWRITE = "write the table again, for example with pandas"


class Fields(dict[str, Any]):
    """The fields of one row; a missing one is a DataError with file and row."""

    def __init__(self, row: Mapping[str, Any], table: "Table", index: int) -> None:
        super().__init__(row)
        self._place = (table, index)

    def __missing__(self, name: str) -> Any:
        table, index = self._place
        raise DataError(table.where(index), f"has no {name}; it has {sorted(self)}", "add it")


PlacedRow = tuple[Mapping[str, Any], str]
"""A row with its place, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of one file."""

    path: Path
    rows: list[dict[str, Any]]
    form: Literal["rows", "mapping"] = "rows"
    """``mapping``: the file was one object by id, which is now ``question_id``; rows that were no
    objects became ``value``."""
    head: Mapping[str, Any] = field(default_factory=dict)
    """Entries in addition to the rows, e.g. SEED-Bench's names of question types."""
    lines: Sequence[int] | None = None
    """Line of each row, from 1; None if rows are not lines."""
    notes: Sequence[str] = ()
    """Warnings about values that may not be read as they were meant."""

    def where(self, index: int) -> str:
        """Return file and line, or file and row, counted from 1."""
        if self.lines is not None:
            return f"{self.path}:{self.lines[index]}"
        return f"{self.path}, row {index + 1}"

    def has(self, *fields: str) -> bool:
        """Return whether the first row has all of these fields."""
        return bool(self.rows) and all(name in self.rows[0] for name in fields)


Tables = Sequence[Table]


def read_table(path: Path) -> Table:
    """Read the rows of a file; image columns of Parquet are skipped. DataError names the line."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():
        raise DataError(str(path), "is a folder, not a file", "name the files in it")
    with path.open("rb") as file:
        if file.read(2) != _GZIP:
            file.seek(0)
            return _name_rows(_read(path, file))
    try:
        with gzip.open(path) as unzipped:
            return _name_rows(_read(path, unzipped))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(str(path), f"broken gzip: {error}", "download it again") from error


def _name_rows(table: Table) -> Table:
    """Return the table with rows that know their place; a column of ids 7.0 becomes integers."""
    for name in filter(table.has, _IDS):
        if all(re.fullmatch(r"\d+\.0", str(row.get(name))) for row in table.rows):
            for row in table.rows:
                row[name] = str(row[name])[:-2]
    table.rows[:] = [Fields(row, table, index) for index, row in enumerate(table.rows)]
    return table


def _read(path: Path, file: _File) -> Table:
    line = file.readline(1 << 16)
    file.seek(0)
    if line.startswith(_PARQUET):
        return _read_parquet(path, file)
    if line.startswith(_ZIP):
        return _read_workbook(path, file)
    first = _LINE_END.split(line.decode("utf-8-sig", "replace"), maxsplit=1)[0]
    for delimiter in "\t,;" if first.lstrip()[:1] not in ("{", "[") else "":
        names = next(csv.reader([first], delimiter=delimiter), [])
        if len(names) > 1 and _COLUMNS & set(names):
            return _read_delimited(path, file, delimiter=delimiter, strict=True)
    if path.suffix == ".txt" and "\t" in first:  # quotes have no meaning in MME's results
        columns = [f"column_{number}" for number in range(1, first.count("\t") + 2)]
        form: dict[str, Any] = {"fieldnames": columns, "delimiter": "\t"}
        return _read_delimited(path, file, **form, quoting=csv.QUOTE_NONE)
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _make_encoding_error(path, error) from error
    return _parse_json(path, text)


def _read_delimited(path: Path, file: _File, **form: Any) -> Table:
    """Read CSV or TSV record by record, so that only one image is in memory."""
    csv.field_size_limit(sys.maxsize)
    rows, lines = [], []
    reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), **form)
    try:
        _check_names(reader.fieldnames or (), str(path))
        for row in reader:
            if None in row or None in row.values():
                names = len(reader.fieldnames or ())
                given = names - list(row.values()).count(None) + len(row.get(None, ()))
                problem = f"{given} cells under {names} names"
                raise DataError(f"{path}:{reader.line_num}", problem, _REWRITE)
            if len(image := row.get(IMAGE_COLUMN, "")) > _MAX_NAME:
                row[IMAGE_COLUMN] = f"{IMAGE_HASH}{hashlib.sha256(image.encode()).hexdigest()}"
            rows.append(row)
            lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise _make_encoding_error(path, error) from error
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}", f"not CSV: {error}", _REWRITE) from error
    return Table(path=path, rows=rows, lines=lines)


def _read_workbook(path: Path, file: _File) -> Table:
    """Read the first sheet of an XLSX file; every cell becomes a text.

    A formula becomes its value, or its own text where it has none: a text that begins with "=" is
    written as a formula without a value by openpyxl, with 0 by XlsxWriter, as an error by Excel.
    """
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        remedy = "pip install -e '.[xlsx]', or save the table as CSV"
        raise DataError(str(path), "XLSX files need openpyxl", remedy) from error
    data, sheets = file.read(), list[list[Any]]()
    try:
        for computed in (False, True):
            book = load_workbook(io.BytesIO(data), read_only=True, data_only=computed)
            book.worksheets[0].reset_dimensions()
            sheets.append(list(book.worksheets[0].rows))
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, IndexError, SyntaxError) as error:
        raise DataError(str(path), f"not an XLSX workbook: {error}", _REWRITE) from error
    cells = [list(zip(*rows, strict=True)) for rows in zip(*sheets, strict=True)]
    formulas = [one for row in cells for own, one in row if own.data_type == "f"]
    computed = any(one.value and one.data_type != "e" for one in formulas)
    names = [str(own.value or "") for own, _ in cells[0]] if cells else []
    _check_names(names, str(path))
    texts = {own.column for row in cells[1:] for own, _ in row if isinstance(own.value, str)}
    found, odd = dict[int, dict[str, Any]](), list[str]()
    for line, row in enumerate(cells[1:], 2):
        found[line] = dict.fromkeys(filter(None, names), "")
        for name, (own, one) in zip(names, row, strict=False):
            known = computed and one.value is not None and one.data_type != "e"
            value = one.value if known else own.value
            if name and value is not None:
                value = int(value) if isinstance(value, float) and value.is_integer() else value
                found[line][name] = text = str(getattr(value, "text", value))  # of an array formula
                number = type(value) is int and own.number_format == "General"
                plain = isinstance(value, str) or (number and own.column not in texts)
                if own.data_type == "f" or not plain:
                    odd.append(f"{own.coordinate}, read as {text!r}")
    found = {line: row for line, row in found.items() if any(row.values())}
    note = f"{path}: {len(odd)} cells are formulas, numbers or dates: {'; '.join(odd[:3])}"
    rows, lines = list(found.values()), list(found)
    return Table(path=path, rows=rows, lines=lines, notes=[note] if odd else ())


def _check_names(names: Sequence[str], where: str) -> None:
    """Raise DataError if columns share a name, as a row would keep only the last of them."""
    for name in filter(None, names):
        if names.count(name) > 1:
            problem = f"{names.count(name)} columns are named {name!r}"
            raise DataError(where, problem, "keep one of them")


def _read_parquet(path: Path, file: _File) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # In memory if zipped: every seek backwards would unzip it again.
    source = io.BytesIO(file.read()) if isinstance(file, gzip.GzipFile) else path
    try:
        with pq.ParquetFile(source) as opened:
            columns = [own.name for own in opened.schema_arrow if not _is_image(pa, own.type)]
            return Table(path=path, rows=opened.read(columns=columns).to_pylist())
    except pa.ArrowException as error:
        raise DataError(str(path), f"broken Parquet: {error}", "download it again") from error


def _is_image(pa: Any, kind: Any) -> bool:
    """Return whether a column's type is bytes, a struct with bytes, or a list of either."""
    if pa.types.is_list(kind):
        return _is_image(pa, kind.value_type)
    if pa.types.is_struct(kind):
        return any(_is_image(pa, kind.field(i).type) for i in range(kind.num_fields))
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _make_encoding_error(path: Path, error: UnicodeDecodeError) -> DataError:
    return DataError(
        str(path),
        f"neither UTF-8 text, gzip, XLSX nor Parquet: {error}",
        "give JSON, JSON lines, CSV, TSV, XLSX or Parquet",
    )


def _load_json(text: str, where: str) -> Any:
    """Parse JSON; DataError for an object with two values of one key: json keeps the last."""

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) < len(pairs) and (lost := [key for key, one in pairs if row[key] != one]):
            problem = f"an object has the key {lost[0]!r} twice, with different values"
            raise DataError(where, problem, "keep one of them")
        return row

    return json.loads(text, object_pairs_hook=build)


def _parse_json(path: Path, text: str) -> Table:
    try:
        value = _load_json(text, str(path))
    except (json.JSONDecodeError, RecursionError) as error:
        if not text.strip():
            return Table(path=path, rows=[])
        # JSON lines: more data follows a complete object.
        if getattr(error, "msg", "") == "Extra data":
            remedy = "write one object per line, or download it again"
            rows = list(read_json_lines(path, remedy, text=text))
            return Table(path=path, rows=[row for _, row in rows], lines=[line for line, _ in rows])
        where = f"{path}:{getattr(error, 'lineno', 1)}"
        raise DataError(where, f"not JSON: {error}", "repair or download it again") from error
    if isinstance(value, list):
        return Table(path=path, rows=_check_objects(value, str(path)))
    if not isinstance(value, dict):
        raise DataError(str(path), f"holds a {type(value).__name__}", "give rows")
    if _ROW_FIELDS & set(value):
        return Table(path=path, rows=[value], lines=[1])
    for key in _LISTS:
        if isinstance(value.get(key), list):
            head = {name: part for name, part in value.items() if name != key}
            return Table(path=path, rows=_check_objects(value[key], str(path)), head=head)
    if isinstance(value.get("results"), dict):  # TabMWP
        value = value["results"]
    rows = [
        {"question_id": key, **row} if isinstance(row, dict) else {"question_id": key, "value": row}
        for key, row in value.items()
    ]
    return Table(path=path, rows=rows, form="mapping")


def _check_objects(values: list[Any], where: str) -> list[dict[str, Any]]:
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            problem = f"is a {type(value).__name__}"
            raise DataError(f"{where}, row {number}", problem, "every row is an object")
    return values


def read_json_lines(
    path: Path, remedy: str = "repair or download it again", *, text: str | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number (from 1) and object of each line that is not blank; DataError."""
    text = path.read_text(encoding="utf-8-sig") if text is None else text
    # Not splitlines(): JSON strings may contain U+2028 and other separators.
    for number, line in enumerate(_LINE_END.split(text), start=1):
        if not line.strip():
            continue
        try:
            row = _load_json(line, f"{path}:{number}")
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{path}:{number}", f"not JSON: {error}", remedy) from error
        if not isinstance(row, dict):
            what = f"holds {line[:40]!r}, a {type(row).__name__}, not an object"
            raise DataError(f"{path}:{number}", what, remedy)
        yield number, row


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a file of :func:`write_json`; empty if missing, DataError if it is not an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(str(path), f"not JSON: {error}", remedy) from error
    if not isinstance(value, dict):
        raise DataError(str(path), f"a {type(value).__name__}, not an object", remedy)
    return value


def format_json(value: Any, indent: int | None = None) -> str:
    """Format as JSON that can be written in UTF-8: only lone surrogates are escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _NOT_UTF8.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON; the file is complete or unchanged."""
    write_text(path, format_json(value, indent=2) + "\n")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines; the file is complete or unchanged."""
    write_text(path, "".join(format_json(row) + "\n" for row in rows))


def folder_sha256(folder: Path) -> str:
    """Return the SHA-256 over names and contents of a model folder's files, in hex."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()} {hash_file(path)}\n".encode())
    return digest.hexdigest()
