"""Runs a recipe: its stages in order, each on the model that the one before it left."""

import dataclasses
import gc
import shutil
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer

from coat_data.mixture.sampler import Cursor
from coat_vlm.checkpoint.atomic_folder import problem_inside, problem_with, remove_folder, settle
from coat_vlm.checkpoint.load import checkpoints_in, latest_checkpoint, load_checkpoint
from coat_vlm.checkpoint.metadata import Progress
from coat_vlm.checkpoint.save import save_checkpoint
from coat_vlm.config import STAGES, Fp8Config, Recipe, StageConfig, StageName
from coat_vlm.config.load import load_recipe, save_recipe
from coat_vlm.distributed import World, joined_world
from coat_vlm.export.hugging_face import save_description, save_model
from coat_vlm.fp8 import arithmetic_of, graph_blocks
from coat_vlm.model import CoatVlm, CoatVlmConfig, build_model, count_parameters, module_parameters
from coat_vlm.model.lora import describe
from coat_vlm.model.pretrained import composed_folder
from coat_vlm.model.processor import (
    CoatVlmProcessor,
    build_processor,
    continued_processor,
    prepare_tokenizer,
    tokenizer_name,
    train_tokenizer,
)
from coat_vlm.train.bad_samples import BAD_SAMPLES, BadSamples
from coat_vlm.train.data import StageData, open_data
from coat_vlm.train.engine import build_engine, clips_itself, prepare_model
from coat_vlm.train.evaluation import EvalSubset, LiveEvaluation
from coat_vlm.train.fp8_monitor import BlockMonitor, Fp8Record
from coat_vlm.train.loop import StageLoop
from coat_vlm.train.sources import SourceRecord, texts
from coat_vlm.train.step import TrainStep
from coat_vlm.train.throughput import PeakMemory, PhaseClock, Throughput
from coat_vlm.train.tracking import METRICS, Metrics, rewind, say

_MAY_CHANGE = {
    "num_workers",
    "save_total_limit",
    "log_every_steps",
    "log_phases",
    "monitor",
    "tracking",
    "eval_sets",
    "eval_every",
    "eval_samples",
    "zero_stage",
}
"""Recipe keys that a resumed run may change: they do not touch the training itself, but for the
monitor's ``action``, which a warning may be the reason to change."""


def run_recipe(
    recipe: Recipe,
    *,
    resume: bool,
    only_stage: str | None = None,
    overwrite: bool = False,
    subsets: Sequence[EvalSubset] = (),
) -> Path:
    """Train the stages of a recipe.

    Args:
        recipe: what to train.
        resume: continue from the newest whole checkpoint; finished stages are skipped.
        only_stage: run this stage only, on the previous stage's model in the run folder.
        overwrite: delete an earlier run in the output folder first.
        subsets: the questions of ``eval_every``, see :func:`coat_eval.eval_subsets`; what
            scores them is above this package.

    Returns:
        The last stage's model folder.

    Raises:
        ValueError: the recipe, a checkpoint or the run folder does not fit, or training failed.
        DataError: the data is bad.
        OSError: something could not be saved.
    """
    if recipe.eval_every and not subsets:
        raise ValueError("eval_every needs questions: pass coat_eval.eval_subsets(recipe)")
    names = stage_names(recipe, only_stage)
    run_dir = model_dir = Path(recipe.output_dir)
    chained = only_stage is not None
    with joined_world() as world:
        _claim(run_dir, recipe, world, resume=resume, chained=chained, overwrite=overwrite)
        world.barrier()
        for name in names:
            model_dir = run_dir / name / "model"
            finished = problem_with(model_dir) is None
            if resume and finished:
                say(world, f"stage {name} is finished: {model_dir}")
                continue
            checkpoints = run_dir / name / "checkpoints"
            if not (resume or finished) and checkpoints_in(checkpoints):
                raise ValueError(
                    f"stage {name} is not finished and has checkpoints in {checkpoints}; continue "
                    "with --resume auto, or start the run over with --overwrite"
                )
            world.barrier()  # all have looked before one deletes
            _run_stage(recipe, name, run_dir, world, subsets, resume=resume)
    return model_dir


