"""Measures the training step of a recipe's stages: ``coat-vlm plan RECIPE --measure``.

Training's code builds and runs a stage, with three differences: weights are random and generated on
the model's device; sequences are generated once and copied to the GPU in every step; a step has at
most two micro-batches per rank. A sequence has the shape that a plan assumes: one token of text,
random images, and random text with a label on every token.
"""

import copy
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from tqdm import tqdm
from transformers import PreTrainedModel

from coat_data.load.loader import LoadedBatch, check_batch_sizes, sum_counts
from coat_vlm.config import Recipe, StageConfig, StageName
from coat_vlm.config.stage import PackingConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import arithmetic_of_recipe, graph_blocks
from coat_vlm.plan.published import find_vocab_size, use_published_shapes
from coat_vlm.plan.rows import Row, row_tokens
from coat_vlm.plan.stage import StagePlan, add_graphs
from coat_vlm.train.engine import steps_overlap
from coat_vlm.train.model_setup import build_planned_model, prepare_model
from coat_vlm.train.passes import build_passes
from coat_vlm.train.step import TrainStep
from coat_vlm.train.step_log import BadSamples, StepLog
from coat_vlm.train.throughput import PeakMemory, Throughput
from coat_vlm.train.tracking import Metrics

STEPS, WARMUP = 5, 3
_NO_RUN = Path("no run folder")  # nothing is read from it or written to it


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """A measured stage."""

    name: StageName
    recipe: Recipe  # with shapes in place of names of published models
    stage: StageConfig  # with the batch size of this number of ranks
    meta_model: Any
    accumulation: int  # micro-batches of a step


class Timing(NamedTuple):
    """Measured steps; the same on every rank, except ``entries``."""

    ms: float  # median time of a step on the slowest GPU
    peak_gb: float | None  # most memory allocated on one GPU, in 10^9 bytes; None on a CPU
    entries: list[dict[str, Any]]  # of metrics.jsonl, including the warm-up


def measure_stage(recipe: Recipe, plan: StagePlan, world: World) -> str:
    """Measure a planned stage on all processes of ``world``, and describe it next to the plan."""
    case, row = open_case(recipe, plan.name, world), plan.row
    stage = case.stage
    model = build_stage_model(case, world.device)
    first = case.recipe.seed + world.rank // stage.sequence_parallel * case.accumulation
    batches = [
        make_batch(row, stage.micro_batch_size, stage.packing, first + number)
        for number in range(case.accumulation)
    ]
    step = build_training_step(model, case, world)
    try:
        torch.manual_seed(recipe.seed + world.rank)
        timing = take_steps(step, batches, case.name, world)
        shared = step.passes.spare_memory.nbytes if step.passes.spare_memory.shares_weights else 0
        skipped = step.skipped_steps
    finally:
        release_engine(step.passes.engine, model)
    text = (
        f"measured, stage {case.name}: {world.size} GPU(s), {case.accumulation} micro-batch(es) of "
        f"{stage.micro_batch_size} sequence(s) of {row.tokens:,} tokens with {row.images} "
        "image(s), random weights\n"
    )
    if skipped:
        return f"{text}  no speed: gradients were NaN or infinite in {skipped} step(s)"
    last, seconds = timing.entries[-1], timing.ms / 1e3 * world.size
    text += (
        f"  a step of {last['tokens']:,} tokens, {last['supervised_tokens']:,} of them supervised: "
        f"{timing.ms:.1f} ms, {last['tokens'] / seconds:,.0f} tokens/s per GPU"
    )
    if "tflop" in last:
        text += f", {sum(last['tflop'].values()) / seconds:.3g} TFLOP/s per GPU"
    if timing.peak_gb is not None:
        graphs = [*plan.find_captured().values()]
        planned = (add_graphs(plan.own_memory, graphs).peak + shared) / 1e9
        error = 100 * (planned / timing.peak_gb - 1)
        text += f"\n  peak {timing.peak_gb:.2f} GB, planned {planned:.4g} GB ({error:+.1f}%)"
    return text


