"""One optimizer step: learning rates, forward, backward, clip, optimizer, log.

The loss of a micro-batch is a sum over its tokens, divided by the number of supervised tokens of
all micro-batches and ranks. So the gradient is that of the mean loss per supervised token of the
whole batch, however it is split over micro-batches and ranks.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from coat_data.load.collate import Batch
from coat_data.load.loader import LoadedBatch
from coat_data.mixture.sampler import Cursor, Order
from coat_vlm.config import StageConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import WeightReuse
from coat_vlm.model.placeholders import copy_to_device
from coat_vlm.model.vlm import CoatVlm, module_parameters
from coat_vlm.optim import lr_factor
from coat_vlm.train.bad_samples import BadSamples
from coat_vlm.train.engine import set_train_mode
from coat_vlm.train.fp8_monitor import BlockMonitor, Fp8Record
from coat_vlm.train.throughput import PeakMemory, PhaseClock, Throughput
from coat_vlm.train.tracking import Metrics

_ON_CPU = frozenset(
    ("attention_mask", "labels", "image_grids", "frame_groups", "cu_seq_lens_q", "max_length_q")
)


@dataclass(slots=True, kw_only=True)
class TrainStep:
    """Takes the optimizer steps of one stage, and logs each."""

    name: str
    """The stage's."""
    stage: StageConfig
    engine: DeepSpeedEngine
    model: CoatVlm
    """The engine's module."""
    world: World
    total_steps: int
    """Of the stage; the learning rates' schedule needs it."""
    order: Order
    """Of the data."""
    row_tokens: int | None
    """Packing: the token budget of a row."""
    clip_here: bool
    """Clip gradients here; DeepSpeed does it otherwise."""
    reuse: WeightReuse
    """Whether micro-batches share FP8 weights."""
    metrics: Metrics
    throughput: Throughput
    bad_samples: BadSamples
    phases: PhaseClock
    memory: PeakMemory
    fp8: Fp8Record | None = None
    """Measures FP8 at the first and at the last step."""
    monitor: BlockMonitor | None = None
    """Compares FP8 blocks with BF16 where that is due."""
    finished: int = 0
    """Steps that were taken."""
    skipped_steps: int = 0
    """Steps of this process that changed nothing, because a gradient was not finite."""
    cursor: Cursor = field(default_factory=Cursor)
    """How far the order of data is used."""

    def __call__(
        self,
        micro_batches: list[LoadedBatch],
        started: float,
        data_wait: float = 0.0,
        stop_requested: bool = False,
    ) -> tuple[dict[str, Any], bool]:
        """Take one step and log it.

        Args:
            micro_batches: of this rank.
            started: ``time.perf_counter()`` before they were asked for.
            data_wait: seconds until they were there.
            stop_requested: whether this process got a signal.

        Returns:
            The step's row of metrics.jsonl, and whether any process got a signal.

        Raises:
            ValueError: too many rows are bad, the loss is not finite, more than
                ``max_skipped_steps`` had gradients that were not, nothing in a batch is trained, or
                a module that should train gets no gradient.
        """
        if self.fp8 is not None and self.finished == 0:
            set_train_mode(self.model, self.stage)
            self.fp8.footprint(self.model, micro_batches[0].batch)
        self.phases.start()
        with ExitStack() as observers:
            observed = self._observe(observers)
            counts = self._count(micro_batches, stop_requested)
            _, self.cursor = self.order.step(self.cursor)
            bad = self.bad_samples.row(counts, lambda: self.order.met(self.cursor))
            lr = self._set_lr()
            set_train_mode(self.model, self.stage)
            loss, norm = self._update(micro_batches, counts["trained_tokens"])
            self.finished += 1
            self._check_finite(loss, norm, micro_batches, counts["trained_tokens"])
        row = self._row(loss, norm, lr, counts, bad, observed)
        seconds = time.perf_counter() - started
        row |= {
            **self.throughput.rates(row, seconds),
            "step_s": round(seconds, 4),
            "data_wait_s": round(data_wait, 4),
            **self.phases.row(data_wait, seconds),
            "bad_samples": self.bad_samples.total,
            "skipped_steps": self.skipped_steps,
        }
        self.metrics.write(row)
        return row, counts["stop"] > 0

    def _count(self, micro_batches: list[LoadedBatch], stop_requested: bool) -> dict[str, float]:
        """What the step holds on all ranks, by name, in the one sum over the ranks that it has."""
        own = {
            **self.throughput.count(micro_batches),
            **self.bad_samples.note(micro_batches, self.finished + 1),
            "stop": float(stop_requested),
        }
        return dict(zip(own, self.world.sum([*own.values()]), strict=True))

    def _set_lr(self) -> dict[str, float]:
        """Set this step's learning rates; returns them by module."""
        factor = lr_factor(
            self.finished,
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

    def _update(
        self, micro_batches: list[LoadedBatch], tokens: float
    ) -> tuple[float, float | None]:
        """Forward, backward, clip and optimizer; returns the loss and the gradients' norm."""
        if not tokens:
            raise ValueError(
                f"stage {self.name}, step {self.finished + 1}: no token of this batch is trained; "
                "check the template and the answers of the data"
            )
        # DeepSpeed divides by the micro-batches (backward) and by the ranks (averaging).
        undo_averaging = len(micro_batches) * self.world.size
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        norm: Any = None
        with ExitStack() as shared_weights:
            shared_weights.enter_context(self.reuse.scope(len(micro_batches)))
            for number, loaded in enumerate(micro_batches, start=1):
                first, last = self.finished == 0 and number == 1, number == len(micro_batches)
                loss = self.loss(loaded.batch, divisor=tokens)
                total += loss.detach().double()
                check = self._all_modules_reached() if first else nullcontext()
                with check, self.phases.during("backward"):
                    self.engine.backward(loss * undo_averaging)
                with self.phases.during("optimizer"):
                    if last:
                        norm = self._clip() if self.clip_here else None
                        shared_weights.close()  # weights move now, and the step may need the memory
                    self.engine.step()  # does nothing before the last micro-batch
        self.reuse.after_step()
        if not self.clip_here:
            norm = self.engine.get_global_grad_norm()
        return self.world.sum([total.item()])[0], None if norm is None else float(norm)

    def loss(self, batch: Batch, divisor: float) -> Tensor:
        """The forward pass: a batch's loss, summed over its tokens, divided by ``divisor``."""
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

    def _check_finite(
        self, loss: float, norm: float | None, micro_batches: list[LoadedBatch], tokens: float
    ) -> None:
        """Count a step that DeepSpeed or :meth:`_clip` skipped; raise if there are too many."""
        if norm is None or math.isfinite(norm):
            if math.isfinite(loss):
                return
            raise ValueError(
                f"stage {self.name}, step {self.finished}: the loss is {loss}; lower the learning "
                "rates or raise warmup_ratio, and continue from the last checkpoint with --resume "
                "auto"
            )
        self.skipped_steps += 1
        if self.skipped_steps <= self.stage.max_skipped_steps:
            return
        # Nothing was updated, so the step can be looked at again, parameter by parameter.
        bad: set[str] = set()

        def note(name: str, gradient: Tensor) -> None:
            if name not in bad and not gradient.isfinite().all():
                bad.add(name)

        with _gradient_hooks(self.model.named_parameters(), note):
            for loaded in micro_batches:
                self.engine.backward(self.loss(loaded.batch, divisor=tokens))
        names = sorted(set[str]().union(*self.world.gather(bad)))
        where = f"first in {names[0]}, one of {len(names)}" if names else "not when tried again"
        raise ValueError(
            f"stage {self.name}, step {self.finished}: gradients are NaN or infinite ({where}; the "
            f"loss is {loss}); no weight was changed. {self.skipped_steps} steps were skipped so "
            f"far, max_skipped_steps is {self.stage.max_skipped_steps}: lower the learning rates, "
            "raise warmup_ratio or raise max_skipped_steps, and continue with --resume auto"
        )

    def _row(
        self,
        loss: float,
        norm: float | None,
        lr: dict[str, float],
        counts: dict[str, float],
        bad: dict[str, Any],
        observed: bool,
    ) -> dict[str, Any]:
        """The step's row of metrics.jsonl, but for its times."""
        if observed:
            self.memory.reset()
        row = {
            "kind": "step",
            "stage": self.name,
            "step": self.finished,
            "total_steps": self.total_steps,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
            "lr": lr,
            **self.throughput.row(counts),
            **bad,
            # Measuring FP8 takes memory too, which is no part of what training needs.
            "peak_memory_mb": None if observed else self.memory.read(),
        }
        if self.row_tokens is not None:
            budget = self.stage.batch_size * self.row_tokens
            row["packing_fill"] = round(row["tokens"] / budget, 4)
        return row

    def _observe(self, observers: ExitStack) -> bool:
        """Start what measures this step, if anything does; returns whether it does."""
        step = self.finished + 1
        monitored = self.monitor is not None and self.monitor.due(step)
        if self.monitor is not None and monitored:
            observers.enter_context(self.monitor.watch(self.name, step, self.metrics.write))
        recorded = self.fp8 is not None and step in (1, self.total_steps)
        if self.fp8 is not None and recorded:
            observers.enter_context(self.fp8.watch(step, self.engine.client_optimizer))
        return monitored or recorded

    @contextmanager
    def _all_modules_reached(self) -> Iterator[None]:
        """Check that a backward pass reaches a parameter of each module that should train."""
        parts = module_parameters(self.model)
        trained = {name: parts[name] for name in parts if self.stage.module(name).train}
        reached: set[str] = set()
        parameters = ((name, p) for name, part in trained.items() for p in part.parameters())
        with _gradient_hooks(parameters, lambda name, _: reached.add(name)):
            yield
        missed = [name for name in trained if name not in reached]
        if missed:
            raise ValueError(
                f"stage {self.name}: {', '.join(missed)} should train but got no gradient in the "
                "first step; check that the data has images and that nothing detaches them"
            )


def inputs_on(batch: Batch, device: torch.device) -> dict[str, Any]:
    """A batch as the model takes it: what the model looks into stays on the CPU."""
    return {
        name: value if name in _ON_CPU else copy_to_device(value, device)  # pyright: ignore[reportArgumentType]
        for name, value in batch.items()
    }


@contextmanager
def _gradient_hooks(
    parameters: Iterable[tuple[str, nn.Parameter]], hook: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``hook`` with a name and each gradient of its parameter, before ZeRO takes it away."""
    with ExitStack() as hooks:
        for name, parameter in parameters:
            if parameter.requires_grad:
                hooks.callback(parameter.register_hook(partial(hook, name)).remove)
        yield
