"""POPE on made-up files in the official formats; scores worked out by hand."""

from pathlib import Path

import pytest
from scoring_helpers import write_lines as write

from coat_data.sample import DataError
from coat_eval.benchmark import Settings
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark

POPE = get_benchmark("pope")
LABELS = {
    "adversarial": [("a.jpg", "Is there a cup?", "yes"), ("a.jpg", "Is there a fork?", "no")],
    "popular": [("a.jpg", "Is there a cup?", "yes"), ("a.jpg", "Is there a person?", "no")],
    "random": [("a.jpg", "Is there a cup?", "yes"), ("a.jpg", "Is there a boat?", "no")],
}


def label_files(folder: Path) -> list[Path]:
    """RUCAIBox's files: ids restart in each, and only the name tells the split."""
    files = []
    for split, rows in LABELS.items():
        content = [
            {"question_id": number, "image": image, "text": text, "label": label}
            for number, (image, text, label) in enumerate(rows, start=1)
        ]
        files.append(write(folder / f"coco_pope_{split}.json", content))
    return files


def llava_questions(folder: Path) -> Path:
    """LLaVA's file: ids of its own, an instruction behind the question, no labels."""
    rows = [
        {
            "question_id": 100 * number + place,
            "image": image,
            "text": f"{text}\nAnswer the question using a single word or phrase.",
            "category": split,
        }
        for number, (split, questions) in enumerate(LABELS.items())
        for place, (image, text, _) in enumerate(questions)
    ]
    return write(folder / "llava_pope_test.jsonl", rows)


ANSWERS = {0: "Yes", 1: "Yes", 100: "Yes, there is.", 101: "No", 200: "No.", 201: "No, not here"}


def llava_answers(folder: Path, answers: dict[int, str] = ANSWERS) -> Path:
    rows = [{"question_id": i, "prompt": "?", "text": text} for i, text in answers.items()]
    return write(folder / "answers.jsonl", rows)


def test_llavas_answers_with_its_questions_and_the_three_label_files(tmp_path: Path):
    labels = label_files(tmp_path)
    references = [labels[2], llava_questions(tmp_path), labels[0], labels[1]]
    report = score_official(POPE, [llava_answers(tmp_path)], references)
    metrics = report["metrics"]
    # adversarial: TP 1, FP 1. popular: TP 1, TN 1. random: FN 1, TN 1.
    assert metrics["adversarial.accuracy"] == metrics["adversarial.precision"] == 50
    assert metrics["adversarial.recall"] == metrics["adversarial.yes_ratio"] == 100
    assert metrics["adversarial.f1"] == pytest.approx(200 / 3)
    assert metrics["popular.f1"] == metrics["popular.accuracy"] == 100
    assert metrics["random.f1"] == metrics["random.precision"] == metrics["random.recall"] == 0
    assert metrics["random.accuracy"] == 50
    assert metrics["mean_f1"] == pytest.approx((200 / 3 + 100 + 0) / 3)
    # Together: TP 2, FP 1, TN 2, FN 1.
    assert metrics["pooled.f1"] == pytest.approx(400 / 6)
    assert (report["n"], report["n_unparsed"]) == (6, 0)
    assert set(report["inputs"]) == {str(path) for path in tmp_path.iterdir()}


def test_label_files_of_other_questions_are_named(tmp_path: Path):
    labels = label_files(tmp_path)
    questions, answers = llava_questions(tmp_path), llava_answers(tmp_path)
    text = labels[2].read_text()
    for other in (text.replace("boat", "bus"), text + text.splitlines()[0]):
        labels[2].write_text(other)
        with pytest.raises(DataError, match="does not ask the 2 random questions") as error:
            score_official(POPE, [answers], [questions, *labels])
        assert error.value.where == str(labels[2])


def test_one_split_by_its_own_ids_and_popes_own_answers_without_ids(tmp_path: Path):
    adversarial = label_files(tmp_path)[0]
    by_id = write(tmp_path / "by_id.jsonl", [{"question_id": "2", "prediction": "no"}])
    report = score_official(POPE, [by_id], [adversarial], allow_missing=True)
    # The missing one counts as the wrong answer: a false negative.
    assert report["metrics"]["adversarial.accuracy"] == 50
    assert report["n_missing"] == 1
    rows = [{"question": text, "answer": "no"} for _, text, _ in LABELS["adversarial"]]
    own = write(tmp_path / "own.json", rows)
    assert score_official(POPE, [own], [adversarial])["metrics"]["adversarial.accuracy"] == 50
    write(own, rows[::-1])
    with pytest.raises(DataError, match="answers 'Is there a fork\\?', but"):
        score_official(POPE, [own], [adversarial])


def test_repeated_ids_need_the_category(tmp_path: Path):
    labels = label_files(tmp_path)
    rows = [
        {"question_id": number, "prediction": label, "category": split}
        for split, questions in LABELS.items()
        for number, (_, _, label) in enumerate(questions, start=1)
    ]
    report = score_official(POPE, [write(tmp_path / "p.jsonl", rows[::-1])], labels)
    assert report["metrics"]["mean_f1"] == 100
    for row in rows:
        del row["category"]
    with pytest.raises(DataError, match="'1' belongs to several questions: adversarial, popular"):
        score_official(POPE, [write(tmp_path / "p.jsonl", rows)], labels)


def test_profiles_read_a_chatty_answer_differently(tmp_path: Path):
    labeled = [
        {"question_id": i, "text": f"{i}?", "label": label, "category": "random"}
        for i, label in enumerate(["yes", "yes", "no", "no"])
    ]
    references = [write(tmp_path / "labeled.jsonl", labeled)]
    said = ["Yes, I do.", "It is there", "I do not see one", "No-one"]
    rows = [{"question_id": i, "prediction": text} for i, text in enumerate(said)]
    predictions = [write(tmp_path / "p.jsonl", rows)]

    def metrics(profile: str) -> dict[str, float]:
        settings = Settings(profile=profile)
        return score_official(POPE, predictions, references, settings=settings)["metrics"]

    # official reads yes, yes, no ("not"), yes ("No-one" is one word).
    assert metrics("official")["random.accuracy"] == 75
    assert metrics("official")["random.f1"] == pytest.approx(80)
    # lmms compares whole texts: all wrong, and its yes-ratio is that of the labels.
    assert metrics("lmms")["random.accuracy"] == metrics("lmms")["random.f1"] == 0
    assert metrics("lmms")["random.yes_ratio"] == 50
    # vlmeval reads yes, unknown, unknown, no.
    assert metrics("vlmeval")["random.accuracy"] == 50
    assert metrics("vlmeval")["random.f1"] == pytest.approx(200 / 3)
