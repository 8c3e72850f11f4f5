"""Standard errors, intervals and tests against formulas, draws and resamples written out here."""

import itertools
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from interval_coverage import LEVELS, NO_MEANS, list_metrics, make_items, measure_coverage
from scoring_helpers import write_lines as write
from test_compare import RECIPE

from coat_cli.main import main
from coat_eval.compare_models import compare_items, compare_runs
from coat_eval.results_page import build_results
from coat_eval.scored_set import read_sets
from coat_eval.scoring import format_headline, score_official
from coat_eval.tasks import BENCHMARKS, get_benchmark
from coat_eval.uncertainty import (
    PERMUTATIONS,
    Term,
    count_discordant,
    estimate,
    mcnemar_p_value,
    permutation_p_value,
    subtract,
)

Z = 1.959963984540054
Numbers = np.ndarray
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "benchmarks.md"


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
    independent = estimate(list(map(Term, scores))).standard_error
    assert independent == pytest.approx(100 * math.sqrt(mean * (1 - mean) / (n - 1)), rel=1e-9)


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


def test_wilsons_interval_has_the_number_of_independent_questions() -> None:
    """Its ends are the shares p whose distance from k / n is 1.96 sqrt(p (1 - p) / n)."""
    for right, count in ((0, 7), (3, 40), (199, 200), (200, 200)):
        scores = [1.0] * right + [0.0] * (count - right)
        for end in estimate(list(map(Term, scores))).interval:
            p = end / 100
            assert abs(p - right / count) == pytest.approx(Z * math.sqrt(p * (1 - p) / count))
    # Each question three times about the same image is worth one question.
    tripled = [Term(score, unit=str(i)) for i, score in enumerate([1.0] * 90 + [0.0] * 110)] * 3
    single = estimate(list(map(Term, [1.0] * 90 + [0.0] * 110)))
    assert estimate(tripled).interval == pytest.approx(single.interval, abs=0.02)


def test_the_interval_of_a_difference_adds_a_pair_to_either_side() -> None:
    """Bonett and Price 2012, from the numbers of pairs that differ."""
    for both, b, c, n in ((90, 12, 20, 200), (150, 0, 0, 200), (10, 3, 0, 60)):
        first = [1.0] * (both + b) + [0.0] * (n - both - b)
        second = [1.0] * both + [0.0] * b + [1.0] * c + [0.0] * (n - both - b - c)
        models = [estimate(list(map(Term, scores))) for scores in (first, second)]
        p, q = (b + 1) / (n + 2), (c + 1) / (n + 2)
        half = Z * math.sqrt((p + q - (q - p) ** 2) / (n + 2))
        error, interval = subtract(*models)
        assert interval == pytest.approx((100 * (q - p - half), 100 * (q - p + half)))
        assert error**2 == pytest.approx(1e4 * ((b + c) / n - ((c - b) / n) ** 2) / (n - 1))
        assert count_discordant(*models) == (b, c)


def test_intervals_near_0_and_of_models_that_hardly_differ() -> None:
    """The exact coverage that docs/experiments/interval_coverage.md states, of 200 questions."""
    found, count = {}, 200
    for percent in (1, 2, 10, 50):
        p, covered = percent / 100, np.zeros(3)
        for right in range(count + 1):
            scores = [1.0] * right + [0.0] * (count - right)
            one, zero = estimate(list(map(Term, scores))), estimate([Term(0.0)] * count)
            ends = one.value - Z * one.standard_error, one.value + Z * one.standard_error
            intervals = (ends, one.interval, subtract(zero, one)[1])
            weight = math.comb(count, right) * p**right * (1 - p) ** (count - right)
            covered += [weight * (low <= percent <= high) for low, high in intervals]
        found[percent] = [round(100 * one, 1) for one in covered]
    page = (REFERENCE.parents[1] / "experiments" / "interval_coverage.md").read_text()
    usual, values, differences = zip(*found.values(), strict=True)
    for case, *stated in (
        *zip(("value of 1%", "2%", "10%", "50%"), usual, values, strict=True),
        ("the second model is right where the first is, and on 1% more", usual[0], differences[0]),
        *zip(("on 2% more", "on 10% more"), usual[1:3], differences[1:3], strict=True),
    ):
        assert f"| {case} | {stated[0]} | {stated[1]} |" in page
    alike = estimate(list(map(Term, [1.0, 0.0] * 100)))
    assert subtract(alike, alike)[1] == pytest.approx((-1.37, 1.37), abs=0.01)


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 0, 1.0),
        (0, 5, 2 / 32),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (3, 3, 1.0),
        (12, 20, 2 * sum(math.comb(32, k) for k in range(13)) / 2**32),
        (900, 1000, 2 * sum(math.comb(1900, k) for k in range(901)) / 2**1900),
    ],
)
def test_mcnemar_is_twice_the_binomial_tail(b: int, c: int, p: float) -> None:
    assert mcnemar_p_value(b, c) == mcnemar_p_value(c, b) == pytest.approx(p, rel=1e-10)


