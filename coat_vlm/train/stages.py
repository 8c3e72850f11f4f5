"""Runs the stages of a recipe in order; each stage starts from the model of the previous one."""

import dataclasses
import gc
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from deepspeed import DeepSpeedEngine
from transformers import AutoTokenizer, PreTrainedModel

from coat_data.folder_lock import FolderLock
from coat_data.load.collate import MAX_PADDING
from coat_data.mixture.sampler import SamplerState
from coat_vlm.checkpoint.atomic_folder import write_folder
from coat_vlm.checkpoint.keep import KeepRule
from coat_vlm.checkpoint.load import FoundCheckpoint, list_checkpoints, load_checkpoint
from coat_vlm.checkpoint.manifest import find_problem
from coat_vlm.checkpoint.metadata import Progress
from coat_vlm.checkpoint.save import CheckpointSaver
from coat_vlm.checkpoint.verify import find_damage
from coat_vlm.config import Recipe, StageConfig, StageName
from coat_vlm.distributed import World, join_world
from coat_vlm.export.hugging_face import save_description, save_model
from coat_vlm.fp8 import SpareMemory, arithmetic_of_recipe, graph_blocks, store_frozen_weights
from coat_vlm.generate import set_stop_tokens
from coat_vlm.model import CoatVlm, CoatVlmConfig, build_model, count_parameters, module_parameters
from coat_vlm.model.build import extend_context
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.folder import AnyProcessor, check_start, load_model, start_processor
from coat_vlm.model.lora import describe
from coat_vlm.model.processor import (
    build_processor,
    prepare_tokenizer,
    tokenizer_name,
    train_tokenizer,
)
from coat_vlm.model.sequence_parallel import join_sequence_group
from coat_vlm.run.heartbeat import Heartbeat
from coat_vlm.run.lock import LOCK, lock_folder
from coat_vlm.run.signals import SIGNALS
from coat_vlm.train.bad_samples import BAD_SAMPLES, BadSamples
from coat_vlm.train.data import StageData, open_data
from coat_vlm.train.data_record import SourceRecord
from coat_vlm.train.divergence import Watchdog, choose_start, read_step_rows
from coat_vlm.train.engine import build_engine, steps_overlap, training_loop_clips
from coat_vlm.train.evaluation import EvalSubset, LiveEvaluation
from coat_vlm.train.fp8_monitor import BlockMonitor, Fp8Record
from coat_vlm.train.loop import StageLoop
from coat_vlm.train.model_setup import (
    avoids_padding,
    describe_missing_start,
    find_start,
    prepare_model,
    select_stages,
)
from coat_vlm.train.nf4 import quantize_frozen_weights
from coat_vlm.train.open_sources import iterate_texts
from coat_vlm.train.preference import build_preference
from coat_vlm.train.resume import check_length, continue_sampler
from coat_vlm.train.run_folder import prepare_run_folder, reset_stage
from coat_vlm.train.step import TrainStep
from coat_vlm.train.throughput import PeakMemory, PhaseClock, Throughput
from coat_vlm.train.tracking import (
    METRICS,
    Metrics,
    list_measured,
    print_on_main,
    read_losses,
    rewind,
)


