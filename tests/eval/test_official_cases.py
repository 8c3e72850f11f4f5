"""Short inputs, one by one, against what the upstream functions gave for them.

COAT_EVAL_DATA is the folder of ``test_official_files.py``; every benchmark's folder has
``cases.dev.jsonl``.
"""

import json
import os
from pathlib import Path

import pytest

from coat_eval import extract, vqa_text
from coat_eval.benchmark import Question, ScoredItem, Settings
from coat_eval.tasks import get_benchmark, mmmu
from coat_eval.tasks.pope import compute_metrics

DATA = os.environ.get("COAT_EVAL_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="COAT_EVAL_DATA names no official files")


def cases(name: str) -> list:
    if DATA is None:
        return []
    lines = (Path(DATA) / name / "cases.dev.jsonl").read_text(encoding="utf-8").split("\n")
    return [pytest.param(row, id=row["id"]) for row in map(json.loads, filter(None, lines))]


def run(name: str, text: str, question: Question, **settings) -> ScoredItem:
    return get_benchmark(name).score_one(question, text, Settings(**settings))


@pytest.mark.parametrize("row", cases("pope"))
def test_pope(row: dict):
    if "aggregate" in row:
        scored = [
            run("pope", text, Question(question_id="1", where="", answer=label))
            for text, label in zip(row["predictions"], row["labels"], strict=True)
        ]
        metrics = compute_metrics(scored, "official")
        wanted = {name: 100 * row["expected"][name] for name in metrics}
        assert metrics == pytest.approx(wanted, abs=1e-9)
        return
    question = Question(question_id="1", where="", answer="no")
    assert run("pope", row["prediction"], question).extracted == row["expected"]
    lmms = run("pope", row["prediction"], question, profile="lmms")
    assert lmms.extracted == row["lmms_eval_compares"]
    vlmeval = run("pope", row["prediction"], question, profile="vlmeval")
    assert vlmeval.extracted == row["vlmevalkit"].lower()


@pytest.mark.parametrize("row", cases("gqa"))
def test_gqa(row: dict):
    question = Question(question_id="1", where="", answer=row["reference"])
    for key, settings in (
        ("expected", {}),
        ("expected_no_preprocess", {"raw": True}),
        ("lmms_eval", {"profile": "lmms"}),
    ):
        assert run("gqa", row["prediction_raw"], question, **settings).score == row[key], key


@pytest.mark.parametrize("row", cases("vqav2"))
def test_vqav2(row: dict):
    question = Question(
        question_id="1",
        where="",
        answer=[vqa_text.strip_blanks(answer) for answer in row["answers"]],
        details={"unanimous": len(set(row["answers"])) == 1},
    )
    assert question.details["unanimous"] == row["unanimous_gt"]
    assert vqa_text.normalize_vqa(row["prediction"]) == row["norm_pred_official"]
    for key, settings in (
        ("expected", {"raw": True}),
        ("expected_after_llava_processor", {}),
        ("lmms_eval", {"profile": "lmms"}),
        ("vlmevalkit", {"profile": "vlmeval"}),
    ):
        score = run("vqav2", row["prediction"], question, **settings).score
        assert score == pytest.approx(row[key], abs=1e-9), key


@pytest.mark.parametrize("row", cases("textvqa"))
def test_textvqa(row: dict):
    question = Question(question_id="1", where="", answer=row["answers"])
    one = run("textvqa", row["prediction"], question)
    assert one.extracted == row["norm_pred"]
    assert one.score == pytest.approx(row["expected"], abs=1e-9)


@pytest.mark.parametrize("row", cases("vizwiz"))
def test_vizwiz(row: dict):
    question = Question(question_id="1", where="", answer=row["answers"])
    assert vqa_text.process_answer(row["prediction"]) == row["llava_upload_form"]
    for key, settings in (
        ("expected", {"raw": True}),
        ("expected_after_llava_processor", {}),
        ("lmms_eval_vizwiz", {"profile": "lmms"}),
    ):
        score = run("vizwiz", row["prediction"], question, **settings).score
        assert score == pytest.approx(row[key], abs=5e-5), key


@pytest.mark.parametrize("row", cases("seedbench"))
def test_seedbench(row: dict):
    if "losses" in row:
        assert extract.select_lowest_loss(row["losses"]) == row["expected_pred"]
        return
    details = {"choices": row["choices"]}
    question = Question(question_id="1", where="", answer=row["answer"], details=details)
    one = run("seedbench", row["response"], question)
    assert (one.extracted, one.score) == (row["strict_pred"], row["expected_strict"])
    lmms = run("seedbench", row["response"], question, profile="lmms")
    assert lmms.extracted == row["lmms_eval_pred"].upper()
    assert lmms.score == row["lmms_eval_correct"]
    vlmeval = run("seedbench", row["response"], question, profile="vlmeval")
    assert (vlmeval.extracted or False) == row["vlmevalkit_can_infer"]


@pytest.mark.parametrize("row", cases("mmmu"))
def test_mmmu(row: dict):
    kind = row["type"]
    question = Question(
        question_id="validation_Art_1",
        where="",
        answer=row.get("gold", "A"),
        details={"type": kind, "choices": row.get("index2ans", {})},
    )
    if kind == "open":
        assert sorted(map(str, mmmu.parse_open_values(row["response"]))) == row["parsed_sorted"]
        assert run("mmmu", row["response"], question).score == row["expected"]
        return
    assert run("mmmu", row["response"], question).extracted == row["expected"]
    lmms = run("mmmu", row["response"], question, profile="lmms")
    assert lmms.extracted == row["lmms_eval"]
    vlmeval = run("mmmu", row["response"], question, profile="vlmeval")
    assert (vlmeval.extracted or False) == row["vlmevalkit_can_infer"]
    [drawn] = get_benchmark("mmmu").score_all([(question, row["response"])], Settings())
    assert drawn.extracted == row["expected_if_first_call_after_seed42"]
    assert drawn.random_fallback == row["random_fallback"]


@pytest.mark.parametrize("row", cases("videomme"))
def test_videomme(row: dict):
    question = Question(question_id="001-1", where="", answer="A", details={"choices": {}})
    for key, profile in (
        ("expected", "official"),
        ("lmms_eval_extract_mcq_answer", "lmms"),
        ("vlmevalkit_regex", "vlmeval"),
    ):
        extracted = run("videomme", row["response"], question, profile=profile).extracted
        assert (extracted or "") == row[key], key
