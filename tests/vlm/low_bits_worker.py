"""Trains a tiny model on two ranks under each ZeRO stage; prints losses and norms as JSON.

Started by ``test_low_bits.py``. The first run of each stage has FP32 copies of BF16 weights, as on
a GPU, and the second one the low bits of the master weights.
"""

import dataclasses
import json
from typing import Any

import pytest
import torch

from coat_kernels import join_master
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import Arithmetic, arithmetic_of_recipe
from coat_vlm.plan import measure
from step_models import SIZES, make_recipe, make_step_batch

STEPS, ACCUMULATION = 3, 2


def run(patch: pytest.MonkeyPatch, world: World, zero_stage: Any, low_bits: bool) -> Any:
    """Train a few steps; return losses, norms, and the master weights after the first step."""
    recipe = make_recipe("tiny", 1, "coat", zero_stage, master_weights="low_bits")
    stage = recipe.stages["sft"]
    trained = {
        name: dataclasses.replace(stage.module(name), lr=3e-3)
        for name in ("vision", "projector", "language")
    }
    stage = dataclasses.replace(stage, max_grad_norm=0.05, **trained)
    recipe = dataclasses.replace(recipe, stages={"sft": stage})
    case = measure.open_case(recipe, "sft", world, accumulation=ACCUMULATION)

    def arithmetic_of(*args: Any) -> Arithmetic:
        return dataclasses.replace(arithmetic_of_recipe(*args), low_bits=low_bits)

    patch.setattr(measure, "arithmetic_of_recipe", arithmetic_of)
    model = measure.build_stage_model(case, world.device)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    step = measure.build_training_step(model, case, world, STEPS)
    engine: Any = step.passes.engine
    entries: list[dict[str, Any]] = []
    step.on_entry = entries.append
    masters = []
    for number in range(STEPS):
        seeds = range(2 * number * ACCUMULATION + world.rank, 2 * (number + 1) * ACCUMULATION, 2)
        step([make_step_batch(model, SIZES["tiny"], 1, None, seed) for seed in seeds], 0.0)
        for master, own in engine.basic_optimizer.state.items() if not number else ():
            assert ("master_low_bits" in own) == low_bits
            detached = master.detach().clone()
            masters.append(join_master(detached, own["master_low_bits"]) if low_bits else detached)
    measure.release_engine(engine, model)
    return [entry["loss"] for entry in entries], [entry["grad_norm"] for entry in entries], masters


def main() -> None:
    """Train; rank 0 prints."""
    found = {}
    with join_world() as world, pytest.MonkeyPatch.context() as patch:
        for zero_stage in (1, 2, 3):
            *copies, expected = run(patch, world, zero_stage, low_bits=False)
            *low, masters = run(patch, world, zero_stage, low_bits=True)
            same = all(map(torch.equal, masters, expected)) and len(masters) == len(expected)
            found[zero_stage] = [copies, low, not world.any(not same)]
    if world.is_main:
        print(json.dumps(found))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()
