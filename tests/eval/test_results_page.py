"""The results page, and the differences that a number of questions can show at all."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from in_browser import find_overflow, needs_browser
from test_compare_items import ANSWERS, pope_report

from coat_cli.main import main
from coat_eval.compare_models import compare_items, format_differences
from coat_eval.results_page import Result, build_results
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark
from coat_eval.uncertainty import Term, compare, estimate


def binomial(n: int, share: float) -> np.ndarray:
    """The probabilities of 0 .. n successes, by logarithms of factorials."""
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        + k * math.log(share) + (n - k) * math.log1p(-share)
        for k in range(n + 1)
    ]  # fmt: skip
    return np.exp(logs)


def mcnemar_power(items: int, discordant: float, difference: float) -> float:
    """The share of all outcomes in which |c - b| / sqrt(b + c) exceeds 1.96, added one by one."""
    favors_second = (discordant + difference) / (2 * discordant)
    power = 0.0
    for m, weight in enumerate(binomial(items, discordant)):
        if m == 0 or weight < 1e-9:
            continue
        c = np.arange(m + 1)
        seen = np.abs(2 * c - m) / math.sqrt(m) > 1.959964
        power += weight * binomial(m, favors_second)[seen].sum()
    return power


def compare_discordant(b: int, c: int, items: int) -> float | None:
    """The detectable difference where so many items are right in only one model."""
    scores = [[1.0] * b + [0.0] * c, [0.0] * b + [1.0] * c]
    rest = [0.0] * (items - b - c)
    found = compare(*(estimate(list(map(Term, [*one, *rest]))) for one in scores))
    assert found["test"] == "McNemar"
    return found["detectable"]


@pytest.mark.parametrize(("discordant", "items"), [(60, 300), (46, 900), (200, 1000)])
def test_the_detectable_difference_is_seen_four_times_in_five(discordant: int, items: int) -> None:
    found = compare_discordant(discordant // 2, discordant // 2, items)
    assert found is not None
    assert mcnemar_power(items, discordant / items, found / 100) == pytest.approx(0.8, abs=0.02)
    assert mcnemar_power(items, discordant / items, 0.7 * found / 100) < 0.6


def test_few_items_that_differ_show_nothing() -> None:
    """Of seven items no share is seen: 2.80 errors of 2.66 points are more than all 7 points."""
    assert compare_discordant(3, 4, 100) is None
    assert compare_discordant(0, 0, 100) is None
    assert compare_discordant(1, 1, 2) is None
    assert compare_discordant(5, 5, 100) == pytest.approx(280.1585 * math.sqrt(0.1 / 99), rel=1e-4)


def gqa_report(folder: Path, right: range, items: int = 200) -> Path:
    """OUT/gqa/report.json of the real scorer; LLaVA-1.5-7B's published accuracy is 62.0."""
    folder = folder / "gqa"
    folder.mkdir(parents=True)
    questions = {
        str(i): {"question": f"What is {i}?", "answer": "red", "imageId": f"n{i // 2}"}
        for i in range(items)
    }
    rows = [
        {"questionId": key, "prediction": "red" if int(key) in right else "blue"}
        for key in questions
    ]
    (folder / "questions.json").write_text(json.dumps(questions))
    (folder / "predictions.json").write_text(json.dumps(rows))
    paths = [folder / "predictions.json"], [folder / "questions.json"]
    report = score_official(get_benchmark("gqa"), *paths)
    report |= {"n_official": items, "dtype": "bfloat16", "precision": "coat"}
    (folder / "report.json").write_text(json.dumps(report))
    return folder.parent


def wilson(share: float, count: int) -> tuple[float, float]:
    """The roots p of (share - p)^2 = 1.96^2 p (1 - p) / count, in percent."""
    z2 = 1.959963984540054**2 / count
    low, high = sorted(np.roots([1 + z2, -2 * share - z2, share**2]).real)
    return 100 * low, 100 * high


def find_rows(paths: list[Path], name: str) -> list[Result]:
    groups = {rows[0].name: rows for rows in build_results(compare_items(paths))}
    return groups[name]


