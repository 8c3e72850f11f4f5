"""``coat-vlm bench step``: the training step of a whole vision-language model.

Every contender is built anew from the same random weights, checked against BF16
(:mod:`coat_vlm.bench.step_check`), run for a few steps per batch size, and freed. Without an
optimizer a step is both passes of one process; with one it goes through DeepSpeed's engine as in
training (:mod:`coat_vlm.bench.step_loop`), on as many GPUs as there are processes.
"""

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Literal, get_args

import torch
from tqdm import tqdm

from coat_vlm.bench.layer import Attention, attention_backend
from coat_vlm.bench.peers import PEERS, check_peers, peer
from coat_vlm.bench.rows import Measurement, whereabouts
from coat_vlm.bench.step_check import (
    Reference,
    disagreement,
    loss_problem,
    measure_reference,
    training_problem,
    values,
)
from coat_vlm.bench.step_loop import (
    EngineLoop,
    Loop,
    OptimizerName,
    PlainLoop,
    engine_loop,
    fp8_config,
    stage_config,
)
from coat_vlm.bench.step_plan import StepPlan
from coat_vlm.bench.vlm_shapes import SIZES, Inputs
from coat_vlm.config import Precision
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model import CoatVlm
from coat_vlm.plan.zero import ZeroStage
from coat_vlm.train.engine import set_train_mode, set_trainable
from coat_vlm.train.world import World

OWN = "own"
"""Stands for the optimizer that a recipe of the precision gets."""

OPTIMIZERS: tuple[OptimizerName | Literal["own"], ...] = (*get_args(OptimizerName), OWN)

NAMES: dict[Precision, str] = {
    "bf16": "bf16",
    "fp8_linear": "coat_fp8_linear",
    "coat": "coat_paper",
    "coat_lean": "coat_lean",
}
"""Precision -> implementation in the rows, as those of the layer benchmark."""

LEFT_BYTES = 64 * 2**20
"""More than this left on the GPU by an earlier contender is told beside a peak that holds it."""


@dataclass(slots=True)
class StepRow(Measurement):
    """One measurement; the columns of ``step.csv``."""

    gpus: int
    zero: int
    """ZeRO stage; 0 also without an optimizer."""
    model: str
    implementation: str
    """Ours begin with ``coat_``; ``bf16`` is our own BF16, ``hf_eager`` transformers'."""
    checkpointing: bool
    optimizer: str
    """``none`` for both passes alone."""
    batch: int
    """Samples of a micro-batch on one GPU."""
    tokens: int
    """Of a step: all micro-batches and GPUs, those of images included."""
    ms: float | None = None
    """A step, median; of the slowest GPU."""
    tok_s: float | None = None
    """Of all GPUs together."""
    peak_gb: float | None = None
    """Most that was allocated on one GPU, in 10^9 bytes; absent on a CPU."""
    note: str = ""
    problem: str = ""
    """Why there is no speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """What is measured, and how."""

    size: str
    """A key of :data:`coat_vlm.bench.vlm_shapes.SIZES`."""
    precisions: Sequence[Precision]
    peers: Sequence[str] = ()
    """Keys of :data:`coat_vlm.bench.peers.PEERS`."""
    optimizers: Sequence[str] = ("none",)
    """Of :data:`OPTIMIZERS`."""
    zero_stages: Sequence[ZeroStage] = (1,)
    batches: Sequence[int] = (1,)
    """Samples of a micro-batch, ascending: after one that does not fit, no larger one is tried."""
    checkpointing: bool = False
    accumulation: int = 1
    """Micro-batches of a step."""
    steps: int = 5
    """Measured ones."""
    warmup: int = 3
    """Steps before them."""
    attention: Attention = "default"
    """SDPA's backend for all; training sets its own, the flash kernel."""
    check_plan: bool = False
    """Also say what ``coat-vlm plan`` would have expected."""


@dataclass(frozen=True, slots=True)
class _Contender:
    precision: Precision | None
    """None for a peer."""
    peer: str | None
    optimizer: OptimizerName
    zero_stage: ZeroStage

    @property
    def implementation(self) -> str:
        if self.precision is not None:
            return NAMES[self.precision]
        assert self.peer is not None
        return PEERS[self.peer][0]


def bench_step(
    bench: StepBench, world: World, on_rows: Callable[[list[StepRow]], None]
) -> list[StepRow]:
    """Measure all contenders, one after the other.

    Args:
        bench: what to measure.
        world: the processes of the run; all call this.
        on_rows: called on the main process with the rows of each contender, as it ends.

    Returns:
        All rows, the same on every process.

    Raises:
        ValueError: the settings do not fit each other or this machine.
    """
    contenders = _contenders(bench, world)
    run = _Run(bench, world)
    rows = []
    bar = tqdm(contenders, desc="step", unit="contender", disable=not world.is_main)
    for contender in bar:
        bar.set_postfix_str(f"{contender.implementation}, {contender.optimizer}")
        with attention_backend(run.attention(contender)):
            found = run.rows(contender)
        rows += found
        if world.is_main:
            on_rows(found)
    return rows


