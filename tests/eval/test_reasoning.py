"""What a model writes before its end-of-thinking token is not its answer, in every task."""

import json
from pathlib import Path
from typing import Any

import pytest
from official_files import make_benchmarks
from scoring_helpers import score, write

from coat_eval.benchmark import Benchmark, Settings
from coat_eval.data_folder import DataFolder
from coat_eval.extract import split_reasoning
from coat_eval.scoring import format_headline
from coat_eval.tasks import BENCHMARKS, TASKS, get_benchmark

TEXTS = ("yes", "No.", "red", "B", "(C)", "D. DD", "", "Is it red? The answer is B")
THINKING = "<think>No, it is not B but (A). So the answer is A. Red, 3, yes.\n</think>\n\n{}"
CUT = "<think>The answer is A. No, it is"


@pytest.mark.parametrize(
    ("text", "state", "answer"),
    [
        ("The answer is A.</think> C", "removed", "C"),  # the token before it is in the prompt
        ("<think>a</think>b<think>c</think>\nd\n", "removed", "d"),
        ("<think>a", "unfinished", None),
        ("<think>a</think>b<think>c", "unfinished", None),
        ("<think>a</think> \n", "unfinished", None),  # cut before the first word
        ("<think>a</think><answer>No</answer>", "removed", "No"),  # GLM-4.1V-Thinking
        ("a</think><|begin_of_box|>C<|end_of_box|>", "removed", "C"),  # GLM-4.5V
        ("\u25c1think\u25b7a\u25c1/think\u25b7C", "removed", "C"),  # Kimi-VL-Thinking
        ("<|channel>thought\na<channel|>C", "removed", "C"),  # Gemma 4
        ("<|channel>thought\na", "unfinished", None),
        ("[THINK]a[/THINK]C", "removed", "C"),  # Magistral
        ("<seed:think>a</seed:think>C", "removed", "C"),
        ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>C<|END_RESPONSE|>", "removed", "C"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
            "<|channel|>final<|message|>C<|return|>",
            "removed",
            "C",
        ),  # gpt-oss
        (" I think: <b>C</b> <answer>", "", " I think: <b>C</b> <answer>"),
        ("", "", ""),
    ],
)
def test_where_the_answer_begins(text: str, state: str, answer: str | None):
    assert split_reasoning(text) == (state, answer)


def test_one_place_for_all_tasks():
    for one in (*BENCHMARKS.values(), *(task() for task in TASKS.values())):
        assert type(one).score_one is Benchmark.score_one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("benchmarks")
    make_benchmarks(place)
    rows = [
        {"question_id": str(i), "text": f"Which {'very ' * i}one?", "answer": "B", "label": "no"}
        for i in range(6)
    ]
    kinds: dict[str, dict[str, Any]] = {
        "multiple_choice": {"choices": ["one", "red"]},
        "yes_no": {"answer": "no"},
        "short_answer": {"answer": "red"},
    }
    for name, more in kinds.items():
        write(place / name / "questions.jsonl", [{**row, **more} for row in rows])
    return place


