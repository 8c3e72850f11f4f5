"""Runs the stages of a recipe in order; each stage starts from the model of the previous one.

A stage opens its data (:func:`_open`), builds its steps or restores them from a checkpoint
(:func:`_build_or_restore`), trains (:mod:`coat_vlm.train.loop`) and saves its model
(:func:`_finish`).
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from coat_data.folder_lock import FolderLock, LockError
from coat_data.load.collate import MAX_PADDING
from coat_data.mixture.sampler import SamplerState
from coat_vlm.checkpoint.atomic_folder import remove_folder
from coat_vlm.checkpoint.load import FoundCheckpoint, list_checkpoints, load_checkpoint
from coat_vlm.checkpoint.manifest import find_problem
from coat_vlm.checkpoint.metadata import Progress
from coat_vlm.checkpoint.save import CheckpointSaver
from coat_vlm.config import Recipe, StageConfig, StageName
from coat_vlm.config.load import describe_recipe
from coat_vlm.distributed import World, join_world
from coat_vlm.export.hugging_face import check_save, save_model
from coat_vlm.fp8 import (
    Arithmetic,
    ConversionReport,
    arithmetic_of_recipe,
    graph_blocks,
    store_frozen_weights,
)
from coat_vlm.generate import set_stop_tokens
from coat_vlm.model.family_model import find_unused
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.folder import AnyProcessor
from coat_vlm.model.lora import describe
from coat_vlm.model.vlm import count_parameters, module_parameters
from coat_vlm.optim import stage_lr_factor
from coat_vlm.run.heartbeat import Heartbeat
from coat_vlm.run.lock import LOCK, lock_folder
from coat_vlm.run.signals import SIGNALS
from coat_vlm.train.data import StageData, open_data
from coat_vlm.train.data_record import SourceRecord
from coat_vlm.train.divergence import (
    Detector,
    Watchdog,
    check_initial_weights,
    check_weights,
    choose_start,
    read_step_entries,
)
from coat_vlm.train.engine import steps_overlap
from coat_vlm.train.evaluation import EvalSubset, LiveEvaluation
from coat_vlm.train.fp8_monitor import Fp8Monitor
from coat_vlm.train.gradient_sums import describe_sums
from coat_vlm.train.loop import StageLoop
from coat_vlm.train.model_setup import (
    avoids_padding,
    find_start,
    load_initial_model,
    prepare_model,
    select_stages,
)
from coat_vlm.train.nf4 import quantize_frozen_weights
from coat_vlm.train.passes import Passes, build_passes
from coat_vlm.train.preference import Preference
from coat_vlm.train.resume import check_length, continue_sampler, prepare_run_folder, reset_stage
from coat_vlm.train.step import TrainStep
from coat_vlm.train.step_log import BadSamples, StepLog
from coat_vlm.train.throughput import PeakMemory, Throughput
from coat_vlm.train.tracking import METRICS, Metrics, list_measured, print_on_main


def run_recipe(
    recipe: Recipe,
    *,
    resume: bool,
    only_stage: str | None = None,
    overwrite: bool = False,
    allow_changed_data: bool = False,
    subsets: Sequence[EvalSubset] = (),
) -> Path:
    """Train the stages of a recipe; return the last stage's model folder.

    ``resume`` continues from the newest complete checkpoint and skips finished stages.
    ``only_stage`` starts from the previous stage's model in the run folder. ``subsets`` are the
    questions of ``eval_every`` (:func:`coat_eval.runner.make_eval_subsets`).

    Raises ValueError if the recipe, a checkpoint or the run folder does not fit, or training
    failed; LockError, DataError, OSError; SystemExit if a signal stopped the run.
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
                _Stage(
                    recipe=recipe,
                    name=name,
                    run_dir=run_dir,
                    world=world,
                    lock=lock,
                    subsets=subsets,
                    resume=resume,
                    allow_changed_data=allow_changed_data,
                )
            )
            gc.collect()  # its objects refer to each other, and hold weights and optimizer states
    return model_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage of a run, and how it is started."""

    recipe: Recipe
    name: StageName
    run_dir: Path
    world: World
    lock: FolderLock
    subsets: Sequence[EvalSubset]
    resume: bool
    allow_changed_data: bool
    started: float = field(default_factory=time.perf_counter)

    @property
    def config(self) -> StageConfig:
        return self.recipe.stages[self.name]

    @property
    def folder(self) -> Path:
        return self.run_dir / self.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """The model of a stage, not in an engine yet, and its data."""

    model: PreTrainedModel
    processor: AnyProcessor
    files: dict[str, bytes]
    """The description of the model in its checkpoints."""
    arithmetic: Arithmetic
    conversion: ConversionReport | None
    """The modules that were converted to FP8; None if the precision is not an FP8 one."""
    data: StageData
    record: SourceRecord
    throughput: Throughput
    evaluation: LiveEvaluation | None
    total_steps: int
    continues: bool
    """Whether there is a checkpoint to continue from."""
    description: dict[str, Any]
    """For the entries of metrics.jsonl at the start and the end."""


def _run_stage(stage: _Stage) -> None:
    opened = _open(stage)
    loop = _build_or_restore(stage, opened)
    try:
        with loop.heartbeat:
            loop.train()
            _finish(stage, opened, loop)
    finally:
        loop.saver.close()
        loop.step.log.metrics.close()
        graph_blocks(opened.model, enabled=False)  # breaks their reference cycle
        loop.step.passes.engine.destroy()


def _open(stage: _Stage) -> _Opened:
    recipe, config, world = stage.recipe, stage.config, stage.world
    continues = world.run_on_rank0(
        lambda: stage.resume and bool(list_checkpoints(stage.checkpoints))
    )
    torch.manual_seed(recipe.seed)
    arithmetic = arithmetic_of_recipe(recipe, world.device)
    start = world.run_on_rank0(partial(find_start, recipe, stage.name, stage.run_dir))
    model, processor = load_initial_model(
        recipe, stage.name, stage.run_dir, start, arithmetic.dtype, world, continues=continues
    )
    check_initial_weights(model, recipe, start, world)
    if isinstance(processor, FamilyProcessor):
        if processor.notes:
            print_on_main(world, f"\n{processor.notes}")
        cast(Any, model).unused = find_unused(model, processor.encoder().filler)
    processor.adopt_template(config.template)
    set_stop_tokens(model, processor)
    unpadded = avoids_padding(model, recipe, config, world.device)
    conversion = prepare_model(model, config, arithmetic, packed=unpadded)
    files = world.run_on_rank0(partial(check_save, stage.folder, model, processor))
    if conversion is not None:
        print_on_main(world, f"\n{conversion}")
    record = SourceRecord(
        stage.folder / "sources.json",
        world,
        compare=continues,
        allow_changed=stage.allow_changed_data,
    )
    throughput = Throughput(model, world, config.sequence_parallel)
    data = open_data(
        recipe,
        stage.name,
        stage.run_dir,
        processor,
        world,
        check=record.open,
        flops=throughput.flops,
        unpad=unpadded,
    )
    evaluation = None
    if recipe.eval_every:
        evaluation = LiveEvaluation(
            stage.subsets,
            processor,
            world,
            every=recipe.eval_every,
            lockstep=recipe.zero_stage == 3,
        )
    total_steps = data.total_steps(config)
    _print_tables(world, config, stage.name, model, data, total_steps)
    return _Opened(
        model=model,
        processor=processor,
        files=files,
        arithmetic=arithmetic,
        conversion=conversion,
        data=data,
        record=record,
        throughput=throughput,
        evaluation=evaluation,
        total_steps=total_steps,
        continues=continues,
        description=_describe_stage(recipe, stage.name, model, world),
    )


def _build_or_restore(stage: _Stage, opened: _Opened) -> StageLoop:
    recipe, config, world, name = stage.recipe, stage.config, stage.world, stage.name
    model, data = opened.model, opened.data
    preference = None
    if config.dpo is not None:
        preference = Preference(model, opened.processor, recipe, config, stage.folder, world)
    passes = build_passes(model, recipe, config, opened.arithmetic, world, preference)
    monitor = Fp8Monitor(
        model, opened.conversion, recipe.monitor, opened.arithmetic, world, recipe.zero_stage == 3
    )
    torch.manual_seed(recipe.seed + world.rank)  # dropout differs between ranks
    new = Progress(
        stage=name,
        step=0,
        world_size=world.size,
        zero_stage=recipe.zero_stage,
        precision=recipe.precision,
        bad_samples=0,
        sampler_state=SamplerState(),
    )
    entries = read_step_entries(stage.run_dir / METRICS, name, world) if opened.continues else []
    done = _restore(stage, opened, passes, new, entries)
    new, micro_batches = replace(new, gradient_sums=passes.sums.sums), passes.sums.micro_batches
    if micro_batches > 1:
        print_on_main(world, f"  {describe_sums(passes.sums.sums, micro_batches)}")
    measured = world.gather(list_measured(stage.run_dir / METRICS, name, done.step))[0]
    run_name, check = describe_recipe(recipe)["name"], stage.lock.check
    metrics = Metrics(stage.run_dir, recipe.tracking, run_name, enabled=world.is_main, check=check)
    sources = [
        {**asdict(share), "passes": share.passes, "tokens": tokens}
        for share, tokens in zip(data.shares, data.tokens, strict=True)
    ]
    start = {**opened.description, "sources": sources, "row": data.shown_row}
    metrics.write({"kind": "stage", "status": "start", **start})
    opened.record.log_changes(metrics, name, done.step)
    saver = _build_saver(stage, opened, passes)
    return StageLoop(
        step=TrainStep(
            name=name,
            total_steps=opened.total_steps,
            sampler=data.loader.sampler,
            passes=passes,
            log=StepLog(
                metrics=metrics,
                throughput=opened.throughput,
                bad_samples=BadSamples(
                    stage.run_dir, name, config, data.sources, done.bad_samples, stage.lock.check
                ),
                memory=PeakMemory(world.device),
                world_size=world.size,
                row_tokens=data.row_tokens,
            ),
            overlaps=steps_overlap(recipe, config, opened.arithmetic, world),
            monitor=monitor,
            finished=done.step,
            sampler_state=continue_sampler(
                data.loader.sampler, SamplerState(*done.sampler_state), stage.allow_changed_data
            ),
        ),
        data=data,
        saver=saver,
        progress=new,
        watchdog=Watchdog(
            detector=Detector(
                recipe.divergence,
                len(opened.processor.tokenizer),
                (entry for entry in entries if entry["step"] <= done.step),
            ),
            config=recipe.divergence,
            saver=saver,
            metrics=metrics,
            world=world,
        ),
        heartbeat=Heartbeat(
            stage.run_dir, name, done.step, world, recipe.collective_timeout_s, stage.lock.check
        ),
        evaluation=opened.evaluation,
        log_every_steps=recipe.log_every_steps,
        measured=measured,
        saved=done.step,
    )


def _build_saver(stage: _Stage, opened: _Opened, passes: Passes) -> CheckpointSaver:
    return CheckpointSaver(
        stage.checkpoints,
        passes.engine,
        stage.world,
        stage.recipe.save_total_limit,
        description=opened.files,
        background=stage.recipe.async_save,
        check=stage.lock.check,
    )


def _restore(
    stage: _Stage, opened: _Opened, passes: Passes, new: Progress, entries: Sequence[dict[str, Any]]
) -> Progress:
    """Load the checkpoint from which the stage continues; remove what it wrote after that.

    Returns the checkpoint's progress, or ``new`` if there is none.
    """
    world, checkpoint = stage.world, FoundCheckpoint()
    if opened.continues:
        vocab_size = len(opened.processor.tokenizer)
        checkpoint = choose_start(
            stage.checkpoints, stage.recipe.divergence, entries, vocab_size, world
        )
    done = new
    if checkpoint.path is not None:
        done = load_checkpoint(checkpoint.path, passes.engine, new, world)
        check_length(done.stage, opened.total_steps, done.step)
        print_on_main(world, f"stage {done.stage} continues from {checkpoint.path}")
        if (done.world_size, done.zero_stage) != (world.size, new.zero_stage):
            print_on_main(
                world,
                f"  its states, of {done.world_size} ranks at ZeRO stage {done.zero_stage}, are "
                f"repartitioned for {world.size} at stage {new.zero_stage}",
            )
        if done.zero_stage == new.zero_stage:
            passes.sums.adopt(done.gradient_sums)
        store_frozen_weights(passes.model)
        quantize_frozen_weights(passes.model, passes.stage.lora)

    def clean() -> None:
        stage.lock.check()
        for name in checkpoint.damaged:
            remove_folder(stage.checkpoints / name)
        reset_stage(stage.run_dir, stage.name, done.step, fresh=checkpoint.path is None)
        opened.record.write()

    world.run_on_rank0(clean)  # others wait: they may log a bad sample next
    return done


def _finish(stage: _Stage, opened: _Opened, loop: StageLoop) -> None:
    name, finished = stage.name, loop.step.finished
    check_weights(opened.model, loop.watchdog.detector, name, stage.world)
    loop.heartbeat.enter("saving the model", finished)
    target = stage.folder / "model"
    last = stage.checkpoints / f"step-{finished:08d}"
    trained = (opened.model, opened.processor, stage.recipe, name, finished)
    try:
        with SIGNALS.hold(f"when {target} is complete"):
            save_model(target, *trained, stage.world, stage.lock.check)
    except LockError:
        raise
    except Exception as error:
        raise OSError(
            f"stage {name} is trained, but its model is not saved: {error}\nNo step is lost: "
            f"{last} is complete. When the cause is fixed, this command writes the model without "
            f"further training: coat-vlm train {stage.run_dir / 'recipe.yaml'} --resume auto\nIf "
            f"the base model or the data are gone: coat-vlm export --model {last} --to FOLDER"
        ) from error
    wall = round(time.perf_counter() - stage.started, 2)
    loop.step.log.metrics.write(
        {"kind": "stage", "status": "end", **opened.description, "wall_s": wall}
    )


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


def _print_tables(
    world: World,
    stage: StageConfig,
    name: str,
    model: PreTrainedModel,
    data: StageData,
    total_steps: int,
) -> None:
    samples = total_steps * data.samples_per_step(stage)
    unit = "samples" if data.packing is None else f"sequences of {data.row_tokens:,} tokens"
    unit = unit if stage.dpo is None else "preference pairs"
    lines = [f"\nstage {name}: {total_steps} steps of {stage.batch_size} {unit}"]
    if data.packing is not None:
        lines.append(
            f"  packed: {data.packing.samples_per_row:.1f} samples and "
            f"{data.packing.images_per_row:.1f} images per sequence, {data.packing.fill:.1%} full"
        )
    if data.unpadded:
        lines.append(f"  micro-batches with over {MAX_PADDING:.0%} of padding are packed instead")
    if stage.sequence_parallel > 1:
        lines.append(f"  {stage.sequence_parallel} ranks share the tokens of each micro-batch")
    lines += [f"  WARNING {warning}" for warning in data.warnings]
    lines += [f"  {line}" for line in data.shown_row]
    lines.append(f"  {'module':<12}{'parameters':>14}  {'trains':<8}{'peak lr':<10}last lr")
    last = stage_lr_factor(stage, total_steps - 1, total_steps)
    for part, module in module_parameters(model).items():
        training = stage.module(part)
        peak = training.lr
        lr = "-" if peak is None else f"{peak:<10g}{peak * last:.3g}"
        trains = "yes" if training.train else "frozen"
        trains = "LoRA" if stage.lora is not None and part in stage.lora.modules else trains
        lines.append(f"  {part:<12}{count_parameters(module):>14,}  {trains:<8}{lr}")
    unused: tuple[str, ...] = getattr(model, "unused", ())
    if unused:
        lines.append(f"  not trained, because no output uses them: {', '.join(unused)}")
    if stage.lora is not None:
        lines.append(f"  {describe(model)}")
    width = max(20, *(len(share.name) + 2 for share in data.shares))
    measured = any(data.tokens)
    header = f"  {'source':<{width}}{'rows':>10}{'per epoch':>12}{'epochs':>10}"
    lines.append(header + (f"{'tokens':>10}{'of all':>9}" if measured else ""))
    means = [mean or 0.0 for mean in data.tokens]
    total = sum(mean * share.samples for share, mean in zip(data.shares, means, strict=True))
    for share, mean in zip(data.shares, means, strict=True):
        passes = samples / data.epoch_size * share.passes
        line = f"  {share.name:<{width}}{share.rows:>10,}{share.samples:>12,}{passes:>10.2f}"
        of_all = f"{mean * share.samples / max(1.0, total):.1%}"
        lines.append(line + (f"{mean:>10,.0f}{of_all:>9}" if measured else ""))
    print_on_main(world, "\n".join(lines))
