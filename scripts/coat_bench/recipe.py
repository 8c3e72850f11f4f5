"""``coat-vlm bench recipe``: the training step of a recipe's stages, with random weights.

A stage is built and stepped by training's own code (:mod:`coat_vlm.train.engine`,
:class:`coat_vlm.train.step.TrainStep`). Three things differ: weights are random and drawn where the
model stands; rows are made once and sent to the GPU in every step as training sends them; a step
has one micro-batch on each rank, or as many as asked for.

A row has the shape that ``coat-vlm plan`` takes it to have: ``model.max_length`` tokens (packed:
those of a packed row), one token of text, its random images, and random text up to the end. All
text is supervised but the first token, which nothing predicts: the costliest case. Training's own
collation makes the batch.
"""

import copy
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from tqdm import tqdm

from coat_bench.models import random_model
from coat_bench.rows import Row, is_out_of_memory, origin, table
from coat_bench.step import free, left_behind
from coat_bench.step_loop import OptimizerName, planned_gb, take_apart
from coat_data.load.collate import collate, collate_packed
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.load.loader import LoadedBatch, check_batch_sizes
from coat_vlm.config import Recipe, StageConfig, StageName
from coat_vlm.config.stage import PackingConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.fp8.graphs import EAGER_PASSES
from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.plan.activations import image_groups, trace
from coat_vlm.plan.frames import gpu_arithmetic, stage_frame, vocabulary, with_published_shapes
from coat_vlm.plan.stage import images_per_row, row_tokens
from coat_vlm.train.bad_samples import BadSamples
from coat_vlm.train.engine import build_engine, clips_itself, prepare_model
from coat_vlm.train.stages import stage_names
from coat_vlm.train.step import TrainStep
from coat_vlm.train.throughput import PeakMemory, PhaseClock, Throughput
from coat_vlm.train.tracking import Metrics

_NO_RUN = Path("no run folder")
"""What would be written or read there is not: nothing is recorded."""


