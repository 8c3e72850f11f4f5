"""Ranks under ZeRO 1 and 2 of which one replays CUDA graphs and the other does not."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from two_ranks import run_on_two_ranks

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import World
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.plan.published import find_vocab_size
from coat_vlm.train import engine
from coat_vlm.train.model_setup import build_planned_model
from coat_vlm.train.zero import GradientOrder

WORKER = Path(__file__).parent / "gradient_order_worker.py"

WHOLE = 10**6
"""Elements of a bucket for all gradients."""


@cache
def run(replays: str, bucket: int, order: str, zero_stage: int = 2) -> dict[str, Any]:
    return run_on_two_ranks(WORKER, replays, str(bucket), order, str(zero_stage))


@pytest.mark.slow
@pytest.mark.parametrize(("bucket", "zero_stage"), [(WHOLE, 2), (20_000, 2), (6_000, 1)])
def test_gradients_are_those_of_eager_ranks(bucket: int, zero_stage: int) -> None:
    """Equal bit by bit; also if a bucket is full in a block, or smaller than a gradient."""
    eager = run("none", WHOLE, "as it comes", zero_stage)
    found = run("first", bucket, "ordered", zero_stage)
    assert not found["same order"]  # in which autograd computes them
    assert found["grads"] == eager["grads"]
    assert found["norm"] == eager["norm"]


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_without_the_order_gradients_are_wrong(zero_stage: int) -> None:
    """Why the class exists: without an error."""
    eager = run("none", WHOLE, "as it comes", zero_stage)
    found = run("first", WHOLE, "as it comes", zero_stage)
    wrong = [name for name, total in found["grads"].items() if total != eager["grads"][name]]
    assert len(wrong) > 10


@pytest.mark.parametrize(
    ("changes", "ranks", "ordered"),
    [
        ([], 2, True),
        (["fp8.cuda_graphs=true"], 2, True),
        ([], 1, False),
        (["fp8.cuda_graphs=false"], 2, False),
        (["zero_stage=1"], 2, True),  # reduces during the backward pass, too
        (["zero_stage=0"], 2, False),
        (["precision=bf16", "fp8=null"], 2, False),
    ],
)
def test_training_orders_gradients_where_ranks_may_differ(
    monkeypatch: pytest.MonkeyPatch, changes: list[str], ranks: int, ordered: bool
) -> None:
    recipe = load_recipe("quickstart", ["precision=coat", "zero_stage=2", *changes])
    stage = recipe.stages["sft"]
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, torch.device("meta"))
    model = build_planned_model(recipe, stage, arithmetic, find_vocab_size(recipe))
    optimizer = SimpleNamespace(
        reduce_ready_partitions_and_remove_grads=len, independent_gradient_partition_epilogue=len
    )

    def initialize(config: dict[str, Any], **_: Any) -> tuple[Any, ...]:
        overlaps = config["zero_optimization"].get("overlap_comm", False)
        made = SimpleNamespace(optimizer=optimizer, zero_overlap_comm=lambda: overlaps)
        return made, None, None, None

    monkeypatch.setattr(engine.deepspeed, "initialize", initialize)
    monkeypatch.setattr(engine, "change_optimizer", lambda _: None)
    world = World(rank=0, size=ranks, device=torch.device("cpu"))
    engine.build_engine(model, recipe, stage, arithmetic, world)
    assert (optimizer.reduce_ready_partitions_and_remove_grads is not len) == ordered
    assert (optimizer.independent_gradient_partition_epilogue is not len) == ordered


@pytest.mark.parametrize("accumulation", [1, 2])
def test_all_gradients_are_passed_on_once_in_the_first_order(accumulation: int) -> None:
    """Under ZeRO-1 in the last micro-batch of a step."""
    passed: list[Any] = []
    ended: list[int] = []
    last = [False]
    optimizer: Any = SimpleNamespace(
        partition_gradients=accumulation == 1,
        is_gradient_accumulation_boundary=lambda: last[0],
        reduce_ready_partitions_and_remove_grads=lambda p, group: passed.append((p, group)),
        independent_gradient_partition_epilogue=lambda: ended.append(len(passed)),
    )
    GradientOrder(optimizer)

    def backward(parameters: str) -> str:
        for number in range(accumulation):
            passed.clear()
            last[0] = number == accumulation - 1
            for name in parameters:
                optimizer.reduce_ready_partitions_and_remove_grads(name, "abcdef".index(name))
        optimizer.independent_gradient_partition_epilogue()
        assert all(group == "abcdef".index(name) for name, group in passed)
        assert ended[-1] == len(passed)
        return "".join(name for name, _ in passed)

    assert backward("abcd") == "abcd"
    assert backward("bacd") == "abcd"
    assert backward("dcba") == "abcd"
    assert backward("dca") == "acd"  # b was not used
    assert backward("ebadc") == "abcde"  # e was not used before
    assert backward("edcba") == "abcde"