def _contenders(bench: StepBench, world: World) -> list[_Contender]:
    check_peers(list(bench.peers))
    if "none" in bench.optimizers and world.size > 1:
        raise ValueError(
            f"--optimizer none is a step of one process without communication, and there are "
            f"{world.size}; start one, or name an optimizer"
        )
    if bench.attention == "cudnn" and set(bench.optimizers) != {"none"}:
        raise ValueError(
            "--attention cudnn: training does without that kernel; leave --attention out with an "
            "optimizer"
        )
    if bench.accumulation < 1 or bench.steps < 1 or bench.warmup < 1:
        raise ValueError("--accumulation, --steps and --warmup are 1 or more")
    if list(bench.batches) != sorted(set(bench.batches)) or min(bench.batches) < 1:
        raise ValueError(f"--batch {bench.batches}: give ascending numbers, 1 or more")
    models: list[tuple[Precision | None, str | None]] = [(name, None) for name in bench.precisions]
    models += [(None, name) for name in bench.peers]
    found: list[_Contender] = []
    for zero_stage, named, (precision, other) in product(
        bench.zero_stages, bench.optimizers, models
    ):
        optimizer: OptimizerName = named  # pyright: ignore[reportAssignmentType]
        if named == OWN:
            optimizer = "coat" if precision in ("coat", "coat_lean") else "adamw"
        stage: ZeroStage = 0 if optimizer == "none" else zero_stage
        contender = _Contender(precision, other, optimizer, stage)
        if contender not in found:
            found.append(contender)
    if not found:
        raise ValueError("nothing to measure; name --precisions or --peers")
    return found


