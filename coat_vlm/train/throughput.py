"""Measures a step: tokens, throughput and peak memory."""

import resource
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from coat_data.load.collate import Batch
from coat_data.load.encode import IGNORE_INDEX
from coat_data.load.loader import LoadedBatch
from coat_data.media.sampling import VIDEO_COUNTS
from coat_data.sample import NOTES
from coat_vlm.config import MODULES
from coat_vlm.distributed import World
from coat_vlm.fp8 import captured_bytes
from coat_vlm.model.flops import ModelFlops, Work, count_flops
from coat_vlm.model.placeholders import KINDS
from coat_vlm.train.tracking import print_on_main

_COUNTS = ("supervised_tokens", "tokens", "samples", "tiles", "vision_tokens")


class Throughput:
    """Counts tokens, samples and FLOPs of the steps of one stage.

    ``model`` has ``requires_grad`` set for the stage, and is not in an engine yet.
    """

    def __init__(self, model: PreTrainedModel, world: World, sequence_parallel: int = 1) -> None:
        ids = (getattr(model.config, f"{kind}_token_id", None) for kind in KINDS)
        self._media_token_ids = [token for token in ids if token is not None]
        self._replica = world.rank // sequence_parallel
        self._replicas = world.size // sequence_parallel
        self.flops: ModelFlops | None = None  # not known
        try:
            self.flops = count_flops(model)
        except ValueError as error:
            print_on_main(world, f"  no TFLOP/s: the model's FLOPs are not known: {error}")

    def count(self, micro_batches: Sequence[LoadedBatch], micro_steps: int) -> dict[str, float]:
        """Count this rank's micro-batches of a step; the result is to be summed over the ranks.

        There are no micro-batches if a signal ended the wait for them; otherwise ``micro_steps``.
        """
        names = (*_COUNTS, *VIDEO_COUNTS, *NOTES, *MODULES)
        counts: dict[str, float] = dict.fromkeys(names, 0.0)
        if self.flops is not None and self._replicas > 1:
            slots = product(range(micro_steps), range(self._replicas))
            counts |= {f"flops/{step}/{replica}": 0.0 for step, replica in slots}
        for step, loaded in enumerate(micro_batches):
            work = measure_work(loaded, self._media_token_ids)
            measured: dict[str, float] = {
                "supervised_tokens": work.supervised_tokens,
                "tokens": int(loaded.batch["attention_mask"].sum()),
                "samples": loaded.num_samples,
                "tiles": loaded.counts.get("images", work.units),
                "vision_tokens": work.vision_tokens,
                **{name: loaded.counts.get(name, 0) for name in (*VIDEO_COUNTS, *NOTES)},
            }
            if self.flops is not None:
                measured |= self.flops.count(work)
                if self._replicas > 1:
                    counts[f"flops/{step}/{self._replica}"] = sum(
                        measured[name] for name in MODULES
                    )
            for name, number in measured.items():
                counts[name] += number
        return counts

    def entry(self, counts: Mapping[str, float]) -> dict[str, Any]:
        """Convert sums of :meth:`count` to entries of metrics.jsonl.

        ``tiles``: also video frames. ``tflop``: model FLOPs / 1e12 by module. ``imbalance``: see
        :func:`measure_imbalance`. ``videos``, ``data_notes``: events while media were read.
        """
        entry: dict[str, Any] = {name: int(counts[name]) for name in _COUNTS}
        if self.flops is not None:
            entry["tflop"] = {
                name: round_digits(counts[name] / 1e12) for name in MODULES if counts[name]
            }
            flops = [number for name, number in counts.items() if name.startswith("flops/")]
            if flops:
                entry["imbalance"] = round(
                    measure_imbalance(np.reshape(flops, (-1, self._replicas))), 4
                )
        entry["videos"] = {name: int(counts[name]) for name in VIDEO_COUNTS if counts[name]}
        notes = {name: int(counts[name]) for name in NOTES if counts[name]}
        if notes:
            entry["data_notes"] = notes
        return entry


def measure_imbalance(work: np.ndarray) -> float:
    """Return the share of the time that ranks wait for each other, if time is proportional to work.

    It is the mean over micro-steps of ``1 - mean / max`` over ranks: with ZeRO-2 and ZeRO-3 ranks
    wait in every micro-step. With ZeRO-0 and ZeRO-1 they wait once a step, and less. ``work`` has
    the shape (micro-steps, ranks).
    """
    largest = work.max(axis=1)
    return float(np.mean(1 - work.mean(axis=1) / largest))


def measure_work(loaded: LoadedBatch, media_token_ids: Sequence[int]) -> Work:
    """Count tiles and tokens of a micro-batch on the CPU, without padding.

    ``media_token_ids`` are the placeholders of features of images and videos.
    """
    batch, counts = loaded.batch, loaded.counts
    mask = batch["attention_mask"].bool()
    placed = torch.isin(batch["input_ids"], torch.tensor(media_token_ids, dtype=torch.int64)) & mask
    answers = max(1, len(mask) // loaded.num_samples)  # two of a preference pair
    if "cu_seq_lens_q" in batch:
        used = int(mask.sum())  # padding is the last sample of a packed sequence
        bounds = batch["cu_seq_lens_q"].tolist()
        lengths = [end - start for start, end in pairwise(bounds) if start < used]
    else:
        lengths = mask.sum(1).tolist()
    return Work(
        units=counts["units"] * answers if "units" in counts else len(batch["pixel_values"]),
        pairs=counts.get("pairs", 0) * answers,
        vision_tokens=int(placed.sum()),
        supervised_tokens=count_supervised_tokens(batch),
        lengths=lengths,
    )


def count_supervised_tokens(batch: Batch) -> int:
    """Count the tokens with a label; the first token of a sequence is not a target."""
    return int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())


def round_digits(number: float) -> float:
    """Round to five significant digits."""
    return float(f"{number:.5g}")


class PeakMemory:
    """Peak memory of this process so far: allocated on a GPU, the resident set on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured = 0

    def read(self) -> float:
        """Return the peak in MB, including the memory of CUDA graphs."""
        if self._device.type != "cuda":
            return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1)
        peak = torch.cuda.max_memory_allocated(self._device) + self._captured
        if self._captured != captured_bytes():
            # PyTorch counts a graph's memory as allocated only in the step that captured it.
            self._captured = captured_bytes()
            self.reset()
        return round(peak / 1e6, 1)

    def reset(self) -> None:
        """Restart the measurement."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
