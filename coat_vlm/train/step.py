"""One optimizer step: learning rates, forward, backward, clip, optimizer, log.

Steps may overlap: the CPU launches the passes of a step's first micro-batch before it reads the
loss and the norm of the previous step, so that the GPU does not wait while the CPU logs a step,
loads the next batch and launches its first kernels. CoatAdamW skips a step with non-finite
gradients on the GPU. The results of a step are read and checked before the next one changes
weights.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from coat_data.load.loader import LoadedBatch
from coat_data.mixture.packing import Sampler
from coat_data.mixture.sampler import SamplerState
from coat_vlm.optim import stage_lr_factor
from coat_vlm.train.fp8_monitor import Fp8Monitor
from coat_vlm.train.passes import Passes, Results
from coat_vlm.train.step_log import StepLog


@dataclass(slots=True, kw_only=True)
class _LaunchedStep:
    """A step that was launched, and whose results are not read yet."""

    number: int
    started: float
    """``time.perf_counter()`` before loading the micro-batches."""
    waited: float
    """Seconds of waiting for its micro-batches; 0 if the entry of the previous step has them."""
    micro_batches: list[LoadedBatch]
    divisor: float
    results: Results
    entry: dict[str, Any]
    """What is known of the step's entry of metrics.jsonl."""
    checked: tuple[float, float | None] | None = None
    """Loss of all ranks and norm, if they are checked already."""


