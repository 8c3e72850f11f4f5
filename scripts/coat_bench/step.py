"""``coat-vlm bench step``: the training step of a whole vision-language model.

Every contender is built anew from the same random weights, checked against BF16
(:mod:`coat_bench.step_check`), run for a few steps per batch size, and freed. Without an
optimizer a step is both passes of one process; with one it goes through DeepSpeed's engine as in
training (:mod:`coat_bench.step_loop`), on as many GPUs as there are processes.
"""

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
from tqdm import tqdm

from coat_bench.layer import Attention, attention_backend
from coat_bench.peers import peer
from coat_bench.profile import format_profile, profiled
from coat_bench.rows import whereabouts
from coat_bench.step_case import Contender, StepBench, StepRow, contenders_of
from coat_bench.step_check import (
    Reference,
    disagreement,
    loss_problem,
    measure_reference,
    training_problem,
    values,
)
from coat_bench.step_loop import (
    EngineLoop,
    Loop,
    PlainLoop,
    engine_loop,
    fp8_config,
    stage_config,
)
from coat_bench.step_plan import StepPlan
from coat_bench.vlm_shapes import SIZES, Inputs
from coat_vlm.config import Precision
from coat_vlm.distributed import World
from coat_vlm.fp8 import arithmetic_of, captured_bytes, graph_blocks, live_graphs
from coat_vlm.model import CoatVlm
from coat_vlm.train.engine import set_train_mode, set_trainable

LEFT_BYTES = 64 * 2**20
"""More than this left on the GPU by an earlier contender is told beside a peak that holds it."""


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
    contenders = contenders_of(bench, world.size)
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

    def attention(self, contender: Contender) -> Attention:
        """SDPA's backend: training through the engine has the flash kernel by default."""
        trains = contender.optimizer != "none"
        return "flash" if trains and self.bench.attention == "default" else self.bench.attention

    def rows(self, contender: Contender) -> list[StepRow]:
        """Measure one contender at every batch size, and free it."""
        rows: list[StepRow] = []
        problem = ""
        try:
            if self.reference is None:
                self.reference = self._measured_reference()
            self._measure(contender, self.reference, rows)
        except Exception as error:  # one that fails is told in its row; the others go on
            if self.world.size > 1:  # the other ranks wait for this one: all have to end
                error.add_note(
                    f"in {contender.implementation} with optimizer {contender.optimizer}, ZeRO-"
                    f"{contender.zero_stage}: leave it or its largest --batch out; only a single "
                    "process goes on after a failure"
                )
                raise
            problem = _told(error)
            traceback.clear_frames(error.__traceback__)  # they hold the model
        self._free()
        if problem:
            self._note_problem(contender, rows, problem)
        return rows

    def _note_problem(self, contender: Contender, rows: list[StepRow], problem: str) -> None:
        """Tell it in the row of the batch at which it came."""
        begun = bool(rows) and rows[-1].ms is None and not rows[-1].problem
        left = self.bench.batches[len(rows) :]
        if not begun and left:
            rows.append(self._row(contender, left[0]))
            begun = True
        if begun:
            rows[-1].problem = problem
        else:
            rows[-1].note += f"; afterwards {problem}"

    def _measured_reference(self) -> Reference:
        contender = Contender("bf16", None, "none", 0)
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
    def _model(self, contender: Contender) -> Iterator[CoatVlm]:
        """The contender's model, in training mode."""
        precision = contender.precision or "bf16"
        device = self.world.device
        fp8 = fp8_config(precision, "coat", bf16_forward_first=self.bench.bf16_forward_first)
        arithmetic = arithmetic_of(precision, fp8, device)
        model = SIZES[self.bench.size].build(device, arithmetic.dtype)
        stage = stage_config(1, 1, 1, self.bench.checkpointing)
        set_trainable(model, stage)
        arithmetic.apply(model)
        set_train_mode(model, stage)
        with contextlib.ExitStack() as stack:
            if contender.peer is not None:
                stack.enter_context(peer(contender.peer, model))
            yield model

    def _measure(self, contender: Contender, reference: Reference, rows: list[StepRow]) -> None:
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

    def _loop(self, contender: Contender, model: CoatVlm) -> PlainLoop | EngineLoop:
        bench, world = self.bench, self.world
        precision = contender.precision or "bf16"
        fp8 = fp8_config(precision, contender.optimizer, contender.graphs, bench.bf16_forward_first)
        arithmetic = arithmetic_of(precision, fp8, world.device)
        if contender.optimizer == "none":
            graph_blocks(model, contender.graphs)
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
            cudnn_attention=bench.attention == "cudnn",
        )

    def _measure_batch(
        self,
        row: StepRow,
        contender: Contender,
        loop: PlainLoop | EngineLoop,
        reference: Reference,
    ) -> None:
        """Run a batch size; fill its row with numbers, or with what is wrong."""
        world = self.world
        inputs = SIZES[self.bench.size].batch(self._first, row.batch, world.device)
        before = {graphs: graphs.replays for graphs in live_graphs()}
        times, losses, peak = _timed(loop, inputs, self.bench, world)
        replayed = [graphs.replays - before.get(graphs, 0) for graphs in live_graphs()]
        if contender.graphs and not (replayed and all(replayed)):
            problem = "not all blocks were captured as CUDA graphs; the log says why"
        elif contender.optimizer == "none":
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
        if self.bench.on_profile is not None:
            try:
                self._profile(row, loop, inputs)
            except (RuntimeError, OSError) as error:
                if world.size > 1 and isinstance(error, RuntimeError):
                    raise  # the others wait in the step
                row.note += f"; no profile: {_told(error)}"

    def _profile(self, row: StepRow, loop: PlainLoop | EngineLoop, inputs: Inputs) -> None:
        world, show = self.world, self.bench.on_profile
        assert show is not None
        world.barrier()  # one rank may have planned
        trace = self.bench.trace if world.is_main else None
        found = profiled(lambda: loop.step(inputs), world.device, trace)
        if world.is_main:
            show(row, format_profile(found, row.ms))

    def _note_plan(self, row: StepRow, contender: Contender, loop: PlainLoop | EngineLoop) -> None:
        bench, precision = self.bench, contender.precision
        assert precision is not None
        kept = bench.accumulation > 1 and bool(loop.reuse.fits)
        if (precision, kept) not in self.plans:
            stage = stage_config(1, 1, 1, bench.checkpointing)
            shape = SIZES[bench.size]
            self.plans[precision, kept] = StepPlan(
                shape,
                precision,
                stage,
                reuse_weights=kept,
                bf16_forward_first=bench.bf16_forward_first,
            )
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

    def _row(self, contender: Contender, batch: int) -> StepRow:
        bench, world = self.bench, self.world
        shape = SIZES[bench.size]
        return StepRow(
            *whereabouts(),
            gpus=world.size,
            zero=contender.zero_stage,
            model=shape.name,
            implementation=contender.implementation + self._suffix(contender),
            checkpointing=bench.checkpointing,
            optimizer=contender.optimizer,
            batch=batch,
            tokens=shape.tokens * batch * bench.accumulation * world.size,
            note=f"attention {self.attention(contender)}, accumulation {bench.accumulation}",
        )

    def _suffix(self, contender: Contender) -> str:
        """What follows the name of an implementation with other first blocks than a recipe's."""
        first = self.bench.bf16_forward_first
        whole = contender.precision in ("coat", "coat_lean")
        return f"_first{first}" if whole and first is not None else ""

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
    peak = torch.cuda.max_memory_allocated(world.device) + captured_bytes() if on_gpu else 0
    return times, values(losses), peak


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _told(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "OOM"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
