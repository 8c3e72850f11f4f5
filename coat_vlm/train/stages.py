"""Runs a recipe: its stages in order, each on the model that the one before it left."""

import dataclasses
import gc
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from coat_data.mixture.sampler import Cursor
from coat_vlm.checkpoint.checkpoint import (
    Progress,
    checkpoints_in,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from coat_vlm.checkpoint.folder import problem_inside, problem_with, remove_folder, settle
from coat_vlm.config import STAGES, Fp8Config, Recipe, StageName
from coat_vlm.config.load import load_recipe, save_recipe
from coat_vlm.distributed import World, joined_world
from coat_vlm.export.export import save_description
from coat_vlm.export.model_folder import save_model
from coat_vlm.fp8 import arithmetic_of, graph_blocks
from coat_vlm.model import CoatVlm, CoatVlmConfig, build_model
from coat_vlm.model.pretrained import composed_folder
from coat_vlm.model.processor import (
    CoatVlmProcessor,
    build_processor,
    continued_processor,
    prepare_tokenizer,
    tokenizer_name,
    train_tokenizer,
)
from coat_vlm.train.engine import build_engine, clips_itself, prepare_model
from coat_vlm.train.evaluation import EvalSubset, LiveEvaluation
from coat_vlm.train.loop import StageRun
from coat_vlm.train.metrics import Metrics, rewind
from coat_vlm.train.monitor import BlockMonitor, Fp8Record
from coat_vlm.train.overview import overview, print_tables, say
from coat_vlm.train.quarantine import Quarantine, rewind_quarantine
from coat_vlm.train.sources import SourceRecord, open_data, texts
from coat_vlm.train.throughput import PhaseClock, Throughput

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
        subsets: the questions of ``eval_every``, see :func:`coat_eval.subset.eval_subsets`; what
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
    settings = dataclasses.asdict(recipe)
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
    start = overview(recipe, name, model, world)
    print_tables(world, recipe, name, model, data, total_steps)
    throughput = Throughput(model, world)
    engine = build_engine(model, recipe, stage, arithmetic, world)
    split = recipe.zero_stage == 3
    monitor = BlockMonitor(model, conversion, recipe.monitor, arithmetic, world, split)
    torch.manual_seed(recipe.seed + world.rank)  # dropout differs between ranks
    checkpoints = run_dir / name / "checkpoints"

    def progress(step: int, bad_samples: int, cursor: Cursor) -> Progress:
        return Progress(
            stage=name,
            step=step,
            world_size=world.size,
            zero_stage=recipe.zero_stage,
            precision=recipe.precision,
            bad_samples=bad_samples,
            cursor=cursor,
            bf16_blocks=monitor.in_bf16,
        )

    def save(step: int, cursor: Cursor) -> None:
        here = progress(step, quarantine.total, cursor)
        describe = partial(save_description, model=model, processor=processor)
        save_checkpoint(checkpoints, engine, here, world, recipe.save_total_limit, describe)

    done = progress(0, 0, Cursor())
    checkpoint = latest_checkpoint(checkpoints, world) if resume else None
    record = SourceRecord(run_dir / name, data.sources, [share.rows for share in data.shares])
    if checkpoint is not None:
        record.check()
        done = load_checkpoint(checkpoint, engine, done, world)
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
    quarantine = Quarantine(run_dir, name, stage, data.sources, done.bad_samples)
    metrics = Metrics(run_dir, recipe.tracking, recipe.name, enabled=world.is_main)
    metrics.write({"kind": "stage", "status": "start", **start})
    run = StageRun(
        name=name,
        stage=stage,
        engine=engine,
        model=model,
        data=data,
        world=world,
        metrics=metrics,
        quarantine=quarantine,
        throughput=throughput,
        phases=PhaseClock(world.device, recipe.log_phases),
        total_steps=total_steps,
        clip_here=clips_itself(recipe, arithmetic),
        save=save,
        log_every_steps=recipe.log_every_steps,
        reuse=arithmetic.weight_reuse(model, world.device),
        fp8=None if conversion is None else Fp8Record(name, conversion, metrics.write),
        monitor=monitor,
        evaluation=evaluation,
        step=done.step,
        cursor=Cursor(*done.cursor),
    )
    try:
        run.train()
        target, back = run_dir / name / "model", monitor.in_bf16
        save_model(target, model, processor, recipe, name, run.step, world, back)
        wall = round(time.perf_counter() - started, 2)
        metrics.write({"kind": "stage", "status": "end", **start, "wall_s": wall})
    finally:
        metrics.close()
        graph_blocks(model, enabled=False)  # blocks and graphs hold each other
        engine.destroy()
    gc.collect()


def _clear(run_dir: Path, name: StageName, step: int, *, models: bool) -> None:
    """Drop what an earlier run left behind ``step`` of a stage: rows and, if asked, folders.

    Its model must not pass for the result of this one.
    """
    if models:
        for left in (run_dir / name / "model", *checkpoints_in(run_dir / name / "checkpoints")):
            if left.exists():
                remove_folder(left)
    rewind(run_dir, name, step)
    rewind_quarantine(run_dir, name, step)


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
    tokenizer = _tokenizer(recipe, run_dir, world)
    model = build_model(recipe.model, tokenizer, dtype)
    return model, build_processor(recipe.model, tokenizer, cast(CoatVlmConfig, model.config))


def _tokenizer(recipe: Recipe, run_dir: Path, world: World) -> PreTrainedTokenizerBase:
    settings, images = recipe.model.tokenizer, recipe.model.vision is not None
    if settings.train_vocab_size is not None:
        folder = run_dir / "tokenizer"
        if world.is_main:
            train_tokenizer(texts(recipe), settings.train_vocab_size).save_pretrained(folder)
        world.barrier()
        return prepare_tokenizer(AutoTokenizer.from_pretrained(folder), images=images)
    name = tokenizer_name(recipe.model)
    return prepare_tokenizer(AutoTokenizer.from_pretrained(name), images=images)