def open_case(
    recipe: Recipe, name: StageName, world: World, *, accumulation: int | None = None
) -> StageCase:
    """Build a stage's model on ``meta``.

    ``accumulation``: micro-batches of a step; by default the recipe's, at most two.
    """
    recipe = use_published_shapes(recipe)
    stage = recipe.stages[name]
    replicas = stage.count_replicas(world.size)
    per_pass = stage.micro_batch_size * replicas
    accumulation = accumulation or min(2, max(1, stage.batch_size // per_pass))
    check_batch_sizes(per_pass * accumulation, stage.micro_batch_size, 0, replicas)
    stage = replace(
        stage, batch_size=per_pass * accumulation, max_steps=WARMUP + STEPS, epochs=None
    )
    arithmetic = arithmetic_of_recipe(recipe, torch.device("meta"))
    model = build_planned_model(recipe, stage, arithmetic, find_vocab_size(recipe))
    return StageCase(
        name=name, recipe=recipe, stage=stage, meta_model=model, accumulation=accumulation
    )


def build_stage_model(case: StageCase, device: torch.device) -> Any:
    """Build the model of a stage with random weights on a device, ready for the engine.

    They are the same at every call on the same kind of device, which generates them: 8B parameters
    take seconds on a GPU, minutes on a CPU.
    """
    recipe = case.recipe
    arithmetic = arithmetic_of_recipe(recipe, device)
    config: Any = copy.deepcopy(case.meta_model.config)
    for part in (config, config.text_config, config.vision_config):
        if part is not None:
            part.dtype = arithmetic.dtype
    # The planned model may have an implementation that a new model would refuse.
    config._attn_implementation = recipe.model.attn_implementation
    before = torch.get_default_dtype()
    torch.manual_seed(recipe.seed)
    torch.set_default_dtype(arithmetic.dtype)
    try:
        with device:
            model: Any = type(case.meta_model)(config)
    finally:
        torch.set_default_dtype(before)
    prepare_model(model, case.stage, arithmetic)
    return model


def make_batch(row: Row, rows: int, packing: PackingConfig | None, seed: int) -> LoadedBatch:
    """Make a micro-batch of random sequences on the CPU; with packing they become one."""
    generator = torch.Generator().manual_seed(seed)
    samples = [row.make(generator) for _ in range(rows)]
    batch, counts = row.collate(samples, packing), sum_counts(samples)
    return LoadedBatch(batch=batch, bad=[], num_samples=rows, counts=counts)


def build_training_step(
    model: PreTrainedModel, case: StageCase, world: World, total_steps: int = WARMUP + STEPS
) -> TrainStep:
    """Build the training step of a stage, with DeepSpeed's engine around the model."""
    recipe, stage = case.recipe, case.stage
    arithmetic = arithmetic_of_recipe(recipe, world.device)
    # Before DeepSpeed splits the weights.
    throughput = Throughput(model, world, stage.sequence_parallel)
    # No source is read, so the sampler has no rows and no state.
    sampler: Any = SimpleNamespace(
        step=lambda state: ([], state), count_by_source=lambda _: np.zeros(0, dtype=np.int64)
    )
    return TrainStep(
        name=case.name,
        total_steps=total_steps,
        sampler=sampler,
        passes=build_passes(model, recipe, stage, arithmetic, world),
        log=StepLog(
            metrics=Metrics(_NO_RUN, recipe.tracking, recipe.name, enabled=False),
            throughput=throughput,
            bad_samples=BadSamples(_NO_RUN, case.name, stage, []),
            memory=PeakMemory(world.device),
            world_size=world.size,
            row_tokens=None if stage.packing is None else row_tokens(recipe, stage),
        ),
        overlaps=steps_overlap(recipe, stage, arithmetic, world),
    )


def release_engine(engine: DeepSpeedEngine, model: PreTrainedModel) -> None:
    """Free the memory of an engine and its model, which become unusable."""
    # ZeRO-3 of deepspeed 0.19.8 never frees a model: a list in its module and classes of its hooks
    # refer to it. Therefore the objects that they refer to are emptied.
    graph_blocks(model, enabled=False)
    wrapper: Any = engine.optimizer
    inner: Any = engine.basic_optimizer
    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    for parameter in model.parameters():
        parameter.grad = None
        vars(parameter).clear()
        parameter.data = parameter.data.new_empty(0)
    inner.state.clear()
    for group in inner.param_groups:
        group["params"] = []
    for held in (wrapper, inner):
        vars(held).clear()


def take_steps(
    step: Any,
    batches: list[LoadedBatch],
    title: str,
    world: World,
    steps: int = STEPS,
    warmup: int = WARMUP,
) -> Timing:
    """Take ``warmup`` and ``steps`` steps on the same micro-batches, on all processes.

    ``step`` is a :class:`TrainStep`, or has its ``on_entry`` and ``__call__``.
    """
    entries: list[dict[str, Any]] = []
    step.on_entry = entries.append
    for number in tqdm(range(warmup + steps), title, unit="step", disable=not world.is_main):
        if number == warmup:
            world.barrier()
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
                torch.cuda.reset_peak_memory_stats(world.device)
        wait = number in (warmup - 1, warmup + steps - 1)
        step(batches, time.perf_counter(), wait=wait)
    measured = entries[warmup:]
    seconds = world.gather([entry["step_s"] for entry in measured])
    ms = 1e3 * median(max(ranks) for ranks in zip(*seconds, strict=True))
    if world.device.type != "cuda":
        return Timing(ms, None, entries)
    peaks = world.gather(max(entry["peak_memory_mb"] for entry in measured))
    return Timing(ms, max(peaks) / 1e3, entries)
