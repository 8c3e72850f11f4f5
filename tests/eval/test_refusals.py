"""Files that must not get a score: questions, labels, repeated or partial ones."""

import json
import math
from pathlib import Path

import pytest
from scoring_helpers import refusal, score
from scoring_helpers import write as write_rows
from scoring_helpers import write_lines as write

from coat_cli.main import main

OBJECTS = {"popular": ("cup", "person"), "adversarial": ("cup", "fork")}
"""The first object is in the image."""


def pope_rows(split: str) -> list[dict]:
    """RUCAIBox's rows: ids restart in each split."""
    return [
        {
            "question_id": number,
            "image": "COCO_val2014_000000000042.jpg",
            "text": f"Is there a {name} in the image?",
            "label": "yes" if number == 1 else "no",
        }
        for number, name in enumerate(OBJECTS[split], start=1)
    ]


def pope_labels(folder: Path, split: str) -> Path:
    return write(folder / f"coco_pope_{split}.json", pope_rows(split))


# Questions and labels in the layouts that LLaVA and the benchmarks publish.
QUESTION_FILES = {
    "labels of POPE": ("pope", pope_rows("popular")),
    "LLaVA's questions of POPE": (
        "pope",
        [
            {
                "question_id": row["question_id"],
                "image": row["image"],
                "text": f"{row['text']}\nAnswer the question using a single word or phrase.",
                "category": "popular",
            }
            for row in pope_rows("popular")
        ],
    ),
}


@pytest.mark.parametrize(("task", "rows"), QUESTION_FILES.values(), ids=QUESTION_FILES.keys())
def test_questions_and_labels_are_not_predictions(tmp_path: Path, task: str, rows: list[dict]):
    given = write(tmp_path / "given.jsonl", rows)
    error = refusal(task, given, pope_labels(tmp_path, "popular"), allow_missing=True)
    assert error.where == str(given)
    assert "contains questions or labels, not predictions" in error.problem


GQA = {
    str(i): {"question": f"Is the door number {i} open?", "answer": "yes", "imageId": f"n{i // 2}"}
    for i in range(4)
}


def test_the_questions_of_ones_own_set_are_not_predictions(tmp_path: Path):
    rows = [{"question_id": "a", "text": "Is there a dog here?", "answer": "yes"}]
    questions = write(tmp_path / "questions.jsonl", rows)
    assert "all are questions" in refusal("yes_no", questions, questions).problem


def test_answers_to_another_split_contradict_the_references_by_their_prompts(tmp_path: Path):
    """Popular and adversarial have the same positive questions and the same ids."""
    rows = [
        {"question_id": row["question_id"], "prompt": row["text"], "text": "No", "model_id": "m"}
        for row in pope_rows("adversarial")
    ]
    answers = write(tmp_path / "answers.jsonl", rows)
    assert score("pope", answers, pope_labels(tmp_path, "adversarial"))["n"] == 2
    error = refusal("pope", answers, pope_labels(tmp_path, "popular"), allow_missing=True)
    assert error.where == f"{answers}:2"
    assert "'Is there a fork in the image?', but question '2' of" in error.problem
    assert "1 of 2 prompts contradict" in error.problem


def test_prompts_that_reword_every_question_are_a_warning(tmp_path: Path):
    rows = [{"question_id": i, "prompt": "Look closely.", "text": "No"} for i in (1, 2)]
    report = score("pope", write(tmp_path / "a.jsonl", rows), pope_labels(tmp_path, "popular"))
    assert any("none of the 2 prompts" in one for one in report["warnings"])


def test_a_question_without_letters_and_one_misprint_are_no_contradiction(tmp_path: Path):
    """A question that is only a picture is in no prompt; question files have misprints."""
    labels = [{**pope_rows("popular")[0], "question_id": i} for i in range(1, 41)]
    labels[0]["text"] = "<image 1>?"
    rows = [
        {"question_id": one["question_id"], "prompt": one["text"], "text": "Yes"} for one in labels
    ]
    rows[1]["prompt"] = "Is there a cupp in the image?"
    references = write(tmp_path / "coco_pope_popular.json", labels)
    report = score("pope", write(tmp_path / "answers.jsonl", rows), references)
    assert report["n"] == 40
    assert any("38 of the 39 prompts" in one for one in report["warnings"])


def test_a_label_that_is_neither_yes_nor_no_is_refused(tmp_path: Path):
    rows = pope_rows("popular")
    rows[1]["label"] = None
    labels = write(tmp_path / "coco_pope_popular.json", rows)
    questions = write(
        tmp_path / "llava_pope_test.jsonl", QUESTION_FILES["LLaVA's questions of POPE"][1]
    )
    answers = write(tmp_path / "a.jsonl", [{"question_id": i, "prediction": "No"} for i in (1, 2)])
    for references in ([labels], [questions, labels]):
        error = refusal("pope", answers, *references, allow_missing=True)
        assert error.where == f"{labels}:2"
        assert "the label is None, neither yes nor no" in error.problem


