"""Sharpness against brute force; outcomes; a sweep that continues past a run that diverges."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from coat_bench.rows import read_rows
from coat_cli.main import main
from coat_lab import fork, stability
from coat_lab.decoder import train_steps
from coat_lab.number_formats import parse_format, parse_scaling, quantize
from coat_lab.stability import StabilityRow, build_variant, compute_sharpness, find_outcome

TINY = fork.SIZES["tiny"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["red", "green", "blue", "circle", "square", "star", "is", "the", "."]
    draws = torch.randint(0, 9, (6000,), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [" ".join(words[i] for i in draws[n : n + 12]) for n in range(0, 6000, 12)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("epsilon", [1e-3, 0.5])
def test_sharpness_equals_the_maximum_over_all_corners(epsilon: float) -> None:
    """A model of six words: cross-entropy is convex in the logits, so a corner is the maximum."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(6, 8), torch.nn.Linear(8, 6))
    ids, targets = torch.randint(0, 6, (2, 5))
    z = model(ids).detach().double() * 3
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=6)), dtype=torch.float64)
    worst = [
        max(F.cross_entropy(row + corner * epsilon * (row.abs() + 1), y) for corner in corners)
        for row, y in zip(z, targets, strict=True)
    ]
    loss = F.cross_entropy(z, targets)
    expected = 100 * (torch.stack(worst).mean() - loss) / (1 + loss)
    found = compute_sharpness(z, targets, epsilon)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5 / epsilon)
    inside = torch.rand(2000, 5, 6, dtype=torch.float64) * 2 - 1
    moved = z + inside * epsilon * (z.abs() + 1)
    others = [F.cross_entropy(one, targets) for one in moved]
    assert max(others) <= loss + expected / 100 * (1 + loss)


def test_outcomes() -> None:
    falling = [5 - 0.04 * n for n in range(50)]
    assert find_outcome(falling, 4.0) == ("trained", *[pytest.approx(3.42)] * 2)
    assert find_outcome(falling, 3.0)[0] == "not learned"
    assert find_outcome([*falling, *[3.8] * 20], 4.0)[0] == "rose"
    assert find_outcome([*falling, *[3.6] * 20], 4.0)[0] == "trained"
    assert find_outcome([5.0, math.nan], 4.0)[0] == "not finite"
    assert find_outcome([*falling, math.inf], 4.0)[0] == "not finite"


def test_a_format_rounds_all_operands_of_all_layers() -> None:
    """The forward pass against one with operands that were rounded beforehand."""
    torch.manual_seed(0)
    model, _ = build_variant(TINY, "e4m3,group32")
    layer = model.model.layers[1].mlp.gate_proj
    fmt, scaling = parse_format("e4m3"), parse_scaling("group32")
    x = torch.randn(3, 64).to(layer.weight)
    expected = quantize(x, fmt, scaling) @ quantize(layer.weight, fmt, scaling).T
    torch.testing.assert_close(layer(x), expected)
    rounded = [m for m in model.modules() if isinstance(m, fork.RoundedLinear)]
    assert len(rounded) == 14
    assert {m.operands for m in rounded} == {frozenset("xwdvga")}
    part, _ = build_variant(TINY, "e8m3:xw@gate@1-1")
    assert [m.operands for m in part.modules() if isinstance(m, fork.RoundedLinear)] == [set("xw")]


