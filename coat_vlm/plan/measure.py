"""Measures the training step of a recipe's stages: ``coat-vlm plan RECIPE --measure``.

Training's code builds and runs a stage, with three differences: weights are random and generated on
the model's device; rows are generated once and copied to the GPU in every step; a step has at most
two micro-batches per rank. A row has the shape that a plan assumes: one token of text, random
images, and random text, of which all tokens are supervised.
"""

import copy
import time
from collections.abc import Callable, Sequence
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

from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.load.loader import LoadedBatch, check_batch_sizes, sum_counts
from coat_vlm.config import Recipe, StageConfig, StageName
from coat_vlm.config.stage import PackingConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import arithmetic_of_recipe, graph_blocks
from coat_vlm.model import CoatVlm
from coat_vlm.plan.activations import image_groups
from coat_vlm.plan.published import find_vocab_size, use_published_shapes
from coat_vlm.plan.rows import PublishedRow, collate_rows, count_images_per_row, row_tokens
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
class RowShape:
    """Shape of a row, as a plan counts it."""

    tokens: int
    groups: tuple[int, ...]
    """Sizes of the groups of images that share one's tokens; all 1 unless frames are pooled."""
    pooled: bool = False

    @property
    def images(self) -> int:
        """Number of images, tiles or frames that pass the vision tower."""
        return sum(self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """A measured stage."""

    name: StageName
    recipe: Recipe  # with shapes in place of names of published models
    stage: StageConfig  # with the batch size of this number of ranks
    meta_model: Any
    row: RowShape | PublishedRow
    accumulation: int  # micro-batches of a step


class Timing(NamedTuple):
    """Measured steps; the same on every rank, except ``entries``."""

    ms: float  # median time of a step on the slowest GPU
    peak_gb: float | None  # most memory allocated on one GPU, in 10^9 bytes; None on a CPU
    entries: list[dict[str, Any]]  # of metrics.jsonl, including the warm-up


def measure_stage(recipe: Recipe, plan: StagePlan, world: World) -> str:
    """Measure a planned stage on all processes of ``world``, and describe it next to the plan."""
    row = plan.row if isinstance(plan.row, PublishedRow) else None
    case = open_case(recipe, plan.name, world, images=plan.row.images, row=row)
    stage = case.stage
    model = build_stage_model(case, world.device)
    first = case.recipe.seed + world.rank // stage.sequence_parallel * case.accumulation
    batches = [
        make_batch(model, [case.row] * stage.micro_batch_size, stage.packing, first + number)
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
        f"{stage.micro_batch_size} row(s) of {case.row.tokens:,} tokens with {case.row.images} "
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
    recipe: Recipe,
    name: StageName,
    world: World,
    *,
    images: int | None = None,
    accumulation: int | None = None,
    row: PublishedRow | None = None,
) -> StageCase:
    """Build a stage's model on ``meta`` and the shape of its rows, by default those of a plan.

    ``accumulation``: micro-batches of a step; by default the recipe's, at most two. ``row``: that
    of a plan, for a published model.
    """
    recipe = use_published_shapes(recipe)
    vocab_size = find_vocab_size(recipe)
    stage = recipe.stages[name]
    replicas = stage.count_replicas(world.size)
    per_pass = stage.micro_batch_size * replicas
    accumulation = accumulation or min(2, max(1, stage.batch_size // per_pass))
    check_batch_sizes(per_pass * accumulation, stage.micro_batch_size, 0, replicas)
    stage = replace(
        stage, batch_size=per_pass * accumulation, max_steps=WARMUP + STEPS, epochs=None
    )
    meta = torch.device("meta")
    model = build_planned_model(recipe, stage, arithmetic_of_recipe(recipe, meta), vocab_size)
    tokens = row_tokens(recipe, stage)
    groups, pool = (1,) * (images or 0), None
    if isinstance(model, CoatVlm):
        config: Any = model.config
        if config.s2_scales is not None:
            raise ValueError(
                "rows of images at several scales (dynamic_s2) are not measured; measure the same "
                "model with model.image.mode=dynamic init_from=null"
            )
        if model.vision_tower is not None and vocab_size is not None:
            config.image_token_id = vocab_size - 1  # the tokenizer's last
        if images is None:
            images, _ = count_images_per_row(recipe, stage, tokens, config)
        pool = recipe.model.video.pool_frames
        groups = tuple(image_groups(model, tokens, images, pool or 1))
    return StageCase(
        name=name,
        recipe=recipe,
        stage=stage,
        meta_model=model,
        row=row or RowShape(tokens=tokens, groups=groups, pooled=pool is not None),
        accumulation=accumulation,
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


def make_sample(model: CoatVlm, shape: RowShape, generator: torch.Generator) -> EncodedSample:
    """Make a random row for a composed model, from a generator on the CPU."""
    config: Any = model.config
    tower = model.vision_tower
    # Text has any id except the image id.
    top = config.text_config.vocab_size - (tower is not None)
    ids = torch.randint(top, (shape.tokens,), generator=generator)
    labels = ids
    positions = groups = None
    size = 0
    if tower is not None:
        size = tower.image_size
        ids += ids >= config.image_token_id
        labels = ids.clone()
        positions = torch.arange(1, 1 + len(shape.groups) * config.tokens_per_image)
        ids[positions] = config.image_token_id
        labels[positions] = IGNORE_INDEX
        groups = torch.tensor(shape.groups, dtype=torch.int64) if shape.pooled else None
    return EncodedSample(
        input_ids=ids,
        labels=labels,
        pixel_values=torch.randn(shape.images, 3, size, size, generator=generator),
        frame_groups=groups,
        image_positions=positions,
    )


def make_batch(
    model: Any,
    shapes: Sequence[RowShape | PublishedRow],
    packing: PackingConfig | None,
    seed: int,
    make_sample: Callable[..., EncodedSample] = make_sample,
) -> LoadedBatch:
    """Make a micro-batch of random rows on the CPU; with packing they become one packed row."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(shapes[0], PublishedRow):
        samples = [shapes[0].make(generator) for _ in shapes]
        batch = shapes[0].collate(samples, packing)
    else:
        samples = [make_sample(model, shape, generator) for shape in shapes]
        batch = collate_rows(samples, packing)
    counts = sum_counts(samples)
    return LoadedBatch(batch=batch, bad=[], num_samples=len(shapes), counts=counts)


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
            row_tokens=None if stage.packing is None else case.row.tokens,
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
