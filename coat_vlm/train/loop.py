"""The training loop of one stage.

One optimizer step: load its micro-batches; sum their trained tokens over all micro-batches and
ranks; run forward and backward, each micro-batch's summed loss divided by that number; let
DeepSpeed average, clip and step. So the gradient is that of the mean loss per trained token of the
whole batch, however it is split over micro-batches and ranks.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from tqdm import tqdm

from coat_data.load.collate import Batch
from coat_data.load.loader import REPLAYED, LoadedBatch
from coat_data.media.sampling import VIDEO_COUNTS
from coat_data.mixture.sampler import Cursor
from coat_vlm.config import StageConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import WeightReuse, captured_bytes
from coat_vlm.model.placeholders import copy_to_device
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.optim import lr_factor
from coat_vlm.train.engine import set_train_mode
from coat_vlm.train.evaluation import LiveEvaluation
from coat_vlm.train.gradients import GradientWatch, NonFiniteWatch
from coat_vlm.train.interrupt import Interrupts
from coat_vlm.train.metrics import Metrics, StepLine
from coat_vlm.train.monitor import BlockMonitor, Fp8Record
from coat_vlm.train.quarantine import Quarantine
from coat_vlm.train.sources import StageData
from coat_vlm.train.throughput import PhaseClock, Throughput, trained_tokens

_READ_COUNTS = (*VIDEO_COUNTS, REPLAYED)

_LOOKED_INTO = frozenset(
    ("attention_mask", "labels", "image_grids", "frame_groups", "cu_seq_lens_q", "max_length_q")
)


class Stopped(SystemExit):
    """Training saved a checkpoint after a signal and leaves with this status."""


@dataclass(slots=True, kw_only=True)
class StageRun:
    """Everything the loop of one stage works on."""

    name: str
    stage: StageConfig
    engine: DeepSpeedEngine
    model: CoatVlm
    """The engine's module."""
    data: StageData
    world: World
    metrics: Metrics
    quarantine: Quarantine
    throughput: Throughput
    phases: PhaseClock
    total_steps: int
    clip_here: bool
    """Clip gradients in the loop; DeepSpeed does it otherwise."""
    save: Callable[[int, Cursor], None]
    """Saves a checkpoint, given the step and how far the order of data is used."""
    log_every_steps: int
    reuse: WeightReuse
    """Whether micro-batches share FP8 weights."""
    fp8: Fp8Record | None = None
    """Measures FP8 at the first and at the last step."""
    monitor: BlockMonitor | None = None
    """Compares FP8 blocks with BF16 where that is due."""
    evaluation: LiveEvaluation | None = None
    """Asks questions on the way."""
    step: int = 0
    """Finished steps."""
    skipped_steps: int = 0
    """Steps of this process that changed nothing, because a gradient was not finite."""
    captured_bytes: int = 0
    """Memory of CUDA graphs that the last step knew of."""
    cursor: Cursor = field(default_factory=Cursor)
    """How far the order of data is used."""

    def train(self) -> None:
        """Run the remaining steps, validating and saving on the way and at the end.

        Raises:
            DataError: a row is bad and none are allowed.
            ValueError: too many rows are bad, the loss is not finite, more than
                ``max_skipped_steps`` had gradients that were not, nothing in a batch is trained, or
                a module that should train gets no gradient.
            Stopped: after a signal, when the checkpoint is saved.
        """
        batches = self.data.loader.steps(self.cursor)
        line = StepLine(self.name, self.total_steps, self.step, self.log_every_steps, self.world)
        with Interrupts() as interrupts, line:
            try:
                while self.step < self.total_steps:
                    started = time.perf_counter()
                    micro_batches = next(batches)
                    data_wait = time.perf_counter() - started
                    row, stop = self.take(micro_batches, started, data_wait, interrupts.received)
                    line.show(row)
                    self._between_steps(stop, interrupts)
            finally:
                batches.close()

    def take(
        self,
        micro_batches: list[LoadedBatch],
        started: float,
        data_wait: float = 0.0,
        stop_requested: bool = False,
    ) -> tuple[dict[str, Any], bool]:
        """One step, with all that is measured around it.

        Args:
            micro_batches: of this rank.
            started: ``time.perf_counter()`` before they were asked for.
            data_wait: seconds until they were there.
            stop_requested: whether this process got a signal.

        Returns:
            Its row of metrics.jsonl, and whether a process got a signal.

        Raises:
            ValueError: as :meth:`train`.
        """
        self._footprint(micro_batches)  # its passes are not for the monitor's hooks
        self.phases.start()
        with self._monitored() as monitored, self._measured() as counted:
            row = self._step(micro_batches, stop_requested)
        # Measuring FP8 takes memory too, which is no part of what training needs.
        row["peak_memory_mb"] = None if counted or monitored else self._peak_memory_mb()
        stop = row.pop("stop")
        return self._report(row, time.perf_counter() - started, data_wait), stop

    def _footprint(self, micro_batches: list[LoadedBatch]) -> None:
        """Measure what FP8 keeps, before the first step."""
        if self.fp8 is not None and self.step == 0:
            set_train_mode(self.model, self.stage)
            self.fp8.footprint(self.model, micro_batches[0].batch)

    @contextmanager
    def _measured(self) -> Iterator[bool]:
        """Measure FP8 around a step where that is due; says whether it is."""
        if self.fp8 is None or self.step not in (0, self.total_steps - 1):
            yield False
            return
        with self.fp8.rates(self.step + 1):
            yield True
        self.fp8.states(self.engine.client_optimizer, self.step)
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)

    @contextmanager
    def _monitored(self) -> Iterator[bool]:
        """Compare FP8 blocks with BF16 after a step where that is due; says whether it is."""
        if self.monitor is None or not _due(self.step + 1, self.monitor.every):
            yield False
            return
        with self.monitor.capturing():
            yield True
        row, warnings = self.monitor.measure()
        self.metrics.write({"kind": "monitor", "stage": self.name, "step": self.step, **row})
        for warning in warnings if self.world.is_main else ():
            tqdm.write(f"WARNING stage {self.name}, step {self.step}: {warning}")
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)

    def validate(self) -> None:
        """Mean loss per trained token of every validation source, over all ranks."""
        self.engine.eval()
        losses = {}
        for name in self.data.validation:
            total = torch.zeros((), dtype=torch.float64, device=self.world.device)
            tokens = 0
            with torch.no_grad():
                for loaded in self.data.validation_batches(name):
                    total += self._loss(loaded.batch, divisor=1).double()
                    tokens += trained_tokens(loaded.batch)
            loss, count = self.world.sum([total.item(), tokens])
            losses[name] = round(loss / max(1.0, count), 6)
        row = {"kind": "val", "stage": self.name, "step": self.step, "losses": losses}
        self.metrics.write(row)

    def _evaluate(self, evaluation: LiveEvaluation) -> None:
        """Answer questions with the weights as they are now."""
        self.engine.eval()
        row = evaluation(self.model)
        self.metrics.write({"kind": "eval", "stage": self.name, "step": self.step, **row})

    def _step(self, micro_batches: list[LoadedBatch], stop_requested: bool) -> dict[str, Any]:
        """One optimizer step; what is known of it only here."""
        bad = [bad for loaded in micro_batches for bad in loaded.bad]
        read = [loaded.counts for loaded in micro_batches]
        held = self.throughput.count([loaded.batch for loaded in micro_batches])
        tokens, all_tokens, samples, stop, *counts = self.world.sum(
            [
                sum(trained_tokens(loaded.batch) for loaded in micro_batches),
                sum(int(loaded.batch["attention_mask"].sum()) for loaded in micro_batches),
                sum(loaded.num_samples for loaded in micro_batches),
                float(stop_requested),
                *held,
                *(sum(counts.get(name, 0) for counts in read) for name in _READ_COUNTS),
                *self.quarantine.note(bad, self.step + 1),
            ]
        )
        held, counts = counts[: len(held)], counts[len(held) :]
        videos, bad_counts = counts[: len(VIDEO_COUNTS)], counts[len(_READ_COUNTS) :]
        replayed = counts[len(VIDEO_COUNTS)]
        order = self.data.loader.order
        _, self.cursor = order.step(self.cursor)
        bad_rates = self.quarantine.count(bad_counts, lambda: order.met(self.cursor))
        if not tokens:
            raise ValueError(
                f"stage {self.name}, step {self.step + 1}: no token of this batch is trained; "
                "check the template and the answers of the data"
            )
        lr = self._set_lr()
        set_train_mode(self.model, self.stage)
        # DeepSpeed divides by the micro-batches (backward) and by the ranks (averaging).
        undo_averaging = len(micro_batches) * self.world.size
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        norm: float | None = None
        with ExitStack() as kept:
            kept.enter_context(self.reuse.scope(len(micro_batches)))
            for number, loaded in enumerate(micro_batches):
                loss = self._loss(loaded.batch, divisor=tokens)
                total += loss.detach().double()
                watched = GradientWatch(self.model, self.stage, active=self.step == 0)
                with watched as watch, self.phases.during("backward"):
                    self.engine.backward(loss * undo_averaging)
                if self.step == 0 and number == 0:
                    watch.check(self.name)
                with self.phases.during("optimizer"):
                    if self.clip_here and number == len(micro_batches) - 1:
                        norm = self._clip()
                    if number == len(micro_batches) - 1:
                        kept.close()  # the weights move now, and the optimizer may need the memory
                    self.engine.step()
        self.reuse.after_step()
        if not self.clip_here:
            norm = self.engine.get_global_grad_norm()
        (loss_value,) = self.world.sum([total.item()])
        self.step += 1
        norm = None if norm is None else float(norm)
        if norm is not None and not math.isfinite(norm):
            self._note_skipped(micro_batches, loss_value, tokens)
        else:
            self._check_finite(loss_value)
        return {
            "loss": loss_value if math.isfinite(loss_value) else None,
            "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
            "lr": lr,
            "trained_tokens": int(tokens),
            "tokens": int(all_tokens),
            "samples": int(samples),
            **self.throughput.row(held),
            "bad_by_source": bad_rates,
            **({"outages": self.quarantine.outages} if self.quarantine.outages else {}),
            "videos": {name: int(n) for name, n in zip(VIDEO_COUNTS, videos, strict=True) if n},
            **({REPLAYED: int(replayed)} if replayed else {}),
            "stop": stop > 0,
        }

    def _loss(self, batch: Batch, divisor: float) -> torch.Tensor:
        with self.phases.during("to_device"):
            inputs = inputs_on(batch, self.world.device)
        with self.phases.during("forward"):
            # In validation the model would return logits, too.
            return self.engine(**inputs, num_items_in_batch=divisor, skip_logits=True).loss

    def _clip(self) -> float:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        limit = self.stage.grad_clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not math.isfinite(norm):
            for parameter in parameters:  # AdamW passes over parameters without a gradient
                parameter.grad = None
        return norm

    def _note_skipped(self, micro_batches: list[LoadedBatch], loss: float, tokens: float) -> None:
        """Count a step that DeepSpeed or :meth:`_clip` skipped; stop when there are too many."""
        self.skipped_steps += 1
        if self.skipped_steps <= self.stage.max_skipped_steps:
            return
        # Nothing was updated, so the step can be looked at again, parameter by parameter.
        with NonFiniteWatch(self.model) as watch:
            for loaded in micro_batches:
                self.engine.backward(self._loss(loaded.batch, divisor=tokens))
        names = sorted({name for found in self.world.gather(watch.names) for name in found})
        where = f"first in {names[0]}, one of {len(names)}" if names else "not when tried again"
        raise ValueError(
            f"stage {self.name}, step {self.step}: gradients are NaN or infinite ({where}; the "
            f"loss is {loss}); no weight was changed. {self.skipped_steps} steps were skipped so "
            f"far, max_skipped_steps is {self.stage.max_skipped_steps}: lower the learning rates, "
            "raise warmup_ratio or raise max_skipped_steps, and continue with --resume auto"
        )

    def _set_lr(self) -> dict[str, float]:
        """Set this step's learning rates; returns them by module."""
        factor = lr_factor(
            self.step,
            self.total_steps,
            round(self.stage.warmup_ratio * self.total_steps),
            self.stage.schedule,
            self.stage.min_lr_ratio,
        )
        rates = {}
        optimizer: Any = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
            rates[group["module"]] = group["lr"]
        return rates

    def _report(self, row: dict[str, Any], seconds: float, data_wait: float) -> dict[str, Any]:
        """Write the step's row of metrics.jsonl; returns it."""
        if self.data.row_tokens is not None:
            budget = self.stage.batch_size * self.data.row_tokens
            row["packing_fill"] = round(row["tokens"] / budget, 4)
        row = {
            "kind": "step",
            "stage": self.name,
            "step": self.step,
            "total_steps": self.total_steps,
            **row,
            **self.throughput.rates(row, seconds),
            "step_s": round(seconds, 4),
            "data_wait_s": round(data_wait, 4),
            **self.phases.row(data_wait, seconds),
            "bad_samples": self.quarantine.total,
            "skipped_steps": self.skipped_steps,
        }
        self.metrics.write(row)
        return row

    def _peak_memory_mb(self) -> float:
        """Largest memory so far in MB: allocated on the GPU, or the process's resident set."""
        if self.world.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.world.device) + self.captured_bytes
            if self.captured_bytes != captured_bytes():
                # Counted as allocated in the step that captured it, and never after that.
                self.captured_bytes = captured_bytes()
                torch.cuda.reset_peak_memory_stats(self.world.device)
            return round(peak / 1e6, 1)
        import resource

        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1)

    def _between_steps(self, stop: bool, interrupts: Interrupts) -> None:
        at_end = self.step == self.total_steps
        validate_every, save_every = self.stage.eval_every_steps, self.stage.save_every_steps
        if self.data.validation and (at_end or _due(self.step, validate_every)):
            self.validate()
        if self.evaluation is not None and (at_end or _due(self.step, self.evaluation.every)):
            self._evaluate(self.evaluation)
        if stop or at_end or _due(self.step, save_every):
            self.save(self.step, self.cursor)
        if stop and not at_end:
            # Another rank may have got the signal; launchers only ask that the status is not 0.
            raise Stopped(interrupts.exit_status)

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise ValueError(
                f"stage {self.name}, step {self.step}: the loss is {loss}; lower the learning "
                "rates or raise warmup_ratio, and continue from the last checkpoint with --resume "
                "auto"
            )


def inputs_on(batch: Batch, device: torch.device) -> dict[str, Any]:
    """A batch as the model takes it: what the model looks into stays on the CPU."""
    return {
        name: value if name in _LOOKED_INTO else copy_to_device(value, device)  # pyright: ignore[reportArgumentType]
        for name, value in batch.items()
    }


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