def stage_names(recipe: Recipe, only_stage: str | None) -> list[StageName]:
    """The stages of a recipe in order, or the one that was asked for.

    Raises:
        ValueError: the recipe has no such stage.
    """
    names: list[StageName] = [name for name in STAGES if name in recipe.stages]
    if only_stage is None:
        return names
    if only_stage not in names:
        raise ValueError(f"--stage {only_stage}: the recipe has the stages {', '.join(names)}")
    return [name for name in names if name == only_stage]


def _claim(
    run_dir: Path, recipe: Recipe, world: World, *, resume: bool, chained: bool, overwrite: bool
) -> None:
    """Prepare the run folder, or say why this run may not use it."""
    saved = run_dir / "recipe.yaml"
    if world.is_main and overwrite and saved.is_file():
        shutil.rmtree(run_dir)
    world.barrier()
    if saved.is_file():
        if not (resume or chained):
            raise ValueError(
                f"{run_dir} already holds a run; continue it with --resume auto, replace it with "
                "--overwrite, or give another folder with output_dir=..."
            )
        _check_same(load_recipe(str(saved)), recipe, saved)
    world.barrier()
    if world.is_main:
        run_dir.mkdir(parents=True, exist_ok=True)
        for stage in STAGES:
            settle(run_dir / stage)
            settle(run_dir / stage / "checkpoints")
        save_recipe(recipe, saved)


def _check_same(old: Recipe, new: Recipe, path: Path) -> None:
    before, after = _settings(old), _settings(new)
    if (old.fp8 or Fp8Config()).second_moment != "auto":
        before["fp8"]["second_moment"], after["fp8"]["second_moment"] = _codecs(old), _codecs(new)
    changed = [key for key in after if key not in _MAY_CHANGE and before[key] != after[key]]
    if changed:
        details = "; ".join(f"{key}: {before[key]!r} -> {after[key]!r}" for key in changed)
        raise ValueError(
            f"the recipe differs from {path}, which this run continues: {details}; restore these "
            "keys, or start a new run in another output_dir"
        )


def _settings(recipe: Recipe) -> dict[str, Any]:
    """A recipe as data, without nested keys that may change.

    These change memory and time only: ``fp8.weights``, ``fp8.cuda_graphs`` and the stages'
    ``micro_batch_size``, which another number of ranks may need (FP8 scales are those of a
    micro-batch: losses then differ by FP8's rounding). And ``fp8.second_moment``, whose meaning is
    compared (:func:`_codecs`); what ``auto`` meant in an earlier version, the checkpoint's states
    say (contents.py).
    """
    fp8 = dataclasses.asdict(recipe.fp8 or Fp8Config())
    del fp8["weights"], fp8["cuda_graphs"], fp8["second_moment"]
    settings = recipe.to_dict()
    stages = {name: dict(stage) for name, stage in settings["stages"].items()}
    for stage in stages.values():
        del stage["micro_batch_size"]
    return {**settings, "fp8": fp8, "stages": stages}


def _codecs(recipe: Recipe) -> dict[str, str]:
    """How each stage keeps its FP8 moments."""
    fp8 = recipe.fp8 or Fp8Config()
    return {name: fp8.codec(stage.betas[1]) for name, stage in recipe.stages.items()}


