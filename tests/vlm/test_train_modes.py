"""Modes of a stage's modules and waits for the GPU, step after step."""

import dataclasses
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_bench.recipe import (
    RecipeBench,
    build_stage_model,
    build_training_step,
    list_stage_cases,
    make_batch,
)
from coat_bench.step import StepCase
from coat_vlm.distributed import join_world


def list_modes(model: torch.nn.Module) -> dict[str, set[bool]]:
    """Return the modes of all modules of each part."""
    parts = ("vision_tower", "projector", "language_model")
    return {part: {m.training for m in model.get_submodule(part).modules()} for part in parts}


def test_a_frozen_tower_is_in_evaluation_mode_also_after_a_validation() -> None:
    recipe = StepCase("bf16", None, True, 0).recipe("tiny", 1)
    stage = recipe.stages["sft"]
    frozen = dataclasses.replace(stage.module("vision"), train=False, lr=None)
    stage = dataclasses.replace(stage, vision=frozen)
    recipe = dataclasses.replace(recipe, stages={"sft": stage})
    modes = {"vision_tower": {False}, "projector": {True}, "language_model": {True}}
    with join_world() as world:
        (case,) = list_stage_cases(RecipeBench(recipe=recipe, images=1, steps=3), world)
        model: Any = build_stage_model(case, world.device).eval()
        step = build_training_step(model, case, world, 3)
        seen: list[dict[str, set[bool]]] = []
        model.register_forward_hook(lambda module, *_: seen.append(list_modes(module)))
        batch = make_batch(model, [case.row], None, seed=0)
        step([batch], 0.0)
        step([batch], 0.0)
        step.engine.eval()  # as a validation does
        assert list_modes(model) == {part: {False} for part in modes}
        step([batch], 0.0)
    assert seen == [modes] * 3


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_deepspeed_times_no_micro_batch(zero_stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third step on, its timer waited for the GPU twice in each of them."""
    recipe = StepCase("coat", None, True, zero_stage).recipe("tiny", 1)
    bench = RecipeBench(recipe=recipe, images=1, steps=4, accumulation=2)
    waits: list[int] = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: waits.append(step.finished))
    with join_world() as world:
        (case,) = list_stage_cases(bench, world)
        model = build_stage_model(case, world.device)
        step = build_training_step(model, case, world, 4)
        batch = make_batch(model, [case.row], None, seed=0)
        for _ in range(4):
            step([batch, batch], 0.0)
    assert step.finished == 4
    assert waits == []
