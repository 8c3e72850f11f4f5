"""BF16 steps against DeepSpeed's own, and steps with bad gradients, which are left out."""

import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from coat_vlm.distributed import World, join_world
from coat_vlm.optim import CoatAdamW
from coat_vlm.train.zero import change_optimizer


class Layers(nn.Module):
    """Two parameter groups' worth of layers, and a gain that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 48)
        self.second = nn.Linear(48, 8)
        self.unused = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().sum()


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def engine_of(max_grad_norm: float, *, own: bool, coat: bool = False, zero_stage: int = 0) -> Any:
    model = Layers().bfloat16()
    groups = [
        {"params": [*model.first.parameters()], "weight_decay": 0.1},
        {"params": [*model.second.parameters(), model.unused], "lr": 0.003},
    ]
    optimizer: Any = (CoatAdamW if coat else torch.optim.AdamW)(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": max_grad_norm,
            "zero_optimization": {"stage": zero_stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )
    optimizer.state.clear()
    if own:
        change_optimizer(engine)
    return engine


def steps(engine: Any, count: int, scale: float = 1.0) -> list[float]:
    """Steps of two micro-batches; the gradients' norms."""
    norms = []
    for step in range(count):
        for half in range(2):
            torch.manual_seed(10 * step + half)
            x = scale * torch.randn(2, 64)
            engine.backward(engine(x.bfloat16()))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def weights(engine: Any) -> dict[str, Tensor]:
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: p.detach().clone() for name, p in parameters.items()}


@pytest.mark.parametrize("coat", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0, 1e6])
def test_steps_are_those_of_deepspeed(max_grad_norm: float, coat: bool) -> None:
    """Without clipping to the last bit; the factor of clipping may differ by its rounding."""
    theirs, ours = (engine_of(max_grad_norm, own=own, coat=coat) for own in (False, True))
    expected = steps(theirs, 5)
    assert steps(ours, 5) == pytest.approx(expected, rel=1e-6)
    assert max(expected) > 1  # so that a limit of 1 clips
    clipped = 0 < max_grad_norm < max(expected)
    for name, weight in weights(theirs).items():
        there = weights(ours)[name]
        assert not weight.equal(Layers().bfloat16().get_parameter(name)) or name == "unused"
        assert torch.allclose(there, weight, rtol=2**-7) if clipped else there.equal(weight), name


@pytest.mark.parametrize(
    ("zero_stage", "bad"),
    # The last value has a finite gradient, whose square is not; stage 3 takes FP64.
    [
        (0, math.nan),
        (0, math.inf),
        (0, 1e15),
        (1, math.nan),
        (2, math.nan),
        (2, 1e15),
        (3, math.inf),
    ],
)
def test_a_bad_gradient_changes_nothing(zero_stage: int, bad: float) -> None:
    """The norm decides: ZeRO's own search for bad gradients is not needed."""
    engine = engine_of(1.0, own=False, zero_stage=zero_stage)
    searches: list[bool] = []
    engine.optimizer.has_overflow = lambda *_: searches.append(True)
    change_optimizer(engine)
    assert math.isfinite(*steps(engine, 1))
    before = weights(engine)
    assert steps(engine, 1, scale=bad) == [math.inf]
    assert engine.skipped_steps == 1
    assert all(weights(engine)[name].equal(weight) for name, weight in before.items())
    assert math.isfinite(*steps(engine, 1))  # the bad gradient is gone
    assert not weights(engine)["first.weight"].equal(before["first.weight"])
    assert searches == []


def test_engines_with_zero_keep_their_step() -> None:
    engine = engine_of(1.0, own=False, zero_stage=2)
    step = engine.optimizer.step
    change_optimizer(engine)
    assert engine.optimizer.step == step
    assert engine.enable_backward_allreduce
