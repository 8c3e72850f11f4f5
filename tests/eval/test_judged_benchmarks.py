"""MathVista, MATH-V and MM-Vet on made-up files in their official layouts; scores by hand."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scoring_helpers import prompts_of, write

from coat_cli.main import main
from coat_data.sample import DataError
from coat_eval.benchmark import Settings
from coat_eval.scored_set import read_sets
from coat_eval.scoring import SAVED_VERDICTS, format_headline, score_official
from coat_eval.tasks import get_benchmark, mathvision
from coat_eval.tasks.mathvision import extract_answer, is_equal, is_same_text

SHORT = "Answer the question using a single word or phrase."


def score(name: str, *predictions: Path, references: tuple[Path, ...] = (), **options: Any) -> dict:
    settings = Settings(profile=options.pop("profile", "official"))
    given = {"allow_missing": True, **options}
    return score_official(get_benchmark(name), predictions, references, settings=settings, **given)


def problem(pid: str, answer: str, kind: str = "integer", **fields: Any) -> dict[str, Any]:
    return {
        **{"pid": pid, "question": f"How many are in picture {pid}?", "image": f"images/{pid}.jpg"},
        **{"choices": None, "unit": None, "precision": None, "answer": answer},
        **{"question_type": "free_form", "answer_type": kind},
        "metadata": {"task": "math word problem", "skills": ["arithmetic", "algebra"]},
        **fields,
    }


def choice(pid: str, answer: str, *choices: str, **fields: Any) -> dict[str, Any]:
    own = {"question_type": "multi_choice", "choices": list(choices)}
    return problem(pid, answer, "text", **own, **fields)


MATHVISTA = {
    row["pid"]: row
    for row in (
        problem("1", "3"),
        problem("2", "1.2", "float", precision=1, unit="cm"),
        choice("3", "yes", "yes", "no"),
        choice("4", "(a) 145", "(a) 145", "(b) 15", metadata={"task": "geometry", "skills": []}),
        problem("5", "[1, 2]", "list"),
    )
}


def mathvista_results(path: Path, said: dict[str, dict[str, Any]]) -> Path:
    return write(path, {pid: MATHVISTA[pid] | own for pid, own in said.items()})


def test_mathvista_from_saved_extractions(tmp_path: Path):
    said = {
        "1": {"response": "There are three.", "extraction": "3.9"},  # int(float()): cut
        "2": {"response": "1.23 cm", "extraction": 1.23},
        "3": {"response": "Maybe (B).", "extraction": "(b) no"},  # the letter, in any case
        "4": {"response": "About 140", "extraction": "a) 145 "},  # the smallest edit distance
        "5": {"response": "[1, 2]", "extraction": "[1, 2]"},
    }
    results = mathvista_results(tmp_path / "output.json", said)
    report = score("mathvista", results)
    assert {item["question_id"]: item["score"] for item in report["items"]} == {
        **{"1": 1, "2": 1, "3": 0, "4": 1, "5": 1}
    }
    metrics, counts = report["metrics"], report["counts"]
    assert (metrics["overall"], metrics["question_type.multi_choice"]) == (80, 50)
    assert (metrics["skills.algebra"], counts["skills.algebra"]) == (75, 4)
    assert (metrics["task.geometry"], metrics["answer_type.list"]) == (100, 100)
    assert (report["judge"], report["n_judged"]) == (SAVED_VERDICTS, 5)
    assert f"judge: {SAVED_VERDICTS}" in format_headline(report)
    # An empty extraction, and the letter of no option, still pick a choice: here the shortest.
    # What is no number is unparsed.
    wrong = {"1": "few", "3": "", "4": "(c) 145"}
    said |= {pid: {"response": "?", "extraction": text} for pid, text in wrong.items()}
    again = score("mathvista", mathvista_results(results, said))
    found = {item["question_id"]: item["extracted"] for item in again["items"]}
    assert [found[pid] for pid in wrong] == [None, "no", "(b) 15"]
    assert again["n_unparsed"] == 1


def test_mathvista_from_responses_alone(tmp_path: Path):
    references = write(tmp_path / "annot_testmini.json", MATHVISTA)
    texts = {
        "1": " 3 ",  # int() of the text
        "2": "1.24",
        "3": "no",  # a choice
        "4": 'So. The answer is "(a) 145".',
        "5": "It is [1, 2]",  # GPT-4 is asked
    }
    rows = [{"question_id": pid, "prediction": text} for pid, text in texts.items()]
    report = score("mathvista", write(tmp_path / "p.jsonl", rows), references=(references,))
    scores = {item["question_id"]: item["score"] for item in report["items"]}
    assert scores == {"1": 1, "2": 1, "3": 0, "4": 1, "5": 0}
    counts = [report[name] for name in ("n_unparsed", "n_needs_judge", "n_judged")]
    assert (counts, report["judge"]) == ([0, 1, 0], "")
    assert (
        "1 of 5 answers need a judge and are not in the score: --judge asks one"
        in (report["warnings"])
    )
    metrics = report["metrics"]
    assert (metrics["overall"], report["n"], report["units"]["overall"]) == (75, 4, "4 images")
    assert (metrics["question_type.free_form"], "answer_type.list" in metrics) == (100, False)
    report_path = write(tmp_path / "r.json", report)  # compare has the same items
    assert read_sets(report_path)["mathvista"].metrics["overall"] == 75
    broken = write(tmp_path / "b.json", {"1": MATHVISTA["3"] | {"choices": []}})
    with pytest.raises(DataError, match="is multi_choice with 0 choices"):
        score("mathvista", tmp_path / "p.jsonl", references=(broken,))
    with pytest.raises(DataError, match="is not a file of mathvista predictions"):
        score("mathvista", references, references=(references,))


def test_prompts_of_mathvista(tmp_path: Path):
    write(tmp_path / "annot_testmini.json", MATHVISTA)
    first, second, third, *_ = prompts_of(tmp_path, "mathvista")
    assert first.text == (
        "Hint: Please answer the question requiring an integer answer and provide the final value, "
        "e.g., 1, 2, 3, at the end.\nQuestion: How many are in picture 1?"
    )
    assert "with one decimal place and provide the final value, e.g., 1.2, 1.3, 1.4" in second.text
    assert second.text.endswith("Question: How many are in picture 2? (Unit: cm)")
    assert third.text.endswith("picture 3?\nChoices:\n(A) yes\n(B) no")
    assert Path(first.media[0].path) == tmp_path / "images" / "1.jpg"
    hub = tmp_path / "hub"
    hub.mkdir()
    rows = [
        row | {"query": "Asked", "decoded_image": {"bytes": b"x"}} for row in MATHVISTA.values()
    ]
    for row in rows:
        row["metadata"] = {"task": "x", "skills": ["y"]}
    pq.write_table(pa.Table.from_pylist(rows), hub / "testmini-00000-of-00001.parquet")
    (first, *_) = prompts_of(hub, "mathvista")
    assert (first.text, first.question_id) == ("Asked", "1")
    assert first.media[0].load().data == b"x"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("So it must be B.", "b"),
        ("It is (C).", "c"),
        ("(D) D\nbecause", "d"),
        ("The length is 12.5.", "12.5"),
        ("Thus the answer is 7. Or not.", "7"),
        ("The answer is 3\nis it", "3"),
        ("\\boxed{1} and \\boxed{x = \\frac{3}{4}}", "\\frac{3}{4}"),
        ("$\\boxed{(A)}$", "a"),
        ("\\boxed{45^{\\circ}}", "45"),
        ("\\boxed{12\\text{ cm}}", "12{cm}"),
        ("\\boxed{5 km}", "5"),
        ("\\boxed{.5}", "\\frac{1}{2}"),
        ("-3/4", "\\frac{-3}{4}"),
        ("03/4", "03/4"),
        ("\\boxed{\\sqrt2 + \\dfrac12}", "\\sqrt{2}+\\frac{1}{2}"),
        ("\\boxed{\\sqrt\\sqrt2}", "\\sqrt\\sqrt{2}"),
        ("x \\approx 3.14", "3.14"),
        ("about 50\\%", "about50"),
        ("   ", ""),
    ],
)
def test_extraction_of_mathvision(text: str, wanted: str):
    assert extract_answer(text) == wanted


def test_values_of_mathvision():
    # Plain numbers need no package.
    for answer, said in (("3", "3.0"), ("0.333", "0.33"), ("(1, 2.001)", "(1,2.0)"), ("A", "a ")):
        assert is_equal(answer, said), (answer, said)
    for answer, said in (("3", "3.1"), ("", ""), ("3", " ")):
        assert not is_equal(answer, said), (answer, said)
    assert is_same_text("A", "a ")
    assert not is_same_text("3", "3.0")
    assert not is_same_text("", "")
    pytest.importorskip("latex2sympy2")
    for answer, said in (
        ("\\frac{1}{2}", "0.5"),
        ("\\sqrt{2}", "1.414"),
        ("2\\pi", "6.28"),
        ("$\\frac{3^{1008}-1}{3^{1009}}$", "\\frac{1}{3}"),
        ("(\\frac{1}{2},3)", "(0.5,3)"),
    ):
        assert is_equal(answer, said), (answer, said)
    for answer, said in (
        ("x", "x+1"),
        ("e", "2.718"),
        ("3", "\\frac{"),
        ("9^{9^{9}}", "2^{9^{9}}"),
        ("[1,2]", "(1,2)"),
    ):
        assert not is_equal(answer, said), (answer, said)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("the total is thus " + "some of the apples and pears " * 700, False),
        ("1" + "+1" * 10_000, False),
        ("(" * 20_000, False),
        ("5. The reason is " + "that there are some more of them " * 600, True),  # as upstream
        (r"\gcd(9^{9^{9}},5)", False),
        (r"\binom{9999999}{4999999}", False),
        (r"\binom{6}{3}^{1}-15", True),
        ("100000000!", False),
        ("(20000!,5)", False),
    ],
)
def test_no_answer_of_mathvision_takes_long(said: str, right: bool):
    pytest.importorskip("latex2sympy2")
    assert is_equal("5", said.replace(" ", "").lower()) == right


def mathvision_rows() -> list[dict[str, Any]]:
    row = {"question": "Which <image1>?", "image": "images/1.jpg", "level": 2}
    return [
        {**row, "id": "1", "options": list("ABCDE"), "answer": "B", "subject": "algebra"},
        {**row, "id": "2", "options": list("34567"), "answer": "C", "subject": "algebra"},
        {**row, "id": "3", "options": [], "answer": "60", "subject": "counting", "level": 1},
    ]


def test_mathvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    references = write(tmp_path / "test.jsonl", mathvision_rows())
    said = {"1": "It is B.", "2": "The answer is 5.", "3": "\\boxed{60.0}"}
    rows = [{"id": key, "response": text} for key, text in said.items()]
    answers = write(tmp_path / "p.jsonl", rows)
    monkeypatch.setattr(mathvision, "find_spec", lambda _: object())
    no_value = SimpleNamespace(latex2sympy=lambda text: text)  # a letter has none
    monkeypatch.setitem(sys.modules, "latex2sympy2", no_value)
    report = score("mathvision", answers, references=(references,))
    assert report["metrics"] == {
        **{"overall": 100, "level.1": 100, "level.2": 100},
        **{"subject.algebra": 100, "subject.counting": 100},
        **{"subject_level.algebra_level2": 100, "subject_level.counting_level1": 100},
    }
    texts = score("mathvision", answers, references=(references,), profile="string")
    assert texts["metrics"]["overall"] == pytest.approx(200 / 3)
    assert "only equal texts: not the official score" in format_headline(texts)
    # Without the package the official profile says what to do, before anything is generated.
    monkeypatch.setattr(mathvision, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[math\]', or .* --profile string"):
        score("mathvision", answers, references=(references,))
    command = ["eval", "--model", "none", "--tasks", "mathvision", "--data", str(tmp_path)]
    assert main([*command, "--to", str(tmp_path / "out")]) == 2
    first, second, third = prompts_of(tmp_path, "mathvision")
    assert first.text == f"Which <image1>?\n\n{SHORT}"  # letters stand in the image
    listed = "Which <image1>?\n(A) 3\n(B) 4\n(C) 5\n(D) 6\n(E) 7\n"
    assert second.text == f"{listed}\n{SHORT}"
    assert Path(third.media[0].path) == tmp_path / "images" / "1.jpg"
    steps = prompts_of(tmp_path, "mathvision", variant="steps")[1].text
    assert steps.startswith("Please solve the problem step by step")
    assert steps.endswith(listed)
    broken = [mathvision_rows()[1] | {"answer": "F"}]
    with pytest.raises(DataError, match="the answer is 'F' and there are 5 options"):
        score(
            "mathvision",
            answers,
            references=(write(tmp_path / "b.jsonl", broken),),
            profile="string",
        )


def test_mmvet_over_runs(tmp_path: Path):
    draw = random.Random(1)
    grades = {f"v1_{i}": [draw.randrange(11) / 10 for _ in range(3)] for i in range(9)}
    rows = {
        key: {"model": ["gpt-4"] * 3, "content": list(map(str, own)), "score": own}
        for key, own in grades.items()
    }
    path = write(tmp_path / "x_gpt-4-grade-3runs.json", rows)
    metrics = score("mmvet", path)["metrics"]
    # As mm-vet_evaluator.py: sums per run, then numpy's mean and std over the runs.
    numpy = pytest.importorskip("numpy")
    runs = numpy.array(list(grades.values())).sum(axis=0) / 9 * 100
    assert [metrics[f"run.{i}"] for i in (1, 2, 3)] == pytest.approx(list(runs))
    assert metrics["total"] == pytest.approx(runs.mean())
    assert metrics["std"] == pytest.approx(runs.std())
    for grade, words in (([0.5, 0.5], "of 3 runs"), ([0.5, 2, 0], "from 0 to 1"), ("x", "3 runs")):
        broken = write(tmp_path / "b.json", rows | {"v1_8": rows["v1_8"] | {"score": grade}})
        with pytest.raises(DataError, match="the grades are") as error:
            score("mmvet", broken)
        assert words in str(error.value)
        assert error.value.where == f"{broken}, row 9"


def test_prompts_of_mmvet(tmp_path: Path):
    row = {"imagename": "v1_0.png", "question": "What is x?", "answer": "-1<AND>5"}
    write(tmp_path / "mm-vet.json", {"v1_0": {**row, "capability": ["ocr", "math"]}})
    (plain,) = prompts_of(tmp_path, "mmvet")
    assert (plain.text, plain.question_id) == ("What is x?", "v1_0")
    assert Path(plain.media[0].path) == tmp_path / "images" / "v1_0.png"
    (lmms,) = prompts_of(tmp_path, "mmvet", variant="lmms")
    assert lmms.text.startswith("First please perform reasoning")
    assert lmms.text.endswith("question: \n\nWhat is x?")
