"""GQA on made-up files in the official formats; scores worked out by hand."""

import json
from pathlib import Path

import pytest

from coat_eval.benchmark import Settings
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark

GQA = get_benchmark("gqa")


def question(answer: str, kind: str, group: str | None, text: str, steps: list, **more) -> dict:
    return {
        "question": text,
        "answer": answer,
        "imageId": "n1",
        "isBalanced": True,
        "types": {"structural": kind, "semantic": "rel" if kind == "query" else "obj"},
        "groups": {"global": group, "local": "x"},
        "semantic": [{"operation": op, "argument": argument} for op, argument in steps],
        **more,
    }


QUESTIONS = {
    "01": question("red", "query", "color", "What color?", [("select", "cup"), ("query", "color")]),
    "02": question("red", "query", "color", "Which color?", [("select", "cup"), ("query", "name")]),
    "03": question("blue", "query", "color", "What is it like ?", [("select", "cup")]),
    "04": question("yes", "verify", None, "Is it?", [("select", "cup"), ("exist", "?")]),
    "05": question("left", "choose", "side", "Left or right?", [("relate", "a"), ("choose", "b")]),
    "06": question("no", "verify", None, "Unbalanced?", [], isBalanced=False),
}
TEXTS = {"01": "Red.", "02": "Blue", "03": "blue ", "04": "Yes", "05": "left"}


@pytest.fixture
def references(tmp_path: Path) -> list[Path]:
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(QUESTIONS))
    return [path]


def official(folder: Path, texts: dict[str, str]) -> list[Path]:
    path = folder / "predictions.json"
    path.write_text(json.dumps([{"questionId": i, "prediction": t} for i, t in texts.items()]))
    return [path]


def test_all_tables(tmp_path: Path, references: list[Path]):
    report = score_official(GQA, official(tmp_path, TEXTS), references)
    metrics = report["metrics"]
    # Right: 01 (period and case), 04, 05. Wrong: 02, and 03 for its trailing blank.
    assert metrics["accuracy"] == pytest.approx(60)
    assert metrics["binary"] == 100
    assert metrics["open"] == pytest.approx(100 / 3)
    # color: gold red 2, blue 1; said red 1, "blue" 1: (1-2)^2/2 + (1-1)^2/1 = 0.5, three questions.
    # side: gold left 1, said left 1: 0, one question. (0.5 * 3 + 0 * 1) / 4 / 100.
    assert metrics["distribution"] == pytest.approx(0.00375)
    assert metrics["structural.query"] == pytest.approx(100 / 3)
    assert metrics["structural.verify"] == metrics["structural.choose"] == 100
    assert metrics["semantic.rel"] == pytest.approx(100 / 3)
    # "query: name" and "exist" are no reasoning steps: 01 and 05 have two, the others one.
    assert metrics["steps.2"] == 100
    assert metrics["steps.1"] == pytest.approx(100 / 3)
    assert metrics["words.2"] == pytest.approx(200 / 3)
    assert metrics["words.5"] == 0
    assert metrics["words.3"] == 100
    assert report["counts"]["words.2"] == 3
    assert report["n"] == 5


def test_raw_text_is_compared_as_it_is(tmp_path: Path, references: list[Path]):
    predictions = official(tmp_path, TEXTS)
    raw = score_official(GQA, predictions, references, settings=Settings(raw=True))
    assert raw["metrics"]["accuracy"] == pytest.approx(20)
    lmms = score_official(
        GQA,
        official(tmp_path, TEXTS | {"01": "r.e-d!"}),
        references,
        settings=Settings(profile="lmms"),
    )
    assert lmms["metrics"]["accuracy"] == pytest.approx(60)
    vlmeval = Settings(profile="vlmeval")
    # Stripped, but "red." keeps its period.
    metrics = score_official(GQA, predictions, references, settings=vlmeval)["metrics"]
    assert metrics["accuracy"] == pytest.approx(60)


def test_llavas_answers_in_any_order_and_predictions_for_unbalanced_questions(
    tmp_path: Path, references: list[Path]
):
    rows = [{"question_id": i, "text": t} for i, t in reversed((TEXTS | {"06": "yes"}).items())]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    report = score_official(GQA, [path], references)
    assert (report["n"], report["metrics"]["accuracy"]) == (5, pytest.approx(60))