@dataclass(slots=True, kw_only=True)
class TrainStep:
    """Runs and logs the optimizer steps of one stage."""

    name: str
    """The stage's name."""
    total_steps: int
    sampler: Sampler
    passes: Passes
    log: StepLog
    overlaps: bool = False
    """Whether a step's results may be read while the next step runs
    (:func:`coat_vlm.train.engine.steps_overlap`)."""
    monitor: Fp8Monitor | None = None
    on_entry: Callable[[dict[str, Any]], None] = lambda _: None
    """Called with a step's entry of metrics.jsonl, before the next step changes weights. An
    exception that it raises aborts the next step if that was already launched."""
    finished: int = 0
    """Number of finished steps; the results of the latest may be unread."""
    skipped_steps: int = 0
    """Steps of this stage skipped for non-finite gradients, since it started or resumed."""
    sampler_state: SamplerState = field(default_factory=SamplerState)
    """State of the sampler after the last step."""
    launched: _LaunchedStep | None = None
    """The latest step, until its results are read."""

    def __call__(
        self,
        micro_batches: list[LoadedBatch] | None,
        started: float,
        data_wait: float = 0.0,
        stop_requested: bool = False,
        *,
        wait: bool = True,
    ) -> bool:
        """Run one optimizer step; return whether any process received a signal.

        Its results are read, checked, logged and passed to ``on_entry``: before this call returns
        if steps do not overlap or it must ``wait``, else during the next call. ``micro_batches`` is
        None if a signal ended the wait for them; no rank then runs the step. ``started``:
        ``time.perf_counter()`` before they were loaded. Raises ValueError if too many rows are bad
        or steps were skipped, the loss is not finite, the batch has no supervised token, or a
        trainable module gets no gradient.
        """
        passes, number = self.passes, self.finished + 1
        self.log.begin(data_wait, passes.world.device)
        measured = self.monitor is not None and self.monitor.is_due(number, self.total_steps)
        if micro_batches is None or stop_requested or measured:
            self.read()
        counts = self._count(micro_batches, stop_requested)
        if micro_batches is None or counts["without_batch"]:
            return True
        watch = nullcontext()
        if self.monitor is not None and measured:
            write = self.log.metrics.write
            watch = self.monitor.watch(self.name, number, self.total_steps, write)
        with watch:
            launched = self._launch(micro_batches, counts, started)
            if measured:  # it repeats the passes of a NaN, with the blocks as they ran
                launched.checked = self._check_finite(launched)
        launched.entry |= self.log.start_entry(counts, passes.stage.batch_size, measured=measured)
        self.launched = launched
        stop = counts["stop"] > 0
        if wait or stop or measured or not self.overlaps:
            self.read()
        return stop

    def read(self) -> None:
        """Wait for the results of the latest step, check and log them, unless that was done."""
        step, self.launched = self.launched, None
        if step is None:
            return
        loss, norm = step.checked or self._check_finite(step)
        entry = step.entry | {
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
            "skipped_steps": self.skipped_steps,
        }
        if self.passes.preference is not None:  # such steps do not overlap
            entry |= self.passes.preference.metrics()
        self.log.finish_entry(entry, step.started, step.waited, step.results)
        self.on_entry(entry)

    def _count(
        self, micro_batches: list[LoadedBatch] | None, stop_requested: bool
    ) -> dict[str, float]:
        """Count tokens, samples, bad samples and signals of all ranks, in a single all-reduce."""
        stage, world = self.passes.stage, self.passes.world
        replicas = stage.count_replicas(world.size)
        micro_steps = stage.batch_size // (stage.micro_batch_size * replicas)
        counted = micro_batches if self.passes.counts and micro_batches is not None else ()
        counts = {
            **self.log.count(counted, micro_steps, self.finished + 1),
            "stop": float(stop_requested),
            "without_batch": float(micro_batches is None),
        }
        return dict(zip(counts, world.sum([*counts.values()]), strict=True))

    def _launch(
        self, micro_batches: list[LoadedBatch], counts: dict[str, float], started: float
    ) -> _LaunchedStep:
        """Launch the passes and the update, and read the previous step's results meanwhile."""
        passes, number = self.passes, self.finished + 1
        _, sampler_state = self.sampler.step(self.sampler_state)
        bad = self.log.bad_samples.entry(
            counts, partial(self.sampler.count_by_source, sampler_state)
        )
        lr = passes.set_lr(stage_lr_factor(passes.stage, self.finished, self.total_steps))
        passes.set_train_mode()
        divisor = counts["supervised_tokens" if passes.preference is None else "samples"]
        if not divisor:
            raise ValueError(
                f"stage {self.name}, step {number}: the batch has no supervised token; check the "
                "template and the answers of the data"
            )
        results = passes.update(micro_batches, divisor, self.read, step=number)
        self.finished, self.sampler_state = number, sampler_state
        entry = {
            "kind": "step",
            "stage": self.name,
            "step": number,
            "total_steps": self.total_steps,
            "lr": lr,
            **bad,
        }
        return _LaunchedStep(
            number=number,
            started=started,
            waited=self.log.launch(),
            micro_batches=micro_batches,
            divisor=divisor,
            results=results,
            entry=entry,
        )

    def _check_finite(self, step: _LaunchedStep) -> tuple[float, float | None]:
        """Wait for a step and return loss and norm; a skipped one is counted."""
        rank_loss, norm = step.results.wait()
        loss = self.passes.world.sum([rank_loss])[0]
        if norm is None or math.isfinite(norm):
            if math.isfinite(loss):
                return loss, norm
            raise ValueError(
                f"stage {self.name}, step {step.number}: the loss is {loss}; lower the learning "
                "rates or raise warmup_ratio, and continue with --resume auto "
                "divergence.action=stop, which starts from before a spike"
            )
        self.skipped_steps += 1
        allowed = self.passes.stage.max_skipped_steps
        if self.skipped_steps <= allowed:
            return loss, norm
        # No weight was updated, so repeating the passes finds the parameters.
        output, names = self.passes.find_bad_values(step.micro_batches, step.divisor)
        if output is not None and step.number == 1:
            raise ValueError(
                f"stage {self.name}, step 1: the loss is {loss}, because the output of {output} is "
                "NaN or infinite (above 3.4e38 in BF16 and FP32); no weight was changed: start "
                "from another checkpoint, or check the data"
            )
        where = f"first in {names[0]}, one of {len(names)}" if names else "not when repeated"
        where += "" if output is None else f", and in the output of {output}"
        cudnn = self.passes.world.device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
        hint = ", or set cudnn_attention=false (cuDNN attention was allowed)" if cudnn else ""
        raise ValueError(
            f"stage {self.name}, step {step.number}: gradients are NaN or infinite ({where}; the "
            f"loss is {loss}); no weight was changed. {self.skipped_steps} steps were skipped so "
            f"far, max_skipped_steps is {allowed}: lower the learning rates, raise warmup_ratio or "
            f"raise max_skipped_steps{hint}, and continue with "
            "--resume auto (divergence.action=stop then starts from before a spike)"
        )
