"""Rows of measurements: where they were made, the CSV files they go to, the tables a user sees."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """One measurement; the fields are the columns of its CSV file, these come first."""

    date: str
    commit: str
    gpu: str


@dataclass(slots=True)
class Row(Measurement):
    """One measurement of code that depends on the versions of torch and Triton above all."""

    torch: str
    triton: str


_Kind = TypeVar("_Kind", bound="DataclassInstance")


def origin(*, on_gpu: bool | None = None) -> tuple[str, str, str, str, str]:
    """The fields of :class:`Row` for a measurement that is made here and now.

    Args:
        on_gpu: whether the first GPU is measured, or the CPU; by default the GPU if there is one.
    """
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    date = datetime.now(UTC).date().isoformat()
    return date, commit() or "unknown", device, torch.__version__, triton.__version__


def require_gpu(what: str) -> None:
    """Refuse to measure without a GPU.

    Args:
        what: what is measured on one.

    Raises:
        ValueError: there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"there is no GPU; {what} measured on one")


def failure(error: Exception) -> str:
    """What a row says of what failed: ``OOM``, or the error and its first line."""
    if is_out_of_memory(error):
        return "OOM"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch, Triton, cuBLAS or NCCL got no memory; all but torch tell it by words alone."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def append_rows(path: Path | None, rows: Sequence[Measurement]) -> None:
    """Add rows of one kind to a CSV file, with a header if it is new.

    Args:
        path: the file; nothing is written without one.
        rows: what to add.

    Raises:
        ValueError: the file has other columns.
    """
    if path is None or not rows:
        return
    columns = [field.name for field in fields(rows[0])]
    new = not path.exists()
    if not new:
        with path.open(newline="") as file:
            there = next(csv.reader(file), [])
        if there != columns:
            raise ValueError(
                f"{path}: has the columns {there}, these rows have {columns}; write to another file"
            )
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(columns)
        writer.writerows([_cell(value) for value in asdict(row).values()] for row in rows)


def read_rows(path: Path, kind: type[_Kind], command: str) -> list[_Kind]:
    """The rows of a file that has their fields as columns, in its order.

    An empty cell is None where the field may be None.

    Args:
        path: the file.
        kind: what its rows are; the fields' types say how cells are read.
        command: writes such a file, for the message if there is none.

    Raises:
        ValueError: there is no such file, it is another one, or a cell is not of its field's type.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {command} {path} writes it")
    columns = [field.name for field in fields(kind)]
    # An empty text is a text: only what may be None is None where nothing was written.
    optional = {field.name for field in fields(kind) if NoneType in get_args(field.type)}
    adapter = TypeAdapter(kind)
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
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


def replace_csv(path: Path, columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file with a header; one that is there is replaced at once or not at all."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
    temporary.replace(path)


def _cell(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.1 else f"{value:.4g}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def table_of(rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """Markdown, one line per row.

    Args:
        rows: any objects.
        columns: head of a column -> a row's cell.
    """
    return table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A cell of a table; ``-`` for what was not measured."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"
