"""Trains a tiny VLM in FP8 with BF16 weights and prints the collectives of a step, as JSON.

Started by ``test_communication.py`` with a JSON list of cases: ``zero_stage``, ``micro_batches``,
``sequence_parallel``, and ``zero``, further keys of DeepSpeed's ``zero_optimization``.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

calls: list[tuple[str, int, int, int]] = []
"""Collective, ranks, bytes of an element, elements of the whole tensor."""

WHOLE = {
    "all_reduce": 0, "reduce": 0, "broadcast": 0, "all_gather_into_tensor": 0,
    "reduce_scatter_tensor": 1, "all_to_all_single": 0,
}  # fmt: skip
"""Collective -> number of the argument that is the whole tensor."""


def record(name: str) -> None:
    """Record the calls of a collective."""
    original = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = [*args, *kwargs.values()][WHOLE[name]]
        groups = (x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup))
        ranks = dist.get_world_size(next(groups, None))
        calls.append((name, ranks, tensor.element_size(), tensor.numel()))
        return original(*args, **kwargs)

    setattr(dist, name, call)


for collective in WHOLE:
    record(collective)  # before DeepSpeed refers to them

import coat_vlm  # noqa: E402, F401 - first, so that torchvision imports
from coat_vlm.distributed import World, join_world  # noqa: E402
from coat_vlm.plan import measure  # noqa: E402
from coat_vlm.train import engine  # noqa: E402
from step_models import SIZES, make_recipe, make_step_batch  # noqa: E402

arithmetic_of_recipe = measure.arithmetic_of_recipe
build_config = engine.build_deepspeed_config


def count(case: dict[str, Any], world: World) -> dict[str, Any]:
    """Take four steps, as ZeRO-3 learns the order of modules in the first ones; count the last."""
    engine.build_deepspeed_config = lambda *args: {
        **(config := build_config(*args)),
        "zero_optimization": {**config["zero_optimization"], **case["zero"]},
    }
    recipe = make_recipe("tiny", 1, "coat", case["zero_stage"])
    stage = replace(recipe.stages["sft"], sequence_parallel=case["sequence_parallel"])
    recipe = replace(recipe, stages={"sft": stage})
    opened = measure.open_case(recipe, "sft", world, accumulation=case["micro_batches"])
    model = measure.build_stage_model(opened, world.device)
    parameters = sum(p.numel() for p in model.parameters())
    step = measure.build_training_step(model, opened, world)
    seed = world.rank // case["sequence_parallel"]
    batch = make_step_batch(model, SIZES["tiny"], 1, None, seed)
    losses: list[float] = []
    step.on_entry = lambda entry: losses.append(entry["loss"])
    for _ in range(4):
        calls.clear()
        step([batch] * case["micro_batches"], 0.0, wait=True)
    counted: Counter[str] = Counter()
    numbers = Counter(call[:3] for call in calls)
    for name, ranks, size, elements in calls:
        counted[f"{name} {ranks} {size}"] += elements
    measure.release_engine(step.passes.engine, model)
    return {
        "parameters": parameters, "losses": losses, "elements": counted,
        "calls": {" ".join(map(str, key)): number for key, number in numbers.items()},
    }  # fmt: skip


def main() -> None:
    """Count all cases; rank 0 prints."""
    # BF16 weights as on a GPU; by default FP8 is emulated in FP32 on a CPU.
    measure.arithmetic_of_recipe = lambda recipe, _: arithmetic_of_recipe(
        recipe, torch.device("meta")
    )
    with join_world() as world:
        results = [count(case, world) for case in json.loads(sys.argv[1])]
        if world.is_main:
            print(json.dumps(results), flush=True)  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()
