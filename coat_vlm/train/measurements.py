"""Which steps of a stage measure FP8: the first, the last, and those of the recipe's monitor."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from coat_data.load.collate import Batch
from coat_vlm.train.fp8_monitor import BlockMonitor, Fp8Record
from coat_vlm.train.passes import Passes
from coat_vlm.train.tracking import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measures FP8 in some steps of one stage."""

    name: str
    """The stage's name."""
    total_steps: int
    record: Fp8Record | None
    """Memory, saturation and states, in the first and the last step; None without FP8."""
    monitor: BlockMonitor
    """Compares FP8 blocks with BF16 at intervals."""
    metrics: Metrics

    def is_due(self, step: int) -> bool:
        """Whether something is measured in this step."""
        return self.monitor.is_due(step) or self._records(step)

    @contextmanager
    def watch(self, step: int, passes: Passes, batch: Batch) -> Iterator[None]:
        """Measure the step in this context, whose first micro-batch is ``batch``."""
        record = self.record if self._records(step) else None
        with ExitStack() as measured:
            if record is not None and step == 1:
                passes.set_train_mode()
                record.footprint(passes.model, batch, passes.stage.sequence_parallel)
            if self.monitor.is_due(step):
                watch = self.monitor.watch(self.name, step, self.metrics.write)
                measured.enter_context(watch)
            if record is not None:
                measured.enter_context(record.watch(step, passes.engine.client_optimizer))
            yield

    def _records(self, step: int) -> bool:
        return self.record is not None and step in (1, self.total_steps)