def _run_stage(
    recipe: Recipe,
    name: StageName,
    run_dir: Path,
    world: World,
    subsets: Sequence[EvalSubset],
    *,
    resume: bool,
) -> None:
    started = time.perf_counter()
    stage = recipe.stages[name]
    torch.manual_seed(recipe.seed)
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, world.device)
    model, processor = _model_for(recipe, name, run_dir, arithmetic.dtype, world)
    conversion = prepare_model(model, recipe, stage, arithmetic)
    if conversion is not None:
        say(world, f"\n{conversion}")
    data = open_data(recipe, name, run_dir, processor, world)
    evaluation = None
    if recipe.eval_every:
        evaluation = LiveEvaluation(
            subsets, processor, world, every=recipe.eval_every, in_step=recipe.zero_stage == 3
        )
    total_steps = data.total_steps(stage)
    start = _overview(recipe, name, model, world)
    _print_tables(world, stage, name, model, data, total_steps)
    throughput = Throughput(model, world)
    engine = build_engine(model, recipe, stage, arithmetic, world)
    split = recipe.zero_stage == 3
    monitor = BlockMonitor(model, conversion, recipe.monitor, arithmetic, world, split)
    torch.manual_seed(recipe.seed + world.rank)  # dropout differs between ranks
    checkpoints = run_dir / name / "checkpoints"
    done = Progress(
        stage=name,
        step=0,
        world_size=world.size,
        zero_stage=recipe.zero_stage,
        precision=recipe.precision,
        bad_samples=0,
        cursor=Cursor(),
    )
    new = done
    checkpoint = latest_checkpoint(checkpoints, world) if resume else None
    record = SourceRecord(run_dir / name, data.sources, [share.rows for share in data.shares])
    if checkpoint is not None:
        record.check()
        done = load_checkpoint(checkpoint, engine, new, world)
        monitor.send_back(done.bf16_blocks)
        say(world, f"stage {name} continues from {checkpoint}")
        if (done.world_size, done.zero_stage) != (world.size, recipe.zero_stage):
            say(
                world,
                f"  its states, of {done.world_size} ranks at ZeRO stage {done.zero_stage}, are "
                f"regrouped for {world.size} at stage {recipe.zero_stage}",
            )
    if world.is_main:
        _clear(run_dir, name, done.step, models=not resume)
        record.save()
    world.barrier()  # before another rank lists a bad sample
    metrics = Metrics(run_dir, recipe.tracking, recipe.name, enabled=world.is_main)
    metrics.write({"kind": "stage", "status": "start", **start})
    step = TrainStep(
        name=name,
        stage=stage,
        engine=engine,
        model=model,
        world=world,
        total_steps=total_steps,
        order=data.loader.order,
        row_tokens=data.row_tokens,
        clip_here=clips_itself(recipe, arithmetic),
        reuse=arithmetic.weight_reuse(model, world.device),
        metrics=metrics,
        throughput=throughput,
        bad_samples=BadSamples(run_dir, name, stage, data.sources, done.bad_samples),
        phases=PhaseClock(world.device, recipe.log_phases),
        memory=PeakMemory(world.device),
        fp8=None if conversion is None else Fp8Record(name, conversion, metrics.write),
        monitor=monitor,
        finished=done.step,
        cursor=Cursor(*done.cursor),
    )

    def save(number: int, cursor: Cursor) -> None:
        here = dataclasses.replace(
            new,
            step=number,
            bad_samples=step.bad_samples.total,
            cursor=cursor,
            bf16_blocks=monitor.in_bf16,
        )
        describe = partial(save_description, model=model, processor=processor)
        save_checkpoint(checkpoints, engine, here, world, recipe.save_total_limit, describe)

    loop = StageLoop(
        step=step,
        data=data,
        save=save,
        log_every_steps=recipe.log_every_steps,
        evaluation=evaluation,
    )
    try:
        loop.train()
        target, back = run_dir / name / "model", monitor.in_bf16
        save_model(target, model, processor, recipe, name, step.finished, world, back)
        wall = round(time.perf_counter() - started, 2)
        metrics.write({"kind": "stage", "status": "end", **start, "wall_s": wall})
    finally:
        metrics.close()
        graph_blocks(model, enabled=False)  # blocks and graphs hold each other
        engine.destroy()
    gc.collect()


def _overview(recipe: Recipe, name: str, model: CoatVlm, world: World) -> dict[str, Any]:
    """What metrics.jsonl notes as a stage starts: its parts, the machine, versions."""
    parts = module_parameters(model)
    gpu = world.device.type == "cuda"
    return {
        "stage": name,
        "trainable": {n: count_parameters(part, trainable_only=True) for n, part in parts.items()},
        "total": {name: count_parameters(part) for name, part in parts.items()},
        "world_size": world.size,
        "device": torch.cuda.get_device_name(world.device) if gpu else "cpu",
        "zero_stage": recipe.zero_stage,
        "precision": recipe.precision,
        "versions": {
            package: version(package) for package in ("torch", "transformers", "deepspeed")
        },
    }


