"""Which losses and gradient norms are out of range."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from coat_vlm.config.recipe import DivergenceConfig
from coat_vlm.distributed import ALONE
from coat_vlm.train.divergence import Detector, check_weights, measure_spread


def rows_of(losses: Any, norms: Any = None) -> Iterator[dict[str, Any]]:
    for number, loss in enumerate(losses):
        norm = 1.0 if norms is None else float(norms[number])
        yield {"step": number + 1, "loss": float(loss), "grad_norm": norm, "skipped_steps": 0}


def alarms(rows: Any, vocab_size: int = 400, **config: Any) -> list[int]:
    detector = Detector(DivergenceConfig(**config), vocab_size)
    return [row["step"] for row in rows if detector.add(row) is not None]


def test_the_robust_spread_is_that_of_the_sorted_values() -> None:
    rng = np.random.default_rng(0)
    for size in (16, 33, 128):
        values = rng.standard_cauchy(size)
        ordered = np.sort(values)
        middle = (ordered[(size - 1) // 2] + ordered[size // 2]) / 2
        distances = np.sort(np.abs(values - middle))
        spread = 1.4826 * (distances[(size - 1) // 2] + distances[size // 2]) / 2
        assert measure_spread(values, 1e-9) == pytest.approx((middle, spread))
        assert measure_spread(values, 100.0) == pytest.approx((middle, 100.0))


STEPS = np.arange(2000)


def curves() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Losses and gradient norms of healthy runs."""
    rng = np.random.default_rng(0)
    decay = 0.5 + 5.5 * (1 + np.cos(np.pi * STEPS / 2000)) / 2
    flat = np.ones(2000)
    rise = np.minimum(1, (STEPS + 1) / 200)
    noise = rng.normal(size=2000)
    return {
        "cosine": (decay * np.exp(0.05 * noise), flat * np.exp(0.2 * rng.normal(size=2000))),
        "noisy": (2 * np.exp(0.4 * noise), np.exp(0.6 * rng.normal(size=2000))),
        "warmup": (6 * np.exp(-STEPS / 300) + 1, 0.2 + 3 * rise * np.exp(0.3 * noise)),
        # One sample per batch: short answers, of which some are surprising.
        "small batch": (rng.gamma(0.5, 1.0, 2000), np.exp(1.0 * rng.normal(size=2000))),
        "memorized": (1e-3 * np.exp(noise), 0.01 * np.exp(noise)),
        "constant": (flat, flat),
        "plateau": (np.where(STEPS < 900, 2.0, 0.7) + 0.05 * noise, np.exp(0.3 * noise)),
    }


@pytest.mark.parametrize("name", list(curves()))
def test_healthy_curves_raise_no_alarm(name: str) -> None:
    assert alarms(rows_of(*curves()[name])) == []


@pytest.mark.parametrize("name", ["cosine", "noisy", "warmup", "constant", "plateau"])
def test_spikes_in_healthy_curves_are_found(name: str) -> None:
    losses, norms = (values.copy() for values in curves()[name])
    losses[700:705] += 40
    norms[1500] *= 1e4
    assert alarms(rows_of(losses, norms)) == [701, 702, 703, 704, 705, 1501]


def test_early_explosions_and_skipped_steps_are_found() -> None:
    assert alarms(rows_of([6.2, 500.0, 6.0])) == [2]
    assert alarms(rows_of([20.0, 21.0, 19.0])) == []  # a poor initialization
    assert alarms(rows_of([6.2, 6.0, 6.0], [1.0, 0.0, 1.0])) == [2]
    skipped = {"step": 2, "loss": 3.0, "grad_norm": None, "skipped_steps": 1}
    assert alarms([*rows_of([3.0]), skipped]) == [2]


def test_weights_are_checked() -> None:
    detector = Detector(DivergenceConfig(), 400)
    model = torch.nn.Linear(2, 2)
    check_weights(model, detector, "sft", ALONE)
    with torch.no_grad():
        model.bias[1] = math.nan
    with pytest.raises(ValueError, match="no model is saved; bias is NaN or infinite"):
        check_weights(model, detector, "sft", ALONE)


def test_padding_of_a_partition_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed leaves it uninitialized where the ranks do not divide a parameter."""
    detector = Detector(DivergenceConfig(), 400)
    model: Any = torch.nn.Linear(2, 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda _: 1)
    parts = {"ds_numel": 3, "ds_process_group": None, "partition_numel": lambda: 2}
    vars(model.bias).update(parts, ds_tensor=torch.tensor([1.0, math.nan]))
    check_weights(model, detector, "sft", ALONE)
    model.bias.ds_tensor[0] = math.inf
    with pytest.raises(ValueError, match="no model is saved; bias is NaN or infinite"):
        check_weights(model, detector, "sft", ALONE)
