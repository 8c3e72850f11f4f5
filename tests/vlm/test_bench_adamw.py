"""The optimizer benchmarks: what is measured, what is called wrong, and the error study."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_bench import adamw
from coat_bench.adamw import (
    SIZES,
    Contender,
    bench_adamw,
    contenders,
    disagreement,
    format_rows,
    parameters,
    state_bytes,
)
from coat_lab import moments
from coat_lab.moments import bench_moments, gradients, lean

CPU = torch.device("cpu")


def test_the_sizes_are_those_of_the_baselines():
    assert (len(SIZES), sum(SIZES)) == (29, 940_572_672)


def test_every_optimizer_is_measured_and_a_failure_is_noted(monkeypatch: pytest.MonkeyPatch):
    def broken(_: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise RuntimeError("not on this GPU\nsecond line")

    monkeypatch.setattr(adamw, "origin", lambda: ("2026-01-31", "abc", "GPU", "2", "3"))
    monkeypatch.setattr(adamw, "require_gpu", lambda _: None)
    monkeypatch.setattr(adamw, "DEVICE", CPU)
    monkeypatch.setattr(adamw, "median_us", lambda _: 2000.0)
    listed = [*contenders(), Contender("broken", "none", ("float32",), broken)]
    monkeypatch.setattr(adamw, "contenders", lambda: listed)
    rows = bench_adamw([1280, 640])
    assert [row.problem for row in rows if row.problem] == ["RuntimeError: not on this GPU"]
    for row in rows[:-1]:
        assert (row.ms, row.params) == (2.0, 1920)
        assert row.ps_per_param == pytest.approx(2e-3 / 1920 * 1e12)
    found = {(row.implementation, row.codec, row.param_dtype): row for row in rows}
    # Two counts of steps of 4 bytes belong to two tensors.
    counts = 2 * 4 / 1920
    fp32, bf16 = (found["coat", "dre_e4m3", dtype] for dtype in ("float32", "bfloat16"))
    assert fp32.state_bytes_per_param == bf16.state_bytes_per_param == 2 + 12 / 128 + counts
    chance = (found["coat", "dre_e4m3_chance", dtype] for dtype in ("float32", "bfloat16"))
    assert {row.state_bytes_per_param for row in chance} == {fp32.state_bytes_per_param}
    remainder = found["coat bf16_remainder", "dre_e4m3", "bfloat16"]
    assert remainder.state_bytes_per_param == 4 + 12 / 128 + counts
    assert found["torch fused", "none", "float32"].state_bytes_per_param == 8 + counts
    assert "| coat | dre_e4m3 | float32 | 2.00 | 1041666.67 |" in format_rows(rows)


def test_wrong_steps_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adamw, "DEVICE", CPU)
    for ours in contenders()[:2]:
        assert disagreement(ours, "float32") == disagreement(ours, "bfloat16") == ""
    assert contenders()[1].codec == "dre_e4m3_chance"
    rates = iter((1e-3, 1.1e-3))

    def faster(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=next(rates))

    wrong = Contender("coat", "dre_e4m3", ("float32",), faster)
    assert disagreement(wrong, "float32").startswith("not correct: tensor 0: relative RMS error")


def test_parameters_and_bytes():
    params = parameters([5, 3], "bfloat16", CPU)
    assert [(p.numel(), p.dtype) for p in params] == [(5, torch.bfloat16), (3, torch.bfloat16)]
    optimizer = torch.optim.SGD(params, momentum=0.9)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert state_bytes(optimizer) == 8 * 2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 40)
    return path


def test_errors_of_moments_are_those_of_the_formulas(text: Path, monkeypatch: pytest.MonkeyPatch):
    """A codec that halves v is off by 1 - sqrt(2), one that keeps everything not at all."""
    monkeypatch.setattr(moments, "local_origin", lambda: ("2026-01-31", "abc", "cpu", "2", "3"))

    def halved(x: Tensor, second: bool) -> Tensor:
        return x / 2 if second else x

    kinds: dict[str, Any] = {"exact": lambda x, _: x, "halved": halved}
    rows = bench_moments(text, steps=1, every=1, candidates=kinds)
    assert [(row.codec, row.beta2) for row in rows] == [
        (name, beta2) for beta2 in (0.95, 0.999) for name in kinds
    ]
    (g,) = gradients(text, 1)
    # In the first step m / sqrt(v) is the sign of the gradient, but for eps.
    expected = (g[g != 0].numel() / g.numel()) * (2**0.5 - 1) ** 2
    for row in rows:
        errors = (row.stored_mse, row.trained_mse, row.v_relative_rms, row.v_bias)
        if row.codec == "exact":
            assert errors == (0, 0, 0, 0)
        else:
            assert errors[:2] == pytest.approx([expected] * 2, rel=1e-2)
            assert errors[2:] == pytest.approx([0.5, -0.5], rel=1e-4)
    assert moments.format_rows(rows).splitlines()[-1].endswith("| 50.0% | -50.0% |")


def test_lean_is_unbiased_and_keeps_the_ends_of_a_group():
    torch.manual_seed(0)
    v = torch.rand(128).add(0.01)
    mean = torch.stack([lean(v, True) for _ in range(2000)]).double().mean(0)
    assert ((mean / v - 1).abs() < 2e-3).all()  # five standard errors
    assert lean(v, True).amax() == v.amax()
    assert lean(-v, False).amin() == -v.amax()
    assert not lean(torch.zeros(130), True).any()


def test_a_short_text_is_refused(tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("short")
    with pytest.raises(ValueError, match=r"short.txt: has 5 bytes; give a text of at least 256"):
        next(gradients(path, 1))
