"""The optimizer benchmark: what is measured, and what is called wrong."""

import pytest
import torch
from torch import nn

from coat_bench import adamw
from coat_bench.adamw import (
    SIZES,
    Implementation,
    bench_adamw,
    count_state_bytes,
    find_disagreement,
    format_rows,
    list_implementations,
    make_parameters,
)

CPU = torch.device("cpu")


def test_the_sizes_are_those_of_the_baselines():
    assert (len(SIZES), sum(SIZES)) == (29, 940_572_672)


def test_every_optimizer_is_measured_and_a_failure_is_noted(monkeypatch: pytest.MonkeyPatch):
    def broken(_: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise RuntimeError("not on this GPU\nsecond line")

    monkeypatch.setattr(adamw, "get_origin", lambda: ("2026-01-31", "abc", "GPU", "2", "3"))
    monkeypatch.setattr(adamw, "require_gpu", lambda _: None)
    monkeypatch.setattr(adamw, "DEVICE", CPU)
    monkeypatch.setattr(adamw, "measure_median_us", lambda _: 2000.0)
    listed = [*list_implementations(), Implementation("broken", "none", ("float32",), broken)]
    monkeypatch.setattr(adamw, "list_implementations", lambda: listed)
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
    chance = (found["coat", "dre_e4m3_stochastic", dtype] for dtype in ("float32", "bfloat16"))
    assert {row.state_bytes_per_param for row in chance} == {fp32.state_bytes_per_param}
    low_bits = found["coat bf16_low_bits", "dre_e4m3", "bfloat16"]
    assert low_bits.state_bytes_per_param == 4 + 12 / 128 + counts
    assert found["torch fused", "none", "float32"].state_bytes_per_param == 8 + counts
    assert "| coat | dre_e4m3 | float32 | 2.00 | 1041666.67 |" in format_rows(rows)


def test_wrong_steps_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adamw, "DEVICE", CPU)
    for ours in list_implementations()[:2]:
        assert find_disagreement(ours, "float32") == find_disagreement(ours, "bfloat16") == ""
    assert list_implementations()[1].codec == "dre_e4m3_stochastic"
    rates = iter((1e-3, 1.1e-3))

    def faster(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=next(rates))

    wrong = Implementation("coat", "dre_e4m3", ("float32",), faster)
    assert find_disagreement(wrong, "float32").startswith(
        "not correct: tensor 0: relative RMS error"
    )


def test_parameters_and_bytes():
    params = make_parameters([5, 3], "bfloat16", CPU)
    assert [(p.numel(), p.dtype) for p in params] == [(5, torch.bfloat16), (3, torch.bfloat16)]
    optimizer = torch.optim.SGD(params, momentum=0.9)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert count_state_bytes(optimizer) == 8 * 2