@dataclass(slots=True)
class _Run:
    """What the contenders of a run have in common."""

    bench: StepBench
    world: World
    reference: Reference | None = None
    trained: dict[int, list[float]] = field(default_factory=dict)
    """Batch -> BF16's losses in its first steps through DeepSpeed."""
    plans: dict[tuple[Precision, bool], StepPlan] = field(default_factory=dict)
    """By precision, and whether FP8 weights are kept."""

    def attention(self, contender: _Contender) -> Attention:
        """SDPA's backend: training through the engine has the flash kernel."""
        return self.bench.attention if contender.optimizer == "none" else "flash"

    def rows(self, contender: _Contender) -> list[StepRow]:
        """Measure one contender at every batch size, and free it."""
        rows: list[StepRow] = []
        problem = ""
        try:
            if self.reference is None:
                self.reference = self._measured_reference()
            self._measure(contender, self.reference, rows)
        except Exception as error:  # one that fails is told in its row; the others go on
            problem = _told(error)
            traceback.clear_frames(error.__traceback__)  # they hold the model
        self._free()
        if problem:
            if not rows or rows[-1].ms is not None or rows[-1].problem:
                tried = {row.batch for row in rows}
                batch = next((b for b in self.bench.batches if b not in tried), 0)
                rows.append(self._row(contender, batch))
            rows[-1].problem = problem
        return rows

    def _measured_reference(self) -> Reference:
        contender = _Contender("bf16", None, "none", 0)
        with self._model(contender) as model:
            count = max(self.bench.batches)
            found = measure_reference(model, SIZES[self.bench.size], self._first, count)
        del model
        self._free()
        return found

    @property
    def _first(self) -> int:
        """Number of this rank's first sample."""
        return self.world.rank * max(self.bench.batches)

    @contextlib.contextmanager
    def _model(self, contender: _Contender) -> Iterator[CoatVlm]:
        """The contender's model, in training mode."""
        precision = contender.precision or "bf16"
        device = self.world.device
        arithmetic = arithmetic_of(precision, fp8_config(precision, "coat"), device)
        model = SIZES[self.bench.size].build(device, arithmetic.dtype)
        stage = stage_config(1, 1, 1, self.bench.checkpointing)
        set_trainable(model, stage)
        arithmetic.apply(model)
        set_train_mode(model, stage)
        with contextlib.ExitStack() as stack:
            if contender.peer is not None:
                stack.enter_context(peer(contender.peer, model))
            yield model

    def _measure(self, contender: _Contender, reference: Reference, rows: list[StepRow]) -> None:
        left = _allocated(self.world.device)
        with self._model(contender) as model:
            sample = SIZES[self.bench.size].sample(self._first, self.world.device)
            problem = disagreement(model, sample, reference)
            if self.world.any(bool(problem)):
                rows.append(self._row(contender, self.bench.batches[0]))
                rows[-1].problem = problem or "not correct on another rank"
                return
            loop = self._loop(contender, model)
            try:
                for batch in self.bench.batches:
                    row = self._row(contender, batch)
                    rows.append(row)
                    if left > LEFT_BYTES:
                        row.note += f"; {left / 1e9:.2f} GB of the peak are an earlier contender's"
                    self._measure_batch(row, contender, loop, reference)
                    if row.problem:
                        return
            finally:
                loop.close()

    def _loop(self, contender: _Contender, model: CoatVlm) -> PlainLoop | EngineLoop:
        bench, world = self.bench, self.world
        precision = contender.precision or "bf16"
        fp8 = fp8_config(precision, contender.optimizer)
        arithmetic = arithmetic_of(precision, fp8, world.device)
        if contender.optimizer == "none":
            reuse = arithmetic.weight_reuse(model, world.device)
            return PlainLoop(model, reuse, bench.accumulation)
        stage = stage_config(bench.batches[0], bench.accumulation, world.size, bench.checkpointing)
        return engine_loop(
            model,
            stage,
            arithmetic,
            world,
            precision=precision,
            optimizer=contender.optimizer,
            zero_stage=contender.zero_stage,
            accumulation=bench.accumulation,
        )

    def _measure_batch(
        self,
        row: StepRow,
        contender: _Contender,
        loop: PlainLoop | EngineLoop,
        reference: Reference,
    ) -> None:
        """Run a batch size; fill its row with numbers, or with what is wrong."""
        world = self.world
        inputs = SIZES[self.bench.size].batch(self._first, row.batch, world.device)
        times, losses, peak = _timed(loop, inputs, self.bench, world)
        if contender.optimizer == "none":
            problem = loss_problem(losses, reference.batch_loss(row.batch))
        else:
            problem = training_problem(losses, self.trained.get(row.batch))
        if world.any(bool(problem)):
            row.problem = problem or "not correct on another rank"
            return
        if contender.precision == "bf16" and contender.optimizer != "none":
            self.trained.setdefault(row.batch, losses)
        row.ms = median(max(ranks) for ranks in zip(*world.gather(times), strict=True))
        row.tok_s = row.tokens / (row.ms / 1e3)
        row.peak_gb = max(world.gather(peak)) / 1e9 if peak else None
        row.note += f"; loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        if self.bench.check_plan and contender.precision is not None and world.is_main:
            try:
                self._note_plan(row, contender, loop)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                row.note += f"; no plan: {_told(error)}"  # what was measured stays

    def _note_plan(self, row: StepRow, contender: _Contender, loop: PlainLoop | EngineLoop) -> None:
        bench, precision = self.bench, contender.precision
        assert precision is not None
        kept = bench.accumulation > 1 and bool(loop.reuse.fits)
        if (precision, kept) not in self.plans:
            stage = stage_config(1, 1, 1, bench.checkpointing)
            shape = SIZES[bench.size]
            self.plans[precision, kept] = StepPlan(shape, precision, stage, reuse_weights=kept)
        planned = self.plans[precision, kept].peak_gb(
            row.batch,
            accumulation=bench.accumulation,
            optimizer=contender.optimizer,
            zero_stage=contender.zero_stage,
            ranks=self.world.size,
        )
        if planned is None:
            return
        off = "" if row.peak_gb is None else f" ({planned / row.peak_gb - 1:+.1%})"
        row.note += f"; plan {planned:.2f} GB{off}"

    def _row(self, contender: _Contender, batch: int) -> StepRow:
        bench, world = self.bench, self.world
        shape = SIZES[bench.size]
        return StepRow(
            *whereabouts(),
            gpus=world.size,
            zero=contender.zero_stage,
            model=shape.name,
            implementation=contender.implementation,
            checkpointing=bench.checkpointing,
            optimizer=contender.optimizer,
            batch=batch,
            tokens=shape.tokens * batch * bench.accumulation * world.size,
            note=f"attention {self.attention(contender)}, accumulation {bench.accumulation}",
        )

    def _free(self) -> None:
        torch.compiler.reset()
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
            torch.cuda.empty_cache()


def _timed(
    loop: Loop, inputs: Inputs, bench: StepBench, world: World
) -> tuple[list[float], list[float], int]:
    """Milliseconds of the measured steps, losses of all, highest memory in the measured ones."""
    on_gpu = world.device.type == "cuda"
    losses = [loop.step(inputs) for _ in range(bench.warmup)]
    world.barrier()
    if on_gpu:
        torch.cuda.synchronize(world.device)
        torch.cuda.reset_peak_memory_stats(world.device)
    times = []
    for _ in range(bench.steps):
        started = time.perf_counter()
        losses.append(loop.step(inputs))
        if on_gpu:
            torch.cuda.synchronize(world.device)
        times.append(1e3 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated(world.device) if on_gpu else 0
    return times, values(losses), peak


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _told(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "OOM"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
