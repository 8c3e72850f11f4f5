"""``coat-vlm bench step``: the training step of a whole vision-language model.

Each implementation is built from the same random weights, compared with BF16, run for a few steps
of one batch size, and freed. Without an optimizer a step is the forward and backward pass in one
process. With an optimizer it is the training step of a recipe of the model
(:mod:`coat_bench.recipe`), on as many GPUs as there are processes. Every micro-batch of a step is
the same batch of random rows. It is on the GPU already for forward and backward passes alone; a
whole step copies it there, as training does.

The reference is this project's BF16 model with the same weights on the same samples. With random
weights every loss is near the logarithm of the vocabulary size, so a wrong scale shows in the norm
of all gradients instead, and an optimizer must lower the loss of its repeated batch.
"""

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from coat_bench.layer import use_attention
from coat_bench.memory import (
    count_gpu_bytes,
    free_memory,
    note_graphs,
    note_leftover_memory,
    note_used_memory,
)
from coat_bench.models import BASELINES, SIZES, apply_baseline, check_baselines
from coat_bench.profile import format_profile, profile_step
from coat_bench.recipe import (
    RecipeBench,
    StageCase,
    Step,
    build_stage_model,
    build_training_step,
    list_stage_cases,
    make_batch,
    plan_peak,
    reduce_time_and_peak,
    release_engine,
    take_steps,
)
from coat_bench.rows import (
    Measurement,
    format_error,
    format_number,
    format_rows_as_table,
    get_origin,
)
from coat_data.load.loader import LoadedBatch
from coat_data.mixture.sampler import SamplerState
from coat_vlm.config import MasterWeights, ModuleTraining, Precision, Recipe, StageConfig
from coat_vlm.config.stage import LoraTraining
from coat_vlm.distributed import World
from coat_vlm.fp8 import SpareMemory, arithmetic_of, graph_blocks, store_frozen_weights
from coat_vlm.model import CoatVlm
from coat_vlm.plan.zero import ZeroStage
from coat_vlm.train.model_setup import set_train_mode
from coat_vlm.train.step import TrainStep, copy_batch_to_device
from coat_vlm.train.throughput import PeakMemory

LR = 2e-5
"""Learning rate, high enough to lower the loss of a repeated batch within a few steps."""

LOSS_TOLERANCE = 0.01
"""Largest relative difference to BF16's loss at the same weights."""

NORM_FACTOR = 1.5
"""Largest ratio of the gradient norms to BF16's, or of its inverse. Rounding to FP8
increases the norm in every block; a wrong scale changes it by a factor of two at least."""

STEP_TOLERANCE = 0.05
"""Largest relative difference to the losses of the BF16 run in the same steps."""

NAMES: dict[Precision, str] = {
    "bf16": "bf16",
    "fp8_linear": "coat_fp8_linear",
    "coat": "coat_paper",
    "coat_lean": "coat_lean",
}
"""Precision -> implementation in the rows, with the names of the layer benchmark."""