def run_recipe(
    recipe: Recipe,
    *,
    resume: bool,
    only_stage: str | None = None,
    overwrite: bool = False,
    allow_changed_data: bool = False,
    subsets: Sequence[EvalSubset] = (),
) -> Path:
    """Train the stages of a recipe.

    Args:
        recipe: the recipe.
        resume: continue from the newest complete checkpoint; finished stages are skipped.
        only_stage: run only this stage, on the previous stage's model in the run folder.
        overwrite: delete an earlier run in the output folder first.
        allow_changed_data: continue although the data, or recipe keys that change the samples or
            their order, differ from those with which the stage started.
        subsets: the questions of ``eval_every`` with their scoring functions, see
            :func:`coat_eval.runner.make_eval_subsets`.

    Returns:
        The last stage's model folder.

    Raises:
        ValueError: the recipe, a checkpoint or the run folder does not fit, or training failed.
        LockError: another process uses the run folder, or took it over.
        SystemExit: a signal stopped the run (:class:`coat_vlm.distributed.Stopped` after a
            checkpoint).
        DataError: the data is bad.
        OSError: a file could not be saved.
    """
    if recipe.eval_every and not subsets:
        raise ValueError(
            "eval_every needs questions: pass coat_eval.runner.make_eval_subsets(recipe)"
        )
    if recipe.memory is not None and recipe.memory.choose:
        raise ValueError(
            f"memory leaves {', '.join(recipe.memory.choose)} to be chosen: pass the recipe that "
            "coat_vlm.plan.fit_recipe returns, as coat-vlm train does"
        )
    names = select_stages(recipe, only_stage)
    run_dir = model_dir = Path(recipe.output_dir)
    with (
        SIGNALS.handle(),
        join_world(recipe.collective_timeout_s) as world,
        lock_folder(run_dir / LOCK, "train", world) as lock,
    ):
        world.run_on_rank0(
            partial(
                prepare_run_folder,
                run_dir,
                recipe,
                continues=resume or only_stage is not None,
                overwrite=overwrite,
                restarted=None if resume else only_stage,
                allow_changed_data=allow_changed_data,
            )
        )
        for name in names:
            model_dir = run_dir / name / "model"
            finished = world.run_on_rank0(partial(find_problem, model_dir)) is None
            if resume and finished:
                print_on_main(world, f"stage {name} is finished: {model_dir}")
                continue
            checkpoints = run_dir / name / "checkpoints"
            if not (resume or finished) and world.run_on_rank0(
                partial(list_checkpoints, checkpoints)
            ):
                raise ValueError(
                    f"stage {name} is not finished and has checkpoints in {checkpoints}; continue "
                    "with --resume auto, or start the run over with --overwrite"
                )
            _run_stage(
                recipe,
                name,
                run_dir,
                world,
                subsets,
                lock,
                resume=resume,
                allow_changed_data=allow_changed_data,
            )
    return model_dir