def test_the_same_references_twice_count_once(tmp_path: Path):
    first, second = tmp_path / "questions.json", tmp_path / "copy.json"
    for path in (first, second):
        path.write_text(json.dumps(GQA))
    answers = write(tmp_path / "a.jsonl", [{"question_id": i, "prediction": "yes"} for i in GQA])
    report = score("gqa", answers, first, second, first, allow_missing=True)
    assert (report["n"], report["n_missing"], report["metrics"]["accuracy"]) == (4, 0, 100)
    assert report["warnings"][0] == f"{second} has the content of {first} and was read once"
    second.write_text(json.dumps({"3": GQA["3"]}))
    error = refusal("gqa", answers, first, second, allow_missing=True)
    assert error.problem == f"question '3' is also in {first}, row 4"


def vqa_annotations(folder: Path) -> Path:
    answers = [{"answer": "2", "answer_id": i} for i in range(10)]
    row = {"question_id": 5, "image_id": 1, "question": "How many dogs are there?"}
    return write(folder / "annotations.json", [{**row, "answers": answers}])


def test_of_text_and_answer_the_question_is_not_the_prediction(tmp_path: Path):
    row = {"question_id": 5, "text": "How many dogs are there?", "answer": "2"}
    report = score("vqav2", write(tmp_path / "a.jsonl", [row]), vqa_annotations(tmp_path))
    assert report["metrics"]["overall"] == 100
    either = write(tmp_path / "b.jsonl", [{"question_id": 5, "text": "two", "answer": "2"}])
    error = refusal("vqav2", either, vqa_annotations(tmp_path))
    assert error.where == f"{either}:1"
    assert "either may be the prediction" in error.problem


def test_losses_with_nan_do_not_choose_a(tmp_path: Path):
    references = tmp_path / "SEED-Bench.json"
    question = {"answer": "B", "question_type_id": 1, "data_type": "image"}
    questions = [{"question_id": i, **question} for i in "12"]
    references.write_text(json.dumps({"questions": questions}))
    losses = [math.nan, 0.5, 0.7, 0.9]
    other = {"question_id": "2", "losses": [3, 1, 2, 4]}
    given = write(tmp_path / "p.jsonl", [{"question_id": "1", "losses": losses}, other])
    error = refusal("seedbench", given, references)
    assert error.where == f"{given}:1"
    assert "is the losses [nan, 0.5, 0.7, 0.9]" in error.problem
    report = score("seedbench", given, references, allow_missing=True)
    assert (report["n_not_text"], report["metrics"]["all"]) == (1, 50)
    given = write(tmp_path / "p.jsonl", [{"question_id": "1", "losses": [True, False, True, 1]}])
    assert refusal("seedbench", given, references).problem == "losses are [True, False, True, 1]"


OPTIONS = {"question": "Which one of these?", "A": "red", "B": "blue", "answer": "A"}
SCENE = {"type": "Scene Text-centric VQA"}
COMPLETE = {
    # The first id, the number of questions, file and further fields of the references.
    "realworldqa": (0, 765, "RealWorldQA.tsv", OPTIONS),
    "ocrbench": (0, 1000, "OCRBench.json", {"dataset_name": "a", "answers": "b", **SCENE}),
    "mmstar": (0, 1500, "MMStar.tsv", {**OPTIONS, "category": "math"}),
}
"""Benchmarks whose ids are numbers, with the sizes of their official sets."""


def make_complete(folder: Path) -> dict[str, tuple[Path, Path]]:
    """References, and an answer to every question, by benchmark."""
    files = {}
    for name, (first, number, file, fields) in COMPLETE.items():
        key = "index" if file.endswith(".tsv") else "question_id"
        question = {} if "answer" in fields else {"question": "What does it say?"}
        rows = [{key: i, **question, **fields} for i in range(first, first + number)]
        said = [{"question_id": i, "prediction": "A"} for i in range(first, first + number)]
        files[name] = write_rows(folder / file, rows), write(folder / f"{name}.jsonl", said)
    return files


