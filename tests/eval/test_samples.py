"""pass@k and the majority of several sampled answers, of a server and of our own generation."""

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_served_model import Server, evaluate, lines, questions, server, text_of  # noqa: F401

from coat_cli.main import main
from coat_eval.samples import best_of

SAID = {
    0: ["no", "no", "no", "yes"],  # right: no
    1: ["no", "Yes.", "yes", "no"],  # right: yes; a tie, in which "no" is first
    2: ["yes", "yes", "yes", "yes"],  # right: no
    3: ["no", "yes", "Yes.", "yes, it is"],  # right: yes
    4: ["", "", "no", ""],  # right: no; empty texts, which the rule reads as yes
}


def chen(n: int, c: int, k: int) -> float:
    """The estimator as Chen et al. 2021 (arXiv:2107.03374, figure 3) print it."""
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_pass_at_k_is_the_estimator_of_chen(n: int):
    for c in range(n + 1):
        for k in range(1, n + 1):
            scores = [1.0] * c + [0.0] * (n - c)
            assert best_of(scores, k) == pytest.approx(chen(n, c, k), abs=1e-12)


def test_soft_scores_are_the_mean_over_all_sets_of_samples():
    scores = [0.3, 1.0, 0.0, 0.6, 0.3, 0.9]
    for k in range(1, 7):
        sets = [max(own) for own in combinations(scores, k)]
        assert best_of(scores, k) == pytest.approx(sum(sets) / len(sets), abs=1e-12)
    assert best_of([1.0] * 2000 + [0.0] * 2000, 1) == pytest.approx(0.5)


def sampled(body: dict[str, Any]) -> tuple[int, str]:
    assert body["temperature"] == 0.7
    return 200, SAID[int(text_of(body).split()[1])][body["seed"]]


def test_the_report_has_the_majority_and_pass_rates(
    server: Server,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    server.answer = sampled
    folder, out = questions(tmp_path / "odd", 5), tmp_path / "out"
    words = ["--samples", "4", "--temperature", "0.7"]
    assert evaluate(server, folder, out, *words) == 0
    report = json.loads((out / "odd/report.json").read_text())
    rows = lines(out / "odd/predictions.jsonl")
    assert [row["prediction"] for row in rows] == ["no", "no", "yes", "yes", "no"]
    right = [3, 2, 0, 3, 1]  # of four
    for k in (1, 2, 4):
        each = [chen(4, c, k) for c in right]
        assert [item[f"pass@{k}"] for item in report["items"]] == pytest.approx(each)
        assert report["metrics"][f"pass@{k}"] == pytest.approx(100 * np.mean(each))
        error = np.std(each, ddof=1) / np.sqrt(5)
        assert report["standard_errors"][f"pass@{k}"] == pytest.approx(100 * error)
    assert report["metrics"]["accuracy"] == pytest.approx(60)
    assert (report["samples"], report["temperature"]) == (4, 0.7)
    printed = capsys.readouterr().out
    assert all(f"pass@{k} " in printed for k in (1, 2, 4))
    singles = [json.loads((out / f"odd/sample_{n}/report.json").read_text()) for n in range(4)]
    mean = np.mean([one["metrics"]["accuracy"] for one in singles])
    assert report["metrics"]["pass@1"] == pytest.approx(mean)
    # The same command asks nothing; more samples ask only for the new ones.
    asked = len(server.requests)
    assert evaluate(server, folder, out, *words) == 0
    assert json.loads((out / "odd/report.json").read_text())["metrics"] == report["metrics"]
    assert len(server.requests) == asked == 20
    for said in SAID.values():
        said.append("no")
    assert evaluate(server, folder, out, "--samples", "5", "--temperature", "0.7") == 2
    assert "has answers made with a different samples" in capsys.readouterr().err
    more = ["--samples", "5", "--temperature", "0.7", "--overwrite"]
    assert evaluate(server, folder, out, *more) == 0
    assert len(server.requests) == 25
    assert {body["seed"] for body in server.requests[20:]} == {4}
    # Greedy answers and those of another temperature are refused.
    assert evaluate(server, folder, out) == 2
    assert evaluate(server, folder, out, "--samples", "5", "--temperature", "1") == 2
    assert "has answers made with a different temperature" in capsys.readouterr().err
    assert len(server.requests) == 25


def test_compare_shows_the_pass_rates(
    server: Server,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    folder = questions(tmp_path / "odd", 60)
    shares = {"weak": 0.3, "strong": 0.6}
    for model, share in shares.items():
        rng = np.random.default_rng(0)
        right = rng.random((60, 2)) < share

        def answer(body: dict[str, Any], right: np.ndarray = right) -> tuple[int, str]:
            number = int(text_of(body).split()[1])
            return 200, ("no", "yes")[(number + 1 + right[number, body["seed"]]) % 2]

        server.answer = answer
        words = ["--samples", "2", "--temperature", "1"]
        assert evaluate(server, folder, tmp_path / model, *words, model=model) == 0
    assert evaluate(server, folder, tmp_path / "one", "--temperature", "1", model="strong") == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "strong")]) == 0
    assert "samples" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "weak"), str(tmp_path / "strong")]) == 0
    table = capsys.readouterr().out
    for k in (1, 2):
        values = [
            json.loads((tmp_path / model / "odd/report.json").read_text())["metrics"][f"pass@{k}"]
            for model in shares
        ]
        row = next(line for line in table.splitlines() if f"odd pass@{k}" in line)
        assert all(f"{value:.2f}" in row for value in values)


