"""Which field of a row is the model's text, and which are refused."""

from pathlib import Path
from typing import Any

import pytest
from scoring_helpers import refuse, score, write

NAMES = ["response", "pred", "output", "model_answer", "generated", "generated_text", "completion"]


def gold_rows(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Labels of POPE, and rows that carry them as ``answer``."""
    rows = [
        {"question_id": i, "text": f"Is there a dog {i}?", "label": label, "category": "random"}
        for i, label in enumerate(["yes", "no", "no", "yes"])
    ]
    gold = [
        {"question_id": row["question_id"], "question": row["text"], "answer": row["label"]}
        for row in rows
    ]
    return write(folder / "labels.jsonl", rows), gold


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("question", ["question", "text"])
def test_gold_in_answer_is_no_prediction(tmp_path: Path, name: str, question: str):
    labels, gold = gold_rows(tmp_path)
    for row in gold:
        row[question] = row.pop("question")
        row[name] = "No"
    report = score("pope", write(tmp_path / "p.jsonl", gold), labels)
    assert report["metrics"]["random.accuracy"] == 50  # of the constant "No", not of the labels


@pytest.mark.parametrize("name", ["llava_says", "explanation"])
@pytest.mark.parametrize("ordered", [False, True])
def test_gold_next_to_an_unknown_text_is_refused(tmp_path: Path, name: str, ordered: bool):
    labels, gold = gold_rows(tmp_path)
    for row in gold:
        row[name] = "No"
        if ordered:  # POPE's own layout
            del row["question_id"]
    problem = refuse("pope", write(tmp_path / "p.jsonl", gold), labels)
    assert problem == (
        "the answer is the reference, as in all 4 rows, and the rows also have "
        f"{name}: that may be the model's answer"
    )
    gold[0]["answer"] = "no"  # one wrong answer: these are a model's
    report = score("pope", write(tmp_path / "p.jsonl", gold), labels)
    assert report["metrics"]["random.accuracy"] == 75


def test_gold_of_ten_annotators_next_to_an_unknown_text_is_refused(tmp_path: Path):
    answers = [{"answer": text, "answer_id": i} for i, text in enumerate(["two"] * 6 + ["2"] * 4)]
    rows = [
        {"question_id": i, "image_id": i, "answers": answers, "answer_type": "number"}
        | {"question_type": "how many", "multiple_choice_answer": "2"}
        for i in range(3)
    ]
    references = write(tmp_path / "v2_mscoco_val2014_annotations.json", {"annotations": rows})
    said = [{"question_id": i, "answer": "2", "qwen": "three"} for i in range(3)]
    assert "that may be" in refuse("vqav2", write(tmp_path / "p.json", said), references)
    for row in said:
        row["pred"] = row.pop("qwen")
    report = score("vqav2", write(tmp_path / "p.json", said), references)
    assert report["metrics"]["overall"] == 0


def test_two_texts_that_may_be_the_answer_are_refused(tmp_path: Path):
    labels, gold = gold_rows(tmp_path)
    two = [{**row, "pred": "yes", "output": "It is yes"} for row in gold]
    problem = refuse("pope", write(tmp_path / "p.jsonl", two), labels)
    assert problem == "has pred 'yes' and output 'It is yes'; either may be the prediction"
    same = [{**row, "pred": "yes", "output": "yes"} for row in gold]
    report = score("pope", write(tmp_path / "p.jsonl", same), labels)
    assert report["metrics"]["random.accuracy"] == 50
    right = [{**row, "model_id": "llava", "image_source": "coco"} for row in gold]
    report = score("pope", write(tmp_path / "p.jsonl", right), labels)  # a model that is right
    assert report["metrics"]["random.accuracy"] == 100