def _print_tables(
    world: World, stage: StageConfig, name: str, model: CoatVlm, data: StageData, total_steps: int
) -> None:
    """Print what a stage trains, and the rows, epochs and tokens of each source."""
    samples = total_steps * data.samples_per_step(stage)
    rows = "samples" if data.packing is None else f"rows of {data.row_tokens:,} tokens"
    lines = [f"\nstage {name}: {total_steps} steps of {stage.batch_size} {rows}"]
    if data.packing is not None:
        lines.append(
            f"  packed: {data.packing.samples_per_bin:.1f} samples and "
            f"{data.packing.images_per_bin:.1f} images in a row, {data.packing.fill:.1%} full"
        )
    lines += [f"  WARNING {warning}" for warning in data.warnings]
    lines.append(f"  label masks verified on {data.verified_rows} rows")
    lines.append(f"  {'module':<12}{'parameters':>14}  {'trains':<8}peak lr")
    for part, module in module_parameters(model).items():
        training = stage.module(part)
        lr = f"{training.lr:g}" if training.lr is not None else "-"
        trains = "yes" if training.train else "frozen"
        trains = "LoRA" if part == "language" and stage.lora is not None else trains
        lines.append(f"  {part:<12}{count_parameters(module):>14,}  {trains:<8}{lr}")
    if stage.lora is not None:
        lines.append(f"  {describe(model)}")
    about = "tokens" if data.packing is not None else "~tokens"
    width = max(20, *(len(share.name) + 2 for share in data.shares))
    lines.append(
        f"  {'source':<{width}}{'rows':>10}{'per epoch':>12}{'epochs':>10}{about:>10}{'of all':>9}"
    )
    means = list(zip(data.shares, data.tokens, strict=True))
    all_tokens = sum((mean or 0.0) * share.samples for share, mean in means)
    for share, mean in means:
        passes = samples / data.epoch_size * share.passes
        each = "-" if mean is None else f"{mean:,.0f}"
        of_all = f"{(mean or 0.0) * share.samples / max(1.0, all_tokens):.1%}"
        lines.append(
            f"  {share.name:<{width}}{share.rows:>10,}{share.samples:>12,}{passes:>10.2f}"
            f"{each:>10}{of_all:>9}"
        )
    say(world, "\n".join(lines))


def _clear(run_dir: Path, name: StageName, step: int, *, models: bool) -> None:
    """Drop what an earlier run left behind ``step`` of a stage: rows and, if asked, folders.

    Its model must not pass for the result of this one.
    """
    if models:
        for left in (run_dir / name / "model", *checkpoints_in(run_dir / name / "checkpoints")):
            if left.exists():
                remove_folder(left)
    for file in (METRICS, BAD_SAMPLES):
        rewind(run_dir / file, name, step)


def _model_for(
    recipe: Recipe, name: StageName, run_dir: Path, dtype: torch.dtype, world: World
) -> tuple[CoatVlm, CoatVlmProcessor]:
    """The model and processor that a stage starts from."""
    earlier = [stage for stage in STAGES[: STAGES.index(name)] if stage in recipe.stages]
    start = run_dir / earlier[-1] / "model" if earlier else recipe.init_from
    problem = problem_inside(run_dir / earlier[-1] / "model", world) if earlier else None
    if problem is not None:
        raise ValueError(
            f"stage {name} starts from {start}, and {problem}; train the stage {earlier[-1]} first"
        )
    if start is not None:
        start = start if earlier else composed_folder(str(start))
        model = CoatVlm.from_pretrained(
            str(start), dtype=dtype, attn_implementation=recipe.model.attention
        )
        processor = CoatVlmProcessor.from_pretrained(str(start))
        if not earlier:
            processor = continued_processor(
                recipe.model, processor, cast(CoatVlmConfig, model.config)
            )
        return model, processor
    vocab_size = recipe.model.tokenizer.train_vocab_size
    folder = tokenizer_name(recipe.model) if vocab_size is None else run_dir / "tokenizer"
    if vocab_size is not None:
        if world.is_main:
            train_tokenizer(texts(recipe), vocab_size).save_pretrained(folder)
        world.barrier()
    images = recipe.model.vision is not None
    tokenizer = prepare_tokenizer(AutoTokenizer.from_pretrained(folder), images=images)
    model = build_model(recipe.model, tokenizer, dtype)
    return model, build_processor(recipe.model, tokenizer, cast(CoatVlmConfig, model.config))