@dataclass(slots=True)
class RecipeRow(Row):
    """One stage's step; the columns of ``recipe.csv``."""

    recipe: str
    """Its name, and the keys that were changed."""
    stage: str
    gpus: int
    zero: int
    """ZeRO stage."""
    precision: str
    optimizer: str
    checkpointing: bool
    micro_batch: int
    """Rows of a micro-batch on one GPU."""
    accumulation: int
    """Micro-batches of a step."""
    row_tokens: int
    """Of the language model, those of images included."""
    images: int
    """Tiles of images, or frames, of a row."""
    tokens: int | None = None
    """Of a step on all GPUs, those of images included."""
    vision_tokens: int | None = None
    """Of these, those that hold image features."""
    trained_tokens: int | None = None
    """Of these, those with a target."""
    ms: float | None = None
    """A step, median; of the slowest GPU."""
    tok_s_gpu: float | None = None
    """Tokens per second of one GPU."""
    vision_tok_s_gpu: float | None = None
    """Vision tokens per second of one GPU."""
    tflops_gpu: float | None = None
    """Model TFLOP/s of one GPU as the log line counts them; absent where they are not known."""
    peak_gb: float | None = None
    """Most that was allocated on one GPU, in 10^9 bytes; absent on a CPU."""
    plan_gb: float | None = None
    """What ``coat-vlm plan`` expects of the same GPUs and micro-batches."""
    plan_off: float | None = None
    """Plan by peak, less 1, in percent."""
    note: str = ""
    problem: str = ""
    """Why there is no speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeBench:
    """What is measured, and how.

    Raises:
        ValueError: a number is too small, or what is to be captured would not be.
    """

    recipe: Recipe
    changes: Sequence[str] = ()
    """The ``key=value`` texts that the recipe was read with."""
    only_stage: str | None = None
    images: int | None = None
    """Tiles or frames of a row; as a plan finds them when absent."""
    steps: int = 5
    """Measured ones."""
    warmup: int = 3
    """Steps before them."""
    accumulation: int = 1
    """Micro-batches of a step."""
    plan: bool = True
    """Also say what ``coat-vlm plan`` expects of the peak."""

    def __post_init__(self) -> None:
        if min(self.steps, self.warmup, self.accumulation) < 1:
            raise ValueError("--steps, --warmup and --accumulation are 1 or more")
        fp8 = self.recipe.fp8
        if fp8 is not None and fp8.cuda_graphs and self.warmup <= EAGER_PASSES:
            raise ValueError(
                f"fp8.cuda_graphs: blocks are captured after {EAGER_PASSES} steps, which --warmup "
                f"{self.warmup} has to exceed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """One row, as a plan counts it."""

    tokens: int
    """All, those of images included."""
    groups: tuple[int, ...]
    """Images, tiles or frames that share the tokens of one; each 1 unless frames are pooled."""
    pooled: bool
    """Whether frames are pooled: the model is then told the groups."""

    @property
    def images(self) -> int:
        """What goes through the vision tower."""
        return sum(self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
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
            out_of_memory = is_out_of_memory(error)
            if not out_of_memory:
                raise
            row.problem = "OOM"
            traceback.clear_frames(error.__traceback__)  # they hold the model
        free(world.device)
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
    stage = replace(stage, batch_size=batch, max_steps=steps, epochs=None)
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


def made_sample(model: CoatVlm, shape: RowShape, generator: torch.Generator) -> EncodedSample:
    """A random row.

    Args:
        model: says how large images are, how many tokens one has, and which id stands for it.
        shape: of the row.
        generator: on the CPU.
    """
    config: Any = model.config
    tower = model.vision_tower
    # Text has any id but that of an image.
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


def made_batch(
    model: CoatVlm, shape: RowShape, rows: int, packing: PackingConfig | None, seed: int
) -> LoadedBatch:
    """A micro-batch of random rows on the CPU, as the loader would give it.

    Args:
        model: see :func:`made_sample`.
        shape: of each row.
        rows: how many; with packing they are sequences of one row, as training has them.
        packing: the stage's.
        seed: the same seed gives the same rows.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = [made_sample(model, shape, generator) for _ in range(rows)]
    if packing is None:
        batch = collate(samples, pad_token_id=0)
    else:
        batch = collate_packed(samples, pad_token_id=0, align=packing.align)
    return LoadedBatch(batch=batch, bad=[], num_samples=rows)


def _no_order() -> Any:
    """What a step of training asks of the order of its data: here no source is used."""
    return SimpleNamespace(
        step=lambda cursor: ([], cursor), met=lambda _: np.zeros(0, dtype=np.int64)
    )


def _measure(row: RecipeRow, bench: RecipeBench, case: StageCase, world: World) -> None:
    """Fill a row with what some steps say, and free all that they took."""
    device = world.device
    row.note += left_behind(device)
    recipe, stage = case.recipe, case.stage
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, device)
    model = build_stage_model(case, device)
    throughput = Throughput(model, world)
    # Before DeepSpeed splits the weights.
    first = recipe.seed + world.rank * bench.accumulation
    batches = [
        made_batch(model, case.row, stage.micro_batch_size, stage.packing, seed=first + place)
        for place in range(bench.accumulation)
    ]
    engine = build_engine(model, recipe, stage, arithmetic, world)
    try:
        torch.manual_seed(recipe.seed + world.rank)
        run = TrainStep(
            name=case.name,
            stage=stage,
            engine=engine,
            model=model,
            world=world,
            total_steps=bench.warmup + bench.steps,
            order=_no_order(),
            row_tokens=None if stage.packing is None else case.row.tokens,
            clip_here=clips_itself(recipe, arithmetic),
            reuse=arithmetic.weight_reuse(model, device),
            metrics=Metrics(_NO_RUN, recipe.tracking, recipe.name, enabled=False),
            throughput=throughput,
            bad_samples=BadSamples(_NO_RUN, case.name, stage, []),
            phases=PhaseClock(device, enabled=False),
            memory=PeakMemory(device),
        )
        _fill(row, _steps(run, batches, bench, world), bench, run)
        kept = run.reuse.policy == "cache" or (bench.accumulation > 1 and bool(run.reuse.fits))
    finally:
        take_apart(engine, model)
    if bench.plan:
        row.plan_gb = planned_peak(case, bench, kept=kept, ranks=world.size)
        if row.peak_gb is not None:
            row.plan_off = 100 * (row.plan_gb / row.peak_gb - 1)


