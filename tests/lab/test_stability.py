"""Sharpness against brute force; outcomes; a sweep that continues past a run that diverges."""

import csv
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import harness
import lab_stability as bench
from decoder import SIZES, train_steps
from lab_fork import RoundedLinear
from lab_formats import parse_format, parse_scaling, quantize
from lab_stability import build_variant, compute_sharpness, find_outcome

TINY = SIZES["tiny"]


@pytest.mark.parametrize("epsilon", [1e-3, 0.5])
def test_sharpness_equals_the_maximum_over_all_corners(epsilon: float) -> None:
    """A model of six words: cross-entropy is convex in the logits, so a corner is the maximum."""
    torch.manual_seed(0)
    z, targets = torch.randn(5, 6, dtype=torch.float64) * 3, torch.randint(0, 6, (5,))
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=6)), dtype=torch.float64)
    worst = [
        max(F.cross_entropy(row + corner * epsilon * (row.abs() + 1), y) for corner in corners)
        for row, y in zip(z, targets, strict=True)
    ]
    loss = F.cross_entropy(z, targets)
    expected = 100 * (torch.stack(worst).mean() - loss) / (1 + loss)
    found = compute_sharpness(z, targets, epsilon)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5 / epsilon)


def test_outcomes() -> None:
    falling = [5 - 0.04 * n for n in range(50)]
    assert find_outcome(falling, 4.0) == ("trained", *[pytest.approx(3.42)] * 2)
    assert find_outcome(falling, 3.0)[0] == "not learned"
    assert find_outcome([*falling, *[3.8] * 20], 4.0)[0] == "rose"
    assert find_outcome([*falling, *[3.6] * 20], 4.0)[0] == "trained"
    assert find_outcome([5.0, math.nan], 4.0)[0] == "not finite"


def test_a_format_rounds_all_operands_of_all_layers() -> None:
    """The forward pass against one with operands that were rounded beforehand."""
    torch.manual_seed(0)
    model, _ = build_variant(TINY, "e4m3,group32")
    layer = model.model.layers[1].mlp.gate_proj
    fmt, scaling = parse_format("e4m3"), parse_scaling("group32")
    x = torch.randn(3, 64).to(layer.weight)
    expected = quantize(x, fmt, scaling) @ quantize(layer.weight, fmt, scaling).T
    torch.testing.assert_close(layer(x), expected)
    rounded = [m for m in model.modules() if isinstance(m, RoundedLinear)]
    assert len(rounded) == 14
    assert {m.operands for m in rounded} == {frozenset("xwdvga")}


def test_all_bits_of_the_mantissa_change_nothing() -> None:
    """E8M23 is FP32: the same losses as a decoder without simulated formats."""
    bench = replace(TINY, steps=3)
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 300, (8, 32), generator=draw) for _ in range(3)]
    losses = []
    for variant in ("e8m23", "fp32"):
        torch.manual_seed(0)
        model, master_weights = build_variant(bench, variant)
        losses.append(list(train_steps(model.cpu(), master_weights, ids, bench)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("variant", "lr", "problem"),
    [
        ("e8m3:coat", 1e-3, "operands 'coat'"),
        ("bf17", 1e-3, "precision 'bf17'"),
        ("e4m3,group128:dg", 1e-3, r"'group128': rows have .* do not divide"),
        ("fp32", math.nan, "--lrs nan: must be above 0 and finite"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_training(
    variant: str, lr: float, problem: str, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        bench.train_all([text], TINY, ["fp32", variant], [lr], [0], tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_a_sweep_goes_on_after_a_run_that_diverges(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--text", str(text), "--size", "tiny", "--steps", "24", "--out", str(tmp_path)]
    words += ["--variants", "fp32", "--lrs", "5e-3", "1e30"]
    assert harness.run_script(bench.build_parser(), bench.main, words) == 0
    trained, diverged = csv.DictReader((tmp_path / "stability.csv").open(newline=""))
    assert (float(trained["lr"]), trained["steps"]) == (5e-3, "24")
    assert 0 < float(trained["held_out_loss"]) < 10
    assert 0 < float(trained["sharpness"]) <= float(trained["max_sharpness"])
    assert (float(diverged["lr"]), diverged["outcome"]) == (1e30, "not finite")
    assert int(diverged["steps"]) < 24
    assert "| 1e+30 | 0 | not finite |" in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert harness.run_script(bench.build_parser(), bench.main, words) == 0
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    words[words.index("24")] = "25"
    assert harness.run_script(bench.build_parser(), bench.main, words) == 2
    assert "the runs had different values of steps" in capsys.readouterr().err