@dataclass(slots=True)
class StepRow(Measurement):
    """One measurement; the columns of ``step.csv``."""

    gpus: int
    zero: int
    """ZeRO stage; 0 also without an optimizer."""
    model: str
    implementation: str
    """Our FP8 ones begin with ``coat_``; ``bf16`` is our BF16, ``hf_eager`` transformers'."""
    checkpointing: bool
    optimizer: str
    """``none`` for forward and backward passes alone."""
    batch: int
    """Samples of a micro-batch on one GPU."""
    tokens: int
    """Tokens of a step over all micro-batches and GPUs, including image tokens."""
    ms: float | None = None
    """Median time of a step on the slowest GPU."""
    tok_s: float | None = None
    """Tokens per second of all GPUs together."""
    peak_gb: float | None = None
    """Most memory allocated on one GPU, in 10^9 bytes; None on a CPU."""
    note: str = ""
    problem: str = ""
    """Why there is no speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """Settings of the benchmark."""

    size: str
    """A key of :data:`coat_bench.models.SIZES`."""
    precisions: Sequence[Precision]
    baselines: Sequence[str] = ()
    """Keys of :data:`coat_bench.models.BASELINES`."""
    optimizers: Sequence[str] = ("none",)
    """``none`` for forward and backward passes alone, ``own`` for the precision's optimizer."""
    zero_stages: Sequence[ZeroStage] = (0,)
    batches: Sequence[int] = (1,)
    """Samples of a micro-batch, ascending; no batch is tried after one that does not fit."""
    accumulation: int = 1
    """Micro-batches of a step."""
    master_weights: MasterWeights = "auto"
    """The recipe key, for steps with an optimizer."""
    lora: int | None = None
    """Rank of LoRA adapters on the language model; None to train all weights."""
    steps: int = 5
    """Measured steps."""
    warmup: int = 3
    """Steps before the measured ones."""
    on_profile: Callable[[StepRow, str], None] | None = None
    """Called on the main process with a measured row and the profile tables of one more step."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """One model with or without its optimizer at one ZeRO stage."""

    precision: Precision | None
    """None for a baseline."""
    baseline: str | None
    """A key of :data:`coat_bench.models.BASELINES`, or None."""
    trains: bool
    """Whether there is an optimizer."""
    zero_stage: ZeroStage
    master_weights: MasterWeights = "auto"
    lora: int | None = None
    """Rank of LoRA adapters; None to train all weights."""

    @property
    def implementation(self) -> str:
        """Name in the rows."""
        if self.precision is not None:
            return NAMES[self.precision]
        assert self.baseline is not None
        return BASELINES[self.baseline].implementation

    def recipe(self, size: str, batch: int) -> Recipe:
        """Build a recipe that trains a model in the case's precision.

        Args:
            size: a key of :data:`coat_bench.models.SIZES`.
            batch: samples of a micro-batch.
        """
        model = SIZES[size].model
        train = ModuleTraining(train=True, lr=LR)
        frozen, lora = ModuleTraining(train=False), self.lora
        stage = StageConfig(
            data=[],
            vision=frozen if model.vision is None or lora is not None else train,
            projector=frozen if model.vision is None else train,
            language=train,
            lora=None if lora is None else LoraTraining(rank=lora, alpha=2 * lora, dropout=0.0),
            batch_size=batch,
            micro_batch_size=batch,
            max_steps=1,
            lr_scheduler_type="constant",
            warmup_ratio=0.0,
            weight_decay=0.1,
        )
        return Recipe(
            name="bench",
            output_dir="unused",
            model=model,
            stages={"sft": stage},
            precision=self.precision or "bf16",
            zero_stage=self.zero_stage,
            master_weights=self.master_weights,
        )


def list_step_cases(bench: StepBench, ranks: int) -> list[StepCase]:
    """List the measured cases by ZeRO stage, then optimizer, then model.

    Args:
        bench: the settings.
        ranks: number of processes.

    Raises:
        ValueError: the settings do not fit each other or this machine.
    """
    check_baselines(bench.baselines)
    if "none" in bench.optimizers and ranks > 1:
        raise ValueError(
            f"--optimizer none is a step of one process without communication, and there are "
            f"{ranks} processes; start one, or name an optimizer"
        )
    if min(bench.accumulation, bench.steps, bench.warmup) < 1:
        raise ValueError("--accumulation, --steps and --warmup are 1 or more")
    if list(bench.batches) != sorted(set(bench.batches)) or min(bench.batches) < 1:
        raise ValueError(f"--batch {bench.batches}: give ascending numbers, 1 or more")
    if bench.lora is not None and bench.baselines:
        raise ValueError("--lora is for --precisions, without --baselines; leave one of them out")
    low_bits_fit = (
        "own" in bench.optimizers
        and set(bench.zero_stages) == {0}
        and set(bench.precisions) <= {"coat", "coat_lean"}
        and not bench.baselines
    )
    if bench.master_weights == "low_bits" and not low_bits_fit:
        raise ValueError(
            "--master-weights low_bits is for --optimizer own, --zero 0 and --precisions coat "
            "coat_lean, without --baselines; change these options, or leave it out"
        )
    models: list[tuple[Precision | None, str | None]] = [(name, None) for name in bench.precisions]
    models += [(None, name) for name in bench.baselines]
    found: list[StepCase] = []
    for zero_stage, optimizer, (precision, baseline) in product(
        bench.zero_stages, bench.optimizers, models
    ):
        trains = optimizer != "none"
        master_weights = bench.master_weights if trains else "auto"
        stage = zero_stage if trains else 0
        found.append(StepCase(precision, baseline, trains, stage, master_weights, bench.lora))
    if not found:
        raise ValueError("nothing to measure; name --precisions or --baselines")
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Reference:
    """Results of BF16 with the initial weights."""

    grad_norm: float
    """Norm of all gradients on the first sample."""
    losses: dict[int, float]
    """Batch size -> loss; always contains the first sample alone (batch size 1)."""


def measure_reference(model: PreTrainedModel, batches: Sequence[LoadedBatch]) -> Reference:
    """Run BF16 on samples of this rank.

    Args:
        model: BF16, in training mode.
        batches: the first sample alone, then the measured batches.
    """
    loss, norm = _run_pass(model, batches[0])
    losses = {1: loss}
    device = next(model.parameters()).device
    with torch.no_grad():
        for loaded in batches[1:]:
            losses[loaded.num_samples] = model(
                **copy_batch_to_device(loaded.batch, device), skip_logits=True
            ).loss.item()
    return Reference(norm, losses)


def _run_pass(model: PreTrainedModel, loaded: LoadedBatch) -> tuple[float, float]:
    """Return the loss and the norm of all gradients; clears the gradients."""
    device = next(model.parameters()).device
    loss = model(**copy_batch_to_device(loaded.batch, device), skip_logits=True).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms)).item()
    model.zero_grad(set_to_none=True)
    return loss.item(), norm


def find_disagreement(model: PreTrainedModel, sample: LoadedBatch, reference: Reference) -> str:
    """Compare a pass over the first sample with BF16; returns the problem, empty if there is none.

    Args:
        model: the converted model with its initial weights.
        sample: the first sample.
        reference: the results of BF16.
    """
    loss, norm = _run_pass(model, sample)
    problem = check_losses([loss], reference.losses[1])
    factor = norm / reference.grad_norm
    if not problem and not 1 / NORM_FACTOR <= factor <= NORM_FACTOR:  # also NaN
        return (
            f"not correct: the gradients' norm is {norm:.4g}, BF16's {reference.grad_norm:.4g}; "
            f"a factor of {NORM_FACTOR} is allowed"
        )
    return problem


def check_losses(losses: Sequence[float], exact: float) -> str:
    """Compare losses with BF16's; returns the problem, empty if there is none."""
    for loss in losses:
        if not abs(loss - exact) <= LOSS_TOLERANCE * abs(exact):  # also NaN
            return (
                f"not correct: the loss is {loss:.4f}, BF16's {exact:.4f}; "
                f"{LOSS_TOLERANCE:.0%} is allowed"
            )
    return ""


