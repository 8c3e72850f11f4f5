"""The optimizer benchmark: what is measured, and what is called wrong."""

import pytest
import torch
from torch import nn

import adamw
import harness
from adamw import (
    SIZES,
    Implementation,
    bench_adamw,
    find_disagreement,
    list_implementations,
)

CPU = torch.device("cpu")


def test_every_optimizer_is_measured_and_a_failure_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise RuntimeError("not on this GPU\nsecond line")

    assert (len(SIZES), sum(SIZES)) == (29, 940_572_672)
    monkeypatch.setattr(harness, "get_origin", lambda: ("2026-01-31", "abc", "GPU", "2", "3"))
    monkeypatch.setattr(harness, "require_gpu", lambda _: None)
    monkeypatch.setattr(harness, "measure_median_us", lambda _: 2000.0)
    monkeypatch.setattr(adamw, "DEVICE", CPU)
    listed = [*list_implementations(), Implementation("broken", "none", ("float32",), broken)]
    monkeypatch.setattr(adamw, "list_implementations", lambda: listed)
    results = bench_adamw([1280, 640])
    assert [r.problem for r in results if r.problem] == ["RuntimeError: not on this GPU"]
    for r in results[:-1]:
        assert (r.ms, r.params) == (2.0, 1920)
        assert r.ps_per_param == pytest.approx(2e-3 / 1920 * 1e12)
    found = {(r.implementation, r.codec, r.param_dtype): r for r in results}
    # Two counts of steps of 4 bytes belong to two tensors.
    counts = 2 * 4 / 1920
    stochastic = found["coat", "dre_e4m3_stochastic", "float32"]
    assert stochastic.state_bytes_per_param == 2 + 12 / 128 + counts
    assert found["torch fused", "none", "float32"].state_bytes_per_param == 8 + counts


def test_wrong_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "DEVICE", CPU)
    ours = list_implementations()[0]
    assert find_disagreement(ours, "float32") == find_disagreement(ours, "bfloat16") == ""
    rates = iter((1e-3, 1.1e-3))

    def faster(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=next(rates))

    wrong = Implementation("coat", "dre_e4m3", ("float32",), faster)
    assert find_disagreement(wrong, "float32").startswith(
        "not correct: tensor 0: relative RMS error"
    )
