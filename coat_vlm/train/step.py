"""One optimizer step: learning rates, forward, backward, clip, optimizer, log.

The loss of a micro-batch is the sum over its tokens, divided by the number of supervised tokens of
all micro-batches and ranks. The gradient is therefore that of the mean loss per supervised token of
the whole batch, and does not depend on the split into micro-batches and ranks. In a stage ``dpo``
it is the sum over its pairs, divided by the number of pairs.

Steps may overlap: the CPU launches the passes of a step's first micro-batch before it reads the
loss and the norm of the previous step, so that the GPU does not wait while the CPU logs a step,
loads the next batch and launches its first kernels. CoatAdamW skips a step with non-finite
gradients on the GPU. The results of a step are read and checked before the next one changes
weights.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from transformers import PreTrainedModel

from coat_data.load.collate import Batch
from coat_data.load.loader import LoadedBatch
from coat_data.mixture.packing import Sampler
from coat_data.mixture.sampler import SamplerState
from coat_kernels import share_scales
from coat_vlm.checkpoint.metadata import Progress
from coat_vlm.config import StageConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import SpareMemory, captured_bytes
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.placeholders import copy_to_device
from coat_vlm.model.sequence_parallel import SHARD, SequenceGroup, shard_batch
from coat_vlm.model.vlm import module_parameters
from coat_vlm.optim import CoatAdamW, lr_factor
from coat_vlm.train.bad_samples import BadSamples
from coat_vlm.train.fp8_monitor import BlockMonitor, Fp8Record
from coat_vlm.train.model_setup import set_train_mode
from coat_vlm.train.preference import Preference, count_pairs
from coat_vlm.train.throughput import (
    PeakMemory,
    PhaseClock,
    Throughput,
    count_supervised_tokens,
)
from coat_vlm.train.tracking import Metrics

_CPU_INPUTS = frozenset(
    (
        *("attention_mask", "labels", "image_grids", "frame_groups", "cu_seq_lens_q"),
        *("max_length_q", "image_sizes", "batch_num_images", SHARD),
    )
)
"""Inputs that the model reads on the CPU, to decide on shapes without waiting for the GPU."""


class _Results(NamedTuple):
    """The loss of this rank and the gradient norm of a step, which the GPU may not have yet."""

    copied: Tensor
    """FP64 [1] or [2] on the CPU: the loss, and the norm unless it is not computed."""
    done: torch.cuda.Event | None
    """When the step has ended and its results are copied; None on a CPU."""

    def wait(self) -> tuple[float, float | None]:
        """Wait for the step, but for nothing that was launched later; return loss and norm."""
        if self.done is not None:
            self.done.synchronize()
        loss, *norm = self.copied.tolist()
        return loss, norm[0] if norm else None


@dataclass(slots=True, kw_only=True)
class _LaunchedStep:
    """A step that was launched, and whose results are not read yet."""

    number: int
    started: float
    """``time.perf_counter()`` before loading the micro-batches."""
    waited: float
    """Seconds of waiting for its micro-batches, unless an earlier step was unread then."""
    micro_batches: list[LoadedBatch]
    divisor: float
    sampler_state: SamplerState
    """State of the sampler after the step."""
    results: _Results
    checked: tuple[float, float | None] | None = None
    """Loss of all ranks and norm, if they are checked already."""
    row: dict[str, Any] = field(default_factory=dict)
    """What is known of the step's row of metrics.jsonl."""


