"""``coat-vlm bench recipe``: the training step of a recipe's stages, with random weights.

Training's code builds and runs a stage (:mod:`coat_vlm.train.engine`,
:class:`coat_vlm.train.step.TrainStep`). Three things differ: weights are random and generated on
the model's device; rows are generated once and copied to the GPU in every step, as in training; a
step has one micro-batch per rank by default.

A row has the shape that ``coat-vlm plan`` assumes: ``model.max_length`` tokens (with packing, the
tokens of a packed row), namely one token of text, random images, and random text up to the end. All
text except the first token is supervised, which is the most expensive case. Training's collation
makes the batch. Ranks of ``sequence_parallel`` share their rows. Other shapes: ``samples``.
"""

import copy
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from coat_bench.memory import (
    count_gpu_bytes,
    free_memory,
    note_graphs,
    note_leftover_memory,
)
from coat_bench.rows import Row, format_table, get_origin, is_out_of_memory
from coat_data.load.collate import collate, collate_packed, collate_unpadded
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.load.loader import LoadedBatch, check_batch_sizes
from coat_data.mixture.sampler import SamplerState
from coat_vlm.config import Recipe, StageConfig, StageName
from coat_vlm.config.stage import PackingConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import SpareMemory, arithmetic_of_recipe, graph_blocks
from coat_vlm.fp8.cuda_graphs import EAGER_PASSES
from coat_vlm.fp8.memory_choices import MAX_SHARE, RowLoad
from coat_vlm.model import CoatVlm
from coat_vlm.model.family_model import trainable_class
from coat_vlm.model.sequence_parallel import join_sequence_group
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import image_groups, trace
from coat_vlm.plan.graphs import add_graphs, plan_graphs
from coat_vlm.plan.stage import (
    count_images_per_row,
    find_vocab_size,
    row_tokens,
    share_tokens,
    use_published_shapes,
)
from coat_vlm.plan.zero import count_sizes, estimate_rank_memory, measure_state_bytes
from coat_vlm.train.bad_samples import BadSamples
from coat_vlm.train.engine import (
    build_engine,
    choose_graphs,
    steps_overlap,
    training_loop_clips,
)
from coat_vlm.train.model_setup import (
    avoids_padding,
    build_planned_model,
    prepare_model,
    refuse_pairs,
    require_composed,
    select_stages,
)
from coat_vlm.train.step import TrainStep
from coat_vlm.train.throughput import PeakMemory, PhaseClock, Throughput
from coat_vlm.train.tracking import Metrics

_NO_RUN = Path("no run folder")
"""Placeholder: nothing is written or read."""

IMAGE_SIDE = 448
"""Pixels of the square images of a published model."""


class Step(Protocol):
    """Takes a step, with the interface of :class:`coat_vlm.train.step.TrainStep`."""

    on_row: Callable[[dict[str, Any], SamplerState], None]
    """Called with the row of metrics.jsonl of each step, when its results are read."""

    def __call__(
        self, micro_batches: list[LoadedBatch], started: float, /, *, wait: bool = True
    ) -> bool:
        """Run the step; see ``TrainStep``."""
        ...


