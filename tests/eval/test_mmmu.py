"""MMMU on made-up files in the official formats; parsed and scored by hand."""

import json
import random
from pathlib import Path

import pytest
from scoring_helpers import write

from coat_data.sample import DataError
from coat_eval.benchmark import Settings
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark
from coat_eval.tasks.mmmu import is_open_correct, parse_choice, parse_open_values

MMMU = get_benchmark("mmmu")
CHOICES = {"A": "red car", "B": "bicycle", "C": "green", "D": "red"}


def chosen(row_id: str, answer: str, response: str) -> dict:
    return {
        "id": f"validation_{row_id}",
        "question_type": "multiple-choice",
        "answer": answer,
        "all_choices": list(CHOICES),
        "index2ans": CHOICES,
        "response": response,
    }


def opened(row_id: str, answer: str | list[str], response: str) -> dict:
    kind = "short-answer"
    row_id = f"validation_{row_id}"
    return {"id": row_id, "question_type": kind, "answer": answer, "response": response}


ROWS = [
    chosen("Sociology_2", "B", "Not (A) but (B)"),
    chosen("Sociology_10", "A", "**B**"),
    chosen("Accounting_3", "C", "**C**"),
    chosen("Accounting_12", "C", "**C**"),
    chosen("Accounting_20", "D", "**C**"),
    opened("Accounting_4", ["12", "twelve"], "The answer is twelve apples"),
    opened("Math_1", "0.33", "= 1/3"),
]


def run(*paths: Path, references: tuple[Path, ...] = (), **settings) -> dict:
    chosen = Settings(**settings)
    # Without references, a part of the benchmark has to be allowed.
    part = not references
    return score_official(MMMU, paths, references, settings=chosen, allow_missing=part)


def test_subjects_are_drawn_in_the_official_order_and_by_number(tmp_path: Path):
    report = run(write(tmp_path / "output.json", ROWS))
    generator = random.Random(42)
    # Accounting before Sociology, 3 before 12: neither the file's order nor the text's matters.
    order = ("Accounting_3", "Accounting_12", "Accounting_20", "Sociology_10")
    drawn = {f"validation_{name}": generator.choice("ABCD") for name in order}
    items = {item["question_id"]: item for item in report["items"]}
    assert {i: one["extracted"] for i, one in items.items() if "random_fallback" in one} == drawn
    assert report["n_random_fallback"] == report["n_unparsed"] == 4
    # The unread ones apart: (B) is right, "twelve" is found, 1/3 is not 0.33.
    assert report["metrics"]["overall_fallback_wrong"] == pytest.approx(100 * 2 / 7)
    wrong = run(tmp_path / "output.json", fallback="wrong")
    assert wrong["metrics"]["overall"] == pytest.approx(100 * 2 / 7)
    assert wrong["metrics"]["subject.Sociology"] == 50
    assert wrong["metrics"]["domain.Business"] == 25
    assert wrong["metrics"]["type.open"] == 50
    assert wrong["n_random_fallback"] == 0
    assert (wrong["fallback"], report["seed"]) == ("wrong", 42)


def test_a_folder_of_outputs_and_answers_from_the_answer_file(tmp_path: Path):
    for subject in ("Sociology", "Accounting", "Math"):
        rows = [row for row in ROWS if f"_{subject}_" in row["id"]]
        write(tmp_path / "run" / f"{subject}.json", rows)
        (tmp_path / "run" / subject).mkdir()
        (tmp_path / "run" / f"{subject}.json").rename(tmp_path / "run" / subject / "output.json")
        write(tmp_path / "run" / subject / "parsed_output.json", [])
    gold = {
        row["id"]: {"question_type": row["question_type"], "ground_truth": row["answer"]}
        for row in reversed(ROWS)
    }
    answers = write(tmp_path / "answer_dict_val.json", gold)
    together = run(tmp_path / "run", references=(answers,))
    assert together["metrics"] == run(write(tmp_path / "all.json", ROWS))["metrics"]
    # Plain rows get their choices from outputs or Parquet given as references.
    plain = [{"question_id": row["id"], "prediction": row["response"]} for row in ROWS]
    path = write(tmp_path / "p.json", plain)
    by_outputs = run(path, references=(tmp_path / "all.json", answers))
    assert by_outputs["metrics"] == together["metrics"]


