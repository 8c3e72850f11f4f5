"""The training loop of one stage: steps, checkpoints, validation and evaluation."""

import dataclasses
import time
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from coat_data.load.loader import LoadedBatch
from coat_vlm.checkpoint.metadata import Progress
from coat_vlm.checkpoint.save import CheckpointSaver
from coat_vlm.distributed import Stopped
from coat_vlm.run.heartbeat import Heartbeat
from coat_vlm.run.signals import SIGNALS
from coat_vlm.train.data import StageData
from coat_vlm.train.divergence import Watchdog
from coat_vlm.train.evaluation import LiveEvaluation
from coat_vlm.train.step import TrainStep
from coat_vlm.train.tracking import StepLine


@dataclass(slots=True, kw_only=True)
class StageLoop:
    """Runs the steps of one stage, and validates, evaluates and saves between them.

    The heartbeat tells the other ranks what this rank is doing.
    """

    step: TrainStep
    data: StageData
    saver: CheckpointSaver
    progress: Progress
    """The stage's entries of trainer.json, at step 0."""
    watchdog: Watchdog
    measured: frozenset[str] = frozenset()
    """Kinds of entries (``val``, ``eval``) that metrics.jsonl has for the step from which the stage
    continues."""
    log_every_steps: int
    heartbeat: Heartbeat
    evaluation: LiveEvaluation | None = None
    saved: int = 0
    """The step of the newest checkpoint."""

    def train(self) -> None:
        """Run the remaining steps; raise Stopped after a signal on any rank, with a checkpoint."""
        step = self.step
        # Killed between saving and measuring: the entries of this step are missing.
        if step.finished and not self._measure(self.measured):
            self._stop()
        batches = self.data.loader.steps(step.sampler_state)
        line = StepLine(
            step.name, step.total_steps, step.finished, self.log_every_steps, step.passes.world
        )

        def handle(entry: dict[str, Any]) -> None:
            line.show(entry)
            self.watchdog.check(entry)

        step.on_entry = handle
        with SIGNALS.handle(), SIGNALS.hold("after this step, with a checkpoint"):
            try:
                while step.finished < step.total_steps:
                    stop = self._run_step(batches)
                    if stop or self._is_due(step.passes.stage.save_steps):
                        self._save()
                    # What a signal or an error leaves out is measured when the stage continues.
                    if stop or not self._measure():
                        self._stop()
                self.saver.finish()
            finally:
                batches.close()

    def _run_step(self, batches: Generator[list[LoadedBatch]]) -> bool:
        step = self.step
        started = time.perf_counter()
        try:
            self.heartbeat.enter("waiting for data", step.finished)
            # None after a signal: the ranks then stop at the last finished step.
            micro_batches = SIGNALS.wait(partial(next, batches))
            data_wait = time.perf_counter() - started
            self.heartbeat.enter("in a training step", step.finished)
            return step(
                micro_batches,
                started,
                data_wait,
                SIGNALS.received is not None,
                wait=self._is_due_after(step.finished + 1),
            )
        except Exception:  # of any kind: it is raised again
            # The previous step is logged, if it was not. Its error comes first.
            step.read()
            raise

    def _save(self) -> None:
        if self.step.finished != self.saved:
            self.heartbeat.enter("saving a checkpoint", self.step.finished)
            begun = time.perf_counter()
            self.saver.save(
                dataclasses.replace(
                    self.progress,
                    step=self.step.finished,
                    bad_samples=self.step.log.bad_samples.total,
                    sampler_state=self.step.sampler_state,
                    spike=self.watchdog.detector.first is not None,
                )
            )
            self.saved = self.step.finished
            self._write("save", save_s=round(time.perf_counter() - begun, 4))

    def _stop(self) -> NoReturn:
        """Save a checkpoint and end the command after a signal on any rank."""
        self._save()
        self.saver.finish()
        # If another rank received the signal, the status is SIGTERM's.
        raise Stopped(SIGNALS.exit_status)

    def _is_due(self, interval: int, step: int | None = None) -> bool:
        step = self.step.finished if step is None else step
        return step == self.step.total_steps or (interval > 0 and step % interval == 0)

    def _is_due_after(self, step: int) -> bool:
        """Return whether the loop may do more after a step than run the next one."""
        stage = self.step.passes.stage
        validates = stage.eval_steps if self.data.validation else 0
        evaluates = 0 if self.evaluation is None else self.evaluation.every
        intervals = (stage.save_steps, validates, evaluates)
        return any(self._is_due(interval, step) for interval in intervals)

    def _measure(self, done: frozenset[str] = frozenset()) -> bool:
        """Validate and evaluate where due, unless that is done; return False after a signal."""
        stage = self.step.passes.stage
        if self.data.validation and self._is_due(stage.eval_steps) and "val" not in done:
            self.heartbeat.enter("computing the validation loss", self.step.finished)
            started = time.perf_counter()
            losses = self.validate()
            if losses is None:
                return False
            seconds = round(time.perf_counter() - started, 4)
            # In the precision of training; ``coat-vlm eval`` has another default.
            self._write("val", precision=self.progress.precision, losses=losses, val_s=seconds)
        evaluation = self.evaluation
        if evaluation is not None and self._is_due(evaluation.every) and "eval" not in done:
            self.heartbeat.enter("answering evaluation questions", self.step.finished)
            self.step.passes.engine.eval()
            values = evaluation(self.step.passes.model)
            if values is None:
                return False
            self._write("eval", precision=self.progress.precision, **values)
        return True

    def validate(self) -> dict[str, float] | None:
        """Return the mean loss per supervised token (or pair) by source; None after a signal."""
        world = self.step.passes.world
        self.step.passes.engine.eval()
        losses = {}
        for name in self.data.validation:
            total = torch.zeros((), dtype=torch.float64, device=world.device)
            terms = 0
            with torch.no_grad():
                for batch in self.data.validation_batches(name):
                    if world.any(SIGNALS.received is not None):
                        return None
                    total += self.step.passes.loss(batch, divisor=1).double()
                    terms += self.step.passes.count_terms(batch) if self.step.passes.counts else 0
            loss, count = world.sum([total.item(), terms])
            losses[name] = round(loss / max(1.0, count), 6)
        return losses

    def _write(self, kind: str, **values: Any) -> None:
        entry = {"kind": kind, "stage": self.step.name, "step": self.step.finished, **values}
        self.step.log.metrics.write(entry)
