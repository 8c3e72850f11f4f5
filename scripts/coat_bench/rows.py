"""Rows of measurements: where they were made, the CSV files they go to, the tables a user sees."""

import csv
from collections.abc import Iterable, Sequence
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


def origin() -> tuple[str, str, str, str, str]:
    """The fields of :class:`Row` for a measurement that is made here and now, on the first GPU."""
    return (*_when(), torch.cuda.get_device_name(), torch.__version__, triton.__version__)


def whereabouts() -> tuple[str, str, str]:
    """The fields of :class:`Measurement`: of the first GPU, or of the CPU where there is none."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return (*_when(), gpu)


def local_origin() -> tuple[str, str, str, str, str]:
    """The same for a measurement on the CPU, of errors: speeds are measured on a GPU."""
    return (*_when(), "cpu", torch.__version__, triton.__version__)


def _when() -> tuple[str, str]:
    return datetime.now(UTC).date().isoformat(), commit() or "unknown"


def require_gpu(what: str) -> None:
    """Refuse to measure without a GPU.

    Args:
        what: what is measured on one.

    Raises:
        ValueError: there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"there is no GPU; {what} measured on one")


def append_rows(path: Path, rows: Sequence[Measurement]) -> None:
    """Add rows of one kind to a CSV file, with a header if it is new.

    Raises:
        ValueError: the file has other columns.
    """
    if not rows:
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


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A cell of a table; ``-`` for what was not measured."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"
