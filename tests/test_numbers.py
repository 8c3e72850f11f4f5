"""docs/make_numbers.py finds figures that differ from their rows, weak baselines and old rows."""

import csv
import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("make_numbers", ROOT / "docs/make_numbers.py")
ADVICE = "run python docs/make_numbers.py"
STRONGEST = "liger_loss_torchao_tensorwise_compile_tower"
"""The strongest baseline of the 8B model."""

Rows = list[dict[str, str]]


@pytest.fixture
def numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, on copies of the result files."""
    assert SPEC is not None
    assert SPEC.loader is not None
    module = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(module)
    shutil.copytree(module.RESULTS, tmp_path / "results")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["make_numbers.py", "--check"])
    return module


def edit(numbers: ModuleType, file: str, change: Callable[[Rows], None]) -> None:
    """Changes the rows of a copied file."""
    path = numbers.RESULTS / file
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    change(rows)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def find(rows: Rows, commit: str, implementation: str) -> dict[str, str]:
    """A row of both passes of the 8B model."""
    return next(
        row
        for row in rows
        if (row["commit"], row["implementation"], row["optimizer"])
        == (commit, implementation, "none")
    )


def test_figures_of_all_pages(numbers: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers.main() == 0, f"{capsys.readouterr().out}; {ADVICE}"


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "docs/results.md", *sorted((ROOT / "docs/experiments").glob("*"))],
    ids=lambda page: page.stem,
)
def test_tables_of_results_are_small(page: Path) -> None:
    """At most five columns, and 25 words in a cell."""
    text = re.sub(r"<!--.*?-->|\]\(.*?\)", "", page.read_text(encoding="utf-8"))
    for line in text.splitlines():
        if line.startswith("| "):
            cells = line.strip("| ").replace("\\|", "").split(" | ")
            assert len(cells) <= 5, line
            assert max(len(cell.split()) for cell in cells) <= 25, line


def test_a_changed_row(numbers: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    edit(numbers, "step.csv", lambda rows: find(rows, "3ced46f6", "coat_paper").update(tok_s="2e4"))
    assert numbers.main() == 1
    assert "README.md: the row has other figures: " in (printed := capsys.readouterr().out)
    assert " 20,000<!--vlm_8b coat tok_s--> tokens/s, 58.5<!--peak_gb--> GB" in printed


def test_a_stronger_baseline(numbers: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def add(rows: Rows) -> None:
        baseline = find(rows, "3ced46f6", STRONGEST)
        rows.append({**baseline, "implementation": "new", "ms": "9e2"})

    edit(numbers, "step.csv", add)
    assert numbers.main() == 1
    assert "README.md: vlm_8b: the fastest baseline of these rows is new" in capsys.readouterr().out


def test_later_rows(numbers: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def add(rows: Rows) -> None:
        for name in ("coat_paper", STRONGEST):
            rows.append({**find(rows, "3ced46f6", name), "commit": "abcdef0"})

    edit(numbers, "step.csv", add)
    assert numbers.main() == 1
    printed = capsys.readouterr().out
    assert "README.md: vlm_8b: abcdef0 has later rows" in printed


def test_a_commit_that_the_page_does_not_name(
    numbers: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(rows: Rows) -> None:
        for row in rows:
            row["commit"] = row["commit"].replace("06f4ade", "abcdef0")

    edit(numbers, "adamw.csv", change)
    for group in ("adamw_fp32", "adamw_bf16"):
        monkeypatch.setitem(numbers.GROUPS[group], "commit", "abcdef0")
    assert numbers.main() == 1
    assert "docs/results.md: the page does not name commit abcdef0" in capsys.readouterr().out
