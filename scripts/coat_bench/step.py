"""``coat-vlm bench step``: the training step of a whole vision-language model.

Every implementation is built anew from the same random weights, checked against BF16, run for a few
steps per batch size, and freed. Without an optimizer a step is both passes of one process; with one
it goes through DeepSpeed's engine as in training (:mod:`coat_bench.step_loop`), on as many GPUs as
there are processes.

The reference of the checks is this project's BF16 model at the same weights on the same samples. At
random weights every loss is near the logarithm of the vocabulary, so a loss alone says little; the
norm of all gradients tells a lost scale, and an optimizer must lower the loss of the batch it
repeats.
"""

import contextlib
import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm

from coat_bench.layer import Attention, attention_backend
from coat_bench.models import BASELINES, SIZES, Inputs, VlmShape, baseline, check_baselines
from coat_bench.profile import format_profile, profiled
from coat_bench.rows import Measurement, failure, number, origin, table_of
from coat_bench.step_loop import (
    Loop,
    OptimizerName,
    PlainLoop,
    engine_loop,
    fp8_config,
    planned_gb,
    stage_config,
    traced,
)
from coat_vlm.config import Precision
from coat_vlm.distributed import World
from coat_vlm.fp8 import arithmetic_of, captured_bytes, graph_blocks, live_graphs
from coat_vlm.fp8.graphs import EAGER_PASSES
from coat_vlm.model import CoatVlm
from coat_vlm.plan.activations import Activations
from coat_vlm.plan.zero import ZeroStage
from coat_vlm.train.engine import set_train_mode, set_trainable

LOSS_TOLERANCE = 0.01
"""Largest difference to BF16's loss at the same weights, as a share of it."""

NORM_FACTOR = 1.5
"""The gradients' norm may be so many times BF16's, or its inverse. FP8's rounding adds to it in
every block; a scale that is lost once is a factor of two at least."""

STEP_TOLERANCE = 0.05
"""Largest difference to the losses of BF16's run in the same steps, as a share of them."""

LEFT_BYTES = 64 * 2**20
"""More than this left on the GPU by an earlier measurement is noted beside its peak."""

OWN = "own"
"""Stands for the optimizer that a recipe of the precision gets."""

