"""How much a step trains on, how fast, in how much memory, and where its time goes.

Every rank counts its own micro-batches on the CPU, from what the loader made; the step adds these
numbers up with its others, in the one sum over the ranks that it has.

The phases of a step are timed on request (``log_phases``). On a GPU a phase is what passes there
between two events in the stream: the CPU runs ahead and its clock would measure launches alone.
Events are asked for their times when the step has read its loss, which waits for the GPU in any
case and comes after the optimizer's work in the stream. So the step has not one wait more than
without this. On a CPU the clock is ``perf_counter``.
"""

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch

from coat_data.load.collate import Batch
from coat_data.load.encode import IGNORE_INDEX
from coat_data.load.loader import REPLAYED, LoadedBatch
from coat_data.media.sampling import VIDEO_COUNTS
from coat_vlm.config import MODULES
from coat_vlm.distributed import World
from coat_vlm.fp8 import captured_bytes
from coat_vlm.model.flops import ModelFlops, Work, model_flops, why_not_counted
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.train.tracking import say

_COUNTS = ("trained_tokens", "tokens", "samples", "tiles", "vision_tokens")

Phase = Literal["to_device", "forward", "backward", "optimizer"]

PHASES = ("data_wait", "to_device", "forward", "backward", "optimizer", "rest")
"""All of a step, in its order: waiting for data; copying batches to the device; the forward pass
with the loss; the backward pass with what ZeRO communicates in it; clipping and the optimizer's
step; whatever is left, such as sums over the ranks. Validation and saving are between steps."""


class Throughput:
    """Counts the steps of one stage.

    Args:
        model: with the stage's modules made trainable, before DeepSpeed gets it.
        world: the processes of the run.
    """

    def __init__(self, model: CoatVlm, world: World) -> None:
        self._image_token_id: int | None = model.config.image_token_id
        self._ranks = world.size
        self._flops: ModelFlops | None = None
        why = why_not_counted(model.language_model)
        if why is None:
            self._flops = model_flops(model)
        else:
            say(world, f"  no TFLOP/s: the model's work is not known, as {why}")

    def count(self, micro_batches: Sequence[LoadedBatch]) -> dict[str, float]:
        """What this rank's micro-batches of a step hold, to be summed over the ranks."""
        names = (*_COUNTS, *VIDEO_COUNTS, REPLAYED, *MODULES)
        counts: dict[str, float] = dict.fromkeys(names, 0.0)
        for loaded in micro_batches:
            work = work_of(loaded.batch, self._image_token_id)
            found: dict[str, float] = {
                "trained_tokens": work.trained_tokens,
                "tokens": int(loaded.batch["attention_mask"].sum()),
                "samples": loaded.num_samples,
                "tiles": work.tiles,
                "vision_tokens": work.vision_tokens,
                **{name: loaded.counts.get(name, 0) for name in (*VIDEO_COUNTS, REPLAYED)},
            }
            if self._flops is not None:
                found |= self._flops.of(work)
            for name, number in found.items():
                counts[name] += number
        return counts

    def row(self, counts: Mapping[str, float]) -> dict[str, Any]:
        """Sums of :meth:`count` as metrics.jsonl has them.

        ``tiles``: tiles of images, and frames. ``vision_tokens``: positions of the language model
        that their features fill; all others of ``tokens`` are text. ``tflop``: model FLOPs of the
        step / 1e12 by part (:mod:`coat_vlm.model.flops`), where they are known. ``videos``, and
        ``replayed_rows`` where there are any: what happened while media were read.
        """
        row: dict[str, Any] = {name: int(counts[name]) for name in _COUNTS}
        if self._flops is not None:
            row["tflop"] = {name: _digits(counts[name] / 1e12) for name in MODULES if counts[name]}
        row["videos"] = {name: int(counts[name]) for name in VIDEO_COUNTS if counts[name]}
        if counts[REPLAYED]:
            row[REPLAYED] = int(counts[REPLAYED])
        return row

    def rates(self, row: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """Rates of a step's row: over all ranks, but TFLOP/s per GPU.

        Args:
            row: has tokens, samples and :meth:`row`'s.
            seconds: of the step, with its wait for data.
        """
        tokens, vision_tokens = row["tokens"], row["vision_tokens"]
        rates = {
            "tokens_per_s": round(tokens / seconds, 1),
            "vision_tokens_per_s": round(vision_tokens / seconds, 1),
            "text_tokens_per_s": round((tokens - vision_tokens) / seconds, 1),
            "samples_per_s": round(row["samples"] / seconds, 2),
        }
        if "tflop" in row:
            own = sum(row["tflop"].values()) / self._ranks
            rates["tflop_per_s_per_gpu"] = _digits(own / seconds)
        return rates


def work_of(batch: Batch, image_token_id: int | None) -> Work:
    """What a micro-batch holds, without its padding.

    Args:
        batch: on the CPU; padded on the right, or packed.
        image_token_id: the placeholder of image features; None for a language model alone.
    """
    mask = batch["attention_mask"].bool()
    placed = 0
    if image_token_id is not None:
        placed = int(((batch["input_ids"] == image_token_id) & mask).sum())
    if "cu_seq_lens_q" in batch:
        used = int(mask.sum())  # what fills the row up is the last sequence
        bounds = batch["cu_seq_lens_q"].tolist()
        lengths = [end - start for start, end in pairwise(bounds) if start < used]
    else:
        lengths = mask.sum(1).tolist()
    return Work(
        tiles=len(batch["pixel_values"]),
        vision_tokens=placed,
        trained_tokens=trained_tokens(batch),
        lengths=lengths,
    )


def trained_tokens(batch: Batch) -> int:
    """Tokens with a target; the first of a row predicts nothing."""
    return int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())