def test_the_permutation_test_flips_the_signs_of_whole_units() -> None:
    """Soft scores about ten images: all 2^10 signs."""
    rng = np.random.default_rng(0)
    images = np.repeat(np.arange(10), 3)
    scores = rng.choice([0, 0.3, 0.6, 0.9, 1], size=(2, 30))
    scores[1] += 0.25
    gaps = np.bincount(images, scores[1] - scores[0])
    signs = np.array(list(itertools.product((-1, 1), repeat=10)))
    exact = np.mean(np.abs(signs @ gaps) >= abs(gaps.sum()) - 1e-9)
    assert 0.02 < exact < 0.5
    models = [
        estimate([Term(score, unit=str(i)) for score, i in zip(row, images, strict=True)])
        for row in scores
    ]
    error = math.sqrt(exact * (1 - exact) / PERMUTATIONS)
    assert permutation_p_value(*models) == pytest.approx(exact, abs=5 * error)
    assert permutation_p_value(models[0], models[0]) == 1
    assert count_discordant(*models) is None


def draw_units(count: int, rng: np.random.Generator) -> Numbers:
    return rng.integers(count, size=(4000, count))


def make_report(folder: Path, name: str, questions: Any, rows: list[dict[str, Any]]) -> Path:
    """FOLDER/NAME/report.json of the real scorer."""
    folder = folder / name
    folder.mkdir(parents=True)
    (folder / "references.json").write_text(json.dumps(questions))
    write(folder / "predictions.jsonl", rows)
    paths = [folder / "predictions.jsonl"], [folder / "references.json"]
    options: Any = {"allow_missing": True}
    score_official(get_benchmark(name), *paths, **options, report_path=folder / "report.json")
    return folder.parent


