import hashlib
import json
from pathlib import Path

import pytest

from coat_data.sample import DataError
from coat_eval.score import read_predictions, score_file
from coat_eval.tasks import get_task

ANSWERS = {"a": "yes", "b": "no", "c": "no"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {"question_id": key, "image": "gone.png", "text": f"{key}?", "answer": answer}
        for key, answer in ANSWERS.items()
    ]
    rows[0]["category"] = "first"
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write_predictions(folder: Path, rows: list[tuple[str, str]]) -> Path:
    path = folder / "predictions.jsonl"
    lines = [json.dumps({"question_id": key, "prediction": text}) for key, text in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def score(folder: Path, rows: list[tuple[str, str]], **options) -> dict:
    path = write_predictions(folder, rows)
    return score_file(get_task("yes_no"), folder, path, folder / "out" / "report.json", **options)


def test_report_of_shuffled_predictions_without_images(folder: Path):
    report = score(folder, [("c", "Yes"), ("a", "Yes"), ("b", "No")])
    assert report["task"] == "yes_no"
    assert report["headline"] == "f1"
    assert report["n"] == 3
    assert report["n_unparsed"] == report["n_missing"] == 0
    assert report["categories"] == {"first": 1}
    assert report["metrics"]["accuracy"] == 66.67
    assert report["metrics"]["chance"] == 50.0
    assert report["metrics"]["majority"] == 66.67
    questions = (folder / "questions.jsonl").read_bytes()
    assert report["questions_sha256"] == hashlib.sha256(questions).hexdigest()
    assert json.loads((folder / "out" / "report.json").read_text()) == report


def test_items_file_has_text_extraction_and_score(folder: Path):
    score(folder, [("a", "Well, yes"), ("b", "No."), ("c", "Sure")])
    lines = (folder / "out" / "items.jsonl").read_text().splitlines()
    assert json.loads(lines[2]) == {
        "question_id": "c",
        "category": "",
        "question": "c?",
        "media": [{"kind": "image", "path": str(folder / "gone.png")}],
        "reference": "no",
        "prediction": "Sure",
        "extracted": "yes",
        "correct": False,
    }
    assert [json.loads(line)["correct"] for line in lines] == [True, True, False]


def test_missing_prediction_names_file_and_id(folder: Path):
    with pytest.raises(DataError, match="no prediction for 1 of 3 questions, first 'b'") as error:
        score(folder, [("a", "Yes"), ("c", "No")])
    assert error.value.where == str(folder / "predictions.jsonl")


def test_missing_predictions_may_be_counted_as_wrong(folder: Path):
    report = score(folder, [("a", "Yes"), ("c", "No")], allow_missing=True)
    assert report["n_missing"] == 1
    assert report["n_unparsed"] == 0
    assert report["metrics"]["accuracy"] == 66.67


def test_limit_scores_the_first_questions_only(folder: Path):
    report = score(folder, [("a", "Yes"), ("b", "No"), ("c", "Yes")], limit=2)
    assert (report["n"], report["limit"], report["metrics"]["accuracy"]) == (2, 2, 100.0)


def test_unknown_id_names_file_and_id(folder: Path):
    with pytest.raises(DataError, match=r"not in .*questions\.jsonl, first 'x'"):
        score(folder, [("a", "Yes"), ("b", "No"), ("c", "No"), ("x", "No")])


def test_duplicate_id_names_file_line_and_id(folder: Path):
    with pytest.raises(DataError, match="second prediction for question 'a'") as error:
        score(folder, [("a", "Yes"), ("b", "No"), ("a", "No")])
    assert error.value.where == f"{folder / 'predictions.jsonl'}:3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question_id"', "not JSON"),
        ("7", "a int, not an object"),
        ('{"question_id": "a"}', "needs question_id and a text"),
        ('{"question_id": "a", "prediction": 1}', "needs question_id and a text"),
    ],
)
def test_unreadable_lines_name_file_and_line(tmp_path: Path, line: str, message: str):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"question_id": 1, "prediction": "x"}}\n{line}\n')
    with pytest.raises(DataError, match=message) as error:
        read_predictions(path)
    assert error.value.where == f"{path}:2"


def test_llavas_answer_rows_are_read(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"question_id": 3, "prompt": "?", "text": "No", "metadata": {}}\n')
    assert read_predictions(path) == {"3": "No"}


def test_an_absent_file_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"p\.jsonl does not exist"):
        read_predictions(tmp_path / "p.jsonl")
