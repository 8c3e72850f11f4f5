"""Scores of multiple-choice benchmarks against what the official scorers printed for them.

COAT_EVAL_DATA is the folder of ``test_official_files.py``. A benchmark whose folder is missing is
skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from coat_eval.benchmark import Settings
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark

DATA = os.environ.get("COAT_EVAL_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="COAT_EVAL_DATA names no official files")
# The files carry six decimals.
ROUNDING = 1e-6
VILA = "pred_vila1.5-8b.jsonl"


def find(name: str) -> Path:
    folder = Path(DATA or ".") / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing")
    return folder


def score(name: str, predictions: str, references: str | Path, **settings: Any) -> dict[str, Any]:
    folder = find(name)
    return score_official(
        get_benchmark(name),
        [folder / predictions],
        [folder / references],
        settings=Settings(**settings),
        with_items=True,
    )


def expected(name: str, predictions: str) -> dict[str, Any]:
    return json.loads((find(name) / "expected.dev.json").read_text())[predictions]


def agree(metrics: dict[str, float], wanted: dict[str, float]) -> None:
    found = {name: metrics[name] for name in wanted}
    assert found == pytest.approx(wanted, abs=ROUNDING, rel=0)


def check_categories(report: dict[str, Any], wanted: dict[str, dict[str, float]]) -> None:
    agree(report["metrics"], {f"category.{name}": row["accuracy"] for name, row in wanted.items()})
    counts = {name: report["counts"][f"category.{name}"] for name in wanted}
    assert counts == {name: row["n"] for name, row in wanted.items()}


@pytest.mark.parametrize(
    ("name", "predictions", "references"),
    [
        ("mmstar", VILA, "gold.jsonl"),
        ("realworldqa", VILA, "gold.jsonl"),
        ("scienceqa", "pred_vila1.5-8b.val.jsonl", "gold.vlmevalkit_val.jsonl"),
    ],
)
def test_one_choice_per_row(name: str, predictions: str, references: str):
    wanted = expected(name, predictions)
    report = score(name, predictions, references, profile="vlmeval@c03bc048")
    official = wanted["official"]
    agree(report["metrics"], {"overall": official["accuracy"]})
    agree(report["metrics"], {"overall": wanted["published"]["accuracy"]})
    assert (report["n"], report["n_official"]) == (official["n"], official["n"])
    assert report["n_unparsed"] == official["unmatched_counted_wrong"]
    assert sum(item["score"] for item in report["items"]) == official["correct"]
    categories = official.get("per_category", {})
    check_categories(report, categories)
    first = score(name, predictions, references, profile="first_letter")
    agree(first["metrics"], {"overall": wanted["exact_first_letter"]})
    if name == "mmstar":
        means = [report["metrics"][f"category.{one}"] for one in categories]
        average = wanted["lmms_eval_style_average_of_categories"]
        assert sum(means) / len(means) == pytest.approx(average, abs=ROUNDING)
    if name != "scienceqa":  # whose official rule is LLaVA's
        assert score(name, predictions, references)["metrics"] == report["metrics"]


def test_scienceqa_by_llava(tmp_path: Path):
    predictions = "pred_llava-v1.5-13b.image300.jsonl"
    lines = (find("scienceqa") / predictions).read_text().splitlines()
    problems = {
        row["question_id"]: {
            "question": "?",
            "choices": ["x"] * row["n_choices"],
            "answer": "ABCDE".index(row["answer"]),
            "hint": "",
            "image": "image.png",
            "split": "test",
        }
        for row in map(json.loads, lines)
    }
    references = tmp_path / "problems.json"
    references.write_text(json.dumps(problems))
    wanted = expected("scienceqa", predictions)["official"]
    report = score("scienceqa", predictions, references)
    agree(report["metrics"], {"image": wanted["accuracy"], "overall": wanted["accuracy"]})
    assert report["n"] == wanted["n"]
    assert sum(item["score"] for item in report["items"]) == wanted["correct"]


@pytest.mark.parametrize(
    ("name", "predictions", "references"),
    [
        (
            "mmbench",
            "pred_llava-v1.5-13b.300groups.jsonl",
            "mmbench_dev_20230712.300groups.tsv",
        ),
        ("ccbench", VILA, "CCBench.min.tsv"),
    ],
)
def test_circular(name: str, predictions: str, references: str):
    wanted = expected(name, predictions)
    report = score(name, predictions, references)
    official = wanted["official"]
    agree(
        report["metrics"],
        {
            "overall": official["circular_accuracy"],
            "first_rotation": official["first_rotation_accuracy"],
            "rows": official["row_accuracy"],
        },
    )
    assert report["n"] == official["groups"]
    assert sum(len(item["reference"]) for item in report["items"]) == official["rows"]
    assert sum(item["score"] for item in report["items"]) == official["correct_groups"]
    check_categories(report, official.get("per_category", {}))
    if "published" in wanted:
        agree(report["metrics"], {"overall": wanted["published"]["circular_accuracy"]})
