import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coat_data.mixture.selection import (
    read_excluded_rows,
    select_rows,
)
from coat_data.sample import DataError


@pytest.mark.parametrize(
    ("select", "rows"),
    [
        ("first 3", range(3)),
        ("last 3", range(37, 40)),
        (" first 12.5% ", range(5)),
        ("last 5%", range(38, 40)),
    ],
)
def test_what_is_selected(select: str | None, rows: range) -> None:
    assert select_rows(40, select, 0, "a").tolist() == list(rows)


def test_random_rows_depend_on_seed_and_name_alone() -> None:
    chosen = select_rows(1000, "random 10%", 0, "a")
    assert len(set(chosen.tolist())) == 100
    assert (np.diff(chosen) > 0).all()
    assert abs(chosen.mean() - 500) < 100
    assert (select_rows(1000, "random 100", 0, "a") == chosen).all()
    assert set(select_rows(1000, "random 10%", 1, "a")) != set(chosen)
    assert set(select_rows(1000, "random 10%", 0, "b")) != set(chosen)


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("first 41", r"a: select='first 41' is 41 of its 40 rows"),
        ("random 1%", r"is 0 of its 40 rows; choose 1 to 40 rows"),
        ("some 3", "write first, last or random"),
        ("first 1.5", "a whole number of rows"),
    ],
)
def test_selections_that_make_no_sense(select: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_rows(40, select, 0, "a")


def listed(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "bad_samples.jsonl"
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def test_a_quarantine_file_excludes_the_rows_of_its_source(tmp_path: Path) -> None:
    path = listed(
        tmp_path,
        {"source": "a", "file": "elsewhere/a.json", "row": 3},
        {"source": "b", "file": "b.json", "row": 5},
        {"source": "a", "file": "a.json", "row": 3},
        {"source": "a", "file": "a.json", "row": 8},
    )
    assert read_excluded_rows(path, "a", "data/a.json", 9) == {2, 7}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"source": "b", "file": "b.json", "row": 5},
            r"lists no row of source 'a' \(a.json\), only of 'b'",
        ),
        ({"source": "a", "file": "x.json", "row": 6}, r"jsonl:1: row 6 of x.json is not of source"),
        ("{cut", r"jsonl:1: not a line of bad_samples.jsonl \(JSONDecodeError"),
    ],
)
def test_a_list_of_something_else_is_refused(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_excluded_rows(listed(tmp_path, row), "a", "a.json", 9)
