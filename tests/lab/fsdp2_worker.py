"""Trains tiny models with two ranks of FSDP2, and compares every step with the unsharded model.

Started by ``test_fsdp2.py``; prints the losses, the gradient norms and the tensors that differ.

FP8 rounding is a step function, so two runs whose weights differ by 1e-7 have losses that differ by
1e-3 here. Therefore the unsharded model gets the weights of the sharded one before every step and
runs the batches of both ranks. Its gradients, cut as FSDP2 cuts them, update copies of the shards:
FP8 groups and stochastic rounding depend on the cut. Shards and states must then be equal bitwise.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_vlm.distributed import World, join_world
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.measure import build_stage_model
from coat_vlm.train.model_setup import set_train_mode
from coat_vlm.train.passes import copy_batch_to_device
from lab_fsdp2 import ShardedStep, build_sharded_model, find_size, open_stage
from step_models import make_step_batch

STEPS = 4


def compare(size: str, update: str, checkpointing: bool, world: World) -> dict[str, Any]:
    """Take steps with FSDP2, and each of them once more without it."""
    chosen = find_size(size, 24)
    case = open_stage(chosen, 1, world, checkpointing=checkpointing)
    # BF16 weights and the low bits of their master weights, as on a GPU.
    case = replace(case, recipe=replace(case.recipe, master_weights="low_bits"))
    model = build_sharded_model(case, world.device)
    step = ShardedStep(model, case, world, update)
    whole = build_stage_model(case, world.device)
    set_train_mode(whole, case.stage)
    batches = [make_step_batch(model, chosen, 1, None, rank) for rank in range(world.size)]
    copies = {p: nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()}
    optimizers: list[CoatAdamW] = step._of_blocks or [step.optimizer]
    twins = [CoatAdamW(list(_copy_groups(optimizer, copies))) for optimizer in optimizers]
    result: dict[str, Any] = {
        name: [] for name in ("sharded", "whole", "norms", "scales", "different")
    }
    step.on_entry = lambda entry: result["sharded"].append(entry["loss"])
    for number in range(STEPS):
        weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
        whole.load_state_dict(weights)
        whole.zero_grad()
        losses = []
        for loaded in batches:
            loss = whole(**copy_batch_to_device(loaded.batch, world.device)).loss / len(batches)
            loss.backward()
            losses.append(loss.item())
        step([batches[world.rank]], 0.0)
        norms = [p.grad.double().norm() for p in whole.parameters() if p.grad is not None]
        result["whole"].append(sum(losses))
        result["norms"].append(torch.stack(norms).norm().item())
        scale = step.optimizer.grad_scale
        if scale is not None:
            result["scales"].append(scale.item())
        for (name, p), unsharded in zip(model.named_parameters(), whole.parameters(), strict=True):
            grad = unsharded.grad
            copies[p].grad = None if grad is None else grad.chunk(world.size)[world.rank]
            assert p.grad is None, name
        for twin in twins:
            twin.grad_scale = scale
            twin.step()
        result["different"] += [
            f"step {number}, rank {world.rank}, {name}: {key}"
            for name, p in model.named_parameters()
            for key, ours, expected in _pair_tensors(p, copies[p], optimizers, twins)
            if not torch.equal(ours.float(), expected.float())
        ]
    return {**result, "different": [*chain.from_iterable(world.gather(result["different"]))]}


def _copy_groups(optimizer: CoatAdamW, copies: Any) -> Iterator[dict[str, Any]]:
    for group in optimizer.param_groups:
        yield {**group, "params": [copies[p] for p in group["params"]], "lr": group["peak_lr"]}


def _pair_tensors(
    p: Any, copy: Tensor, optimizers: list[CoatAdamW], twins: list[CoatAdamW]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a shard and the tensors of its state, each with its name and its counterpart."""
    yield "weight", p.to_local(), copy
    for optimizer, twin in zip(optimizers, twins, strict=True):
        state: Any = twin.state.get(copy, {})
        for key, expected in state.items():
            yield key, optimizer.state[p][key], expected


if __name__ == "__main__":
    with join_world() as joined:
        cases = (("tiny", "after", False), ("tiny-llm", "backward", True))
        results = [compare(*case, joined) for case in cases]
        if joined.is_main:
            print(json.dumps(results), flush=True)  # noqa: T201 - read by the test
