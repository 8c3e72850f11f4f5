"""Sums of the gradients of many micro-batches, against the exact sum."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from summed_gradients import one_gradient, summed
from two_ranks import run_on_two_ranks

from coat_vlm.distributed import ALONE, World, join_world
from coat_vlm.train.gradient_sums import GradientSums, Sums, choose_sums

MANY = 512


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


@pytest.mark.parametrize(
    ("zero_stage", "low_bits"), [(zero, low) for zero in range(4) for low in (False, True)]
)
def test_a_repeated_micro_batch_counts_as_often(
    monkeypatch: pytest.MonkeyPatch, world: World, zero_stage: int, low_bits: bool
) -> None:
    """In BF16, 0.75 of the length would be left."""
    (total,) = summed(monkeypatch, world, zero_stage, MANY, low_bits=low_bits)
    exact = MANY * one_gradient()
    assert total.norm() / exact.norm() == pytest.approx(1, abs=1e-3)
    in_bf16 = zero_stage and low_bits  # when the optimizer reads it
    assert (total - exact).norm() < (2e-3 if in_bf16 else 1e-3) * exact.norm()


def test_two_ranks_add_the_same_sums() -> None:
    """Also of a parameter that one rank does not use, and the other not in the last micro-batch."""
    errors = run_on_two_ranks(Path(__file__).with_name("gradient_sums_worker.py"))
    assert len(errors) == 8
    assert max(errors) < 1e-3


@pytest.mark.parametrize("count", [256, MANY])
def test_stochastic_sums_have_no_bias(
    monkeypatch: pytest.MonkeyPatch, world: World, count: int
) -> None:
    """The norm to 1%, and the direction to the variance of the roundings.

    A sum s of equal terms g has a spacing of at most 2^-7 s. Adding g rounds up with the
    probability g / spacing, with a variance of at most spacing * g: at most 2^-8 s^2 in all.
    """

    def run(**options: Any) -> list[torch.Tensor]:
        return summed(monkeypatch, world, 0, count, "stochastic", low_bits=True, **options)

    totals = run(steps=2)
    exact = count * one_gradient()
    for total in totals:
        assert total.norm() / exact.norm() == pytest.approx(1, abs=0.01)
        assert torch.cosine_similarity(total, exact, 0) > (1 + 2**-8) ** -0.5
    slope = torch.stack(totals).mean(0) @ exact / exact.square().sum()
    error = (2**-8 * (exact**4).sum() / len(totals)) ** 0.5 / exact.square().sum()
    assert slope == pytest.approx(1, abs=4 * float(error))
    assert not torch.equal(totals[0], totals[1])
    (again,) = run(first_step=2)  # as a run that continues before the second step
    assert torch.equal(again, totals[1])


@pytest.mark.parametrize("sums", ["fp32", "stochastic"])
def test_the_last_micro_batch_may_not_use_a_parameter(
    monkeypatch: pytest.MonkeyPatch, world: World, sums: Sums
) -> None:
    _, gain = summed(monkeypatch, world, 0, 32, sums, low_bits=True, gain=True)
    exact = 31 * one_gradient("gain")
    assert gain.norm() / exact.norm() == pytest.approx(1, abs=0.03 if sums != "fp32" else 1e-6)


@pytest.mark.parametrize(
    ("micro_batches", "billions", "gpu", "settings", "expected"),
    [
        (8, 2, 85e9, {}, "bf16"),
        (9, 2, 85e9, {}, "fp32"),
        (9, 8, 85e9, {}, "stochastic"),
        (9, 8, 150e9, {}, "fp32"),
        (9, 8, 85e9, {"low_bits": False}, "fp32"),
        (1, 2, 85e9, {"bf16": False}, "fp32"),
    ],
)
def test_memory_and_micro_batches_decide(
    micro_batches: int, billions: int, gpu: float, settings: dict[str, bool], expected: str
) -> None:
    how = {"bf16": True, "low_bits": True} | settings
    assert choose_sums(micro_batches, billions * 10**9, gpu, **how) == expected


def test_a_run_continues_with_the_sums_of_its_checkpoint() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    for parameters, expected in (([parameter], "stochastic"), ((), "fp32")):
        sums = GradientSums(
            sums="fp32", world=ALONE, seed=0, micro_batches=9, parameters=parameters
        )
        sums.adopt("stochastic")
        assert sums.sums == expected
        sums.adopt("fp32")  # of a larger GPU
        assert sums.sums == expected
