"""ZeRO in BF16 leaves a step with bad gradients out for their norm, with one look at them."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from coat_vlm.distributed import World, join_world
from coat_vlm.train.engine import replace_slow_step

WIDTH = 6


class Layers(nn.Module):
    """The gradient of ``gain`` [6] is what is given, all others are those of a layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 4)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, of_gain: Tensor) -> Tensor:
        x = torch.ones(2, WIDTH, dtype=self.gain.dtype)
        return self.layer(x).square().sum() + (self.gain * of_gain).sum()


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def build(zero_stage: int) -> tuple[Any, list[bool]]:
    """An engine in BF16, and an entry for every time that its ``has_overflow`` was asked."""
    model = Layers().bfloat16()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": zero_stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )
    wrapper: Any = engine.optimizer
    original, asked = wrapper.has_overflow, []

    def has_overflow(partition_gradients: bool = True) -> bool:
        asked.append(partition_gradients)
        return original(partition_gradients)

    wrapper.has_overflow = has_overflow
    return engine, asked


def step(engine: Any, of_gain: float = 0.5) -> dict[str, Tensor]:
    """One step with a gradient that has this value in one place; the weights after it."""
    gradient = torch.full((WIDTH,), 0.5, dtype=torch.bfloat16)
    gradient[3] = of_gain
    engine.backward(engine(gradient))
    engine.step()
    return weights(engine)


def weights(engine: Any) -> dict[str, Tensor]:
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: p.detach().clone() for name, p in parameters.items()}


@pytest.mark.parametrize(
    ("zero_stage", "bad"),
    [
        *product([1, 2, 3], [math.nan]),
        (2, math.inf),
        (2, 1e30),  # whose square is not finite in FP32; stage 3 takes FP64
    ],
)
def test_a_bad_gradient_changes_nothing_and_is_looked_at_once(zero_stage: int, bad: float) -> None:
    engine, asked = build(zero_stage)
    replace_slow_step(engine)
    start = weights(engine)
    first = step(engine)
    assert math.isfinite(engine.get_global_grad_norm())
    for name, before in start.items():
        assert not first[name].equal(before), name
    second = step(engine, bad)
    assert math.isinf(engine.get_global_grad_norm())
    for name, before in first.items():
        assert second[name].equal(before), name
    third = step(engine)  # the bad gradient is gone
    assert math.isfinite(engine.get_global_grad_norm())
    for name, before in second.items():
        assert third[name].isfinite().all(), name
        assert not third[name].equal(before), name
    assert asked == []
