"""Checkpoints read at another number of ranks and another ZeRO stage (many_ranks.py trains)."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import started
import torch

RUNS: dict[str, dict[str, Any]] = {
    "whole": {"ranks": 1, "zero": 1, "steps": 9},
    "a": {"ranks": 1, "zero": 2, "steps": 3},
    "b": {"ranks": 2, "zero": 3, "steps": 2, "resume": "a"},
    "again": {"ranks": 2, "zero": 3, "steps": 1, "resume": "b"},
    "c": {"ranks": 4, "zero": 1, "steps": 1, "resume": "b"},
    "d": {"ranks": 1, "zero": 0, "steps": 2, "resume": "c"},
    "e": {"ranks": 2, "zero": 2, "steps": 1, "resume": "d"},
    "low": {"ranks": 2, "zero": 0, "steps": 1, "low_bits": True, "resume": "d"},
    "low again": {"ranks": 2, "zero": 0, "steps": 1, "low_bits": True, "resume": "low"},
    "low 2": {"ranks": 2, "zero": 2, "steps": 1, "low_bits": True, "resume": "low again"},
    "low 3": {"ranks": 4, "zero": 3, "steps": 1, "low_bits": True, "resume": "low 2"},
    "low 1": {"ranks": 1, "zero": 1, "steps": 1, "low_bits": True, "resume": "low 3"},
    "high": {"ranks": 2, "zero": 2, "steps": 1, "resume": "low 1"},
    "f": {"ranks": 2, "zero": 1, "steps": 2, "optimizer": "adamw", "bf16": True},
    "g": {"ranks": 1, "zero": 3, "steps": 1, "optimizer": "adamw", "bf16": True, "resume": "f"},
    "h": {"ranks": 2, "zero": 0, "steps": 1, "optimizer": "adamw", "bf16": True, "resume": "g"},
}
"""Every stage is left and entered; 1, 2 and 4 ranks become one another."""

COAT = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")]
ADAMW = [("f", "g"), ("g", "h")]
RATES = [1e-2, 3e-3, 1e-3]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("regroup")
    steps: dict[str, int] = {}
    listed = []
    for name, run in RUNS.items():
        source = run.get("resume")
        steps[name] = run["steps"] + (steps[source] if source else 0)
        resume = f"{source}/step-{steps[source]:08d}" if source else None
        defaults = {"name": name, "optimizer": "coat", "bf16": False, "low_bits": False}
        listed.append({**defaults, **run, "resume": resume})
    program = Path(__file__).with_name("many_ranks.py")
    done = started.run([str(folder)], program=program, text=json.dumps(listed), timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: torch.load(folder / f"{name}.pt") for name in RUNS}


@pytest.mark.parametrize(("before", "after"), [*COAT, *ADAMW, ("b", "again")])
def test_weights_settings_and_step_counts_are_exact(
    runs: dict[str, Any], before: str, after: str
) -> None:
    saved, loaded = runs[before]["end"], runs[after]["loaded"]
    for kind in ("master", "weight"):
        assert saved[kind].keys() == loaded[kind].keys()
        for name, value in saved[kind].items():
            assert torch.equal(value, loaded[kind][name]), (kind, name)
    assert loaded["lr"] == RATES  # DeepSpeed's universal checkpoint gives all groups the first
    assert loaded["steps"] == saved["steps"] == {sum(RUNS[n]["steps"] for n in path_to(before))}


def path_to(name: str) -> list[str]:
    source = RUNS[name].get("resume")
    return [*(path_to(source) if source else []), name]


LOW = ["d", "low", "low again", "low 2", "low 3", "low 1", "high"]
LOW_BITS = [*itertools.pairwise(LOW)]


@pytest.mark.parametrize(("before", "after"), LOW_BITS)
def test_low_bits_and_fp32_master_weights_become_each_other(
    runs: dict[str, Any], before: str, after: str
) -> None:
    """Copied whole, and put together of parts."""
    saved, loaded = runs[before]["end"], runs[after]["loaded"]
    in_bf16 = after != "high"
    for name, master in saved["master"].items():
        assert torch.equal(loaded["master"][name], master), name
        weight = loaded["weight"][name]
        assert weight.dtype == (torch.bfloat16 if in_bf16 else torch.float32)
        # To nearest, ties away from zero: half the spacing is 2^-8 of the value at most.
        assert ((weight.float() - master).abs() <= 2**-8 * master.abs()).all(), name
        assert torch.equal(weight.float(), master) == (not in_bf16 or name == "unused"), name
    assert loaded["steps"] == saved["steps"]


def test_low_bits_get_every_bit_and_train_on(runs: dict[str, Any]) -> None:
    saved, loaded = runs["low"]["end"], runs["low again"]["loaded"]
    for key in ("weight", *(key for key in saved if key.startswith("exp_avg"))):
        for name, value in saved[key].items():
            assert torch.equal(value, loaded[key][name]), (key, name)
    whole = runs["whole"]["losses"]
    chain = [loss for name in path_to("low again") for loss in runs[name]["losses"]]
    assert chain[: len(whole)] == pytest.approx(whole, rel=2e-2)


@pytest.mark.parametrize(("before", "after"), COAT)
def test_fp8_moments_move_by_half_a_step_at_most(
    runs: dict[str, Any], before: str, after: str
) -> None:
    saved, loaded = runs[before]["end"], runs[after]["loaded"]
    moved = 0
    for moment in ("exp_avg", "exp_avg_sq"):
        for name, value in saved[moment].items():
            # The exact code of the old value in the group that holds it now.
            amax, k = loaded[f"{moment}.amax"][name], loaded[f"{moment}.k"][name]
            ratio = value.double().abs() / torch.where(amax == 0, 1.0, amax)
            code = 448 * ratio ** k.double()
            half = 2.0 ** (torch.floor(torch.log2(code)).clamp_min(-6) - 4)
            found = loaded[f"{moment}.code"][name].double().abs()
            error = ((found - code).abs() / half).max()
            assert error <= 1 + 1e-4, (moment, name, error)
            assert torch.equal(loaded[moment][name].sign(), value.sign()), (moment, name)
            moved += int((loaded[moment][name] != value).sum())
    assert moved  # the groups are others: otherwise this compares nothing


@pytest.mark.parametrize(("before", "after"), ADAMW)
def test_fp32_moments_are_exact(runs: dict[str, Any], before: str, after: str) -> None:
    saved, loaded = runs[before]["end"], runs[after]["loaded"]
    for moment in ("exp_avg", "exp_avg_sq"):
        assert any(value.any() for value in saved[moment].values())
        for name, value in saved[moment].items():
            assert torch.equal(value, loaded[moment][name]), (moment, name)


def test_the_same_ranks_and_stage_get_every_bit(runs: dict[str, Any]) -> None:
    saved, loaded = runs["b"]["end"], runs["again"]["loaded"]
    for key in saved:
        if key.startswith("exp_avg"):
            for name, value in saved[key].items():
                assert torch.equal(value, loaded[key][name]), (key, name)


def test_training_goes_on_as_if_nothing_had_happened(runs: dict[str, Any]) -> None:
    chain = [loss for name in path_to("e") for loss in runs[name]["losses"]]
    assert chain == pytest.approx(runs["whole"]["losses"], rel=5e-3)
    assert chain[-1] < 0.9 * chain[0]
    bf16 = [loss for name in path_to("h") for loss in runs[name]["losses"]]
    assert bf16 == pytest.approx(runs["whole"]["losses"][: len(bf16)], rel=2e-2)


def test_bf16_weights_are_the_rounded_masters(runs: dict[str, Any]) -> None:
    for name in ("g", "h"):
        for parameter, master in runs[name]["loaded"]["master"].items():
            weight = runs[name]["loaded"]["weight"][parameter]
            assert torch.equal(weight, master.bfloat16())
            assert not torch.equal(weight.float(), master) or parameter == "unused"