NAMES: dict[Precision, str] = {
    "bf16": "bf16",
    "fp8_linear": "coat_fp8_linear",
    "coat": "coat_paper",
    "coat_lean": "coat_lean",
}
"""Precision -> implementation in the rows, as those of the layer benchmark."""


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
    """A key of :data:`coat_bench.models.SIZES`."""
    precisions: Sequence[Precision]
    peers: Sequence[str] = ()
    """Keys of :data:`coat_bench.models.BASELINES`."""
    optimizers: Sequence[str] = ("none",)
    """Of :data:`coat_bench.step_loop.OptimizerName`, or :data:`OWN`."""
    zero_stages: Sequence[ZeroStage] = (1,)
    batches: Sequence[int] = (1,)
    """Samples of a micro-batch, ascending: after one that does not fit, no larger one is tried."""
    graphs: bool = False
    """Also measure the precisions with FP8 blocks as CUDA graphs."""
    bf16_forward_first: int | None = None
    """That key of ``fp8`` in a recipe, for coat and coat_lean."""
    accumulation: int = 1
    """Micro-batches of a step."""
    steps: int = 5
    """Measured ones."""
    warmup: int = 3
    """Steps before them."""
    attention: Attention = "default"
    """SDPA's backend for all; training has the flash kernel by default."""
    check_plan: bool = False
    """Also say what ``coat-vlm plan`` would have expected."""
    on_profile: Callable[[StepRow, str], None] | None = None
    """Called on the main process with a measured row and the tables of one more step, which torch's
    profiler watched."""
    trace: Path | None = None
    """Where to write what the profiler saw of that step."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """One model with one optimizer at one ZeRO stage."""

    precision: Precision | None
    """None for a baseline."""
    peer: str | None
    """A key of :data:`coat_bench.models.BASELINES`, or None."""
    optimizer: OptimizerName
    zero_stage: ZeroStage
    graphs: bool = False
    """With FP8 blocks as CUDA graphs."""

    @property
    def implementation(self) -> str:
        """Its name in the rows."""
        if self.precision is not None:
            return NAMES[self.precision] + ("_graphs" if self.graphs else "")
        assert self.peer is not None
        return BASELINES[self.peer].implementation


def step_cases(bench: StepBench, ranks: int) -> list[StepCase]:
    """What is measured, in order: by ZeRO stage, then optimizer, then model.

    Args:
        bench: the settings.
        ranks: processes.

    Raises:
        ValueError: the settings do not fit each other or this machine.
    """
    models: list[tuple[Precision | None, str | None, bool]] = []
    for precision in bench.precisions:
        models.append((precision, None, False))
        if bench.graphs and precision in ("coat", "coat_lean"):
            models.append((precision, None, True))
    models += [(None, name, False) for name in bench.peers]
    found: list[StepCase] = []
    for zero_stage, named, (precision, name, graphs) in product(
        bench.zero_stages, bench.optimizers, models
    ):
        optimizer: OptimizerName = named  # pyright: ignore[reportAssignmentType]
        if named == OWN:
            optimizer = "coat" if precision in ("coat", "coat_lean") else "adamw"
        stage: ZeroStage = 0 if optimizer == "none" else zero_stage
        found.append(StepCase(precision, name, optimizer, stage, graphs and stage != 3))
    found = list(dict.fromkeys(found))
    _check(bench, found, ranks)
    return found


def _check(bench: StepBench, found: list[StepCase], ranks: int) -> None:
    """Refuse settings that do not fit each other or this machine."""
    check_baselines(bench.peers)
    if "none" in bench.optimizers and ranks > 1:
        raise ValueError(
            f"--optimizer none is a step of one process without communication, and there are "
            f"{ranks}; start one, or name an optimizer"
        )
    if min(bench.accumulation, bench.steps, bench.warmup) < 1:
        raise ValueError("--accumulation, --steps and --warmup are 1 or more")
    if list(bench.batches) != sorted(set(bench.batches)) or min(bench.batches) < 1:
        raise ValueError(f"--batch {bench.batches}: give ascending numbers, 1 or more")
    if not found:
        raise ValueError("nothing to measure; name --precisions or --peers")
    if bench.graphs and not any(case.graphs for case in found):
        raise ValueError(
            "--graphs: there is no coat or coat_lean below ZeRO-3 to measure with them"
        )
    if bench.graphs and bench.warmup <= EAGER_PASSES:
        raise ValueError(
            f"--graphs: blocks are captured after {EAGER_PASSES} steps, which --warmup has to "
            "exceed"
        )
    if bench.trace is not None:
        _check_trace(bench.trace, bench.on_profile is not None, len(found) * len(bench.batches))


def _check_trace(trace: Path, profiles: bool, steps: int) -> None:
    """Refuse to write a trace that would be lost, or over a file."""
    problem = ""
    if not profiles:
        problem = "what --profile saw; give both"
    elif steps > 1:
        problem = f"holds one step, and there are {steps}; give one model, one --optimizer, one "
        problem += "--zero stage and one --batch"
    elif not trace.name.endswith((".json", ".json.gz")):
        problem = "writes JSON; end the name in .json or .json.gz"
    elif trace.exists():
        problem = "is there already; name another file"
    elif not trace.parent.is_dir():
        problem = f"there is no folder {trace.parent}; make it"
    if problem:
        raise ValueError(f"--trace {trace}: {problem}")


@dataclass(frozen=True, slots=True)
class Reference:
    """What BF16 computes at the first weights."""

    losses: tuple[float, ...]
    """Of this rank's samples, one by one."""
    grad_norm: float
    """Of all parameters, on the first sample."""

    def batch_loss(self, count: int) -> float:
        """Mean loss of the first samples; all have as many supervised tokens."""
        return sum(self.losses[:count]) / count


def measure_reference(model: CoatVlm, shape: VlmShape, first: int, count: int) -> Reference:
    """Run BF16 on samples.

    Args:
        model: BF16, in training mode.
        shape: its samples.
        first: number of the first sample.
        count: how many.
    """
    device = next(model.parameters()).device
    loss, norm = _pass(model, shape.sample(first, device))
    losses = [loss]
    with torch.no_grad():
        for place in range(1, count):
            losses.append(model(**shape.sample(first + place, device)).loss.item())
    return Reference(tuple(losses), norm)


