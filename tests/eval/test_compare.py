"""Comparing runs, against figures worked out by hand and scikit-like formulas written again."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from coat_cli.main import main
from coat_eval.compare_models import compare_runs, format_comparison

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "output_dir": "runs/tiny",
    "model": {"vision": {"name_or_path": "tower"}, "language": {"name_or_path": "llm"}},
    "stages": {
        "sft": {
            "data": [{"name": "a", "path": "a.json"}],
            "language": {"train": True, "lr": 1e-3},
            "batch_size": 1,
            "micro_batch_size": 1,
            "max_steps": 4,
        }
    },
    "eval_sets": {
        "naming": {"task": "short_answer", "path": "naming"},
        "presence": {"task": "yes_no", "path": "presence"},
    },
}


def write_report(folder: Path, task: str, items: list[dict[str, Any]]) -> None:
    """A report without metrics, which are then computed from the items."""
    rules = {"task": task, "profile": "official", "follows": "x"}
    report = {**rules, "metrics": {}, "standard_errors": {}, "items": items}
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report))


def make_run(
    folder: Path, naming: list[bool], presence: list[tuple[str, str]], loss: float
) -> Path:
    """A run folder with items (correct), (said, labeled), and four training steps."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    rows: list[dict[str, Any]] = [
        {"question_id": f"n{i}", "score": float(c), "extracted": "x", "reference": "x"}
        for i, c in enumerate(naming)
    ]
    write_report(folder / "eval" / "naming", "short_answer", rows)
    rows = [
        {"question_id": f"p{i}", "score": float(s == l), "extracted": s, "reference": l}
        for i, (s, l) in enumerate(presence)
    ]
    # Predictions come in the order of prompt length, so the files' orders differ.
    write_report(folder / "eval" / "presence", "yes_no", rows[::-1])
    metrics = [
        {"kind": "step", "stage": "sft", "step": step, "loss": loss + 4 - step}
        for step in range(1, 5)
    ]
    metrics.append({"kind": "val", "stage": "sft", "step": 4, "losses": {"a": loss + 0.5}})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    return folder


def f1(pairs: list[tuple[str, str]]) -> float:
    tp = sum(pair == ("yes", "yes") for pair in pairs)
    precision = tp / sum(said == "yes" for said, _ in pairs)
    recall = tp / sum(label == "yes" for _, label in pairs)
    return 100 * 2 * precision * recall / (precision + recall)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[list[Path], list[Path], dict[str, Any]]:
    rng = np.random.default_rng(0)
    labels = ["yes" if v else "no" for v in rng.random(200) < 0.5]
    naming, presence, folders = [], [], []
    for number in range(4):
        right = rng.random(200) < (0.7 if number < 2 else 0.8)
        swap = {"yes": "no", "no": "yes"}
        pairs = [(l if r else swap[l], l) for r, l in zip(right, labels, strict=True)]
        naming.append([bool(r) for r in right])
        presence.append(pairs)
        folders.append(make_run(tmp_path / str(number), naming[-1], pairs, 0.1 * (number + 1)))
    return folders[:2], folders[2:], {"naming": naming, "presence": presence}


def test_means_and_differences(runs: tuple[list[Path], list[Path], dict[str, Any]]) -> None:
    first, second, data = runs
    rows = {row.name: row for row in compare_runs(first, second)}
    expected = [100 * float(np.mean(flags)) for flags in data["naming"]]
    assert rows["naming"].first == pytest.approx(expected[:2])
    assert rows["naming"].second == pytest.approx(expected[2:])
    assert rows["naming"].difference == pytest.approx(
        float(np.mean(expected[2:]) - np.mean(expected[:2]))
    )
    expected = [f1(pairs) for pairs in data["presence"]]
    assert rows["presence"].first + rows["presence"].second == pytest.approx(expected)
    assert rows["sft training"].first == pytest.approx([0.1, 0.2])
    assert rows["sft validation a"].second == pytest.approx([0.8, 0.9])


def test_the_interval_is_that_of_paired_differences(
    runs: tuple[list[Path], list[Path], dict[str, Any]],
) -> None:
    first, second, data = runs
    rows = {row.name: row for row in compare_runs(first, second)}
    flags = np.array(data["naming"], float)
    gaps = 100 * (flags[2:].mean(0) - flags[:2].mean(0))
    half = 1.96 * gaps.std(ddof=1) / np.sqrt(gaps.size)
    low, high = rows["naming"].interval or (0.0, 0.0)
    assert low == pytest.approx(gaps.mean() - half, abs=0.6)
    assert high == pytest.approx(gaps.mean() + half, abs=0.6)


