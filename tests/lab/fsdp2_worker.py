"""Trains tiny models with two ranks of FSDP2, and with a plain loop on the data of both ranks.

Started by ``test_fsdp2.py``; prints the losses and the gradient norms of both, as JSON.
"""

import json
from typing import Any

import torch
from torch import nn

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import arithmetic_of_recipe
from coat_vlm.fp8.convert import Bf16RoundedLinear
from coat_vlm.plan.measure import StageCase, build_stage_model
from coat_vlm.train.engine import build_optimizer
from coat_vlm.train.model_setup import set_train_mode
from coat_vlm.train.passes import copy_batch_to_device
from lab_fsdp2 import ShardedStep, build_sharded_model, find_size, open_stage
from step_models import make_step_batch

STEPS = 4


def train_plainly(case: StageCase, weights: Any, batches: Any, world: World, limit: float) -> Any:
    """Return the losses and the gradient norms of a loop without sharding."""
    model = build_stage_model(case, world.device)
    model.load_state_dict(weights)
    for module in model.modules():  # as on a GPU, which the sharded language model is made for
        if case.recipe.model.vision is None and type(module) is Bf16RoundedLinear:
            module.__class__ = nn.Linear
    set_train_mode(model, case.stage)
    optimizer = build_optimizer(
        model, case.stage, arithmetic_of_recipe(case.recipe, world.device), world
    )
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"]
    losses, norms = [], []
    for _ in range(STEPS):
        total = 0.0
        for loaded in batches:
            loss = model(**copy_batch_to_device(loaded.batch, world.device)).loss / len(batches)
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def compare(size: str, update: str, checkpointing: bool, world: World) -> dict[str, Any]:
    """Train with both."""
    chosen = find_size(size, 24)
    case = open_stage(chosen, 1, world, checkpointing=checkpointing)
    model = build_sharded_model(case, world.device)
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    batches = [make_step_batch(model, chosen, 1, None, rank) for rank in range(world.size)]
    clips = update == "after"
    plain, norms = train_plainly(case, weights, batches, world, 1.0 if clips else float("inf"))
    step, losses, scales = ShardedStep(model, case, world, update), [], []
    step.on_entry = lambda entry: losses.append(entry["loss"])
    for _ in range(STEPS):
        step([batches[world.rank]], 0.0)
        if step.optimizer.grad_scale is not None:
            scales.append(step.optimizer.grad_scale.item())
    return {"plain": plain, "sharded": losses, "norms": norms, "scales": scales}


if __name__ == "__main__":
    with join_world() as joined:
        cases = (("tiny", "after", False), ("tiny-llm", "backward", True))
        results = [compare(*case, joined) for case in cases]
        if joined.is_main:
            print(json.dumps(results), flush=True)  # noqa: T201 - read by the test