def test_answers_that_were_read_already(tmp_path: Path):
    gold = {
        "validation_Art_1": {"question_type": "multiple-choice", "ground_truth": "A"},
        "validation_Art_2": {"question_type": "multiple-choice", "ground_truth": "B"},
        "validation_Math_3": {"question_type": "short-answer", "ground_truth": "30"},
    }
    answers = write(tmp_path / "answer_dict_val.json", gold)
    read = {"validation_Art_1": "A", "validation_Art_2": "B.", "validation_Math_3": "is 30."}
    report = run(write(tmp_path / "p.json", read), references=(answers,))
    # main_eval_only.py compares letters as they are, and parses open answers.
    assert report["metrics"]["overall"] == pytest.approx(200 / 3)
    assert (report["n_random_fallback"], report["n_unparsed"]) == (0, 1)


@pytest.mark.parametrize(
    ("said", "num_drawn"), [("B.", 0), ("(B)", 0), ("", 1), ("bicycle", 1), ("B\n", 1)]
)
def test_texts_are_parsed_with_choices_or_not_at_all(tmp_path: Path, said: str, num_drawn: int):
    art = [chosen(f"Art_{number}", "B", "B") for number in (1, 2)]
    gold = {
        **{row["id"]: {"question_type": "multiple-choice", "ground_truth": "B"} for row in art},
        "validation_Math_1": {"question_type": "short-answer", "ground_truth": "5"},
    }
    answers = write(tmp_path / "answer_dict_val.json", gold)
    math = {"id": "validation_Math_1", "response": "It is 5."}
    letters = [math, *({"id": row["id"], "response": "B"} for row in art)]
    # Letters need no choices; open answers have none.
    report = run(write(tmp_path / "letters.json", letters), references=(answers,))
    assert report["metrics"]["overall"] == 100
    path = write(tmp_path / "p.json", [*letters[:2], {**letters[2], "response": said}])
    with pytest.raises(DataError, match=r"validation_Art_2.*not a bare letter.*Parquet") as error:
        run(path, references=(answers,))
    assert error.value.where == f"{path}, row 3"
    choices = write(tmp_path / "output.json", art)
    report = score_official(MMMU, [path], [choices, answers], allow_missing=True)
    # The official parser draws for a choice's text of few words and for a line end.
    assert report["n_random_fallback"] == num_drawn


def test_the_hubs_rows_carry_options_as_python_text(tmp_path: Path):
    row = {
        "id": "validation_Music_1",
        "question_type": "multiple-choice",
        "options": "['a trumpet', \"a drummer's kit\"]",
        "answer": "B",
        "image_1": None,
    }
    references = (write(tmp_path / "music.json", [row]),)
    said = [{"question_id": "validation_Music_1", "prediction": "I see a drummer's kit on it"}]
    report = run(write(tmp_path / "p.json", said), references=references)
    assert report["metrics"]["overall"] == 100
    assert report["n_random_fallback"] == 0


def test_submission_of_a_test_split(tmp_path: Path):
    row = {**chosen("Art_1", "?", "(D)"), "id": "test_Art_1"}
    path = write(tmp_path / "out.json", [row, {**row, "id": "test_Art_2", "response": "?"}])
    report = score_official(MMMU, [path], [path], submission_path=tmp_path / "upload.json")
    draw = random.Random(42).choice("ABCD")
    upload = json.loads((tmp_path / "upload.json").read_text())
    assert upload == {"test_Art_1": "D", "test_Art_2": draw}
    assert report["metrics"] == {}


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("'.A'.", None),
        ("(A) is wrong, so (C), not (A)", "A"),
        ("B or C or B", "B"),
        ("it is certainly a red car here", "A"),
        ("red bicycle", None),
        ("It is RED, not a bicycle, you see", "B"),
        ("A;", "A"),
        ("A.;", None),
    ],
)
def test_choices(text: str, letter: str | None):
    """Each outer mark goes once, in the order , . ! ? ; : ' and so "A.;" keeps its period."""
    assert parse_choice(text, CHOICES) == letter


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("It is so 5", {5.0}),
        ("x = 3 or y = 4.567", {4.57}),
        ("a = 1\nthe result is b", {" b", "b "}),
        ("the answer is :", {"the answer is :"}),
        ("-1,234.5e2", {-123450.0, -1234.0, 23450.0, 234.0, 2.0}),
    ],
)
def test_open_values(text: str, values: set):
    assert parse_open_values(text) == values


def test_open_answers():
    assert is_open_correct(parse_open_values("about 1,000 men"), "1000")
    assert not is_open_correct(parse_open_values("cab"), "a")
    assert is_open_correct(parse_open_values("so it is a"), "a")
    assert not is_open_correct(parse_open_values("It is 12. It is 30."), "12")