def _pass(model: CoatVlm, inputs: Inputs) -> tuple[float, float]:
    """Loss and norm of all gradients; leaves none behind."""
    loss = model(**inputs).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms)).item()
    model.zero_grad(set_to_none=True)
    return loss.item(), norm


def disagreement(model: CoatVlm, inputs: Inputs, reference: Reference) -> str:
    """What a pass over the first sample does otherwise than BF16; empty when it is right.

    Args:
        model: converted, not trained yet.
        inputs: the first sample.
        reference: BF16's.
    """
    loss, norm = _pass(model, inputs)
    problem = loss_problem([loss], reference.losses[0])
    factor = norm / reference.grad_norm
    if not problem and not 1 / NORM_FACTOR <= factor <= NORM_FACTOR:  # also NaN
        return (
            f"not correct: the gradients' norm is {norm:.4g}, BF16's {reference.grad_norm:.4g}; "
            f"a factor of {NORM_FACTOR} is allowed"
        )
    return problem


def loss_problem(losses: Sequence[float], exact: float) -> str:
    """Which loss is not BF16's; empty when all are."""
    for loss in losses:
        if not abs(loss - exact) <= LOSS_TOLERANCE * abs(exact):  # also NaN
            return (
                f"not correct: the loss is {loss:.4f}, BF16's {exact:.4f}; "
                f"{LOSS_TOLERANCE:.0%} is allowed"
            )
    return ""