@dataclass(slots=True, kw_only=True)
class TrainStep:
    """Runs and logs the optimizer steps of one stage."""

    name: str
    """The stage's name."""
    stage: StageConfig
    engine: DeepSpeedEngine
    model: PreTrainedModel
    """The engine's module."""
    world: World
    total_steps: int
    """Number of steps of the stage, for the learning rate schedule."""
    sampler: Sampler
    """Returns the samples of each step."""
    row_tokens: int | None
    """Token budget of a packed row; None without packing."""
    clip_here: bool
    """Whether this class clips gradients, instead of DeepSpeed."""
    overlaps: bool = False
    """Whether a step's results may be read while the next step runs. A single process must train
    with CoatAdamW; see :func:`coat_vlm.train.engine.steps_overlap`."""
    spare_memory: SpareMemory
    """Uses the memory that steps leave."""
    sequence: SequenceGroup | None = None
    """The ranks that share the tokens of each micro-batch; None without sequence parallelism."""
    preference: Preference | None = None
    """The loss of a stage ``dpo``; None for that of supervised tokens."""
    metrics: Metrics
    throughput: Throughput
    bad_samples: BadSamples
    phases: PhaseClock
    memory: PeakMemory
    fp8: Fp8Record | None = None
    """Measures FP8 in the first and the last step."""
    monitor: BlockMonitor | None = None
    """Compares FP8 blocks with BF16 at intervals."""
    on_row: Callable[[dict[str, Any], SamplerState], None] = lambda *_: None
    """Called with a step's row of metrics.jsonl and the state of the sampler after the step, before
    the next step changes weights. What it raises ends a next step that was launched meanwhile."""
    finished: int = 0
    """Number of finished steps; the results of the latest may be unread."""
    skipped_steps: int = 0
    """Number of steps skipped because of non-finite gradients, since this process started or went
    back."""
    sampler_state: SamplerState = field(default_factory=SamplerState)
    """State of the sampler after the last step."""
    mode_is_set: bool = False
    """Whether the modules' modes were set; a validation sets the whole model to evaluation mode."""
    launched: _LaunchedStep | None = None
    """The latest step, until its results are read."""
    read_at: float = -math.inf
    """``time.perf_counter()`` when results were read last."""
    waited: float = 0.0
    """Seconds of waiting for micro-batches since the latest step was launched. While it is unread,
    the wait for the next one's is in its row, as in its ``step_s``."""
    begun: torch.cuda.Event | None = None
    """When the step that is being launched began on the GPU."""
    captured: int = field(default_factory=captured_bytes)
    """Bytes of CUDA graphs when results were read last."""

    def __call__(
        self,
        micro_batches: list[LoadedBatch] | None,
        started: float,
        data_wait: float = 0.0,
        stop_requested: bool = False,
        *,
        wait: bool = True,
    ) -> bool:
        """Run one optimizer step.

        Its results are read, checked, logged and passed to ``on_row``: before this call returns, or
        during the next call if steps overlap.

        Args:
            micro_batches: the micro-batches of this rank; None if a signal ended the wait for
                them. No rank then runs the step.
            started: ``time.perf_counter()`` before loading the micro-batches.
            data_wait: seconds of waiting for the micro-batches.
            stop_requested: whether this process received a signal.
            wait: whether the results must be read before this call returns. They also are after a
                signal and if FP8 is measured in the step.

        Returns:
            Whether any process received a signal. This step's results are read then.

        Raises:
            ValueError: too many rows are bad, the loss is not finite, more than
                ``max_skipped_steps`` steps had non-finite gradients, the batch has no supervised
                token, or a trainable module gets no gradient.
        """
        self.waited += data_wait
        self.begun = _record_event(self.world.device)
        number = self.finished + 1
        monitor = None if self.monitor is None or not self.monitor.is_due(number) else self.monitor
        fp8 = self.fp8 if number in (1, self.total_steps) else None
        measured = monitor is not None or fp8 is not None
        if micro_batches is None or stop_requested or measured:
            self.read()
        counts = self._count(micro_batches, stop_requested)
        if micro_batches is None or counts["without_batch"]:
            return True
        if fp8 is not None and number == 1:
            set_train_mode(self.model, self.stage)
            fp8.footprint(self.model, micro_batches[0].batch, self.stage.sequence_parallel)
        self.phases.start()
        with ExitStack() as measurements:
            if monitor is not None:
                measurements.enter_context(monitor.watch(self.name, number, self.metrics.write))
            if fp8 is not None:
                measurements.enter_context(fp8.watch(number, self.engine.client_optimizer))
            _, sampler_state = self.sampler.step(self.sampler_state)
            bad = self.bad_samples.row(counts, lambda: self.sampler.count_by_source(sampler_state))
            lr = self._set_lr()
            if not (self.mode_is_set and self.model.training):
                # All modules are visited: 9 ms with adapters on 7B parameters.
                set_train_mode(self.model, self.stage)
                self.mode_is_set = True
            divisor = counts["supervised_tokens" if self.preference is None else "samples"]
            results = self._update(micro_batches, divisor)
            self.finished, self.sampler_state = number, sampler_state
            launched = _LaunchedStep(
                number=number,
                started=started,
                waited=self.waited,
                micro_batches=micro_batches,
                divisor=divisor,
                sampler_state=sampler_state,
                results=results,
            )
            if measured:  # the search for NaN repeats the passes, with the blocks of this step
                launched.checked = self._check_finite(launched)
        launched.row = self._start_row(lr, counts, bad, measured)
        self.launched, self.waited, self.begun = launched, 0.0, None
        stop = counts["stop"] > 0
        if wait or stop or measured or not self.overlaps:
            self.read()
        return stop

    def read(self) -> None:
        """Wait for the results of the latest step, check and log them, unless that was done.

        Raises:
            ValueError: see :meth:`__call__`; and what ``on_row`` raises.
        """
        step, self.launched = self.launched, None
        if step is None:
            return
        loss, norm = step.checked or self._check_finite(step)
        row = step.row | {
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
            "skipped_steps": self.skipped_steps,
        }
        if self.preference is not None:  # such steps do not overlap
            row |= self.preference.metrics()
        now = time.perf_counter()
        # A step that overlaps with the previous one takes the time since that one was read.
        seconds, self.read_at = now - max(step.started, self.read_at), now
        waited, self.waited = self.waited, 0.0
        if self.begun is not None and step.results.done is not None:
            # What counts is the GPU's idle time: from the end of this step to the next one's start.
            self.begun.synchronize()
            waited = min(waited, step.results.done.elapsed_time(self.begun) / 1e3)
        waited += step.waited
        captured, self.captured = self.captured, captured_bytes()
        if self.captured > captured:
            row["captured"] = True
        row |= {
            **self.throughput.rates(row, seconds),
            "step_s": round(seconds, 4),
            "data_wait_s": round(waited, 4),
            **self.phases.row(waited, seconds),
        }
        self.metrics.write(row)
        self.on_row(row, step.sampler_state)

    @property
    def counts(self) -> bool:
        """Whether this rank counts its micro-batches, which other ranks may also have read."""
        return self.sequence is None or self.sequence.rank == 0

    def go_back(self, progress: Progress, bad_samples: BadSamples) -> None:
        """Continue from an earlier step, whose checkpoint is loaded."""
        self.finished = progress.step
        self.sampler_state = SamplerState(*progress.sampler_state)
        self.bad_samples = bad_samples
        self.skipped_steps = 0
        self.model.zero_grad(set_to_none=True)  # of a step that was launched and is given up

    def _count(
        self, micro_batches: list[LoadedBatch] | None, stop_requested: bool
    ) -> dict[str, float]:
        """Count tokens, samples, bad samples and signals of all ranks, in a single all-reduce."""
        replicas = self.stage.count_replicas(self.world.size)
        micro_steps = self.stage.batch_size // (self.stage.micro_batch_size * replicas)
        counted = micro_batches if self.counts and micro_batches is not None else ()
        own = {
            **self.throughput.count(counted, micro_steps),
            **self.bad_samples.note(counted, self.finished + 1),
            "stop": float(stop_requested),
            "without_batch": float(micro_batches is None),
        }
        return dict(zip(own, self.world.sum([*own.values()]), strict=True))

    def _set_lr(self) -> dict[str, float]:
        """Set the learning rates of this step and return them by module."""
        factor = lr_factor(
            self.finished,
            self.total_steps,
            round(self.stage.warmup_ratio * self.total_steps),
            self.stage.lr_scheduler_type,
            self.stage.min_lr_ratio,
        )
        rates = {}
        optimizer: Any = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
            rates[group["module"]] = group["lr"]
        return rates

    def _update(self, micro_batches: list[LoadedBatch], divisor: float) -> _Results:
        """Launch forward, backward and the optimizer, and read the previous step's results."""
        if not divisor:
            raise ValueError(
                f"stage {self.name}, step {self.finished + 1}: the batch has no supervised token; "
                "check the template and the answers of the data"
            )
        # DeepSpeed divides by the number of micro-batches (backward) and of ranks (averaging). Each
        # rank's loss is the sum over its own tokens, also if ranks share a micro-batch.
        undo_averaging = len(micro_batches) * self.world.size
        total_loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        norm: Tensor | float | None = None
        with ExitStack() as shared_weights:
            shared_weights.enter_context(self.spare_memory.share_weights(len(micro_batches)))
            if self.sequence is not None:
                shared_weights.enter_context(share_scales(self.sequence.raise_to_largest))
            for number, loaded in enumerate(micro_batches, start=1):
                first, last = self.finished == 0 and number == 1, number == len(micro_batches)
                loss = self.loss(loaded.batch, divisor)
                total_loss += loss.detach().double()
                check = self._check_modules_get_gradients() if first else nullcontext()
                with check, self.phases.measure("backward"):
                    self.engine.backward(loss * undo_averaging)
                # The GPU has work meanwhile. No weight has changed since the previous step, so its
                # passes can be repeated, and a rollback has nothing to undo.
                self.read()
                with self.phases.measure("optimizer"):
                    if last:
                        if self.clip_here:
                            norm = self._clip()
                        shared_weights.close()  # the step changes weights and needs the memory
                    self.engine.step()  # updates weights only after the last micro-batch
        self.spare_memory.after_step()
        if not self.clip_here:
            norm = self.engine.get_global_grad_norm()
        results = [total_loss]
        if norm is not None:
            results.append(torch.as_tensor(norm, dtype=torch.float64, device=self.world.device))
        copied = torch.stack(results).to("cpu", non_blocking=True)
        return _Results(copied, _record_event(self.world.device))

    def loss(self, batch: Batch, divisor: float) -> Tensor:
        """Run the forward pass; return the sum of the token losses divided by ``divisor``.

        With sequence parallelism these are the tokens of this rank. In a stage ``dpo`` it is the
        sum of the losses of the pairs.
        """
        with self.phases.measure("to_device"):
            own: Mapping[str, Any] = batch
            if self.sequence is not None:
                own = shard_batch(batch, self.sequence, cast(CoatVlmConfig, self.model.config))
            inputs = copy_batch_to_device(own, self.world.device)
        with self.phases.measure("forward"):
            if self.preference is not None:
                return self.preference.loss(self.engine, inputs, divisor)
            # Without skip_logits the model would also return logits in validation.
            return self.engine(**inputs, num_items_in_batch=divisor, skip_logits=True).loss

    def count_terms(self, batch: Batch) -> int:
        """Count the terms of the sum in :meth:`loss`: supervised tokens, or pairs."""
        if self.preference is not None:
            return count_pairs(batch["labels"])
        return count_supervised_tokens(batch)

    def _clip(self) -> Tensor:
        """Clip the gradients, or have the optimizer skip them if they are not finite.

        Returns:
            The norm [] before clipping. CoatAdamW reads the scale of the gradients on their device;
            for torch's AdamW, this function waits for the norm.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        limit = self.stage.max_grad_norm or math.inf
        optimizer: Any = self.engine.optimizer
        if isinstance(optimizer, CoatAdamW):
            norm = _measure_norm([p.grad for p in parameters if p.grad is not None])
            divisor = torch.clamp((norm.double() + 1e-6) / limit, min=1.0)  # as DeepSpeed does
            optimizer.grad_scale = torch.where(norm.isfinite(), 1.0 / divisor, math.nan).float()
            return norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        if not math.isfinite(norm):
            for parameter in parameters:  # AdamW skips parameters without a gradient
                parameter.grad = None
        return norm

    def _check_finite(self, step: _LaunchedStep) -> tuple[float, float | None]:
        """Wait for a step; return the loss of all ranks and the gradient norm if it was computed.

        A step that DeepSpeed or :meth:`_clip` skipped is counted.

        Raises:
            ValueError: the loss is not finite, or too many steps were skipped.
        """
        own_loss, norm = step.results.wait()
        loss = self.world.sum([own_loss])[0]
        if norm is None or math.isfinite(norm):
            if math.isfinite(loss):
                return loss, norm
            raise ValueError(
                f"stage {self.name}, step {step.number}: the loss is {loss}; lower the learning "
                "rates or raise warmup_ratio, and continue with --resume auto "
                "divergence.action=stop, which starts from before a spike"
            )
        self.skipped_steps += 1
        if self.skipped_steps <= self.stage.max_skipped_steps:
            return loss, norm
        # No weight was updated, so repeating the passes finds the parameters.
        bad: set[str] = set()

        def check(name: str, gradient: Tensor) -> None:
            if name not in bad and not gradient.isfinite().all():
                bad.add(name)

        with _gradient_hooks(self.model.named_parameters(), check):
            for loaded in step.micro_batches:
                self.engine.backward(self.loss(loaded.batch, step.divisor))
        names = sorted(set[str]().union(*self.world.gather(bad)))
        where = f"first in {names[0]}, one of {len(names)}" if names else "not when repeated"
        raise ValueError(
            f"stage {self.name}, step {step.number}: gradients are NaN or infinite ({where}; the "
            f"loss is {loss}); no weight was changed. {self.skipped_steps} steps were skipped so "
            f"far, max_skipped_steps is {self.stage.max_skipped_steps}: lower the learning rates, "
            f"raise warmup_ratio or raise max_skipped_steps{_name_cudnn(self.world.device)}, and "
            "continue with --resume auto (divergence.action=stop then starts from before a spike)"
        )

    def _start_row(
        self, lr: dict[str, float], counts: dict[str, float], bad: dict[str, Any], measured: bool
    ) -> dict[str, Any]:
        """Return what is known of a step's row of metrics.jsonl before its results are read."""
        if measured:
            self.memory.reset()
        row = {
            "kind": "step",
            "stage": self.name,
            "step": self.finished,
            "total_steps": self.total_steps,
            "loss": None,
            "grad_norm": None,
            "lr": lr,
            **self.throughput.row(counts),
            **bad,
            # Measuring FP8 needs memory that training does not.
            "peak_memory_mb": None if measured else self.memory.read(),
        }
        if self.row_tokens is not None:
            budget = self.stage.batch_size * self.row_tokens
            row["packing_fill"] = round(row["tokens"] / budget, 4)
        return row | {"bad_samples": self.bad_samples.total}

    @contextmanager
    def _check_modules_get_gradients(self) -> Iterator[None]:
        """Check that the backward pass in this context reaches every trainable module."""
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


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that a GPU reaches after what was launched so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _name_cudnn(device: torch.device) -> str:
    """Return the setting to try against NaN gradients if cuDNN attention is allowed, or ""."""
    if device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        return ""
    return ", or set cudnn_attention=false (cuDNN attention was allowed)"


def copy_batch_to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy the model's inputs to a device, except those that the model reads on the CPU."""
    inputs: dict[str, Any] = {**batch}
    inputs |= inputs.pop("extras", {})
    return {
        name: value if name in _CPU_INPUTS else copy_to_device(value, device)
        for name, value in inputs.items()
    }


def _measure_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm [] of all gradients in FP32, also of BF16 ones, without copying them.

    Args:
        gradients: at least one.
    """
    norms = torch._foreach_norm(gradients, 2.0, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


@contextmanager
def _gradient_hooks(
    parameters: Iterable[tuple[str, nn.Parameter]], hook: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``hook`` with the name and the gradient of each parameter, before ZeRO reduces it."""
    with ExitStack() as hooks:
        for name, parameter in parameters:
            if parameter.requires_grad:
                hooks.callback(parameter.register_hook(partial(hook, name)).remove)
        yield
