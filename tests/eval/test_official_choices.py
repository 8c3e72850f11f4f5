"""Scores of multiple-choice benchmarks against what the official scorers printed for them.

COAT_EVAL_DATA is the folder of ``test_official_files.py``. A benchmark whose folder is missing is
skipped.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from scoring_helpers import ROUNDING, agree, expected, find, needs_official_files, score_files

pytestmark = needs_official_files
VILA = "pred_vila1.5-8b.jsonl"


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
    report = score_files(name, predictions, references, profile="vlmeval@c03bc048")
    official = wanted["official"]
    agree(report["metrics"], {"overall": official["accuracy"]})
    agree(report["metrics"], {"overall": wanted["published"]["accuracy"]})
    assert (report["n"], report["n_official"]) == (official["n"], official["n"])
    assert report["n_unparsed"] == official["unmatched_counted_wrong"]
    assert sum(item["score"] for item in report["items"]) == official["correct"]
    categories = official.get("per_category", {})
    check_categories(report, categories)
    first = score_files(name, predictions, references, profile="first_letter")
    agree(first["metrics"], {"overall": wanted["exact_first_letter"]})
    if name == "mmstar":
        means = [report["metrics"][f"category.{one}"] for one in categories]
        average = wanted["lmms_eval_style_average_of_categories"]
        assert sum(means) / len(means) == pytest.approx(average, abs=ROUNDING)
    if name != "scienceqa":  # whose official rule is LLaVA's
        assert score_files(name, predictions, references)["metrics"] == report["metrics"]


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
    report = score_files("scienceqa", predictions, references)
    agree(report["metrics"], {"image": wanted["accuracy"], "overall": wanted["accuracy"]})
    assert report["n"] == wanted["n"]
    assert sum(item["score"] for item in report["items"]) == wanted["correct"]


@pytest.mark.parametrize(
    ("name", "predictions", "references"),
    [
        ("mmbench", "pred_llava-v1.5-13b.300groups.jsonl", "mmbench_dev_20230712.300groups.tsv"),
        ("ccbench", VILA, "CCBench.min.tsv"),
    ],
)
def test_circular(name: str, predictions: str, references: str):
    wanted = expected(name, predictions)
    report = score_files(name, predictions, references)
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