NAMES = ("pope", "gqa", "vqav2", "textvqa", "vizwiz", "seedbench", "mmmu", "videomme", *TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_answers(folder: Path, name: str):
    benchmark = get_benchmark(name)
    data = DataFolder.open(folder / name, name, benchmark.layouts)
    questions = benchmark.questions(data.tables, [])
    for profile in benchmark.profiles:
        settings = Settings(profile=profile)
        for first in range(len(TEXTS)):
            answers = [TEXTS[(first + i) % len(TEXTS)] for i in range(len(questions))]
            plain, thought, cut = (
                benchmark.score_all(zip(questions, texts, strict=True), settings)
                for texts in (
                    [text.strip() or None for text in answers],
                    [THINKING.format(text) for text in answers],
                    [CUT] * len(answers),
                )
            )
            if profile.startswith("vlmeval"):
                assert {one.reasoning for one in (*thought, *cut)} == {"kept"}
                continue
            assert [one.extracted for one in plain] == [one.extracted for one in thought]
            assert benchmark.aggregate(plain, settings) == benchmark.aggregate(thought, settings)
            assert [one.text for one in plain] == [one.text for one in thought]
            assert {(one.extracted, one.score, one.parsed) for one in cut} == {(None, 0, False)}
            assert {one.random_fallback for one in cut} == {False}  # MMMU draws for texts only


def test_the_report_says_what_became_of_the_reasoning(tmp_path: Path):
    rows = [
        {"question_id": i, "text": "Is there a dog?", "label": label, "category": "random"}
        for i, label in enumerate(["yes", "no", "no", "no"])
    ]
    labels = write(tmp_path / "labels.jsonl", rows)
    texts = ["<think>no</think>Yes", "<think>It is yes</think>\nNo", "<think>No, not", "no"]
    said = [{"question_id": i, "prediction": text} for i, text in enumerate(texts)]
    said = write(tmp_path / "p.jsonl", said)
    report = score("pope", said, labels)
    assert report["metrics"]["random.accuracy"] == 75
    counts = [report[f"n_{name}"] for name in ("unparsed", "reasoning", "unfinished")]
    assert counts == [1, 3, 1]
    assert report["warnings"][1:] == [
        "2 of 4 texts contain reasoning: only what follows the last end-of-thinking token is the "
        "answer",
        "1 of 4 texts end before the model's answer, in its reasoning (raise --max-new-tokens)",
    ]
    assert "n_unfinished" in format_headline(report)
    assert [item["prediction"] for item in report["items"]] == texts  # as the model wrote them
    kept = score("pope", said, labels, profile="vlmeval")
    assert kept["metrics"]["random.accuracy"] == 50  # a "yes" and a "no" are no answer
    assert kept["warnings"][-1].startswith("3 of 4 texts contain reasoning, which is read as a")


def test_reasoning_that_repeats_the_questions_is_no_file_of_questions(tmp_path: Path):
    rows = [{"question_id": i, "text": f"Is there a dog {i}?", "label": "no"} for i in range(3)]
    labels = write(tmp_path / "l.jsonl", [{**row, "category": "random"} for row in rows])
    said = [
        {"question_id": row["question_id"], "prediction": f"<think>{row['text']}</think>no"}
        for row in rows
    ]
    report = score("pope", write(tmp_path / "p.jsonl", said), labels)
    assert report["metrics"]["random.accuracy"] == 100


def test_rotations_and_submissions_have_answers_without_reasoning(tmp_path: Path):
    rows = [
        {"index": 1_000_000 * turn, "question": "Which?", "answer": "AB"[turn], "category": "ocr"}
        | {"A": ("x", "y")[turn], "B": ("y", "x")[turn]}
        for turn in range(2)
    ]
    references = write(tmp_path / "t.tsv", rows)
    for second, overall, unfinished in (("<think>A</think>B", 100, 0), ("<think>B", 0, 1)):
        said = {0: "A", 1_000_000: second}
        said = [{"question_id": i, "prediction": text} for i, text in said.items()]
        said = write(tmp_path / "p.jsonl", said)
        report = score("mmbench", said, references)
        assert (report["metrics"]["overall"], report["n_unfinished"]) == (overall, unfinished)
        assert report["items"][0]["prediction"] == f"A\n{second}"
    asked = [{"questionId": i, "question": "What?", "docId": i} for i in range(2)]
    references = write(tmp_path / "test_v1.0.json", {"data": asked})
    texts = ["<think>a cat</think>\nA dog.", CUT]
    said = [{"questionId": i, "answer": text} for i, text in enumerate(texts)]
    score(
        "docvqa",
        write(tmp_path / "d.json", said),
        references,
        submission_path=tmp_path / "s.json",
    )
    submitted = json.loads((tmp_path / "s.json").read_text())
    assert [row["answer"] for row in submitted] == ["A dog.", ""]
