import hashlib
import json
from pathlib import Path

import pytest

from coat_data.sample import DataError
from coat_eval.scoring import score_set
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
    return score_set(get_task("yes_no"), folder, path, folder / "out" / "report.json", **options)


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
    with pytest.raises(DataError, match="there is no prediction for question 'b'") as error:
        score(folder, [("a", "Yes"), ("c", "No")])
    assert error.value.where == f"{folder / 'questions.jsonl'}:2"


def test_missing_predictions_may_be_counted_as_wrong(folder: Path):
    report = score(folder, [("a", "Yes"), ("c", "No")], allow_missing=True)
    assert report["n_missing"] == 1
    assert report["n_unparsed"] == 0
    assert report["metrics"]["accuracy"] == 66.67


def test_limit_scores_the_first_questions_only(folder: Path):
    report = score(folder, [("a", "Yes"), ("b", "No"), ("c", "Yes")], limit=2)
    assert (report["n"], report["limit"], report["metrics"]["accuracy"]) == (2, 2, 100.0)


def test_unknown_id_names_file_and_id(folder: Path):
    with pytest.raises(DataError, match="question id 'x' is not in the references"):
        score(folder, [("a", "Yes"), ("b", "No"), ("c", "No"), ("x", "No")])


def test_duplicate_id_names_file_line_and_id(folder: Path):
    with pytest.raises(DataError, match="a further prediction for question 'a'") as error:
        score(folder, [("a", "Yes"), ("b", "No"), ("a", "No")])
    assert error.value.where == f"{folder / 'predictions.jsonl'}:3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question_id"', "not JSON"),
        ("7", "a int, not an object"),
        ('{"question_id": "a"}', "has no prediction or text"),
        ('{"question_id": "a", "prediction": 1}', "is 1, not a text"),
    ],
)
def test_unreadable_lines_name_file_and_line(folder: Path, line: str, message: str):
    path = folder / "p.jsonl"
    path.write_text(f'{{"question_id": "b", "prediction": "x"}}\n{line}\n')
    with pytest.raises(DataError, match=message) as error:
        score_set(get_task("yes_no"), folder, path, folder / "report.json")
    assert error.value.where == f"{path}:2"


def test_llavas_answer_rows_are_read(folder: Path):
    path = folder / "answers.jsonl"
    row = {"question_id": "a", "prompt": "?", "text": "No", "metadata": {}, "category": "default"}
    path.write_text(json.dumps(row) + "\n")
    report = score_set(get_task("yes_no"), folder, path, folder / "report.json", limit=1)
    assert (report["n"], report["metrics"]["yes_ratio"]) == (1, 0.0)


def test_what_does_not_fit_may_be_counted(folder: Path):
    rows = [("c", "No"), ("a", "Yes"), ("x", "No"), ("a", "No")]
    report = score(folder, rows, allow_missing=True)
    assert [report[f"n_{kind}"] for kind in ("missing", "unknown", "duplicate")] == [1, 1, 1]
    assert report["metrics"]["accuracy"] == 33.33  # of repeated ones the last counts


def test_an_absent_file_is_named(folder: Path):
    with pytest.raises(FileNotFoundError, match=r"p\.jsonl does not exist"):
        score_set(get_task("yes_no"), folder, folder / "p.jsonl", folder / "report.json")
