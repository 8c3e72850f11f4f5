"""How long ranks wait for each other on samples of many lengths: "Balance of ranks" in 2026-11.md.

``torchrun --nproc-per-node N docs/lab/rank_waiting.py STEPS ROWS MICRO_BATCH OUT.json RECIPE
[key=value ...]`` runs every rank's micro-batches of ``balance: true`` without collectives and
without an optimizer, and times them; STEPS 0 times nothing, and counts the FLOPs of 200 steps.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coat_bench.lengths import draw_samples
from coat_bench.recipe import RecipeBench, build_stage_model, list_stage_cases, make_batch
from coat_data.mixture.sampler import BatchRow, assign_to_ranks
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model.flops import count_flops
from coat_vlm.train.prepare import set_train_mode
from coat_vlm.train.step import copy_batch_to_device

WARMUP = 10


def print_shares(name: str, work: np.ndarray) -> None:
    """Print the part of the time that ranks wait; ``work`` is [ranks, steps, micro-steps]."""
    for where, values in (("step", work.sum(2)), ("micro-step", work.reshape(len(work), -1))):
        largest = values.max(0)
        fastest = 1 - values.min(0).sum() / largest.sum()
        mean = np.mean(1 - values.mean(0) / largest)
        sys.stdout.write(f"{name}, by {where}: fastest {fastest:.2%}, mean {mean:.2%}\n")


def main(world: World) -> None:
    """Measure what the command line says; every process calls this."""
    steps, batch, micro_batch = map(int, sys.argv[1:4])
    recipe = load_recipe(sys.argv[5], sys.argv[6:])
    (case,) = list_stage_cases(
        RecipeBench(recipe=recipe, only_stage="sft", images=0, plan=False), world
    )
    count, per_image = (steps or 200) * batch, case.frame.config.tokens_per_image
    shapes = draw_samples(count, per_image, recipe.model.max_length, recipe.seed)
    tokens, images = (np.array([getattr(s, key) for s in shapes]) for key in ("tokens", "images"))
    costs = count_flops(case.frame).estimate(tokens, images)
    rows = [BatchRow((i,), int(tokens[i]), int(images[i]), float(costs[i])) for i in range(count)]
    starts = range(0, count, batch)
    dealt = [assign_to_ranks(rows[at : at + batch], micro_batch, world.size) for at in starts]
    flops = [[[sum(row.cost for row in own) for own in ranks] for ranks in step] for step in dealt]
    if world.is_main:
        print_shares("FLOPs", np.array(flops).transpose(2, 0, 1))
    if steps == 0:
        return
    model: Any = build_stage_model(case, world.device)
    set_train_mode(model, case.stage)
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, world.device, recipe.master_weights)
    reuse = arithmetic.weight_reuse(model, world.device)

    def timed() -> Iterator[list[float]]:
        for number, step in enumerate(dealt):
            own = [[shapes[row.positions[0]] for row in ranks[world.rank]] for ranks in step]
            batches = [make_batch(model, samples, None, seed=number) for samples in own]
            seconds = []
            for loaded in batches:
                inputs = copy_batch_to_device(loaded.batch, world.device)
                started = time.perf_counter()
                with reuse.scope(len(batches)):
                    loss = model(**inputs, skip_logits=True).loss
                    (loss / len(batches)).backward()
                loss.item()
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            model.zero_grad(set_to_none=True)
            reuse.after_step()
            yield seconds

    everyones = world.gather(list(timed()))
    if world.is_main:
        Path(sys.argv[4]).write_text(json.dumps(everyones), encoding="utf-8")
        print_shares("time", np.array(everyones)[:, WARMUP:])


if __name__ == "__main__":
    with join_world() as joined:
        main(joined)