def _run_stage(
    recipe: Recipe,
    name: StageName,
    run_dir: Path,
    world: World,
    subsets: Sequence[EvalSubset],
    lock: FolderLock,
    *,
    resume: bool,
    allow_changed_data: bool = False,
) -> None:
    started = time.perf_counter()
    checkpoints = run_dir / name / "checkpoints"
    continues = world.run_on_rank0(lambda: resume and bool(list_checkpoints(checkpoints)))
    stage = recipe.stages[name]
    torch.manual_seed(recipe.seed)
    arithmetic = arithmetic_of_recipe(recipe, world.device)
    model, processor = _load_initial_model(
        recipe, name, run_dir, arithmetic.dtype, world, continues=continues
    )
    processor.adopt_template(stage.template)
    set_stop_tokens(model, processor)
    unpadded = avoids_padding(model, recipe, stage, world.device)
    conversion = prepare_model(model, recipe, stage, arithmetic, packed=unpadded)
    if conversion is not None:
        print_on_main(world, f"\n{conversion}")
    record = SourceRecord(
        run_dir / name / "sources.json",
        world,
        compare=continues,
        allow_changed=allow_changed_data,
    )
    throughput = Throughput(model, world, stage.sequence_parallel)
    data = open_data(
        recipe,
        name,
        run_dir,
        processor,
        world,
        check=record.open,
        flops=throughput.flops,
        unpad=unpadded,
    )
    record.finish(data.sources, [share.rows for share in data.shares])
    evaluation = None
    if recipe.eval_every:
        evaluation = LiveEvaluation(
            subsets, processor, world, every=recipe.eval_every, lockstep=recipe.zero_stage == 3
        )
    total_steps = data.total_steps(stage)
    start = _describe_stage(recipe, name, model, world)
    _print_tables(world, stage, name, model, data, total_steps)
    preference = build_preference(model, processor, recipe, name, run_dir, world)
    engine = build_engine(model, recipe, stage, arithmetic, world)
    split = recipe.zero_stage == 3
    monitor = BlockMonitor(model, conversion, recipe.monitor, arithmetic, world, split)
    torch.manual_seed(recipe.seed + world.rank)  # dropout differs between ranks
    done = Progress(
        stage=name,
        step=0,
        world_size=world.size,
        zero_stage=recipe.zero_stage,
        precision=recipe.precision,
        bad_samples=0,
        sampler_state=SamplerState(),
    )
    new = done
    vocab_size = len(processor.tokenizer)
    found = FoundCheckpoint()
    rows = read_step_rows(run_dir / METRICS, name, world) if continues else []
    if continues:
        found = choose_start(checkpoints, recipe.divergence, rows, vocab_size, world)
    if found.path is not None:
        done = _load_progress(found.path, engine, new, total_steps, world)
        store_frozen_weights(model)
        quantize_frozen_weights(model, stage.lora)
    if world.is_main:
        lock.check()
        reset_stage(run_dir, name, done.step, fresh=found.path is None)
        record.write()
    world.barrier()  # before another rank logs a bad sample
    watchdog = Watchdog(
        recipe.divergence,
        run_dir / name,
        world,
        vocab_size,
        rows,
        done.step,
    )
    measured = world.gather(list_measured(run_dir / METRICS, name, done.step))[0]
    metrics = Metrics(
        run_dir, recipe.tracking, recipe.name, enabled=world.is_main, check=lock.check
    )
    metrics.write({"kind": "stage", "status": "start", **start, "sources": _describe_sources(data)})
    for row in record.rows(name, done.step):
        metrics.write(row)
    step = TrainStep(
        name=name,
        stage=stage,
        engine=engine,
        model=model,
        world=world,
        total_steps=total_steps,
        sampler=data.loader.sampler,
        row_tokens=data.row_tokens,
        clip_here=training_loop_clips(recipe, arithmetic),
        overlaps=steps_overlap(recipe, stage, arithmetic, world),
        spare_memory=SpareMemory.of(model, arithmetic, world.device),
        sequence=join_sequence_group(world, stage.sequence_parallel, recipe.collective_timeout_s),
        preference=preference,
        metrics=metrics,
        throughput=throughput,
        bad_samples=BadSamples(run_dir, name, stage, data.sources, done.bad_samples, lock.check),
        phases=PhaseClock(world.device, recipe.log_phases),
        memory=PeakMemory(world.device),
        fp8=None if conversion is None else Fp8Record(name, conversion, metrics.write),
        monitor=monitor,
        finished=done.step,
        sampler_state=continue_sampler(
            data.loader.sampler, SamplerState(*done.sampler_state), allow_changed_data
        ),
    )

    validated = recipe.keep_best
    saver = CheckpointSaver(
        checkpoints,
        engine,
        world,
        KeepRule(
            last=recipe.save_total_limit,
            every_steps=recipe.keep_every_steps,
            best=validated is not None,
        ),
        describe=partial(save_description, model=model, processor=processor),
        background=recipe.async_save,
        check=lock.check,
        discarded=found.damaged,
        losses=partial(read_losses, run_dir / METRICS, name, validated) if validated else None,
    )
    watchdog.finish_save = saver.finish

    def roll_back(checkpoint: Path) -> None:
        lock.check()
        back = load_checkpoint(checkpoint, engine, new, world)
        if world.is_main:
            rewind(run_dir / BAD_SAMPLES, name, back.step)
        metrics.rewind(name, back.step)
        world.barrier()
        bad_samples = BadSamples(run_dir, name, stage, data.sources, back.bad_samples, lock.check)
        step.go_back(back, bad_samples)

    def save(number: int, sampler_state: SamplerState) -> None:
        begun = time.perf_counter()
        here = dataclasses.replace(
            new,
            step=number,
            bad_samples=step.bad_samples.total,
            sampler_state=sampler_state,
            spike=watchdog.spiking,
        )
        saver.save(here)
        seconds = round(time.perf_counter() - begun, 4)
        metrics.write({"kind": "save", "stage": name, "step": number, "save_s": seconds})

    heartbeat = Heartbeat(
        run_dir, name, step.finished, world, recipe.collective_timeout_s, lock.check
    )
    loop = StageLoop(
        step=step,
        data=data,
        save=save,
        watchdog=watchdog,
        roll_back=roll_back,
        measured=measured,
        finish_save=saver.finish,
        log_every_steps=recipe.log_every_steps,
        evaluation=evaluation,
        heartbeat=heartbeat,
        saved=done.step,
    )
    try:
        with heartbeat:
            loop.train()
            watchdog.check_weights(model, name)
            heartbeat.enter("saving the model", step.finished)
            target = run_dir / name / "model"
            with SIGNALS.hold(f"when {target} is complete"):
                save_model(target, model, processor, recipe, name, step.finished, world, lock.check)
        wall = round(time.perf_counter() - started, 2)
        metrics.write({"kind": "stage", "status": "end", **start, "wall_s": wall})
    finally:
        saver.close()
        metrics.close()
        graph_blocks(model, enabled=False)  # blocks and graphs hold each other
        engine.destroy()
    gc.collect()


def _load_progress(
    checkpoint: Path, engine: DeepSpeedEngine, new: Progress, total_steps: int, world: World
) -> Progress:
    """Load a checkpoint from which the stage continues, and print which."""
    done = load_checkpoint(checkpoint, engine, new, world)
    check_length(done.stage, total_steps, done.step)
    print_on_main(world, f"stage {done.stage} continues from {checkpoint}")
    if (done.world_size, done.zero_stage) != (world.size, new.zero_stage):
        print_on_main(
            world,
            f"  its states, of {done.world_size} ranks at ZeRO stage {done.zero_stage}, are "
            f"repartitioned for {world.size} at stage {new.zero_stage}",
        )
    return done