def training_problem(losses: Sequence[float], exact: Sequence[float] | None) -> str:
    """What is wrong with the losses of steps on one repeated batch; empty when nothing is.

    Args:
        losses: of each step.
        exact: those of BF16's run, if there was one.
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


def bench_step(
    bench: StepBench, world: World, on_rows: Callable[[list[StepRow]], None]
) -> list[StepRow]:
    """Measure all cases, one after the other.

    Args:
        bench: what to measure.
        world: the processes of the run; all call this.
        on_rows: called on the main process with the rows of each case, as it ends.

    Returns:
        All rows, the same on every process.

    Raises:
        ValueError: the settings do not fit each other or this machine.
    """
    cases = step_cases(bench, world.size)
    run = _Run(bench, world)
    rows = []
    bar = tqdm(cases, desc="step", unit="model", disable=not world.is_main)
    for case in bar:
        bar.set_postfix_str(f"{case.implementation}, {case.optimizer}")
        with attention_backend(run.attention(case)):
            found = run.rows(case)
        rows += found
        if world.is_main:
            on_rows(found)
    return rows


@dataclass(slots=True)
class _Run:
    """What the cases of a run have in common."""

    bench: StepBench
    world: World
    reference: Reference | None = None
    trained: dict[int, list[float]] = field(default_factory=dict)
    """Batch -> BF16's losses in its first steps through DeepSpeed."""
    traces: dict[tuple[Precision, int, bool], tuple[CoatVlm, Activations]] = field(
        default_factory=dict
    )
    """By precision, batch, and whether FP8 weights are shared."""

    @property
    def _shape(self) -> VlmShape:
        return SIZES[self.bench.size]

    @property
    def _first(self) -> int:
        """Number of this rank's first sample."""
        return self.world.rank * max(self.bench.batches)

    def attention(self, case: StepCase) -> Attention:
        """SDPA's backend: training through the engine has the flash kernel by default."""
        trains = case.optimizer != "none"
        return "flash" if trains and self.bench.attention == "default" else self.bench.attention

    def rows(self, case: StepCase) -> list[StepRow]:
        """Measure one case at every batch size, and free it."""
        rows: list[StepRow] = []
        problem = ""
        try:
            if self.reference is None:
                self.reference = self._measured_reference()
            self._measure(case, self.reference, rows)
        except Exception as error:  # one that fails is noted in its row; the others go on
            if self.world.size > 1:  # the other ranks wait for this one: all have to end
                error.add_note(
                    f"in {case.implementation} with optimizer {case.optimizer}, ZeRO-"
                    f"{case.zero_stage}: leave it or its largest --batch out; only a single "
                    "process goes on after a failure"
                )
                raise
            problem = failure(error)
            traceback.clear_frames(error.__traceback__)  # they hold the model
        free(self.world.device)
        if problem:
            self._note_problem(case, rows, problem)
        return rows

    def _note_problem(self, case: StepCase, rows: list[StepRow], problem: str) -> None:
        """Note it in the row of the batch at which it came."""
        begun = bool(rows) and rows[-1].ms is None and not rows[-1].problem
        left = self.bench.batches[len(rows) :]
        if not begun and left:
            rows.append(self._row(case, left[0]))
            begun = True
        if begun:
            rows[-1].problem = problem
        else:
            rows[-1].note += f"; afterwards {problem}"

    def _measured_reference(self) -> Reference:
        with self._model(StepCase("bf16", None, "none", 0)) as model:
            count = max(self.bench.batches)
            found = measure_reference(model, self._shape, self._first, count)
        del model
        free(self.world.device)
        return found

    @contextlib.contextmanager
    def _model(self, case: StepCase) -> Iterator[CoatVlm]:
        """The case's model, in training mode."""
        precision = case.precision or "bf16"
        device = self.world.device
        fp8 = fp8_config(precision, bf16_forward_first=self.bench.bf16_forward_first)
        arithmetic = arithmetic_of(precision, fp8, device)
        model = self._shape.build(device, arithmetic.dtype)
        stage = stage_config()
        set_trainable(model, stage)
        arithmetic.apply(model)
        set_train_mode(model, stage)
        with contextlib.ExitStack() as stack:
            if case.peer is not None:
                stack.enter_context(baseline(case.peer, model))
            yield model

    def _measure(self, case: StepCase, reference: Reference, rows: list[StepRow]) -> None:
        device = self.world.device
        left = left_behind(device)
        with self._model(case) as model:
            problem = disagreement(model, self._shape.sample(self._first, device), reference)
            if self.world.any(bool(problem)):
                rows.append(self._row(case, self.bench.batches[0]))
                rows[-1].problem = problem or "not correct on another rank"
                return
            loop = self._loop(case, model)
            try:
                for batch in self.bench.batches:
                    row = self._row(case, batch)
                    rows.append(row)
                    row.note += left
                    self._measure_batch(row, case, loop, reference)
                    if row.problem:
                        return
            finally:
                loop.close()

    def _loop(self, case: StepCase, model: CoatVlm) -> Loop:
        bench, world = self.bench, self.world
        precision = case.precision or "bf16"
        fp8 = fp8_config(precision, case.optimizer, case.graphs, bench.bf16_forward_first)
        arithmetic = arithmetic_of(precision, fp8, world.device)
        if case.optimizer == "none":
            graph_blocks(model, case.graphs)
            reuse = arithmetic.weight_reuse(model, world.device)
            return PlainLoop(model, reuse, bench.accumulation)
        return engine_loop(
            model,
            stage_config(bench.batches[0], bench.accumulation, world.size),
            arithmetic,
            world,
            precision=precision,
            optimizer=case.optimizer,
            zero_stage=case.zero_stage,
            accumulation=bench.accumulation,
            cudnn_attention=bench.attention == "cudnn",
        )

    def _measure_batch(
        self, row: StepRow, case: StepCase, loop: Loop, reference: Reference
    ) -> None:
        """Run a batch size; fill its row with numbers, or with what is wrong."""
        world = self.world
        inputs = self._shape.batch(self._first, row.batch, world.device)
        before = {graphs: graphs.replays for graphs in live_graphs()}
        times, losses, peak = _timed(loop, inputs, self.bench, world)
        replayed = [graphs.replays - before.get(graphs, 0) for graphs in live_graphs()]
        if case.graphs and not (replayed and all(replayed)):
            problem = "not all blocks were captured as CUDA graphs; the log says why"
        elif case.optimizer == "none":
            problem = loss_problem(losses, reference.batch_loss(row.batch))
        else:
            problem = training_problem(losses, self.trained.get(row.batch))
        if world.any(bool(problem)):
            row.problem = problem or "not correct on another rank"
            return
        if case.precision == "bf16" and case.optimizer != "none":
            self.trained.setdefault(row.batch, losses)
        row.ms = median(max(ranks) for ranks in zip(*world.gather(times), strict=True))
        row.tok_s = row.tokens / (row.ms / 1e3)
        row.peak_gb = max(world.gather(peak)) / 1e9 if peak else None
        row.note += f"; loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        if self.bench.check_plan and case.precision is not None and world.is_main:
            try:
                planned = self._planned_gb(case.precision, row, case, loop)
                off = "" if row.peak_gb is None else f" ({planned / row.peak_gb - 1:+.1%})"
                row.note += f"; plan {planned:.2f} GB{off}"
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                row.note += f"; no plan: {failure(error)}"  # what was measured stays
        if self.bench.on_profile is not None:
            try:
                self._profile(row, loop, inputs)
            except (RuntimeError, OSError) as error:
                if world.size > 1 and isinstance(error, RuntimeError):
                    raise  # the others wait in the step
                row.note += f"; no profile: {failure(error)}"

    def _profile(self, row: StepRow, loop: Loop, inputs: Inputs) -> None:
        world, show = self.world, self.bench.on_profile
        assert show is not None
        world.barrier()  # one rank may have planned
        trace = self.bench.trace if world.is_main else None
        found = profiled(lambda: loop.step(inputs), world.device, trace)
        if world.is_main:
            show(row, format_profile(found, row.ms))

    def _planned_gb(self, precision: Precision, row: StepRow, case: StepCase, loop: Loop) -> float:
        bench = self.bench
        shared = bench.accumulation > 1 and bool(loop.reuse.fits)
        key = (precision, row.batch, shared)
        if key not in self.traces:
            self.traces[key] = traced(
                self._shape,
                precision,
                row.batch,
                reuse_weights=shared,
                bf16_forward_first=bench.bf16_forward_first,
            )
        frame, activations = self.traces[key]
        return planned_gb(
            frame,
            stage_config(),
            activations,
            optimizer=case.optimizer,
            zero_stage=case.zero_stage,
            ranks=self.world.size,
            accumulates=bench.accumulation > 1,
        )

    def _row(self, case: StepCase, batch: int) -> StepRow:
        bench, world = self.bench, self.world
        first = bench.bf16_forward_first  # others than a recipe's are part of the name
        has_first = case.precision in ("coat", "coat_lean") and first is not None
        return StepRow(
            *origin()[:3],
            gpus=world.size,
            zero=case.zero_stage,
            model=self._shape.name,
            implementation=case.implementation + (f"_first{first}" if has_first else ""),
            checkpointing=False,
            optimizer=case.optimizer,
            batch=batch,
            tokens=self._shape.tokens * batch * bench.accumulation * world.size,
            note=f"attention {self.attention(case)}, accumulation {bench.accumulation}",
        )


