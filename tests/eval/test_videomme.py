"""Video-MME on made-up results in the official format; scores worked out by hand."""

from pathlib import Path

import pytest
from scoring_helpers import write

from coat_data.sample import DataError
from coat_eval.benchmark import Settings
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark

VIDEOMME = get_benchmark("videomme")
OPTIONS = ["A. Two.", "B. Three.", "C. Four.", "D. Five."]


def video(number: str, duration: str, domain: str, asked: list[tuple[str, str, str]]) -> dict:
    questions = [
        {
            "question_id": f"{number}-{place}",
            "task_type": task,
            "question": "?",
            "options": OPTIONS,
            "answer": answer,
            "response": response,
        }
        for place, (task, answer, response) in enumerate(asked, start=1)
    ]
    head = {"video_id": number, "duration": duration, "domain": domain, "sub_category": "Food"}
    return {**head, "questions": questions}


RESULTS = [
    video(
        "001",
        "short",
        "Life Record",
        [
            ("Counting Problem", "B", "The best answer is: B. Three."),
            ("Counting Problem", "C", "Answer: C"),
            ("OCR Problems", "A", "definitely three of them"),
        ],
    ),
    video("002", "long", "Knowledge", [("OCR Problems", "D", "So it is D")]),
]


def run(path: Path, *references: Path, profile: str = "official", **options) -> dict:
    settings = Settings(profile=profile)
    options = {"allow_missing": not references, **options}  # two of the 900 videos
    return score_official(VIDEOMME, [path], references, settings=settings, **options)


def test_results_carry_their_answers_and_the_unanswered_are_left_out(tmp_path: Path):
    report = run(write(tmp_path / "results.json", RESULTS))
    metrics = report["metrics"]
    # Of four questions three are answered, all rightly; "definitely ..." has no A to D.
    assert metrics["overall"] == metrics["short"] == metrics["long"] == 100
    assert metrics["unanswered_wrong.overall"] == 75
    assert metrics["unanswered_wrong.short"] == pytest.approx(200 / 3)
    assert metrics["unanswered_wrong.task_type.OCR Problems"] == 50
    assert metrics["domain.Life Record"] == metrics["sub_category.Food"] == 100
    assert "medium" not in metrics
    assert (report["n"], report["n_unparsed"]) == (4, 1)


def test_profiles(tmp_path: Path):
    path = write(tmp_path / "results.json", RESULTS)
    assert run(path, profile="lmms")["metrics"]["overall"] == 75
    # vlmeval finds "three" among the options: B, wrong.
    assert run(path, profile="vlmeval")["metrics"]["overall"] == 75
    assert run(path, profile="vlmeval")["n_unparsed"] == 0


def test_rows_by_id_with_flat_references(tmp_path: Path):
    flat = [
        {**{k: v for k, v in one.items() if k != "questions"}, **asked}
        for one in RESULTS
        for asked in one["questions"]
    ]
    for row in flat:
        del row["response"]
    rows = [{"question_id": row["question_id"], "prediction": row["answer"]} for row in flat]
    path, references = write(tmp_path / "p.json", rows), write(tmp_path / "flat.json", flat)
    assert run(path, references)["metrics"]["overall"] == 100
    with pytest.raises(ValueError, match="does not contain the answers"):
        run(path)


def test_a_missing_video_is_an_error_or_counted(tmp_path: Path):
    marked = [RESULTS[0], {**RESULTS[1], "missing": True}]
    path = write(tmp_path / "results.json", marked)
    with pytest.raises(DataError, match="no prediction for question '002-1'"):
        run(path, allow_missing=False)
    report = run(path, allow_missing=True)
    assert report["n_missing"] == 1
    assert report["metrics"]["overall"] == 100
    assert report["metrics"]["unanswered_wrong.overall"] == 50
