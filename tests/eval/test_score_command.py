"""coat-vlm score TASK: the report, bad input of every kind, speed, and what it does not import."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coat_cli.main import main
from coat_eval.benchmark import PromptOptions
from coat_eval.data_folder import DataFolder
from coat_eval.scoring import SCORER_VERSION, score_official

QUESTIONS = {
    str(i): {
        "question": "Is it?",
        "answer": "yes",
        "imageId": "n1",
        "isBalanced": True,
        "types": {"structural": "verify", "semantic": "obj"},
        "groups": {"global": "g"},
        "semantic": [{"operation": "select", "argument": "x"}],
    }
    for i in range(3)
}
GOOD = [{"question_id": str(i), "prediction": "Yes."} for i in range(3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS))
    return tmp_path


def score(folder: Path, rows: object, *more: str, task: str = "gqa") -> int:
    (folder / "p.json").write_text(json.dumps(rows))
    files = [
        "--predictions",
        str(folder / "p.json"),
        "--references",
        str(folder / "questions.json"),
    ]
    return main(["score", task, *files, "--out", str(folder / "report.json"), *more])


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_the_report(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert score(folder, GOOD) == 0
    found = report(folder)
    assert found["task"] == "gqa"
    assert found["profile"] == "official"
    assert found["scorer_version"] == SCORER_VERSION
    assert found["metrics"]["accuracy"] == found["metrics"]["binary"] == 100
    assert (found["n"], found["n_unparsed"], found["n_random_fallback"]) == (3, 0, 0)
    files = [folder / "p.json", folder / "questions.json"]
    assert found["inputs"] == {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    assert found["items"][0] == {
        "question_id": "0",
        "prediction": "Yes.",
        "extracted": "yes",
        "reference": "yes",
        "score": 1.0,
        "tables": {"structural": "verify", "semantic": "obj", "steps": "1", "words": "2"},
        "unit": "n1",
    }
    printed = capsys.readouterr().out
    # Wilson's interval of 1 of 1 images: its lower end is n / (n + 1.96^2).
    assert (
        "accuracy             100.0000  +- 0.0000, 95% 20.65 to 100.00 (3 in 1 images)" in printed
    )
    assert "structural.verify" not in printed
    assert score(folder, GOOD, "--raw") == 0
    assert report(folder)["metrics"]["accuracy"] == 0


BAD = {
    "missing": (GOOD[:2], "no prediction for question '2'", "n_missing"),
    "duplicate": ([*GOOD, GOOD[1]], "a further prediction for question '1'", "n_duplicate"),
    "unknown": (
        [*GOOD, {"question_id": "x", "prediction": "no"}],
        "question id 'x' is not in the references",
        "n_unknown",
    ),
    "empty": ([*GOOD[:2], {"question_id": "2", "prediction": " "}], "'2' is empty", "n_empty"),
    "no text": (
        [*GOOD[:2], {"question_id": "2", "prediction": None}],
        "'2' is None, not a text",
        "n_not_text",
    ),
}


@pytest.mark.parametrize(("rows", "message", "counter"), BAD.values(), ids=BAD.keys())
def test_a_misfit_is_an_error_that_names_file_and_id_or_is_counted(
    folder: Path, capsys: pytest.CaptureFixture[str], rows: list, message: str, counter: str
):
    assert score(folder, rows) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "--allow-missing" in error
    assert ("as the empty text, as the official scorers do" in error) == (counter == "n_empty")
    assert str(folder / ("questions.json" if counter == "n_missing" else "p.json")) in error
    assert not (folder / "report.json").exists()
    assert score(folder, rows, "--allow-missing") == 0
    found = report(folder)
    assert found[counter] == 1
    assert found["n"] == 3
    wrong = counter in ("n_missing", "n_empty", "n_not_text")
    assert found["metrics"]["accuracy"] == pytest.approx(200 / 3 if wrong else 100)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no prediction"),
        ([{"image": "VizWiz_val_1.jpg", "answer": "a"}], "looks like predictions for vizwiz"),
        ([{"question_id": "validation_Art_1", "text": "A"}], "none of the 1 question ids are"),
        (QUESTIONS, "looks like references for gqa"),
        ([{"question_id": "0"}], "not a file of gqa predictions"),
        ([*GOOD[:2], {"question_id": "2"}], "row 3: has no prediction or text"),
    ],
    ids=["empty", "vizwiz", "other ids", "references", "no text", "a row without text"],
)
def test_other_files_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], rows: object, message: str
):
    assert score(folder, rows) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(folder / "p.json") in error


def test_references_of_another_benchmark_or_without_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert score(folder, GOOD, task="vqav2") == 2
    assert "looks like references for gqa" in capsys.readouterr().err
    questions = {i: {k: v for k, v in q.items() if k != "answer"} for i, q in QUESTIONS.items()}
    (folder / "questions.json").write_text(json.dumps(questions))
    assert score(folder, GOOD) == 2
    assert "row 1: question '0' has no answer (a test split?)" in capsys.readouterr().err
    assert score(folder, GOOD, "--allow-missing") == 0
    assert (report(folder)["n_without_answer"], report(folder)["metrics"]) == (3, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gqa", "--profile", "mine"], "allowed: official, lmms, vlmeval"),
        (["gqa", "--profile", "lmms", "--raw"], "raw requires the profile official"),
        (["gqa", "--fallback", "wrong"], "fallback and seed have no effect"),
        (["gqa"], "needs its reference files"),
        (["yes_no", "--references", "x"], "name the question set: yes_no=FOLDER"),
        (["yes_no=.", "--raw"], "--raw has no effect: it is for benchmarks"),
        (["yes=."], "unknown task 'yes'; allowed: yes_no"),
        (["x"], "unknown benchmark 'x'; allowed: pope"),
    ],
)
def test_options_that_do_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    (folder / "p.json").write_text(json.dumps(GOOD))
    words = [*words, "--predictions", str(folder / "p.json"), "--out", str(folder / "r.json")]
    assert main(["score", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_set_of_ones_own(folder: Path):
    row = {"question_id": "a", "image": "gone.png", "text": "a?", "answer": "yes", "category": "c"}
    (folder / "questions.jsonl").write_text(json.dumps(row))
    llava = {"question_id": "a", "prompt": "a?", "text": "Well, yes", "category": "default"}
    (folder / "p.jsonl").write_text(json.dumps(llava))
    words = [f"yes_no={folder}", "--predictions", str(folder / "p.jsonl")]
    assert main(["score", *words, "--out", str(folder / "report.json")]) == 0
    found = report(folder)
    assert (found["headline"], found["metrics"]["accuracy"]) == ("f1", 100)
    assert found["counts"] == {"category.c": 1}
    assert found["items"] == [
        {
            "question_id": "a",
            "question": "a?",
            "media": [{"kind": "image", "path": str(folder / "gone.png")}],
            "prediction": "Well, yes",
            "extracted": "yes",
            "reference": "yes",
            "score": 1.0,
            "tables": {"category": "c"},
            "unit": str(folder / "gone.png"),
        }
    ]


def test_scoring_imports_neither_torch_nor_transformers(folder: Path):
    (folder / "p.json").write_text(json.dumps(GOOD))
    words = ["score", "gqa", "--predictions", "p.json", "--references", "questions.json"]
    code = (
        "import sys; from coat_cli.main import main; "
        f"status = main({[*words, '--out', 'r.json']!r}); "
        "sys.exit(status or str(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_the_documented_example_of_a_benchmark_scores(tmp_path: Path):
    document = Path(__file__).parents[2] / "docs" / "reference" / "benchmarks.md"
    [code] = re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)
    room: dict = {}
    exec(code, room)
    counts = [("a", 3, "cup"), ("b", 1, "cup"), ("c", 7, "fork")]
    rows = [{"question_id": i, "count": n, "kind": kind} for i, n, kind in counts]
    (tmp_path / "refs.json").write_text(json.dumps(rows))
    said = [("c", "none"), ("a", "I see 3"), ("b", "2 cups")]
    predictions = [{"question_id": i, "prediction": text} for i, text in said]
    (tmp_path / "p.json").write_text(json.dumps(predictions))
    found = score_official(room["Counting"](), [tmp_path / "p.json"], [tmp_path / "refs.json"])
    assert found["metrics"] == {"overall": 50, "kind.cup": 75, "kind.fork": 0}
    assert found["n_unparsed"] == 1

    rows = [{**row, "picture": "a.png"} for row in rows]
    (tmp_path / "counting.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = DataFolder.open(tmp_path, "counting", room["Counting"].layouts)
    asked = list(room["Counting"]().prompts(folder, PromptOptions()))
    assert [one.question_id for one in asked] == [str(row["question_id"]) for row in rows]
    assert asked[0].text == f"How many are there: {rows[0]['kind']}?"
    assert asked[0].media[0].name == str(tmp_path / "pictures" / "a.png")