def check_training(losses: Sequence[float], exact: Sequence[float] | None) -> str:
    """Check the losses of steps on one repeated batch; returns the problem, empty if there is none.

    Args:
        losses: one loss per step.
        exact: the losses of the BF16 run, if there was one.
    """
    listed = ", ".join(f"{loss:.4f}" for loss in losses)
    if not all(math.isfinite(loss) for loss in losses):
        return f"not correct: losses {listed}"
    if losses[-1] >= losses[0]:
        return f"not correct: training does not lower the loss of its batch: {listed}"
    for place, (loss, other) in enumerate(zip(losses, exact or (), strict=False), start=1):
        if abs(loss - other) > STEP_TOLERANCE * abs(other):
            return (
                f"not correct: the loss of step {place} is {loss:.4f}, BF16's {other:.4f}; "
                f"{STEP_TOLERANCE:.0%} is allowed"
            )
    return ""


@dataclass(slots=True)
class Passes:
    """Forward and backward pass of every micro-batch, with the interface of a training step."""

    model: PreTrainedModel
    spare_memory: SpareMemory
    device: torch.device
    memory: PeakMemory
    on_row: Callable[[dict[str, Any], SamplerState], None] = lambda *_: None
    """Called with the last loss, the seconds and the memory of a step."""

    def __call__(
        self, micro_batches: list[LoadedBatch], started: float, *, wait: bool = True
    ) -> bool:
        """Run the passes and free the gradients."""
        del wait  # without an optimizer step each step waits for its loss, as a baseline's does
        loss = torch.zeros(())
        with self.spare_memory.share_weights(len(micro_batches)):
            for loaded in micro_batches:
                inputs = copy_batch_to_device(loaded.batch, self.device)
                loss = self.model(**inputs, skip_logits=True).loss
                (loss / len(micro_batches)).backward()
        self.model.zero_grad(set_to_none=True)
        self.spare_memory.after_step()
        row = {"loss": loss.item(), "step_s": time.perf_counter() - started}  # waits for the GPU
        self.on_row(row | {"peak_memory_mb": self.memory.read()}, SamplerState())
        return False


