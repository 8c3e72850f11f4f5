"""Rows of measurements: their origin, their CSV files, and their Markdown tables."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch
import triton
from pydantic import TypeAdapter, ValidationError

from coat_vlm import commit

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(slots=True)
class Measurement:
    """One measurement; the fields are the columns of its CSV file, these three first."""

    date: str
    commit: str
    gpu: str


@dataclass(slots=True)
class Row(Measurement):
    """One measurement with the versions of torch and Triton."""

    torch: str
    triton: str


_Kind = TypeVar("_Kind", bound="DataclassInstance")


def get_origin() -> tuple[str, str, str, str, str]:
    """Return the fields of :class:`Row` for a measurement on this machine, on its GPU if any."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    date = datetime.now(UTC).date().isoformat()
    return date, commit() or "unknown", device, torch.__version__, triton.__version__


def require_gpu(what: str) -> None:
    """Raise an error if there is no GPU.

    Args:
        what: subject and verb of the message, such as "the speed of a step is".

    Raises:
        ValueError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"there is no GPU; {what} measured on a GPU")


def format_error(error: Exception) -> str:
    """Format an error for a row: ``OOM``, or the error's class and first line."""
    if is_out_of_memory(error):
        return "OOM"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch, Triton, cuBLAS or NCCL ran out of memory; only torch has a class for it."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


_RENAMED = {"trained_tokens": "supervised_tokens"}  # deprecated column name -> name


def append_rows(path: Path | None, rows: Sequence[Measurement]) -> None:
    """Append rows of one class to a CSV file, with a header if the file is new.

    Args:
        path: the file; nothing is written if it is None.
        rows: the rows.

    Raises:
        ValueError: the file has other columns.
    """
    if path is None or not rows:
        return
    columns = [field.name for field in fields(rows[0])]
    new = not path.exists()
    if not new:
        with path.open(newline="") as file:
            there = [_RENAMED.get(name, name) for name in next(csv.reader(file), [])]
        if there != columns:
            raise ValueError(
                f"{path}: has the columns {there}, these rows have {columns}; write to another file"
            )
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(columns)
        writer.writerows([_format_cell(value) for value in asdict(row).values()] for row in rows)


def read_rows(path: Path, kind: type[_Kind], command: str) -> list[_Kind]:
    """Read the rows of a CSV file whose columns are the fields of ``kind``.

    An empty cell is None if the field may be None.

    Args:
        path: the file.
        kind: the class of the rows; its field types decide how cells are read.
        command: the command that writes such a file, for the message if it does not exist.

    Raises:
        ValueError: there is no such file, it has other columns, or a cell has a wrong type.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {command} {path} writes it")
    columns = [field.name for field in fields(kind)]
    # An empty cell of a text field is an empty text.
    optional = {field.name for field in fields(kind) if NoneType in get_args(field.type)}
    adapter = TypeAdapter(kind)
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        lines.fieldnames = [_RENAMED.get(name, name) for name in lines.fieldnames or []]
        if lines.fieldnames != columns:
            raise ValueError(f"{path}: has the columns {lines.fieldnames}, expected {columns}")
        found = []
        for line in lines:
            empty = {name: None for name in optional if not line[name]}
            try:
                found.append(adapter.validate_python(line | empty))
            except ValidationError as error:
                raise ValueError(
                    f"{path}:{lines.line_num}: {error}; write the row again"
                ) from error
    return found


def _format_cell(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.1 else f"{value:.4g}"


def format_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def format_rows_as_table(rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """Format a Markdown table with one line per row.

    Args:
        rows: any objects.
        columns: title of a column -> function from a row to its cell.
    """
    return format_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def format_number(value: float | None, digits: int, unit: str = "") -> str:
    """Format a cell of a table; ``-`` if there is no value."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"
