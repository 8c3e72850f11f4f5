"""Standard errors, by the paper's formula over pairs and by torch-free simulation; profiles."""

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from scoring_helpers import write_lines as write

from coat_eval.benchmark import UPSTREAM, Question, Settings
from coat_eval.extract import infer_letter
from coat_eval.remarks import get_official_size
from coat_eval.scoring import format_headline, score_official
from coat_eval.tasks import BENCHMARKS, get_benchmark
from coat_eval.uncertainty import Term, estimate


def test_the_formula_of_miller_2024_written_out_over_pairs():
    """Equation 4 of arXiv:2411.00640, term by term."""
    rng = random.Random(0)
    clusters = [f"image {rng.randrange(12)}" for _ in range(50)]
    scores = [float(rng.random() < 0.6) for _ in clusters]
    n, mean = len(scores), sum(scores) / len(scores)
    squared = sum((s - mean) ** 2 for s in scores) / (n - 1) / n
    for first, second in itertools.permutations(range(n), 2):
        if clusters[first] == clusters[second]:
            squared += (scores[first] - mean) * (scores[second] - mean) / n**2
    found = estimate(list(map(Term, scores, [1.0] * n, clusters))).standard_error
    assert found == pytest.approx(100 * math.sqrt(squared), rel=1e-9)
    # Without clusters the central limit theorem's: sqrt(p (1 - p) / (n - 1)) for scores 0 and 1.
    alone = estimate(list(map(Term, scores))).standard_error
    assert alone == pytest.approx(100 * math.sqrt(mean * (1 - mean) / (n - 1)), rel=1e-9)


def test_the_error_of_f1_is_its_spread_over_repeated_draws_of_images():
    """F1 is a ratio: the linearized error must equal the spread of F1 over new samples."""
    rng = random.Random(1)
    sample, found, size = [], [], 300

    def draw() -> tuple[list[float], list[float], list[str]]:
        above, below, names = [], [], []
        for image in range(size):
            skill = rng.choice((0.5, 0.95))  # questions of an image are alike
            for _ in range(3):
                label, right = rng.random() < 0.5, rng.random() < skill
                above.append(2.0 * (label and right))
                below.append(above[-1] + (not right))
                names.append(str(image))
        return above, below, names

    for _ in range(400):
        above, below, names = draw()
        sample.append(100 * sum(above) / sum(below))
        found.append(estimate(list(map(Term, above, below, names))).standard_error)
    mean = sum(sample) / len(sample)
    spread = math.sqrt(sum((one - mean) ** 2 for one in sample) / (len(sample) - 1))
    # The spread of 400 draws has a relative standard error of 1 / sqrt(800) = 3.5%.
    assert sum(found) / len(found) == pytest.approx(spread, rel=0.14)
    above, below, names = draw()
    loose = estimate(list(map(Term, above, below))).standard_error
    assert loose < 0.95 * estimate(list(map(Term, above, below, names))).standard_error


def test_every_report_has_errors_clustered_by_image(tmp_path: Path):
    """Three questions about each image, all right or all wrong: as if each image were one."""
    questions = {
        str(i): {"question": "Is it?", "answer": "yes", "imageId": f"n{i // 3}"} for i in range(12)
    }
    (tmp_path / "q.json").write_text(json.dumps(questions))
    rows = [{"question_id": str(i), "prediction": "yes" if i // 3 % 2 else "no"} for i in range(12)]
    answers = write(tmp_path / "a.jsonl", rows)
    report = score_official(get_benchmark("gqa"), [answers], [tmp_path / "q.json"])
    # Sum over images of (3 * 0.5)^2 / 12^2 plus 12 * 0.25 / (12 * 11) - 12 * 0.25 / 144.
    squared = 4 * 1.5**2 / 144 + 3 / 132 - 3 / 144
    assert report["standard_errors"]["accuracy"] == pytest.approx(100 * math.sqrt(squared))
    assert f"accuracy              50.0000  +- {100 * math.sqrt(squared):.4f}" in (
        format_headline(report)
    )


CHOICES = {"A": "a red car", "B": "a blue bus", "C": "a bike", "D": "a train"}


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        # The letter is unique but early: only the later rule of VLMEvalKit finds it.
        ("The correct answer is B. It is clearly visible at the left of the street.", "B"),
        ("The answer is **C** because option C shows a thing, and option D does not.", "C"),
        # A and B are both words; the statement decides, in any case.
        ("A or B? The answer is b", "B"),
        # As upstream: "a cat" begins with A, and A to D are the only letters.
        ("I think that the answer is a thing that nobody can see in this image here.", "A"),
        ("Not sure. Is it Z?", None),
        ("It is hard to say what stands there.", None),
    ],
)
def test_vlmevalkits_later_rule(text: str, letter: str | None):
    """Pull request 1552 of open-compass/VLMEvalKit; after the letter, before the choice's text."""
    assert infer_letter(text, CHOICES) == letter


def test_every_profile_names_the_commit_that_it_follows(tmp_path: Path):
    guide = Path(__file__).parents[2] / "docs" / "reference" / "benchmarks.md"
    documented = guide.read_text()
    for commit in UPSTREAM.values():
        assert commit in documented
    for benchmark in BENCHMARKS.values():
        for profile in benchmark.profiles:
            assert "@" in benchmark.get_upstream(profile)
    labels = write(
        tmp_path / "labels.jsonl",
        [{"question_id": 1, "text": "Is there a dog?", "label": "yes", "category": "random"}],
    )
    answers = write(tmp_path / "a.jsonl", [{"question_id": 1, "prediction": "yes"}])
    report = score_official(
        get_benchmark("pope"), [answers], [labels], settings=Settings(profile="vlmeval")
    )
    assert (report["n"], report["n_official"]) == (1, 9000)
    assert get_official_size(get_benchmark("pope"), 3000) == 3000  # one split alone is complete
    assert report["follows"] == UPSTREAM["vlmeval"]
    assert f"profile vlmeval: rules of {UPSTREAM['vlmeval']}" in format_headline(report)


@pytest.mark.parametrize("name", ["seedbench", "mmmu", "mmstar", "scienceqa", "mmbench"])
def test_both_versions_of_a_changed_rule_stand_beside_each_other(name: str):
    """VLMEvalKit's pull request 1552: two letters were undecided before "answer is X"."""
    benchmark = get_benchmark(name)
    choices = {"A": "a cup", "B": "a plate", "C": "a fork"}
    details = {"choices": choices, "type": "multiple-choice"}
    question = Question(question_id="1", answer="B", details=details)
    text = "The answer is B, because C would be made of steel and not of clay"
    read = {
        profile: benchmark.extract(text, question, Settings(profile=profile))
        for profile in ("vlmeval", "vlmeval@c03bc048")
    }
    assert read == {"vlmeval": "B", "vlmeval@c03bc048": None}
    assert benchmark.get_upstream("vlmeval@c03bc048") == "open-compass/VLMEvalKit @c03bc048"
    with pytest.raises(ValueError, match=r"no profile 'vlmeval@1'; allowed: .*vlmeval@c03bc048"):
        benchmark.check_profile("vlmeval@1")