@dataclass(slots=True)
class RecipeRow(Row):
    """The training step of a stage; the columns of ``recipe.csv``."""

    recipe: str
    """Name of the recipe, and the keys that were changed."""
    stage: str
    gpus: int
    zero: int
    """ZeRO stage."""
    precision: str
    optimizer: str
    checkpointing: bool
    micro_batch: int
    """Rows of a micro-batch on one GPU, or on the GPUs that share their tokens."""
    accumulation: int
    """Micro-batches of a step."""
    row_tokens: int
    """Tokens of a row, including image tokens."""
    images: int
    """Tiles of images, or frames, of a row."""
    tokens: int | None = None
    """Tokens of a step on all GPUs, including image tokens."""
    vision_tokens: int | None = None
    """Tokens of a step that hold image features."""
    supervised_tokens: int | None = None
    """Tokens of a step with a target."""
    ms: float | None = None
    """Median time of a step on the slowest GPU."""
    tok_s_gpu: float | None = None
    """Tokens per second of one GPU."""
    vision_tok_s_gpu: float | None = None
    """Vision tokens per second of one GPU."""
    tflops_gpu: float | None = None
    """Model TFLOP/s of one GPU, counted as in the log line; None if the FLOPs are unknown."""
    peak_gb: float | None = None
    """Most memory allocated on one GPU, in 10^9 bytes; None on a CPU."""
    plan_gb: float | None = None
    """Peak that ``coat-vlm plan`` expects for the same GPUs and micro-batches."""
    plan_off: float | None = None
    """``plan_gb / peak_gb - 1`` in percent."""
    note: str = ""
    problem: str = ""
    """Why there is no speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """Shape of a row, as a plan counts it."""

    tokens: int
    """Tokens, including image tokens."""
    groups: tuple[int, ...]
    """Sizes of the groups of images that share one's tokens; all 1 unless frames are pooled."""
    pooled: bool
    """Whether frames are pooled; the batch then contains the groups."""

    @property
    def images(self) -> int:
        """Number of images, tiles or frames that pass the vision tower."""
        return sum(self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeBench:
    """Settings of the benchmark.

    Raises:
        ValueError: a number is too small, or the warm-up ends before CUDA graphs are captured.
    """

    recipe: Recipe
    changes: Sequence[str] = ()
    """The ``key=value`` overrides of the recipe."""
    only_stage: str | None = None
    images: int | None = None
    """Tiles or frames of a row; by default the number that a plan assumes."""
    steps: int = 5
    """Measured steps."""
    warmup: int = 3
    """Steps before the measured ones."""
    accumulation: int = 1
    """Micro-batches of a step."""
    samples: Sequence[Sequence[RowShape]] | None = None
    """Shapes of the samples of each micro-batch of this rank, as many as ``accumulation``. Default:
    full rows."""
    plan: bool = True
    """Also compute the peak that ``coat-vlm plan`` expects."""

    def __post_init__(self) -> None:
        if min(self.steps, self.warmup, self.accumulation) < 1:
            raise ValueError("--steps, --warmup and --accumulation are 1 or more")
        fp8 = self.recipe.fp8
        if fp8 is not None and fp8.cuda_graphs is True and self.warmup <= EAGER_PASSES:
            raise ValueError(
                f"fp8.cuda_graphs: true: blocks are captured after {EAGER_PASSES} steps; --warmup "
                f"must be larger, and is {self.warmup}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """A measured stage."""

    name: StageName
    recipe: Recipe
    """The recipe, with shapes in place of names of published models."""
    stage: StageConfig
    """The stage, with the batch size of this number of ranks."""
    frame: Any
    """The model on ``meta``, as on a GPU with FP8 tensor cores."""
    config: PretrainedConfig
    """The model's configuration, with a token id for images."""
    row: RowShape
    images_why: str
    """Source of the number of images."""


def bench_recipe(
    bench: RecipeBench, world: World, on_row: Callable[[RecipeRow], None]
) -> list[RecipeRow]:
    """Measure the stages one after the other.

    Args:
        bench: what to measure.
        world: the processes of the run; all must call this.
        on_row: called on the main process with each stage's row.

    Returns:
        The rows, the same on every process. A stage has no row if only other processes than the
        main one ran out of memory.

    Raises:
        ValueError: the settings do not fit the recipe or this machine, or one of several processes
            ran out of memory.
    """
    require_composed(bench.recipe, "coat-vlm bench recipe")
    cases = list_stage_cases(bench, world)
    rows = []
    for case in cases:
        recipe, stage = case.recipe, case.stage
        row = RecipeRow(
            *get_origin(),
            recipe=" ".join([recipe.name, *bench.changes]),
            stage=case.name,
            gpus=world.size,
            zero=recipe.zero_stage,
            precision=recipe.precision,
            optimizer=recipe.optimizer,
            checkpointing=stage.gradient_checkpointing,
            micro_batch=stage.micro_batch_size,
            accumulation=bench.accumulation,
            row_tokens=case.row.tokens,
            images=case.row.images,
            note=f"images: {case.images_why.split(' (')[0]}; "  # no paths of this machine
            f"cudnn_attention {str(recipe.cudnn_attention).lower()}",
        )
        out_of_memory = False
        try:
            _measure(row, bench, case, world)
        except RuntimeError as error:
            out_of_memory = is_out_of_memory(error)
            if not out_of_memory:
                raise
            row.problem = "OOM"
            traceback.clear_frames(error.__traceback__)  # frees the model
        free_memory(world.device)
        rows.append(row)
        if world.is_main:
            on_row(row)
        if out_of_memory and world.size > 1:  # the other ranks may wait for this one
            raise ValueError(
                f"stage {case.name}: out of memory with stages.{case.name}.micro_batch_size="
                f"{stage.micro_batch_size} at ZeRO-{recipe.zero_stage}; lower it, or "
                "raise zero_stage (with several processes the run ends at the first such stage)"
            )
    return rows


def list_stage_cases(bench: RecipeBench, world: World) -> list[StageCase]:
    """List the measured stages in order.

    Args:
        bench: what to measure.
        world: the processes of the run.

    Raises:
        ValueError: no such stage, images that do not fit, or a model that cannot be built.
    """
    recipe = use_published_shapes(bench.recipe)
    if recipe.init_from is None and recipe.model.image.mode == "dynamic_s2":
        raise ValueError(
            "model.image.mode: dynamic_s2: this benchmark has no rows of several scales; measure "
            "the same model with model.image.mode=dynamic"
        )
    given = recipe.init_from is not None or recipe.model.pretrained is not None
    vocab_size = None if given else find_vocab_size(recipe)
    return [
        _build_case(bench, recipe, name, vocab_size, world)
        for name in select_stages(recipe, bench.only_stage)
    ]


def _build_case(
    bench: RecipeBench, recipe: Recipe, name: StageName, vocab_size: int | None, world: World
) -> StageCase:
    stage = recipe.stages[name]
    refuse_pairs(name, stage, "coat-vlm bench recipe")
    replicas = stage.count_replicas(world.size)
    batch = stage.micro_batch_size * bench.accumulation * replicas
    check_batch_sizes(batch, stage.micro_batch_size, 0, replicas)
    steps = bench.warmup + bench.steps
    stage = replace(stage, batch_size=batch, max_steps=steps, epochs=None)
    arithmetic = arithmetic_of_recipe(recipe, torch.device("meta"))
    frame = build_planned_model(recipe, stage, arithmetic, vocab_size)
    config: Any = copy.deepcopy(frame.config)
    tokens, images, why = row_tokens(recipe, stage), bench.images, "--images"
    if not isinstance(frame, CoatVlm):
        row = RowShape(tokens=tokens, groups=(1,) * (images or 0), pooled=False)
        return StageCase(
            name=name, recipe=recipe, stage=stage, frame=frame, config=config, row=row,
            images_why=why,
        )  # fmt: skip
    if config.s2_scales is not None:
        raise ValueError(
            f"init_from={recipe.init_from!r} is a model of images at several scales, for "
            "which this benchmark has no rows; measure one of model.image.mode=dynamic with "
            "init_from=null"
        )
    if frame.vision_tower is not None and vocab_size is not None:
        config.image_token_id = vocab_size - 1  # the tokenizer's last
    if images is None:
        images, why = count_images_per_row(recipe, stage, tokens, config)
    pooled = recipe.model.video.pool_frames
    groups = image_groups(frame, tokens, images, pooled or 1)
    row = RowShape(tokens=tokens, groups=tuple(groups), pooled=pooled is not None)
    return StageCase(
        name=name, recipe=recipe, stage=stage, frame=frame, config=config, row=row, images_why=why
    )


def build_stage_model(case: StageCase, device: torch.device, *, unpad: bool = False) -> Any:
    """Build the model of a stage with random weights on a device, ready for the engine.

    The weights are the same at every call on the same kind of device. They are generated on this
    device: 8B parameters take seconds on a GPU, minutes on a CPU.

    Args:
        case: the stage; its recipe has the seed.
        device: the device of the weights.
        unpad: rows may be packed as by :func:`make_batch` with ``unpad``.

    Raises:
        ValueError: the device has no FP8 tensor cores, or the model does not fit the precision.
    """
    recipe = case.recipe
    arithmetic = arithmetic_of_recipe(recipe, device)
    config: Any = copy.deepcopy(case.config)
    for part in (config, config.text_config, config.vision_config):
        if part is not None:
            part.dtype = arithmetic.dtype
    before = torch.get_default_dtype()
    torch.manual_seed(recipe.seed)
    torch.set_default_dtype(arithmetic.dtype)
    try:
        with device:
            composed = isinstance(case.frame, CoatVlm)
            model = CoatVlm(config) if composed else trainable_class(config.model_type)(config)
    finally:
        torch.set_default_dtype(before)
    packed = unpad and avoids_padding(model, recipe, case.stage, device)
    prepare_model(model, recipe, case.stage, arithmetic, packed=packed)
    return model


def make_sample(
    model: PreTrainedModel, shape: RowShape, generator: torch.Generator
) -> EncodedSample:
    """Make a random row.

    Args:
        model: the model, whose configuration has the image size, tokens per image and image id.
        shape: shape of the row.
        generator: a generator on the CPU.
    """
    config: Any = model.config
    if not isinstance(model, CoatVlm):
        return _make_published_sample(model, shape, generator)
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


def _make_published_sample(
    model: Any, shape: RowShape, generator: torch.Generator
) -> EncodedSample:
    """Make a random row as the processors of Qwen2.5-VL and Qwen3-VL do: pixels of patches."""
    config, vision = model.config, model.config.vision_config
    side = IMAGE_SIDE // vision.patch_size
    grid = torch.tensor([[1, side, side]]).repeat(shape.images, 1)
    # Text has any id below the media ids.
    top = min(config.image_token_id, config.vision_start_token_id)
    ids = torch.randint(top, (shape.tokens,), generator=generator)
    image = torch.full((1 + (side // vision.spatial_merge_size) ** 2,), config.image_token_id)
    image[0] = config.vision_start_token_id
    placed = image.repeat(shape.images)
    ids[1 : 1 + len(placed)] = placed
    is_image = ids == config.image_token_id
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return EncodedSample(
        input_ids=ids,
        labels=ids.masked_fill(is_image, IGNORE_INDEX),
        pixel_values=torch.randn(shape.images * side**2, pixels, generator=generator),
        extras={"image_grid_thw": grid, model.family.token_types: is_image[None].int()},
    )


def make_batch(
    model: PreTrainedModel,
    shapes: Sequence[RowShape],
    packing: PackingConfig | None,
    seed: int,
    *,
    unpad: bool = False,
) -> LoadedBatch:
    """Make a micro-batch of random rows on the CPU, as the loader returns it.

    Args:
        model: see :func:`make_sample`.
        shapes: shape of each row; with packing they are sequences of one row, as in training.
        packing: the stage's packing.
        seed: seed of the rows.
        unpad: pack rows that would be padded much, as training does where
            :func:`coat_vlm.train.model_setup.avoids_padding`.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = [make_sample(model, shape, generator) for shape in shapes]
    if packing is not None:
        batch = collate_packed(samples, pad_token_id=0, align=packing.align)
    elif unpad:
        batch = collate_unpadded(samples, pad_token_id=0, align=PackingConfig().align)
    else:
        batch = collate(samples, pad_token_id=0)
    return LoadedBatch(batch=batch, bad=[], num_samples=len(shapes))


def build_training_step(
    model: PreTrainedModel, case: StageCase, world: World, total_steps: int
) -> TrainStep:
    """Build the training step of a stage, with DeepSpeed's engine around the model.

    Args:
        model: from :func:`build_stage_model`.
        case: the stage.
        world: the processes of the run.
        total_steps: length of the learning rate schedule.
    """
    recipe, stage = case.recipe, case.stage
    arithmetic = arithmetic_of_recipe(recipe, world.device)
    ranks = stage.sequence_parallel
    throughput = Throughput(model, world, ranks)  # before DeepSpeed splits the weights
    # No source is read, so the sampler has no rows and no state.
    sampler: Any = SimpleNamespace(
        step=lambda state: ([], state), count_by_source=lambda _: np.zeros(0, dtype=np.int64)
    )
    engine = build_engine(model, recipe, stage, arithmetic, world)
    return TrainStep(
        name=case.name,
        stage=stage,
        engine=engine,
        model=model,
        world=world,
        total_steps=total_steps,
        sampler=sampler,
        row_tokens=None if stage.packing is None else case.row.tokens,
        clip_here=training_loop_clips(recipe, arithmetic),
        overlaps=steps_overlap(recipe, stage, arithmetic, world),
        spare_memory=SpareMemory.of(model, arithmetic, world.device),
        sequence=join_sequence_group(world, ranks, recipe.collective_timeout_s),
        metrics=Metrics(_NO_RUN, recipe.tracking, recipe.name, enabled=False),
        throughput=throughput,
        bad_samples=BadSamples(_NO_RUN, case.name, stage, []),
        phases=PhaseClock(world.device, enabled=False),
        memory=PeakMemory(world.device),
    )


def release_engine(engine: DeepSpeedEngine, model: PreTrainedModel) -> None:
    """Remove DeepSpeed's hooks from a model and free the memory of both, which become unusable.

    ZeRO-3 of deepspeed 0.19.8 never frees a model: a list in its module and classes of its hooks
    refer to it. Therefore the objects that they refer to are emptied.
    """
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
    step: Step, batches: list[LoadedBatch], title: str, bench: RecipeBench, world: World
) -> list[dict[str, Any]]:
    """Take the steps of a measurement on the same micro-batches.

    Args:
        step: the function that takes a step.
        batches: micro-batches of this rank.
        title: title of the progress bar.
        bench: number of steps.
        world: the processes of the run; all must call this.

    Returns:
        The ``metrics.jsonl`` rows of all steps.
    """
    rows: list[dict[str, Any]] = []
    step.on_row = lambda row, _: rows.append(row)
    steps = range(bench.warmup + bench.steps)
    for place in tqdm(steps, title, unit="step", disable=not world.is_main):
        if place == bench.warmup:
            world.barrier()
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
                torch.cuda.reset_peak_memory_stats(world.device)
        wait = place in (bench.warmup - 1, len(steps) - 1)
        step(batches, time.perf_counter(), wait=wait)
    return rows


def reduce_time_and_peak(
    measured: list[dict[str, Any]], world: World
) -> tuple[float, float | None]:
    """Return the median milliseconds of a step on the slowest GPU, and the peak of one GPU in GB.

    Args:
        measured: rows of :func:`take_steps` without the warm-up.
        world: the processes of the run; all must call this. The peak is None on a CPU.
    """
    seconds = world.gather([step["step_s"] for step in measured])
    ms = 1e3 * median(max(ranks) for ranks in zip(*seconds, strict=True))
    if world.device.type != "cuda":
        return ms, None
    return ms, max(world.gather(max(step["peak_memory_mb"] for step in measured))) / 1e3


def _measure(row: RecipeRow, bench: RecipeBench, case: StageCase, world: World) -> None:
    """Take the steps of a stage, write the measurements into a row, and free the memory."""
    row.note += note_leftover_memory(world.device)
    recipe, stage = case.recipe, case.stage
    model = build_stage_model(case, world.device)
    first = recipe.seed + world.rank // stage.sequence_parallel * bench.accumulation
    full = [[case.row] * stage.micro_batch_size] * bench.accumulation
    batches = [
        make_batch(model, shapes, stage.packing, seed=first + place)
        for place, shapes in enumerate(bench.samples or full)
    ]
    run = build_training_step(model, case, world, bench.warmup + bench.steps)
    try:
        torch.manual_seed(recipe.seed + world.rank)
        steps = take_steps(run, batches, case.name, bench, world)
        losses, last = [step["loss"] for step in steps], steps[-1]
        norm = steps[0]["grad_norm"]
        row.note += "" if norm is None else f"; gradient norm {norm:.6g}"
        row.note += f"; loss {losses[0]:.6f} -> {losses[-1]:.6f}" if None not in losses else ""
        row.tokens, row.vision_tokens = last["tokens"], last["vision_tokens"]
        row.supervised_tokens = last["supervised_tokens"]
        if run.skipped_steps or None in losses:
            row.problem = f"gradients were NaN or infinite in {run.skipped_steps} step(s)"
        else:
            row.ms, row.peak_gb = reduce_time_and_peak(steps[bench.warmup :], world)
            own = row.ms / 1e3 * world.size
            row.tok_s_gpu, row.vision_tok_s_gpu = last["tokens"] / own, last["vision_tokens"] / own
            if "tflop" in last:
                row.tflops_gpu = sum(last["tflop"].values()) / own
        row.note += note_graphs()
        reuse = run.spare_memory.shares_weights
    finally:
        release_engine(run.engine, model)
    if bench.plan:
        row.plan_gb = plan_peak(
            case, bench, reuse=reuse, ranks=world.size, gpu_bytes=count_gpu_bytes(world.device)
        )
        if row.peak_gb is not None:
            row.plan_off = 100 * (row.plan_gb / row.peak_gb - 1)


def plan_peak(
    case: StageCase, bench: RecipeBench, *, reuse: bool, ranks: int, gpu_bytes: float
) -> float:
    """Return the peak of a rank that a plan expects, in 10^9 bytes.

    Args:
        case: the stage.
        bench: number of micro-batches of a step.
        reuse: whether micro-batches share FP8 weights.
        ranks: number of processes.
        gpu_bytes: memory of a GPU for tensors; CUDA graphs take part of what is left.
    """
    frame = cast(CoatVlm, case.frame)
    shared = case.stage.sequence_parallel
    traced = [
        trace(
            frame,
            factor * case.stage.micro_batch_size,
            case.row.tokens,
            case.row.images,
            pool_frames=case.recipe.model.video.pool_frames or 1,
            reuse_weights=reuse,
        )
        for factor in ((1,) if shared == 1 else (1, 2, 4))
    ]
    activations = traced[0] if shared == 1 else share_tokens(traced, shared)[0]
    kind = CoatAdamW if case.recipe.optimizer == "coat" else torch.optim.AdamW
    low_bits = case.recipe.has_low_bits(gpu=True)
    sizes = count_sizes(frame, case.stage, measure_state_bytes(kind), low_bits=low_bits)
    zero_stage, accumulates = case.recipe.zero_stage, bench.accumulation > 1
    memory = estimate_rank_memory(zero_stage, sizes, ranks, activations, accumulates=accumulates)
    arithmetic = arithmetic_of_recipe(case.recipe, torch.device("meta"))
    mode = choose_graphs(case.recipe, case.stage, arithmetic)
    graphs = plan_graphs(frame, mode, case.row.tokens, case.row.images)
    spare, micro_batch = MAX_SHARE * max(0.0, gpu_bytes - memory.peak), case.stage.micro_batch_size
    captured: dict[str, RowLoad] = {}
    if not reuse:
        captured = graphs.find_captured(activations, micro_batch, spare, accumulates=accumulates)
    return add_graphs(memory, [*captured.values()]).peak / 1e9


def format_row(row: RecipeRow) -> str:
    """Format a heading and a Markdown table of one stage."""
    checkpointed = ", gradient checkpointing" if row.checkpointing else ""
    heading = (
        f"{row.recipe}, stage {row.stage}: {row.gpus} x {row.gpu}, ZeRO-{row.zero}, "
        f"{row.precision}, {row.optimizer}{checkpointed}\n"
        f"a step: {row.gpus} rank(s) x {row.accumulation} micro-batch(es) x {row.micro_batch} "
        f"row(s) of {row.row_tokens:,} tokens with {row.images} image(s)"
    )
    if row.problem:
        return f"{heading}\nno speed: {row.problem}"

    columns = {
        "tokens a step": ("tokens", "{:,.0f}"),
        "supervised": ("supervised_tokens", "{:,.0f}"),
        "ms/step": ("ms", "{:.1f}"),
        "tokens/s per GPU": ("tok_s_gpu", "{:,.0f}"),
        "vision tokens/s per GPU": ("vision_tok_s_gpu", "{:,.0f}"),
        "TFLOP/s per GPU": ("tflops_gpu", "{:.3g}"),
        "peak GB": ("peak_gb", "{:.2f}"),
        "plan GB": ("plan_gb", "{:.4g}"),
        "plan off": ("plan_off", "{:+.1f}%"),
    }
    cells = [
        "-" if getattr(row, name) is None else form.format(getattr(row, name))
        for name, form in columns.values()
    ]
    return f"{heading}\n{row.note}\n\n{format_table(list(columns), [cells])}"
