"""Reads files of rows in their published formats, and writes JSON files atomically.

Rows come from JSON (a list of rows, rows by id, or rows beside a header), JSON lines, CSV, TSV,
XLSX and Parquet, each with or without gzip. The content decides the format, not the name: POPE's
``.json`` files are JSON lines. Only MME's results, tab-separated without a header, are recognized
by their name (``.txt``). A written file is complete or unchanged, also if the process is killed.
"""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coat_data.sample import DataError
from coat_data.saved_files import hash_file, write_text
from coat_eval.spreadsheet import (
    ZIP,
    has_header,
    read_columns,
    read_delimited,
    read_without_images,
    read_workbook,
)

ITEMS_FILE = "items.jsonl"
REPORT_FILE = "report.json"
_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"
_LISTS = ("annotations", "questions", "data", "logs")
"""Keys of the rows in files of VQA v2 (the first two), SEED-Bench (the second), TextVQA, and of the
sample logs of lmms-eval 0.1."""
_ROW_FIELDS = frozenset({"question_id", "questionId", "id", "image", "video_id", "prediction"})
"""A JSON object with one of these keys is itself a row: JSON lines with a single line."""
_MAPPINGS = ("results",)
"""Keys of the rows by id in files of TabMWP."""
_COLUMNS = _ROW_FIELDS | {"index", "qid"}
"""One of these is in the header line of a CSV or TSV file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of one file."""

    path: Path
    rows: list[dict[str, Any]]
    form: Literal["rows", "mapping"] = "rows"
    """``mapping``: the file was one object by id. Rows that were not objects became
    ``{"question_id": id, "value": row}``; the others got their id as ``question_id``."""
    head: Mapping[str, Any] = field(default_factory=dict)
    """Entries beside the rows, e.g. SEED-Bench's names of question types."""
    lines: Sequence[int] | None = None
    """Line of each row, from 1; None if rows are not lines."""

    def where(self, index: int) -> str:
        """Return file and line, or file and row, counted from 1."""
        if self.lines is not None:
            return f"{self.path}:{self.lines[index]}"
        return f"{self.path}, row {index + 1}"

    def has(self, *fields: str) -> bool:
        """Return whether the first row has all of these fields."""
        return bool(self.rows) and all(name in self.rows[0] for name in fields)


def read_table(path: Path) -> Table:
    """Read the rows of a file; an empty file or list has none.

    Image columns of Parquet files are skipped.

    Raises:
        FileNotFoundError: the file does not exist.
        DataError: the file cannot be read; names the file and, if known, the line.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():
        raise DataError(str(path), "is a folder, not a file", "name the files in it")
    with path.open("rb") as file:
        if file.read(len(_PARQUET)) == _PARQUET:
            return _read_parquet(path, path)  # may contain gigabytes of images
        file.seek(0)
        data = read_without_images(file)
    if data.startswith(_GZIP):
        try:
            data = read_without_images(io.BytesIO(gzip.decompress(data)))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(str(path), f"broken gzip: {error}", "download it again") from error
    if data.startswith(_PARQUET):
        return _read_parquet(path, io.BytesIO(data))
    if data.startswith(ZIP):
        rows, lines = read_workbook(path, data)
        return Table(path=path, rows=rows, lines=lines)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            str(path),
            f"neither UTF-8 text, gzip, XLSX nor Parquet: {error}",
            "give JSON, JSON lines, CSV, TSV, XLSX or Parquet",
        ) from error
    del data
    return _parse_text(path, text)


def read_json_lines(
    path: Path, remedy: str = "repair or download it again", *, text: str | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number (from 1) and object of each line that is not blank.

    Args:
        path: the file, in UTF-8.
        remedy: advice in the error about a line that cannot be read.
        text: content of the file, if it has already been read.

    Raises:
        FileNotFoundError: the file does not exist.
        DataError: a line is not a JSON object; names file and line.
    """
    text = path.read_text(encoding="utf-8-sig") if text is None else text
    # Not splitlines(): JSON strings may contain U+2028 and other separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}", f"not JSON: {error}", remedy) from error
        if not isinstance(row, dict):
            what = f"holds {line[:40]!r}, a {type(row).__name__}, not an object"
            raise DataError(f"{path}:{number}", what, remedy)
        yield number, row


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a file of :func:`write_json`; empty if it does not exist.

    Raises:
        DataError: the file is not a JSON object; the error contains ``remedy``.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(str(path), f"not JSON: {error}", remedy) from error
    if not isinstance(value, dict):
        raise DataError(str(path), f"a {type(value).__name__}, not an object", remedy)
    return value


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON; the file is complete or unchanged."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines; the file is complete or unchanged."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def folder_sha256(folder: Path) -> str:
    """Return the SHA-256 over the names and contents of a model folder's files in hex.

    All weights are read, so a model that was trained again in the same folder differs.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()} {hash_file(path)}\n".encode())
    return digest.hexdigest()


def _read_parquet(path: Path, source: Path | io.BytesIO) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source) as file:
            columns = [field.name for field in file.schema_arrow if not _is_image(pa, field.type)]
            return Table(path=path, rows=file.read(columns=columns).to_pylist())
    except pa.ArrowException as error:
        raise DataError(str(path), f"broken Parquet: {error}", "download it again") from error


def _is_image(pa: Any, kind: Any) -> bool:
    """Return whether a column's type is bytes, a struct with bytes, or a list of either."""
    if pa.types.is_list(kind):
        return _is_image(pa, kind.value_type)
    if pa.types.is_struct(kind):
        return any(_is_image(pa, kind.field(i).type) for i in range(kind.num_fields))
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _parse_text(path: Path, text: str) -> Table:
    """Parse CSV, TSV, MME's results, JSON or JSON lines."""
    if text.lstrip()[:1] not in ("{", "[") and has_header(text, _COLUMNS):
        rows, lines = read_delimited(path, text)
        return Table(path=path, rows=rows, lines=lines)
    if path.suffix == ".txt" and "\t" in text.lstrip().split("\n", 1)[0]:
        rows, lines = read_columns(path, text)
        return Table(path=path, rows=rows, lines=lines)
    return _parse_json(path, text)


def _load_json(text: str) -> Any:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def share(value: dict[str, Any]) -> dict[str, Any]:
        """Return one object for equal answers of annotators: VQA v2 has millions of them."""
        if "answer_id" not in value:
            return value
        try:
            return known.setdefault((*value, *value.values()), value)
        except TypeError:  # an answer that is no text
            return value

    return json.loads(text, object_hook=share)


def _parse_json(path: Path, text: str) -> Table:
    try:
        value = _load_json(text)
    except json.JSONDecodeError as error:
        if not text.strip():
            return Table(path=path, rows=[])
        # JSON lines: more data follows a complete object.
        if error.msg == "Extra data":
            remedy = "write one object per line, or download it again"
            rows = list(read_json_lines(path, remedy, text=text))
            return Table(path=path, rows=[row for _, row in rows], lines=[line for line, _ in rows])
        raise DataError(
            f"{path}:{error.lineno}", f"not JSON: {error}", "repair or download it again"
        ) from error
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
    value = next((value[key] for key in _MAPPINGS if isinstance(value.get(key), dict)), value)
    rows = [
        {"question_id": key, **row} if isinstance(row, dict) else {"question_id": key, "value": row}
        for key, row in value.items()
    ]
    return Table(path=path, rows=rows, form="mapping")


def _check_objects(values: list[Any], where: str) -> list[dict[str, Any]]:
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise DataError(
                f"{where}, row {number}", f"is a {type(value).__name__}", "every row is an object"
            )
    return values
