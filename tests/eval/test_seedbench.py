"""SEED-Bench on made-up files in the official formats; scores worked out by hand."""

import json
from pathlib import Path

import pytest

from coat_data.sample import DataError
from coat_eval.benchmark import Settings
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark

SEED = get_benchmark("seedbench")
CHOICES = {"choice_a": "One", "choice_b": "Two", "choice_c": "Three", "choice_d": "Four"}


def row(question_id: str, answer: str, kind: int) -> dict:
    data = "image" if kind <= 9 else "video"
    return {
        "question_id": question_id,
        "answer": answer,
        "question_type_id": kind,
        "data_type": data,
        "question": "?",
        **CHOICES,
    }


ROWS = [row("7", "A", 1), row("8", "B", 1), row("49914", "A", 5), row("49914", "B", 5)]
ROWS += [row("v1", "D", 10)]


def run(folder: Path, predictions: list[dict], **settings) -> dict:
    names = {"Scene Understanding": 1, "Instances Counting": 5}
    content = {"questions": ROWS, "question_type": names}
    (folder / "SEED-Bench.json").write_text(json.dumps(content))
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in predictions))
    options = {key: settings.pop(key) for key in ("allow_missing",) if key in settings}
    return score_official(
        SEED, [path], [folder / "SEED-Bench.json"], settings=Settings(**settings), **options
    )


def rows(*texts: str) -> list[dict]:
    ids = [7, "8", 49914, 49914, "v1"]
    return [{"question_id": i, "text": text} for i, text in zip(ids, texts, strict=True)]


def test_micro_macro_and_types_with_the_repeated_id_paired_in_order(tmp_path: Path):
    report = run(tmp_path, rows("A", "C", "A", "B", "A"))
    # Type 1: 1 of 2. Type 5: 2 of 2. Type 10: 0 of 1.
    assert report["metrics"] == pytest.approx(
        {
            "all": 60,
            "image": 75,
            "video": 0,
            "macro": 50,
            "macro_image": 75,
            "macro_video": 0,
            "type.Scene Understanding": 50,
            "type.Instances Counting": 100,
            "type.Action Recognition": 0,
        }
    )
    assert run(tmp_path, rows("A", "C", "B", "A", "A"))["metrics"]["image"] == 25


def test_one_prediction_serves_every_question_of_the_repeated_id(tmp_path: Path):
    unique = rows("A", "C", "A", "A", "D")
    del unique[3]
    report = run(tmp_path, unique)
    # "A" is right for the first question of 49914 and wrong for the second.
    assert report["metrics"]["type.Instances Counting"] == 50
    assert (report["n"], report["n_missing"]) == (5, 0)
    with pytest.raises(DataError, match="there is no prediction for question '49914'"):
        run(tmp_path, [one for one in unique if one["question_id"] != 49914])


def test_extraction_by_profile(tmp_path: Path):
    said = rows("A\n", "B. Two", "(A)", "two", "d")
    # official: the stripped text is the letter or nothing.
    assert run(tmp_path, said)["metrics"]["all"] == 20
    assert run(tmp_path, said)["n_unparsed"] == 4
    assert run(tmp_path, said, raw=True)["metrics"]["all"] == 0
    # lmms: the first character in any case.
    assert run(tmp_path, said, profile="lmms")["metrics"]["all"] == 60
    # vlmeval: a letter among the words, or a choice's text; "d" is neither.
    assert run(tmp_path, said, profile="vlmeval")["metrics"]["all"] == 80


def test_likelihood_ranking_takes_the_lowest_loss(tmp_path: Path):
    losses = [[0.5, 1, 2, 3], [9, 8, 9, 9], [-3, -2, -1, 0], [4, 3, 5, 6], [2, 2, 2, 1]]
    predictions = [
        {"question_id": one["question_id"], "losses": values}
        for one, values in zip(ROWS, losses, strict=True)
    ]
    assert run(tmp_path, predictions)["metrics"]["all"] == 100
    predictions[1]["losses"] = [1, 2]
    with pytest.raises(DataError, match=r"losses are \[1, 2\]"):
        run(tmp_path, predictions)
