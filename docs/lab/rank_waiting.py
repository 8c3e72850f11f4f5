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
from torch.utils.data import DataLoader

from coat_bench.lengths import draw_samples
from coat_bench.recipe import (
    RecipeBench,
    RowShape,
    build_stage_model,
    list_stage_cases,
    make_batch,
)
from coat_data.mixture.sampler import BatchRow, assign_to_ranks
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import SpareMemory, arithmetic_of_recipe
from coat_vlm.model.flops import count_flops
from coat_vlm.train.prepare import avoids_padding, set_train_mode
from coat_vlm.train.step import copy_batch_to_device

WARMUP = 160
"""Rows of the first steps, which are left out."""
LOADERS = 4
"""Processes per rank that make random micro-batches beside the passes, as in training."""


def print_shares(name: str, work: np.ndarray) -> None:
    """Print the part of the time that ranks wait; ``work`` is [ranks, steps, micro-steps]."""
    for where, values in (("step", work.sum(2)), ("micro-step", work.reshape(len(work), -1))):
        largest = values.max(0)
        fastest = 1 - values.min(0).sum() / largest.sum()
        mean = np.mean(1 - values.mean(0) / largest)
        sys.stdout.write(f"{name}, by {where}: fastest {fastest:.2%}, mean {mean:.2%}\n")


class MicroBatches:
    """A data set of random micro-batches with the given shapes."""

    def __init__(self, model: Any, shapes: list[list[RowShape]], *, unpad: bool) -> None:
        self.model, self.shapes, self.unpad = model, shapes, unpad

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, number: int) -> Any:
        shapes = self.shapes[number]
        return make_batch(self.model, shapes, None, seed=number, unpad=self.unpad).batch


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
    warmup = -(-WARMUP // batch)
    if steps <= warmup:
        raise ValueError(f"STEPS is {steps}, and the first {warmup} are left out; give more")
    model: Any = build_stage_model(case, world.device, unpad=True)
    set_train_mode(model, case.stage)
    arithmetic = arithmetic_of_recipe(recipe, world.device)
    spare = SpareMemory.of(model, arithmetic, world.device)

    unpad = avoids_padding(model, recipe, case.stage, world.device)
    per_step = len(dealt[0])
    own = [
        [shapes[row.positions[0]] for row in ranks[world.rank]] for step in dealt for ranks in step
    ]
    loader = DataLoader(
        MicroBatches(model, own, unpad=unpad),  # pyright: ignore[reportArgumentType]
        batch_size=None,
        num_workers=LOADERS,
        multiprocessing_context="fork",
        prefetch_factor=4,
    )

    def timed() -> Iterator[float]:
        for number, loaded in enumerate(loader, 1):
            inputs = copy_batch_to_device(loaded, world.device)
            started = time.perf_counter()
            with spare.share_weights(per_step):
                loss = model(**inputs, skip_logits=True).loss
                (loss / per_step).backward()
            loss.item()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            yield time.perf_counter() - started
            if number % per_step == 0:
                model.zero_grad(set_to_none=True)
                spare.after_step()

    everyones = world.gather(list(timed()))
    if world.is_main:
        seconds = np.array(everyones).reshape(world.size, steps, per_step)
        Path(sys.argv[4]).write_text(json.dumps(seconds.tolist()), encoding="utf-8")
        print_shares("time", seconds[:, warmup:])


if __name__ == "__main__":
    with join_world() as joined:
        main(joined)