def test_allow_missing_accepts_no_answers_to_another_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Ids from 0 or 1 are the ids of many benchmarks."""
    files = make_complete(tmp_path)
    accepted = []
    for task, (references, _) in files.items():
        out = str(tmp_path / "r.json")
        for name, (_, given) in files.items():
            words = ["--predictions", str(given), "--references", str(references), "--out", out]
            if main(["score", task, *words, "--allow-missing"]) == 0:
                accepted.append((task, name))
    assert accepted == [(task, task) for task in files]
    assert "these look like predictions for realworldqa" in capsys.readouterr().err


def test_allow_missing_accepts_a_part_of_the_answers(tmp_path: Path):
    """Not a smaller one than half, whose score would be that of missing answers."""
    references, given = make_complete(tmp_path)["mmstar"]
    rows = [json.loads(line) for line in given.read_text().splitlines()]
    report = score("mmstar", write(given, rows[:1400]), references, allow_missing=True)
    assert (report["n"], report["n_missing"]) == (1500, 100)
    error = refusal("mmstar", write(given, rows[:749]), references, allow_missing=True)
    assert "and 749 of the 1500 questions have a text" in error.problem
    # As many as OCRBench has, unless the predictions say that they are of this benchmark.
    write(given, rows[:1000])
    assert "ocrbench" in refusal("mmstar", given, references, allow_missing=True).problem
    write(given, [{**row, "question": OPTIONS["question"]} for row in rows[:1000]])
    assert score("mmstar", given, references, allow_missing=True)["n_missing"] == 500


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"question_id": 0, "prediction": null}'])
def test_allow_missing_accepts_no_file_without_an_answer(tmp_path: Path, text: str):
    references, given = make_complete(tmp_path)["realworldqa"]
    given.write_text(text)
    error = refusal("realworldqa", given, references, allow_missing=True)
    assert ("has no prediction" if len(text) < 3 else "0 of the 765") in error.problem


def mmmu_outputs(folder: Path, repeat: bool) -> Path:
    rows = [
        {
            "id": f"validation_Art_{i}",
            "question_type": "multiple-choice",
            "answer": "A",
            "all_choices": ["A", "B"],
            "index2ans": {"A": "red", "B": "blue"},
            "response": "A",
        }
        for i in range(1, 31)
    ]
    return write(folder / "output.json", [*rows, rows[0]] if repeat else rows)


def videomme_results(folder: Path, repeat: bool) -> Path:
    asked = [
        {
            "question_id": f"001-{i}",
            "task_type": "OCR Problems",
            "question": f"What is written on sign {i}?",
            "options": ["A. Stop.", "B. Go."],
            "answer": "A",
            "response": "A",
        }
        for i in (1, 2, 3)
    ]
    video = {"video_id": "001", "duration": "short", "domain": "Knowledge", "questions": asked}
    path = folder / "results.json"
    path.write_text(json.dumps([video] * (2 if repeat else 1)))
    return path


@pytest.mark.parametrize(
    ("task", "make", "number", "size"),
    [("mmmu", mmmu_outputs, 30, "900 (validation)"), ("videomme", videomme_results, 3, "2,700")],
)
def test_without_references_parts_and_repetitions_are_errors_or_counted_once(
    tmp_path: Path, task: str, make, number: int, size: str
):
    part = make(tmp_path, repeat=False)
    error = refusal(task, part)
    assert f"{number} questions; complete sets of {task} have {size}" in error.problem
    report = score(task, part, allow_missing=True)
    assert (report["n"], report["n_official"]) == (number, 900 if task == "mmmu" else 2700)
    assert any(size in one for one in report["warnings"])
    repeated = make(tmp_path, repeat=True)
    assert "a further prediction for question" in refusal(task, repeated).problem
    report = score(task, repeated, allow_missing=True)
    assert report["n"] == number
    assert report["n_duplicate"] == (1 if task == "mmmu" else 3)


def test_empty_answers_are_counted_where_the_score_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Empty answers of an untrained model: POPE's rule reads them as yes."""
    rows = [
        {"question_id": i, "text": "Is there a dog in the image?", "answer": answer}
        for i, answer in enumerate(["yes", "no"])
    ]
    write(tmp_path / "questions.jsonl", rows)
    given = write(tmp_path / "p.jsonl", [{"question_id": i, "prediction": ""} for i in (0, 1)])
    words = [f"yes_no={tmp_path}", "--predictions", str(given), "--allow-missing"]
    assert main(["score", *words, "--out", str(tmp_path / "report.json")]) == 0
    error = capsys.readouterr().err
    assert "2 of 2 answers are empty and the rule reads them as 'yes'" in error
    always = "f1 66.6700 is not above 66.6700, the score of always answering 'yes'"
    assert always in error
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["n"], report["n_empty"], report["metrics"]["accuracy"]) == (2, 2, 50)


def test_a_figure_not_above_a_constant_answer_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    labels = pope_labels(tmp_path, "popular")
    always = write(tmp_path / "a.jsonl", [{"question_id": i, "prediction": "Yes"} for i in (1, 2)])
    words = ["--predictions", str(always), "--references", str(labels), "--out"]
    assert main(["score", "pope", *words, str(tmp_path / "r.json")]) == 0
    printed = capsys.readouterr().out
    assert "not above 66.6667, the score of always answering 'yes'" in printed
    right = [{"question_id": 1, "prediction": "Yes"}, {"question_id": 2, "prediction": "No"}]
    write(always, right)
    assert main(["score", "pope", *words, str(tmp_path / "r.json")]) == 0
    assert "not above" not in capsys.readouterr().out
    gqa = tmp_path / "questions.json"
    gqa.write_text(json.dumps(GQA | {"4": {**GQA["0"], "answer": "no"}}))
    answers = write(
        tmp_path / "g.jsonl", [{"question_id": str(i), "prediction": "yes"} for i in range(5)]
    )
    constants = score("gqa", answers, gqa)["constants"]
    assert constants["accuracy"] == {"answer": "yes", "value": 80.0}