def bench_step(bench: StepBench, world: World, on_row: Callable[[StepRow], None]) -> list[StepRow]:
    """Measure all cases, one after the other.

    Args:
        bench: what to measure.
        world: the processes of the run; all must call this.
        on_row: called on the main process with each row.

    Returns:
        All rows, the same on every process.

    Raises:
        ValueError: the settings do not fit each other or this machine.
    """
    run = _Run(bench, world)
    rows = []
    for case in list_step_cases(bench, world.size):
        with use_attention("default"):  # restores what the engine sets
            for batch in bench.batches:
                rows.append(run.measure(case, batch))
                if world.is_main:
                    on_row(rows[-1])
                if rows[-1].problem:
                    break
    return rows


@dataclass(slots=True)
class _Run:
    """State that the cases of a run share."""

    bench: StepBench
    world: World
    reference: Reference | None = None
    trained: dict[int, list[float]] = field(default_factory=dict)
    """Batch size -> BF16's losses in its first steps through DeepSpeed."""

    def measure(self, case: StepCase, batch: int) -> StepRow:
        """Measure one batch size of a case, and free its memory."""
        bench, world = self.bench, self.world
        recipe, size = case.recipe(bench.size, batch), SIZES[bench.size]
        samples = batch * bench.accumulation * world.size
        row = StepRow(
            *get_origin()[:3],
            gpus=world.size,
            zero=case.zero_stage,
            model=size.name,
            implementation=case.implementation,
            checkpointing=False,
            optimizer=_name_optimizer(recipe, world.device) if case.trains else "none",
            batch=batch,
            tokens=size.model.max_length * samples,
            note=f"attention {recipe.cudnn_attention if case.trains else 'default'}, "
            f"accumulation {bench.accumulation}"
            + ("" if bench.lora is None else f"; LoRA rank {bench.lora}"),
        )
        try:
            if self.reference is None:
                self.reference = self._measure_reference()
            self._measure(row, case, self.reference)
        except Exception as error:  # the row reports the error, and the next case runs
            if world.size > 1:  # the other ranks wait for this one, so all must end
                error.add_note(
                    f"in {case.implementation} with optimizer {row.optimizer}, ZeRO-"
                    f"{case.zero_stage}: leave it or its largest --batch out; only a single "
                    "process continues after a failure"
                )
                raise
            row.problem = format_error(error)
            traceback.clear_frames(error.__traceback__)  # frees the model
        free_memory(world.device)
        return row

    def _build_stage(self, case: StepCase, batch: int) -> tuple[RecipeBench, StageCase]:
        """Build the recipe benchmark of a case, and its only stage."""
        bench = RecipeBench(
            recipe=case.recipe(self.bench.size, batch),
            images=SIZES[self.bench.size].images,
            steps=self.bench.steps,
            warmup=self.bench.warmup,
            accumulation=self.bench.accumulation,
        )
        (stage,) = list_stage_cases(bench, self.world)
        return bench, stage

    def _measure_reference(self) -> Reference:
        _, stage = self._build_stage(StepCase("bf16", None, False, 0, lora=self.bench.lora), 1)
        model = build_stage_model(stage, self.world.device)
        set_train_mode(model, stage.stage)
        sizes = dict.fromkeys((1, *self.bench.batches))
        batches = [make_batch(model, [stage.row] * size, None, self.world.rank) for size in sizes]
        found = measure_reference(model, batches)
        del model
        free_memory(self.world.device)
        return found

    def _measure(self, row: StepRow, case: StepCase, reference: Reference) -> None:
        """Write the measurements, or the problem, into a row."""
        world = self.world
        row.note += note_leftover_memory(world.device)
        bench, stage = self._build_stage(case, row.batch)
        model = build_stage_model(stage, world.device)
        set_train_mode(model, stage.stage)
        sample, loaded = (
            make_batch(model, [stage.row] * batch, None, seed=world.rank)
            for batch in (1, row.batch)
        )
        with contextlib.ExitStack() as stack:
            if case.baseline is not None:
                stack.enter_context(apply_baseline(case.baseline, model))
            problem = find_disagreement(model, sample, reference)
            if world.any(bool(problem)):
                row.problem = problem or "not correct on another rank"
                return
            step: Step
            if case.trains:
                step = build_training_step(model, stage, world, bench.warmup + bench.steps)
                stack.callback(release_engine, step.engine, model)
            else:
                arithmetic = arithmetic_of(bench.recipe.precision, None, world.device)
                store_frozen_weights(model)
                if case.baseline is None and arithmetic.fp8 is not None:
                    graph_blocks(model, arithmetic.fp8.cuda_graphs)
                    stack.callback(graph_blocks, model, enabled=False)
                spare = SpareMemory.of(model, arithmetic, world.device)
                step = Passes(model, spare, world.device, PeakMemory(world.device))
                # A failed pass leaves gradients.
                stack.callback(model.zero_grad, set_to_none=True)
                inputs: Any = copy_batch_to_device(loaded.batch, world.device)
                loaded = replace(loaded, batch=inputs)
            batches = [loaded] * bench.accumulation
            title = f"{row.implementation}, {row.optimizer}, batch {row.batch}"
            steps = take_steps(step, batches, title, bench, world)
            losses = [math.nan if taken["loss"] is None else taken["loss"] for taken in steps]
            if case.trains:
                problem = check_training(losses, self.trained.get(row.batch))
            else:
                problem = check_losses(losses, reference.losses[row.batch])
            if world.any(bool(problem)):
                row.problem = problem or "not correct on another rank"
                return
            if case.trains and case.precision == "bf16":
                self.trained.setdefault(row.batch, losses)
            row.ms, row.peak_gb = reduce_time_and_peak(steps[bench.warmup :], world)
            row.tok_s = row.tokens / (row.ms / 1e3)
            row.note += f"; loss {losses[0]:.4f} -> {losses[-1]:.4f}"
            row.note += note_graphs() + note_used_memory(world.device)
            planned = isinstance(model, CoatVlm) and case.precision is not None
            if isinstance(step, TrainStep) and planned:
                reuse = step.spare_memory.shares_weights
                left = count_gpu_bytes(world.device)
                planned = plan_peak(stage, bench, reuse=reuse, ranks=world.size, gpu_bytes=left)
                row.note += f"; plan {planned:.4g} GB"
            if self.bench.on_profile is not None:
                self._profile(row, step, batches)

    def _profile(self, row: StepRow, step: Step, batches: list[LoadedBatch]) -> None:
        world, show = self.world, self.bench.on_profile
        assert show is not None
        try:
            found = profile_step(lambda: step(batches, time.perf_counter()), world.device)
        except (RuntimeError, OSError) as error:
            if world.size > 1 and isinstance(error, RuntimeError):
                raise  # the other ranks wait in the step
            row.note += f"; no profile: {format_error(error)}"
            return
        if world.is_main:
            show(row, format_profile(found, row.ms))


def _name_optimizer(recipe: Recipe, device: torch.device) -> str:
    """Return the optimizer of a recipe in the rows; ``coat_low_bits`` with low bits."""
    low_bits = recipe.has_low_bits(gpu=device.type == "cuda")
    return f"{recipe.optimizer}{'_low_bits' if low_bits else ''}"


def format_rows(rows: Sequence[StepRow]) -> str:
    """Format rows as a Markdown table, one line per implementation, optimizer, stage, batch."""
    return format_rows_as_table(
        rows,
        {
            "implementation": lambda row: row.implementation,
            "optimizer": lambda row: row.optimizer,
            "ZeRO": lambda row: "-" if row.optimizer == "none" else str(row.zero),
            "batch": lambda row: str(row.batch),
            "tokens": lambda row: f"{row.tokens:,}",
            "ms": lambda row: format_number(row.ms, 1),
            "tokens/s": lambda row: "-" if row.tok_s is None else f"{row.tok_s:,.0f}",
            "peak GB": lambda row: format_number(row.peak_gb, 2),
            "note": lambda row: row.problem or row.note,
        },
    )