def _describe_stage(
    recipe: Recipe, name: str, model: PreTrainedModel, world: World
) -> dict[str, Any]:
    """Return the entries of metrics.jsonl at a stage's start: modules, machine, versions."""
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


def _describe_sources(data: StageData) -> list[dict[str, Any]]:
    """Return rows, samples and passes per epoch, and mean tokens of a sample, of each source."""
    return [
        {
            "name": share.name,
            "rows": share.rows,
            "samples": share.samples,
            "passes": share.passes,
            "tokens": tokens,
        }
        for share, tokens in zip(data.shares, data.tokens, strict=True)
    ]


def _print_tables(
    world: World,
    stage: StageConfig,
    name: str,
    model: PreTrainedModel,
    data: StageData,
    total_steps: int,
) -> None:
    """Print the modules of a stage, and the rows, epochs and tokens of each source."""
    samples = total_steps * data.samples_per_step(stage)
    rows = "samples" if data.packing is None else f"rows of {data.row_tokens:,} tokens"
    rows = rows if stage.dpo is None else "preference pairs"
    lines = [f"\nstage {name}: {total_steps} steps of {stage.batch_size} {rows}"]
    if data.packing is not None:
        lines.append(
            f"  packed: {data.packing.samples_per_row:.1f} samples and "
            f"{data.packing.images_per_row:.1f} images in a row, {data.packing.fill:.1%} full"
        )
    if data.unpadded:
        lines.append(f"  micro-batches with over {MAX_PADDING:.0%} of padding are packed instead")
    if stage.sequence_parallel > 1:
        lines.append(f"  {stage.sequence_parallel} ranks share the tokens of each micro-batch")
    lines += [f"  WARNING {warning}" for warning in data.warnings]
    lines.append(f"  label masks verified on {data.verified_rows} rows")
    lines.append(f"  {'module':<12}{'parameters':>14}  {'trains':<8}peak lr")
    for part, module in module_parameters(model).items():
        training = stage.module(part)
        lr = f"{training.lr:g}" if training.lr is not None else "-"
        trains = "yes" if training.train else "frozen"
        trains = "LoRA" if stage.lora is not None and part in stage.lora.modules else trains
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
    print_on_main(world, "\n".join(lines))


def _load_initial_model(
    recipe: Recipe,
    name: StageName,
    run_dir: Path,
    dtype: torch.dtype,
    world: World,
    *,
    continues: bool,
) -> tuple[PreTrainedModel, AnyProcessor]:
    """Load or build the model and processor from which a stage starts.

    If the stage continues from a checkpoint, a tokenizer that was trained for it is loaded.
    """
    start = world.run_on_rank0(partial(find_start, recipe, name, run_dir))
    if start is not None:
        if start.parent.parent == run_dir:
            problem = find_damage(start, world)
            if problem is not None:
                raise ValueError(describe_missing_start(name, start, problem))
        else:
            check_start(recipe, str(start))
        print_on_main(world, f"\nstage {name} starts from {start}")
        model = load_model(start, dtype, recipe.model.attn_implementation)
        if isinstance(model, CoatVlm):
            extend_context(model.language_model, recipe.model)
            cast(CoatVlmConfig, model.config).text_config = model.language_model.config
        return model, start_processor(recipe, str(start))
    if recipe.model.pretrained is not None:
        source = ("model.pretrained", recipe.model.pretrained)
        model = load_family_model(*source, dtype, recipe.model.attn_implementation)
        limits = recipe.model.max_length, recipe.model.max_pixels
        return model, FamilyProcessor.load(*source, *limits)
    vocab_size = recipe.model.tokenizer.train_vocab_size
    folder = tokenizer_name(recipe.model) if vocab_size is None else run_dir / "tokenizer"
    if vocab_size is not None:
        kept = continues and world.run_on_rank0(Path(folder).is_dir)
        if not kept:

            def train(temporary: Path) -> None:
                train_tokenizer(iterate_texts(recipe), vocab_size).save_pretrained(temporary)

            write_folder(Path(folder), world, train)
        # The check waits until every rank sees the files.
        problem = find_damage(Path(folder), world)
        if problem is not None:
            raise OSError(f"{folder} is damaged: {problem}; start over with --overwrite")
    images = recipe.model.vision is not None
    tokenizer = prepare_tokenizer(AutoTokenizer.from_pretrained(folder), images=images)
    model = build_model(recipe.model, tokenizer, dtype)
    return model, build_processor(recipe.model, tokenizer, cast(CoatVlmConfig, model.config))