def test_all_bits_of_the_mantissa_change_nothing(text: Path) -> None:
    """E8M23 is FP32: the same losses as a decoder without simulated formats."""
    bench = replace(TINY, steps=3)
    ids = [
        torch.randint(0, 300, (8, 32), generator=torch.Generator().manual_seed(n)) for n in range(3)
    ]
    losses = []
    for variant in ("e8m23", "fp32"):
        torch.manual_seed(0)
        model, master_weights = build_variant(bench, variant)
        losses.append(list(train_steps(model.cpu(), master_weights, ids, bench)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        ("e8m3:coat", "operands 'coat'"),
        ("e8m3:xw@@0-9", "blocks '0-9'"),
        ("e8", "precision 'e8'|format 'e8'"),
        ("e4m3,tensor:static", "operands 'static'"),
        ("bf17", "precision 'bf17'"),
    ],
)
def test_a_variant_that_means_nothing_is_refused(variant: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        build_variant(TINY, variant)


def test_a_sweep_goes_on_after_a_run_that_diverges(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["lab", "stability", "--text", str(text), "--size", "tiny", "--steps", "24"]
    command += ["--out", str(tmp_path), "--variants", "fp32", "e4m3:xwdvga"]
    lrs = ["--lrs", "5e-3", "1e30"]
    assert main([*command, *lrs]) == 0
    rows = read_rows(tmp_path / "stability.csv", StabilityRow, "")
    assert [(row.variant, row.lr) for row in rows] == [
        (variant, lr) for variant in ("fp32", "e4m3:xwdvga") for lr in (5e-3, 1e30)
    ]
    assert [row.outcome for row in rows if row.lr == 1e30] == ["not finite"] * 2
    ended = rows[0]
    assert ended.steps == 24
    assert 0 < ended.held_out_loss < 10
    assert 0 < ended.sharpness <= ended.max_sharpness
    assert rows[1].steps < 24
    assert "| 1/1 not finite |" in capsys.readouterr().out
    assert (tmp_path / "stability.svg").read_text().count("<svg") == 1

    trained: list[Any] = []
    train_run = stability.train_run
    monkeypatch.setattr(
        stability, "train_run", lambda *args: (trained.append(args[2]), train_run(*args))[1]
    )
    assert main([*command, *lrs, "--seeds", "0", "7"]) == 0  # continues
    assert [run.seed for run in trained] == [7] * 4
    assert len(read_rows(tmp_path / "stability.csv", StabilityRow, "")) == 8
    monkeypatch.setattr(stability, "train_run", None)
    command[command.index("24")] = "25"
    with pytest.raises(ValueError, match="was trained with other values of steps"):
        stability.sweep([text], replace(TINY, steps=25), ["fp32"], [5e-3], [0], tmp_path)


def test_groups_that_do_not_divide_a_layer_are_refused_before_any_training(
    text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"'group128': rows have .* do not divide"):
        stability.sweep(
            [text], replace(TINY, steps=20), ["fp32", "e4m3,group128:dg"], [1e-3], [0],
            tmp_path / "o",
        )  # fmt: skip
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_cannot_be_is_refused(text: Path, tmp_path: Path, lr: float) -> None:
    with pytest.raises(ValueError, match=f"--lrs {lr}: must be above 0 and finite"):
        stability.sweep([text], replace(TINY, steps=20), ["fp32"], [1e-3, lr], [0], tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_runs_have_files_of_their_own() -> None:
    """The parts of these variants, and the digits of these rates, differ in little."""
    variants = ["e4m3:xw@q+v", "e4m3:xw@q/v", "e4m3:xw@q v", "e4m3:xw@q_v"]
    runs = [stability.Run(v, lr, 0) for v in variants for lr in (1e-3, 0.0010000001)]
    assert len({run.file for run in runs}) == len(runs)
    assert all("/" not in run.file for run in runs)


def test_processes_train_the_same_runs(text: Path, tmp_path: Path) -> None:
    for jobs in (1, 2):
        bench = replace(TINY, steps=20)
        stability.sweep([text], bench, ["fp32"], [1e-3], [0, 1], tmp_path / str(jobs), jobs)
    for path in (tmp_path / "1" / "runs").iterdir():
        alone, beside = (
            json.loads((tmp_path / jobs / "runs" / path.name).read_text()) for jobs in "12"
        )
        # The number of threads may change the order of sums.
        assert alone["losses"] == pytest.approx(beside["losses"], rel=1e-3)
