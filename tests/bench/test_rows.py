"""What all benchmarks share: CSV files and tables."""

import csv
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from coat_bench.adamw import AdamwRow
from coat_bench.gemm import GemmRow
from coat_bench.kernels import KernelRow
from coat_bench.layer import LayerRow
from coat_bench.long import LongRow
from coat_bench.recipe import RecipeRow
from coat_bench.rows import (
    Measurement,
    Row,
    append_rows,
    format_number,
    format_table,
    read_rows,
)
from coat_bench.step import StepRow
from coat_lab import curves, single_pass
from coat_lab.fork import ForkRow
from coat_lab.moments import MomentRow

RESULTS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "results"
WHERE = ("2026-01-31", "abc", "NVIDIA H200", "2.11.0", "3.6.0")


@dataclass(slots=True)
class Measured(Row):
    name: str
    ms: float | None = None
    problem: str = ""


def test_rows_are_added_to_a_file_of_the_same_columns(tmp_path: Path):
    path = tmp_path / "rows.csv"
    append_rows(path, [])
    assert not path.exists()
    append_rows(path, [Measured(*WHERE, "first", 1.25)])
    append_rows(path, [Measured(*WHERE, "second", problem="a, b"), Measured(*WHERE, "third")])
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["name"] for row in read] == ["first", "second", "third"]
    assert [row["ms"] for row in read] == ["1.2500", "", ""]
    assert read[1]["problem"] == "a, b"
    assert tuple(read[0].values())[:5] == WHERE
    path.write_text("other,columns\n")
    with pytest.raises(ValueError, match=r"has the columns \['other', 'columns'\]"):
        append_rows(path, [Measured(*WHERE, "fourth")])
    assert path.read_text() == "other,columns\n"


def test_a_deprecated_column_name_is_read_and_appended_to(tmp_path: Path):
    path = tmp_path / "recipe.csv"
    row = RecipeRow(*WHERE, "r", "sft", 1, 0, "coat", "coat", False, 1, 1, 64, 1)
    append_rows(path, [row])
    path.write_text(path.read_text().replace("supervised_tokens", "trained_tokens"))
    append_rows(path, [row])
    assert len(read_rows(path, RecipeRow, "bench recipe")) == 2


def test_files_in_the_repository_have_the_columns_of_their_rows():
    kinds: dict[str, type[Measurement]] = {
        "layer": LayerRow,
        "kernels": KernelRow,
        "gemm": GemmRow,
        "adamw": AdamwRow,
        "recipe": RecipeRow,
        "long": LongRow,
        "step": StepRow,
    }
    columns = {name: tuple(field.name for field in fields(row)) for name, row in kinds.items()}
    columns["decoder"] = columns["single_pass"] = curves.COLUMNS
    for size in ("100m", "350m"):
        columns[f"single_pass_{size}_results"] = single_pass.COLUMNS
    # Of an option of bench decoder that is gone (--across).
    across = ("precision", "seed", "arithmetic", "training_text", "held_out")
    columns["decoder_100m_across"] = across
    columns["fork"] = tuple(field.name for field in fields(ForkRow))
    committed = sorted(RESULTS.glob("*.csv"))
    assert committed
    columns["adamw_error"] = tuple(field.name for field in fields(MomentRow))
    for path in committed:
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        kind = max((name for name in columns if path.stem.startswith(name)), key=len)
        assert tuple(header) == columns[kind], path
        assert rows, path


def test_a_table_is_markdown():
    lines = [
        ["x", format_number(1.25, 1)],
        ["y", format_number(None, 1, "%")],
        ["z", format_number(3.0, 0, "%")],
    ]
    assert format_table(["name", "ms"], lines).splitlines() == [
        "| name | ms |",
        "| --- | --- |",
        "| x | 1.2 |",
        "| y | - |",
        "| z | 3% |",
    ]