def test_samples_that_are_all_equal_are_a_warning(
    server: Server,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    words = ["--samples", "2", "--temperature", "1"]
    assert evaluate(server, questions(tmp_path / "odd", 3), tmp_path / "out", *words) == 0
    assert "all samples of each question are equal: nothing was sampled" in capsys.readouterr().err


def test_own_samples_differ_and_a_resumed_run_draws_the_same(
    speaking_model: Path, benchmarks: Path, tmp_path: Path
):
    words = ["eval", "--model", str(speaking_model), "--data", str(benchmarks), "--tasks", "pope"]
    words += ["--samples", "3", "--temperature", "40", "--max-new-tokens", "4"]
    words += ["--batch-size", "4", "--to"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    texts = [
        [row["prediction"] for row in lines(tmp_path / f"whole/pope/sample_{n}/predictions.jsonl")]
        for n in range(3)
    ]
    assert len(set(map(tuple, texts))) == 3
    report = json.loads((tmp_path / "whole/pope/report.json").read_text())
    scores = Counter[str]()
    for n in range(3):
        one = json.loads((tmp_path / f"whole/pope/sample_{n}/report.json").read_text())
        scores.update(
            {item["question_id"] + item["category"]: item["score"] for item in one["items"]}
        )
    assert report["metrics"]["pass@1"] == pytest.approx(100 * np.mean(list(scores.values())) / 3)
    assert report["metrics"]["pass@3"] == pytest.approx(
        100 * np.mean([score > 0 for score in scores.values()])
    )
    # As after a kill inside the second sample's third batch.
    part = tmp_path / "part/pope"
    assert main([*words[:-1], "--limit", "18", "--to", str(part.parent)]) == 0
    path = part / "sample_1/predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:9]))
    for name in ("report.json", "predictions.jsonl", "sample_2/predictions.jsonl"):
        (part / name).unlink()
    assert main([*words, str(part.parent)]) == 0
    for name in ("predictions.jsonl", *(f"sample_{n}/predictions.jsonl" for n in range(3))):
        assert (part / name).read_bytes() == (tmp_path / "whole/pope" / name).read_bytes()


def test_options_of_samples(
    speaking_model: Path, benchmarks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["eval", "--model", str(speaking_model), "--data", str(benchmarks)]
    words += ["--to", str(tmp_path / "out"), "--tasks"]
    assert main([*words, "pope", "--samples", "2"]) == 2
    assert "--samples needs --temperature above 0" in capsys.readouterr().err
    assert main([*words, "seedbench_likelihood", "--temperature", "1"]) == 2
    assert (
        "no --temperature changes; generate letters: --tasks seedbench" in capsys.readouterr().err
    )
