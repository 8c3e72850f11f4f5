"""``coat-vlm bench recipe``: the training step of a recipe's stages, with random weights.

A stage is built and stepped by training's own code (:mod:`coat_vlm.train.engine`,
:class:`coat_vlm.train.loop.StageRun`). Three things differ: weights are random and drawn where the
model stands; rows are made once (:mod:`coat_bench.recipe_rows`) and sent to the GPU in every
step as training sends them; a step has one micro-batch on each rank, or as many as asked for.
"""

import copy
import dataclasses
import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from tqdm import tqdm

from coat_bench.recipe_case import RecipeBench, RecipeRow
from coat_bench.recipe_rows import MadeData, RowShape, made_batch
from coat_bench.rows import local_origin, origin
from coat_bench.step import LEFT_BYTES
from coat_bench.step_loop import take_apart
from coat_bench.vlm_shapes import random_model
from coat_data.load.loader import check_batch_sizes
from coat_vlm.config import Recipe, StageConfig, StageName
from coat_vlm.distributed import World
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import image_groups, trace
from coat_vlm.plan.frames import gpu_arithmetic, stage_frame, vocabulary, with_published_shapes
from coat_vlm.plan.stage import images_per_row, row_tokens
from coat_vlm.plan.zero import rank_memory, sizes_of, state_bytes_per_parameter
from coat_vlm.train.engine import build_engine, clips_itself, prepare_model
from coat_vlm.train.loop import StageRun
from coat_vlm.train.metrics import Metrics
from coat_vlm.train.quarantine import Quarantine
from coat_vlm.train.sources import StageData
from coat_vlm.train.stages import stage_names
from coat_vlm.train.throughput import PhaseClock, Throughput

_NO_RUN = Path("no run folder")
"""What would be written or read there is not: nothing is recorded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """One stage as it is measured."""

    name: StageName
    recipe: Recipe
    """Without names of published models."""
    stage: StageConfig
    """With the batch of the ranks at hand."""
    frame: CoatVlm
    """The model on ``meta``, as it would stand on a GPU with FP8 units."""
    config: CoatVlmConfig
    """The model's, with an id for images."""
    row: RowShape
    images_why: str
    """Where the number of images comes from."""


def bench_recipe(
    bench: RecipeBench, world: World, on_row: Callable[[RecipeRow], None]
) -> list[RecipeRow]:
    """Measure the stages one after the other.

    Args:
        bench: what to measure.
        world: the processes of the run; all call this.
        on_row: called on the main process with each stage's row.

    Returns:
        The rows, the same numbers on every process. There is none of a stage for which another
        than the main process alone had no memory.

    Raises:
        ValueError: the settings do not fit the recipe or this machine, or with several processes
            one ran out of memory.
    """
    cases = stage_cases(bench, world)
    rows = []
    for case in cases:
        row = _new_row(bench, case, world)
        out_of_memory = False
        try:
            _measure(row, bench, case, world)
        except RuntimeError as error:
            out_of_memory = _is_out_of_memory(error)
            if not out_of_memory:
                raise
            row.problem = "OOM"
            traceback.clear_frames(error.__traceback__)  # they hold the model
        _free(world.device)
        rows.append(row)
        if world.is_main:
            on_row(row)
        if out_of_memory and world.size > 1:  # the other ranks may wait for this one
            raise ValueError(
                f"stage {case.name}: out of memory with stages.{case.name}.micro_batch_size="
                f"{case.stage.micro_batch_size} at ZeRO-{case.recipe.zero_stage}; lower it, or "
                "raise zero_stage (several processes end at the first stage that does not fit)"
            )
    return rows


def stage_cases(bench: RecipeBench, world: World) -> list[StageCase]:
    """The stages that are measured, in order.

    Args:
        bench: what to measure.
        world: the processes of the run.

    Raises:
        ValueError: no such stage, images that do not fit, or a model that cannot be built.
    """
    recipe = with_published_shapes(bench.recipe)
    if recipe.init_from is None and recipe.model.image.mode == "dynamic_s2":
        raise ValueError(
            "model.image.mode: dynamic_s2: rows of several scales are not made here; measure the "
            "same model with model.image.mode=dynamic"
        )
    names = stage_names(recipe, bench.only_stage)
    vocab_size = None if recipe.init_from is not None else vocabulary(recipe)
    return [_case(bench, recipe, name, vocab_size, world) for name in names]