def test_other_items_do_not_compare(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", [True], [("yes", "yes")], 1.0)
    b = make_run(tmp_path / "b", [True, True], [("yes", "yes")], 1.0)
    with pytest.raises(ValueError, match="not comparable: naming: 1 items in one only, first 'n1'"):
        compare_runs([a], [b])
    rows = {row.name: row for row in compare_runs([a], [b], anyway=True)}
    assert rows["naming"].first == rows["naming"].second == [100]
    assert "1 items in one only" in format_comparison(list(rows.values())).splitlines()[1]
    c = make_run(tmp_path / "c", [True], [("no", "no")], 1.0)
    with pytest.raises(ValueError, match="presence: 1 references, first 'p0'"):
        compare_runs([a], [c])
    with pytest.raises(ValueError, match="1 references, first 'p0'"):  # none is in common
        compare_runs([a], [c], anyway=True)
    d = make_run(tmp_path / "d", [True], [("yes", "yes")], 1.0)
    metrics = (d / "metrics.jsonl").read_text()
    (d / "metrics.jsonl").write_text(metrics.replace('"a"', '"other"'))
    with pytest.raises(ValueError, match="validation other"):
        compare_runs([a], [d])
    (b / "eval/naming/report.json").unlink()
    with pytest.raises(FileNotFoundError, match="coat-vlm eval --model"):
        compare_runs([a], [b])


def test_what_is_no_group_of_runs(
    runs: tuple[list[Path], list[Path], dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, _ = runs
    with pytest.raises(ValueError, match="the same path is given twice"):
        compare_runs([first[0], tmp_path / "1" / ".." / "0"], second)
    more = {**RECIPE["eval_sets"], "more": {"task": "yes_no", "path": "p"}}
    (second[1] / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "eval_sets": more}))
    names = [row.name for row in compare_runs(first, second)]
    assert names == ["naming", "presence", "sft training", "sft validation a"]
    assert "not all runs have these eval_sets: more" in caplog.text
    for options, problem in (
        (["--json", "a.json"], "a single model cannot be compared"),
        (["--html", "a.html"], "a single model cannot be compared"),
    ):
        assert main(["compare", str(first[0]), *options]) == 2
        assert problem in capsys.readouterr().err


def test_the_command_prints_a_table(
    runs: tuple[list[Path], list[Path], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = runs
    assert main(["compare", *map(str, first), "--with", *map(str, second)]) == 0
    out = capsys.readouterr().out
    assert "| presence f1 |" in out
    head = out.splitlines()[:5]
    assert head[0] == "A = first group, B = second group"
    assert head[1] == "Comparable: same items, references and rules."
    gap = 100 * np.subtract(*(np.mean(runs[2]["naming"][i:][:2]) for i in (2, 0)))
    assert f"B is better, beyond chance (B - A): naming accuracy {gap:+.2f} (95% " in head[2]
    assert "95% interval" in out
    assert main(["compare", str(first[0])]) == 0
    assert "difference" not in capsys.readouterr().out
    assert main(["compare", str(first[0]), str(second[0])]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "A = 0, B = 2"
    flags = [np.array(runs[2]["naming"][index]) for index in (0, 2)]
    only = [int((flags[i] & ~flags[1 - i]).sum()) for i in (0, 1)]
    (row,) = [row for row in rows if "naming" in row and row.endswith("| 200 questions |")]
    assert [int(cell) for cell in row.split("|")[6:8]] == only


def test_losses_of_runs_that_are_not_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One was killed while it wrote a line, and has continued."""
    runs = [make_run(tmp_path / name, [], [], loss) for name, loss in (("a", 1.0), ("b", 2.0))]
    for run in runs:
        shutil.rmtree(run / "eval")
        (run / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "eval_sets": {}}))
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines()
    (runs[0] / "metrics.jsonl").write_text("\n".join([*lines[:2], lines[2][:20], *lines[2:]]))
    arguments = [*map(str, runs)]
    assert main(["compare", *arguments]) == 0
    assert "No run is evaluated" in capsys.readouterr().out
    assert main(["compare", *arguments, "--json", str(tmp_path / "a.json")]) == 2
    assert "has no scored set" in capsys.readouterr().err
    (runs[1] / "metrics.jsonl").write_text("")
    assert main(["compare", *arguments]) == 2
    assert "has no steps yet" in capsys.readouterr().err