def _steps(
    run: TrainStep, batches: list[Any], bench: RecipeBench, world: World
) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of all steps."""
    rows = []
    for place in tqdm(range(run.total_steps), run.name, unit="step", disable=not world.is_main):
        if place == bench.warmup:
            world.barrier()
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
                torch.cuda.reset_peak_memory_stats(world.device)
        rows.append(run(batches, time.perf_counter())[0])
    return rows


def _fill(row: RecipeRow, steps: list[dict[str, Any]], bench: RecipeBench, run: TrainStep) -> None:
    """What the measured steps say, of the slowest GPU and of the one with most memory."""
    world = run.world
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
    activations = trace(
        case.frame,
        case.stage.micro_batch_size,
        case.row.tokens,
        case.row.images,
        pool_frames=case.recipe.model.video.pool_frames or 1,
        reuse_weights=kept,
    )
    return planned_gb(
        case.frame,
        case.stage,
        activations,
        optimizer=_optimizer(case.recipe),
        zero_stage=case.recipe.zero_stage,
        ranks=ranks,
        accumulates=bench.accumulation > 1,
    )


def _optimizer(recipe: Recipe) -> OptimizerName:
    fp8 = gpu_arithmetic(recipe.precision, recipe.fp8).fp8
    return "coat" if fp8 is not None and fp8.optimizer == "coat" else "adamw"


def _new_row(bench: RecipeBench, case: StageCase, world: World) -> RecipeRow:
    recipe, stage = case.recipe, case.stage
    return RecipeRow(
        *origin(on_gpu=world.device.type == "cuda"),
        recipe=" ".join([recipe.name, *bench.changes]),
        stage=case.name,
        gpus=world.size,
        zero=recipe.zero_stage,
        precision=recipe.precision,
        optimizer=_optimizer(recipe),
        checkpointing=stage.gradient_checkpointing,
        micro_batch=stage.micro_batch_size,
        accumulation=bench.accumulation,
        row_tokens=case.row.tokens,
        images=case.row.images,
        note=f"images: {case.images_why.split(' (')[0]}",  # no paths of this machine
    )


def format_row(row: RecipeRow) -> str:
    """A heading and a Markdown table of one stage."""
    checkpointed = ", gradient checkpointing" if row.checkpointing else ""
    heading = (
        f"{row.recipe}, stage {row.stage}: {row.gpus} x {row.gpu}, ZeRO-{row.zero}, "
        f"{row.precision}, {row.optimizer}{checkpointed}\n"
        f"a step: {row.gpus} rank(s) x {row.accumulation} micro-batch(es) x {row.micro_batch} "
        f"row(s) of {row.row_tokens:,} tokens with {row.images} image(s)"
    )
    if row.problem:
        return f"{heading}\nno speed: {row.problem}"

    def cell(value: float | None, spec: str) -> str:
        return "-" if value is None else format(value, spec)

    cells = {
        "tokens a step": cell(row.tokens, ",.0f"),
        "trained": cell(row.trained_tokens, ",.0f"),
        "ms/step": cell(row.ms, ".1f"),
        "tokens/s per GPU": cell(row.tok_s_gpu, ",.0f"),
        "vision tokens/s per GPU": cell(row.vision_tok_s_gpu, ",.0f"),
        "TFLOP/s per GPU": cell(row.tflops_gpu, ".3g"),
        "peak GB": cell(row.peak_gb, ".2f"),
        "plan GB": cell(row.plan_gb, ".4g"),
        "plan off": "-" if row.plan_off is None else f"{row.plan_off:+.1f}%",
    }
    return f"{heading}\n{row.note}\n\n{table(list(cells), [list(cells.values())])}"