def _case(
    bench: RecipeBench, recipe: Recipe, name: StageName, vocab_size: int | None, world: World
) -> StageCase:
    stage = recipe.stages[name]
    batch = stage.micro_batch_size * bench.accumulation * world.size
    check_batch_sizes(batch, stage.micro_batch_size, world.rank, world.size)
    steps = bench.warmup + bench.steps
    stage = dataclasses.replace(stage, batch_size=batch, max_steps=steps, epochs=None)
    arithmetic = gpu_arithmetic(recipe.precision, recipe.fp8)
    frame = stage_frame(recipe, stage, arithmetic, vocab_size)
    config = cast(CoatVlmConfig, copy.deepcopy(frame.config))
    if config.s2_scales is not None:
        raise ValueError(
            f"init_from={recipe.init_from!r} is a model of images at several scales, of which no "
            "rows are made here; measure one of model.image.mode=dynamic with init_from=null"
        )
    if frame.vision_tower is not None and vocab_size is not None:
        config.image_token_id = vocab_size - 1  # the tokenizer's last
    tokens, images, why = row_tokens(recipe, stage), bench.images, "--images"
    if images is None:
        images, why = images_per_row(recipe, stage, tokens, config)
    pooled = recipe.model.video.pool_frames
    groups = image_groups(frame, tokens, images, pooled or 1)
    row = RowShape(tokens=tokens, groups=tuple(groups), pooled=pooled is not None)
    return StageCase(
        name=name, recipe=recipe, stage=stage, frame=frame, config=config, row=row, images_why=why
    )


def build_stage_model(case: StageCase, device: torch.device) -> CoatVlm:
    """The model of a stage with random weights on a device, ready for the engine.

    Args:
        case: the stage.
        device: where the weights are drawn.

    Raises:
        ValueError: the device has no FP8 units, or the model does not fit the precision.
    """
    recipe = case.recipe
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, device)
    config: Any = copy.deepcopy(case.config)
    for part in (config, config.text_config, config.vision_config):
        if part is not None:
            part.dtype = arithmetic.dtype
    model = random_model(config, device, arithmetic.dtype, recipe.seed)
    prepare_model(model, recipe, case.stage, arithmetic)
    return model


def _measure(row: RecipeRow, bench: RecipeBench, case: StageCase, world: World) -> None:
    """Fill a row with what some steps say, and free all that they took."""
    device = world.device
    if device.type == "cuda" and torch.cuda.memory_allocated(device) > LEFT_BYTES:
        left = torch.cuda.memory_allocated(device) / 1e9
        row.note += f"; {left:.2f} GB of the peak are an earlier stage's"
    recipe, stage = case.recipe, case.stage
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, device)
    model = build_stage_model(case, device)
    throughput = Throughput(model, world)
    # Before DeepSpeed splits the weights.
    batches = [
        made_batch(
            model,
            case.row,
            stage.micro_batch_size,
            stage.packing,
            seed=recipe.seed + world.rank * bench.accumulation + number,
        )
        for number in range(bench.accumulation)
    ]
    engine = build_engine(model, recipe, stage, arithmetic, world)
    try:
        torch.manual_seed(recipe.seed + world.rank)
        run = StageRun(
            name=case.name,
            stage=stage,
            engine=engine,
            model=model,
            data=cast(StageData, MadeData(None if stage.packing is None else case.row.tokens)),
            world=world,
            metrics=Metrics(_NO_RUN, recipe.tracking, recipe.name, enabled=False),
            quarantine=Quarantine(_NO_RUN, case.name, stage, []),
            throughput=throughput,
            phases=PhaseClock(device, enabled=False),
            total_steps=bench.warmup + bench.steps,
            clip_here=clips_itself(recipe, arithmetic),
            save=_never,
            log_every_steps=1,
            reuse=arithmetic.weight_reuse(model, device),
        )
        steps = _steps(run, batches, bench, case, world)
        _fill(row, steps, bench, run, world)
        kept = run.reuse.policy == "cache" or (bench.accumulation > 1 and bool(run.reuse.fits))
    finally:
        take_apart(engine, model)
    if bench.plan:
        row.plan_gb = planned_peak(case, bench, kept=kept, ranks=world.size)
        if row.peak_gb is not None:
            row.plan_off = 100 * (row.plan_gb / row.peak_gb - 1)


