"""Modes of a stage's modules, step after step."""

import dataclasses
from typing import Any

import torch

from coat_vlm.distributed import join_world
from coat_vlm.plan.measure import build_stage_model, build_training_step, open_case
from step_models import SIZES, make_recipe, make_step_batch


def list_modes(model: torch.nn.Module) -> dict[str, set[bool]]:
    """Return the modes of all modules of each part."""
    parts = ("vision_tower", "projector", "language_model")
    return {part: {m.training for m in model.get_submodule(part).modules()} for part in parts}


def test_a_frozen_tower_is_in_evaluation_mode_also_after_a_validation() -> None:
    recipe = make_recipe("tiny", 1)
    stage = recipe.stages["sft"]
    frozen = dataclasses.replace(stage.module("vision"), train=False, lr=None)
    stage = dataclasses.replace(stage, vision=frozen)
    recipe = dataclasses.replace(recipe, stages={"sft": stage})
    modes = {"vision_tower": {False}, "projector": {True}, "language_model": {True}}
    with join_world() as world:
        case = open_case(recipe, "sft", world)
        model: Any = build_stage_model(case, world.device).eval()
        step = build_training_step(model, case, world, 3)
        seen: list[dict[str, set[bool]]] = []
        model.register_forward_hook(lambda module, *_: seen.append(list_modes(module)))
        batch = make_step_batch(model, SIZES["tiny"], 1, None, 0)
        step([batch], 0.0)
        step([batch], 0.0)
        step.passes.engine.eval()  # as a validation does
        assert list_modes(model) == {part: {False} for part in modes}
        step([batch], 0.0)
    assert seen == [modes] * 3
