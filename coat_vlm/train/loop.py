"""The loop of one stage: steps, and validation, questions and checkpoints between them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coat_data.mixture.sampler import Cursor
from coat_vlm.train.data import StageData
from coat_vlm.train.evaluation import LiveEvaluation
from coat_vlm.train.interrupt import Interrupts
from coat_vlm.train.step import TrainStep
from coat_vlm.train.throughput import trained_tokens
from coat_vlm.train.tracking import StepLine


class Stopped(SystemExit):
    """Training saved a checkpoint after a signal and leaves with this status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoop:
    """Takes the steps of one stage, and does what is due between them."""

    step: TrainStep
    data: StageData
    save: Callable[[int, Cursor], None]
    """Saves a checkpoint, given the step and how far the order of data is used."""
    log_every_steps: int
    evaluation: LiveEvaluation | None = None
    """Asks questions on the way."""

    def train(self) -> None:
        """Run the remaining steps, validating and saving on the way and at the end.

        Raises:
            DataError: a row is bad and none are allowed.
            ValueError: as :class:`coat_vlm.train.step.TrainStep`.
            Stopped: after a signal, when the checkpoint is saved.
        """
        step = self.step
        batches = self.data.loader.steps(step.cursor)
        line = StepLine(
            step.name, step.total_steps, step.finished, self.log_every_steps, step.world
        )
        with Interrupts() as interrupts, line:
            try:
                while step.finished < step.total_steps:
                    started = time.perf_counter()
                    micro_batches = next(batches)
                    data_wait = time.perf_counter() - started
                    row, stop = step(micro_batches, started, data_wait, interrupts.received)
                    line.show(row)
                    self._between_steps(stop, interrupts)
            finally:
                batches.close()

    def _between_steps(self, stop: bool, interrupts: Interrupts) -> None:
        finished, stage = self.step.finished, self.step.stage
        at_end = finished == self.step.total_steps

        def due(interval: int) -> bool:
            return at_end or (interval > 0 and finished % interval == 0)

        if self.data.validation and due(stage.eval_every_steps):
            self._write("val", losses=self.validate())
        if self.evaluation is not None and due(self.evaluation.every):
            self.step.engine.eval()
            self._write("eval", **self.evaluation(self.step.model))
        if stop or due(stage.save_every_steps):
            self.save(finished, self.step.cursor)
        if stop and not at_end:
            # Another rank may have got the signal; launchers only ask that the status is not 0.
            raise Stopped(interrupts.exit_status)

    def validate(self) -> dict[str, float]:
        """Mean loss per supervised token of every validation source, over all ranks."""
        world = self.step.world
        self.step.engine.eval()
        losses = {}
        for name in self.data.validation:
            total = torch.zeros((), dtype=torch.float64, device=world.device)
            tokens = 0
            with torch.no_grad():
                for loaded in self.data.validation_batches(name):
                    total += self.step.loss(loaded.batch, divisor=1).double()
                    tokens += trained_tokens(loaded.batch)
            loss, count = world.sum([total.item(), tokens])
            losses[name] = round(loss / max(1.0, count), 6)
        return losses

    def _write(self, kind: str, **values: Any) -> None:
        row = {"kind": kind, "stage": self.step.name, "step": self.step.finished, **values}
        self.step.metrics.write(row)