def test_rows_are_tested_against_models_and_not_against_published_results(tmp_path: Path) -> None:
    paths = [gqa_report(tmp_path / "a", range(110)), gqa_report(tmp_path / "b", range(20, 144))]
    first, second, *published = find_rows(paths, "gqa accuracy")
    assert (first.value, second.value, second.difference) == pytest.approx((55.0, 62.0, 7.0))
    assert (first.model, first.precision, first.difference) == ("a", "coat", None)
    # Images are clusters of two questions with equal answers: the error of 100 of them.
    assert first.interval is not None
    assert first.size == "200 in 100 images"
    assert first.interval[1] == pytest.approx(wilson(0.55, 100)[1], abs=0.05)
    tested = second.tested
    assert tested is not None
    assert (tested.only_first, tested.only_second, tested.test) == (20, 34, "permutation")
    # Of the images ten and seventeen: 2 P(B(27, 1/2) <= 10) = 0.2478, of 9,999 permutations.
    assert tested.p_value == pytest.approx(0.2478, abs=4 * math.sqrt(0.2478 * 0.7522 / 9999))
    error = 100 * math.sqrt((0.27 - 0.07**2) / 100)
    assert tested.standard_error == pytest.approx(error, rel=0.01)
    assert tested.detectable == pytest.approx(2.801585 * error, rel=0.01)
    assert second.verdict == "not distinguishable"
    llava = published[0]
    assert (llava.model, llava.value, llava.verdict) == ("LLaVA-1.5-7B", 62.0, "not tested")
    assert llava.interval == pytest.approx(wilson(0.62, 200))
    assert first.rules.startswith("gqa: official of GQA v1.2 eval.py")


def test_f1_has_no_binomial_variance_and_a_permutation_test(tmp_path: Path) -> None:
    paths = [pope_report(tmp_path / name, ANSWERS[name]) for name in "ab"]
    _, second, llava, *_ = find_rows(paths, "pope mean_f1")
    assert (llava.interval, llava.tested, llava.verdict) == (None, None, "not tested")
    assert second.tested is not None
    assert second.tested.test == "permutation"
    assert "| detectable |" in (said := format_differences(compare_items(paths)))
    assert "Rules: pope: official of RUCAIBox/POPE evaluate.py @" in said


def test_published_results_stand_beside_complete_benchmarks_only(tmp_path: Path) -> None:
    paths = [gqa_report(tmp_path / name, range(50)) for name in "ab"]
    assert len(find_rows(paths, "gqa accuracy")) > 2
    report = json.loads((paths[1] / "gqa" / "report.json").read_text())
    (paths[1] / "gqa" / "report.json").write_text(json.dumps({**report, "n_official": 12578}))
    assert len(find_rows(paths, "gqa accuracy")) == 2


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with a long name, published models and flipped items."""
    long = "a_run_with_a_name_as_long_as_such_names_are_in_practice_0123456789"
    paths = [tmp_path / "bf16", tmp_path / long]
    for path, answers, right in zip(paths, "ab", (range(110), range(144)), strict=True):
        pope_report(path, ANSWERS[answers])
        gqa_report(path, right)
    html = tmp_path / "page.html"
    root = str(paths[0] / "pope")
    assert main(["compare", *map(str, paths), "--html", str(html), "--media-root", root]) == 0
    return html


def test_the_page_has_a_plot_per_metric_and_loads_nothing(page: Path) -> None:
    text = page.read_text()
    for name in ("gqa accuracy", "pope mean_f1", "pope random.f1"):
        assert f"<figcaption>{name} " in text
    assert text.count('class="dot"') == text.count('class="line own"') + text.count(
        'class="line published"'
    )
    assert "LLaVA-1.5-7B (published)" in text
    assert ">higher<" in text
    assert "Scoring rules: " in text
    assert "@c121f04" in text
    assert "http" not in text.replace("http-equiv", "")


@needs_browser
def test_a_browser_shows_the_page_at_every_width(page: Path, tmp_path: Path) -> None:
    assert find_overflow(page, tmp_path) == {}