def left_behind(device: torch.device) -> str:
    """What a row's note says of memory that an earlier measurement left on a GPU."""
    left = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return f"; {left / 1e9:.2f} GB of the peak are an earlier one's" if left > LEFT_BYTES else ""


def free(device: torch.device) -> None:
    """Drop what was compiled and all memory that nothing holds."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _timed(
    loop: Loop, inputs: Inputs, bench: StepBench, world: World
) -> tuple[list[float], list[float], int]:
    """Milliseconds of the measured steps, losses of all, highest memory in the measured ones."""
    on_gpu = world.device.type == "cuda"
    losses: list[Tensor] = [loop.step(inputs) for _ in range(bench.warmup)]
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
    peak = torch.cuda.max_memory_allocated(world.device) + captured_bytes() if on_gpu else 0
    return times, torch.stack([loss.float() for loss in losses]).tolist(), peak


def format_rows(rows: Sequence[StepRow]) -> str:
    """Markdown: one line per implementation, optimizer, ZeRO stage and batch."""
    return table_of(
        rows,
        {
            "implementation": lambda row: row.implementation,
            "optimizer": lambda row: row.optimizer,
            "ZeRO": lambda row: "-" if row.optimizer == "none" else str(row.zero),
            "batch": lambda row: str(row.batch),
            "tokens": lambda row: f"{row.tokens:,}",
            "ms": lambda row: number(row.ms, 1),
            "tokens/s": lambda row: "-" if row.tok_s is None else f"{row.tok_s:,.0f}",
            "peak GB": lambda row: number(row.peak_gb, 2),
            "note": lambda row: row.problem or row.note,
        },
    )