def _never(*_: Any) -> None:
    raise AssertionError("a benchmark saves no checkpoint")


def _steps(
    run: StageRun, batches: list[Any], bench: RecipeBench, case: StageCase, world: World
) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of all steps."""
    on_gpu = world.device.type == "cuda"
    rows = []
    for number in tqdm(
        range(run.total_steps), desc=case.name, unit="step", disable=not world.is_main
    ):
        if number == bench.warmup:
            world.barrier()
            if on_gpu:
                torch.cuda.synchronize(world.device)
                torch.cuda.reset_peak_memory_stats(world.device)
        rows.append(run.take(batches, time.perf_counter())[0])
    return rows


def _fill(
    row: RecipeRow, steps: list[dict[str, Any]], bench: RecipeBench, run: StageRun, world: World
) -> None:
    """What the measured steps say, of the slowest GPU and of the one with most memory."""
    losses = [step["loss"] for step in steps]
    row.note += f"; loss {losses[0]:.4f} -> {losses[-1]:.4f}" if None not in losses else ""
    last = steps[-1]
    row.tokens, row.vision_tokens = last["tokens"], last["vision_tokens"]
    row.trained_tokens = last["trained_tokens"]
    if run.skipped_steps or None in losses:
        row.problem = f"gradients were NaN or infinite in {run.skipped_steps} step(s)"
        return
    measured = steps[bench.warmup :]
    seconds = world.gather([step["step_s"] for step in measured])
    slowest = median(max(ranks) for ranks in zip(*seconds, strict=True))
    row.ms = 1e3 * slowest
    own = slowest * world.size
    row.tok_s_gpu, row.vision_tok_s_gpu = row.tokens / own, row.vision_tokens / own
    if "tflop" in last:
        row.tflops_gpu = sum(last["tflop"].values()) / own
    if world.device.type == "cuda":
        peaks = world.gather(max(step["peak_memory_mb"] for step in measured))
        row.peak_gb = max(peaks) / 1e3


def planned_peak(case: StageCase, bench: RecipeBench, *, kept: bool, ranks: int) -> float:
    """What a plan expects of a rank's peak, in 10^9 bytes.

    Args:
        case: the stage.
        bench: how many micro-batches a step has.
        kept: whether they share FP8 weights.
        ranks: processes.
    """
    arithmetic = gpu_arithmetic(case.recipe.precision, case.recipe.fp8)
    coat = arithmetic.fp8 is not None and arithmetic.fp8.optimizer == "coat"
    optimizer = CoatAdamW if coat else torch.optim.AdamW
    activations = trace(
        case.frame,
        case.stage.micro_batch_size,
        case.row.tokens,
        case.row.images,
        pool_frames=case.recipe.model.video.pool_frames or 1,
        reuse_weights=kept,
    )
    planned = rank_memory(
        case.recipe.zero_stage,
        sizes_of(case.frame, case.stage, state_bytes_per_parameter(optimizer)),
        ranks,
        activations,
        accumulates=bench.accumulation > 1,
    )
    return planned.peak / 1e9


def _new_row(bench: RecipeBench, case: StageCase, world: World) -> RecipeRow:
    recipe, stage = case.recipe, case.stage
    arithmetic = gpu_arithmetic(recipe.precision, recipe.fp8)
    coat = arithmetic.fp8 is not None and arithmetic.fp8.optimizer == "coat"
    return RecipeRow(
        *(origin() if world.device.type == "cuda" else local_origin()),
        recipe=" ".join([recipe.name, *bench.changes]),
        stage=case.name,
        gpus=world.size,
        zero=recipe.zero_stage,
        precision=recipe.precision,
        optimizer="coat" if coat else "adamw",
        checkpointing=stage.gradient_checkpointing,
        micro_batch=stage.micro_batch_size,
        accumulation=bench.accumulation,
        row_tokens=case.row.tokens,
        images=case.row.images,
        note=f"images: {case.images_why.split(' (')[0]}",  # no paths of this machine
    )


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch, Triton, cuBLAS or NCCL got no memory; all but torch tell it by words alone."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