def hallusion_reports(folder: Path, wrong: dict[str, Numbers]) -> list[Path]:
    """Reports of models that answer these questions [figures, questions of a figure] wrongly."""
    paths = []
    for model, table in wrong.items():
        questions, rows = [], []
        for figure, number in np.ndindex(*table.shape):
            name = {"category": "VD", "subcategory": "ocr", "visual_input": "1"}
            name |= {"set_id": str(figure // 2), "figure_id": str(figure % 2 + 1)}
            name |= {"question_id": str(number)}
            questions.append({**name, "question": f"{figure} {number}?", "gt_answer": "1"})
            said = "No." if table[figure, number] else "Yes."
            rows.append({"question_id": "_".join(name.values()), "prediction": said})
        paths.append(make_report(folder / model, "hallusionbench", questions, rows))
    return paths


def test_figures_and_not_questions_count_in_facc(tmp_path: Path) -> None:
    """Twelve figures against twenty: p = 0.215; the questions on them would give 0.002."""
    wrong = {"a": np.zeros((200, 3), bool), "b": np.zeros((200, 3), bool)}
    wrong["b"][:12, 0] = wrong["a"][20:40, :2] = wrong["a"][50:90] = wrong["b"][50:90] = True
    paths = hallusion_reports(tmp_path, wrong)
    rows = {row.metric: row for row in compare_items(paths).differences}
    row = rows["fAcc"]
    assert (row.first, row.second) == pytest.approx((70, 74))
    assert (row.only_first, row.only_second, row.size) == (12, 20, "200 figures")
    tail = sum(math.comb(32, k) for k in range(13))
    assert (row.test, row.p_value) == ("McNemar", pytest.approx(2 * tail / 2**32))
    right = [~wrong[model].any(1) for model in "ab"]
    gaps = (right[1].astype(float) - right[0])[draw_units(200, np.random.default_rng(0))].mean(1)
    # Percentiles of 4,000 draws have a standard error of 0.07; one pair to each side adds 0.05.
    assert row.interval == pytest.approx(tuple(100 * np.percentile(gaps, [2.5, 97.5])), abs=0.4)
    assert rows["qAcc"].size == "300 questions of all figures"
    assert rows["aAcc"].size == "600 in 100 sets of figures"
    assert rows["aAcc"].test == "permutation"
    report = json.loads((paths[0] / "hallusionbench" / "report.json").read_text())
    assert report["units"] == {metric: one.size for metric, one in rows.items()}
    share = right[0].mean()
    assert report["standard_errors"]["fAcc"] == pytest.approx(
        100 * math.sqrt(share * (1 - share) / 199)
    )


def test_f1_of_pope_is_resampled_by_image(tmp_path: Path) -> None:
    """Images in all three splits, easy or hard for both models."""
    rng = np.random.default_rng(1)
    splits, labels = ("random", "popular", "adversarial"), np.array(["yes", "no"] * 3)
    hard, paths, said = rng.random(200) < 0.4, [], []
    for model in "ab":
        skill = np.where(hard, 0.55 if model == "a" else 0.7, 0.95)
        right = rng.random((200, 18)) < skill[:, None]
        flipped = {"yes": "no", "no": "yes"}
        questions, rows, texts = [], [], []
        for image, place in np.ndindex(200, 18):
            label = str(labels[place % 6])
            ids = {"question_id": f"{image}.{place}", "category": splits[place // 6]}
            texts.append(label if right[image, place] else flipped[label])
            asked = {"text": "Is it?", "label": label, "image": f"{image}.jpg"}
            questions.append({**ids, **asked})
            rows.append({**ids, "prediction": texts[-1]})
        said.append(np.array(texts).reshape(200, 3, 6))
        paths.append(make_report(tmp_path / model, "pope", questions, rows))
    row = next(one for one in compare_items(paths).differences if one.metric == "mean_f1")

    def sum_up(texts: Numbers) -> tuple[Numbers, Numbers]:
        """2 TP and 2 TP + FP + FN of every image and split."""
        twice = 2.0 * ((texts == "yes") & (labels == "yes")).sum(2)
        return twice, twice + (texts != labels).sum(2)

    drawn = draw_units(200, rng)
    f1s = [
        (above[drawn].sum(1) / below[drawn].sum(1)).mean(1) for above, below in map(sum_up, said)
    ]
    gaps = 100 * (f1s[1] - f1s[0])
    # 4,000 draws: the spread has a relative error of 1%, a percentile one of 0.04 spreads.
    assert row.standard_error == pytest.approx(gaps.std(), rel=0.05)
    assert row.interval is not None
    low, high = np.percentile(gaps, [2.5, 97.5])
    assert row.interval == pytest.approx((low, high), abs=0.25 * gaps.std())
    assert (row.size, row.test) == ("3600 in 200 images", "permutation")
    # Without images, as compare drew questions at first, the interval is too narrow.
    (scored,) = read_sets(paths[0]).values()
    loose = estimate([replace(term, unit="") for term in scored.estimates["mean_f1"].terms])
    assert loose.standard_error < 0.8 * scored.estimates["mean_f1"].standard_error


def test_score_compare_groups_and_page_have_one_unit(tmp_path: Path) -> None:
    """Ten questions about each of 60 pictures, on each of which a model is good or bad."""
    rng, runs, right = np.random.default_rng(2), [], []
    for run in range(4):
        skill = np.where(rng.random(60) < (0.5 if run < 2 else 0.7), 0.9, 0.3)
        right.append(rng.random((60, 10)) < skill[:, None])
        folder = tmp_path / f"run{run}"
        (folder / "eval" / "naming").mkdir(parents=True)
        sets = {"naming": RECIPE["eval_sets"]["naming"]}
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "eval_sets": sets}))
        steps = [{"kind": "step", "stage": "sft", "step": 1, "loss": 1.0}]
        (folder / "metrics.jsonl").write_text(json.dumps(steps[0]))
        questions, rows = [], []
        for picture, number in np.ndindex(60, 10):
            name = f"{picture}.{number}"
            asked = {"question_id": name, "text": "What?", "image": f"{picture}.png"}
            questions.append({**asked, "answer": "red"})
            said = "red" if right[run][picture, number] else "blue"
            rows.append({"question_id": name, "prediction": said})
        write(tmp_path / "questions.jsonl", questions)
        write(tmp_path / "predictions.jsonl", rows)
        words = ["--predictions", str(tmp_path / "predictions.jsonl"), "--out"]
        report = folder / "eval" / "naming" / "report.json"
        assert main(["score", f"short_answer={tmp_path}", *words, str(report)]) == 0
        (folder / "eval.json").write_text("{}")
        runs.append(folder)
    means = 100 * np.array(right, float).mean(2)  # [runs, pictures]
    drawn = draw_units(60, rng)
    (row,) = [row for row in compare_runs(runs[:2], runs[2:]) if row.name == "naming"]
    gaps = (means[2:].mean(0) - means[:2].mean(0))[drawn].mean(1)
    assert row.size == "600 in 60 images or videos"
    assert row.interval == pytest.approx(np.percentile(gaps, [2.5, 97.5]), abs=0.3 * gaps.std())
    assert (row.test, row.detectable) == (
        "permutation",
        pytest.approx(2.8016 * gaps.std(), rel=0.1),
    )
    flips = rng.choice((-1, 1), size=(4000, 60)) * (means[2:].mean(0) - means[:2].mean(0))
    p = np.mean(np.abs(flips.mean(1)) >= abs(row.difference or 0) - 1e-9)
    assert row.p_value == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / 4000) + 1e-3)
    comparison = compare_items([runs[0], runs[2]])
    (tested,) = comparison.differences
    gaps = (means[2] - means[0])[drawn].mean(1)
    assert tested.standard_error == pytest.approx(gaps.std(), rel=0.05)
    assert tested.interval == pytest.approx(np.percentile(gaps, [2.5, 97.5]), abs=0.3 * gaps.std())
    report = json.loads((runs[0] / "eval/naming/report.json").read_text())
    first, second = build_results(comparison)[0]
    low, high = report["intervals"]["accuracy"]
    assert (first.interval, first.size) == ((low, high), report["units"]["accuracy"])
    assert (second.tested, second.size) == (tested, row.size)
    values = means[0][drawn].mean(1)
    assert report["standard_errors"]["accuracy"] == pytest.approx(values.std(), rel=0.05)
    assert (low, high) == pytest.approx(np.percentile(values, [2.5, 97.5]), abs=0.3 * values.std())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_headline_metric_declares_its_unit(name: str) -> None:
    benchmark, rng = BENCHMARKS[name], np.random.default_rng(0)
    table = re.search(r"\| unit \| benchmarks \|\n(.*?)\n\n", REFERENCE.read_text(), re.DOTALL)
    assert table is not None
    for metric in benchmark.headline:
        items = list(itertools.islice(make_items(benchmark, metric, rng), 40))
        answered = [{**item, "score": 1.0, "extracted": item["reference"]} for item in items]
        found = benchmark.estimate(metric, answered, "official")
        assert (found is None) == ((name, metric) in NO_MEANS)
        if found is not None and metric != "unanswerable_rate":
            full = {"perception": 2000, "cognition": 800, "final_score": 40}.get(metric, 100)
            assert found.value == pytest.approx(full)
            assert found.unit in table[1]
        rows = [row for row in table[1].split("\n") if re.search(rf"\b{name}\b", row)]
        assert benchmark.unit == "images" or any(benchmark.get_unit(metric) in row for row in rows)


def check_coverage(name: str, metric: str, **options: Any) -> None:
    """Nominal 95% is between 93 and 97 for true values from 10 to 90%."""
    for coverages in measure_coverage(name, metric, **options):
        assert all(93 <= one <= 97 for one in coverages), coverages


@pytest.mark.parametrize(
    ("name", "metric"),
    [("mmmu", "overall"), ("hallusionbench", "fAcc"), ("videomme", "short"), ("vizwiz", "overall")],
)
def test_intervals_cover_the_true_value(name: str, metric: str) -> None:
    check_coverage(name, metric, levels=(10, 50, 90), samples=5000)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "metric"), list_metrics())
def test_intervals_of_every_metric_cover_the_true_value(name: str, metric: str) -> None:
    check_coverage(name, metric, levels=LEVELS[1:-1])
    text = REFERENCE.with_name("interval_coverage.md").read_text()
    row = next(row for row in text.split("\n") if row.startswith(f"| {name} {metric} |"))
    assert f"| {BENCHMARKS[name].get_unit(metric)} |" in row