def _digits(number: float) -> float:
    return float(f"{number:.5g}")


class PeakMemory:
    """The largest memory of this process so far.

    Args:
        device: GPU, whose allocated memory it is; of a CPU, the process's resident set.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured = 0

    def read(self) -> float:
        """In MB, with what CUDA graphs hold."""
        if self._device.type != "cuda":
            return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1)
        peak = torch.cuda.max_memory_allocated(self._device) + self._captured
        if self._captured != captured_bytes():
            # Counted as allocated in the step that captured it, and never after that.
            self._captured = captured_bytes()
            self.reset()
        return round(peak / 1e6, 1)

    def reset(self) -> None:
        """Forget what was taken so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


class PhaseClock:
    """Times the phases of one process's steps, summed over micro-batches.

    Args:
        device: where the work is done.
        enabled: False times nothing.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._on_gpu = device.type == "cuda"
        self._enabled = enabled
        self._in_step = False
        self._spans: list[tuple[Phase, Any, Any]] = []

    def start(self) -> None:
        """A step begins."""
        self._in_step = True

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Time a part of a phase; outside of steps, as in validation, nothing is timed."""
        if not (self._enabled and self._in_step):
            yield
            return
        begin = self._now()
        yield
        self._spans.append((phase, begin, self._now()))

    def row(self, data_wait: float, seconds: float) -> dict[str, dict[str, float]]:
        """``phases`` as metrics.jsonl has them: seconds that add up to those of the step.

        Args:
            data_wait: seconds that the step waited for its data.
            seconds: of the whole step, whose loss has been read.
        """
        if not self._enabled:
            return {}
        found = dict.fromkeys(PHASES, 0.0) | {"data_wait": data_wait}
        for phase, begin, end in self._spans:
            found[phase] += begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
        self._spans.clear()
        self._in_step = False
        found["rest"] = max(0.0, seconds - sum(found.values()))
        return {"phases": {phase: round(value, 5) for phase, value in found.items()}}

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
