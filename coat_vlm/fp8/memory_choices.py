"""Decides how to use the memory that a training step leaves free.

Two uses make a step faster: CUDA graphs of blocks, where the GPU waits for the CPU
(:mod:`coat_vlm.fp8.cuda_graphs`), and FP8 weights that all micro-batches of a step share
(:mod:`coat_vlm.fp8.weights`), where the GPU does not wait. If almost nothing is left, q, k and v
are no longer saved for backward (``fp8.recompute_qkv``). The settings ``auto`` are decided once,
after two steps: in the first one kernels are compiled, and the optimizer creates its states after
the passes, so that they are not in memory together with the activations. At most half of the free
memory is used, because steps differ and memory fragments.

The GPU waits for the CPU where the CPU is less than a block ahead. How much of a step that is
depends on GPU, CPU, model and batch, so the second step measures it. No choice changes results. All
ranks choose by the least free memory and the longest waits of any of them: they wait for each
other, and ranks that share tokens must repeat attention's exchanges equally often.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from coat_vlm.fp8.convert import Arithmetic, count_fp8_weights, recompute_qkv
from coat_vlm.fp8.cuda_graphs import BlockGraphs, find_graphs
from coat_vlm.fp8.weights import reused_weights

logger = logging.getLogger(__name__)

MAX_SHARE = 0.5
"""Largest share of the free memory that is used."""

MIN_FREE = 0.03
"""Share of the GPU's memory: if less is left, q, k and v are computed again in backward."""

DECIDED_AFTER = 2
"""Steps before the decision."""

MIN_WAITING = 0.03
"""Smallest share of a step during which the GPU waits for launches of blocks that are captured:
graphs paid where it waited for 38 of 890 ms (docs/experiments/step_8b.md)."""

MEMORY_FACTOR = 1.5
"""Ratio of the memory of graphs to the memory of the activations that the blocks save."""


@dataclass(slots=True)
class SpareMemory:
    """Uses the memory that the steps of a stage leave; call :meth:`after_step` after each step."""

    weights: Literal["auto", "recompute"]
    """Whether the micro-batches of a step share FP8 weights: ``fp8.weights``."""
    nbytes: int
    """Bytes of both layouts of all FP8 weights."""
    device: torch.device
    graphs: Sequence[BlockGraphs] = ()
    """Consecutive blocks of which some may be captured."""
    recomputing: nn.Module | None = None
    """The model, if its blocks may compute q, k and v again."""
    weights_fit: bool = False
    """Whether no block is captured, and the memory suffices for shared weights."""
    steps: int = 0
    """Steps so far, until the decision."""
    started: float = 0.0
    """Time at which the last step before the decision began."""
    accumulates: bool = False
    """Whether the last step had several micro-batches."""

    @classmethod
    def of(cls, model: nn.Module, arithmetic: Arithmetic, device: torch.device) -> "SpareMemory":
        """Build it for a model after :meth:`Arithmetic.apply` and ``graph_blocks``."""
        fp8 = arithmetic.fp8
        # Replays quantize the weights in every pass, and repeat what was captured.
        if fp8 is None or fp8.cuda_graphs is True:
            return cls("recompute", 0, device)
        # Row-major and transposed, one byte each.
        nbytes = 2 * count_fp8_weights(model)
        saves = not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        recomputing = model if fp8.recompute_qkv == "auto" and saves else None
        return cls(fp8.weights, nbytes, device, find_graphs(model), recomputing)

    @property
    def shares_weights(self) -> bool:
        """Whether the micro-batches of a step like the last one share FP8 weights."""
        return self.weights == "auto" and self.accumulates and self.weights_fit

    def share_weights(self, micro_batches: int) -> AbstractContextManager[None]:
        """Return the context for the micro-batches of one step."""
        self.accumulates, self.started = micro_batches > 1, time.perf_counter()
        return reused_weights(self.shares_weights)

    def after_step(self) -> None:
        """Decide after the second step, by the memory that its peak left."""
        self.steps += 1
        if self.steps > DECIDED_AFTER:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        step_s, self.started = now - self.started, now
        if self.steps < DECIDED_AFTER:
            for row in self.graphs:
                row.waits.clear()
            return
        free, total = self._measure_memory()
        # By the median, as single passes may have compiled a kernel.
        waits = [len(x) * median(x or [0.0]) / step_s for x in (row.waits for row in self.graphs)]
        tokens, saved = [row.tokens for row in self.graphs], [row.saved for row in self.graphs]
        most = find_largest_of_ranks([-free, *tokens, *saved, *waits], self.device)
        free, n = -most[0], len(self.graphs)
        if self.recomputing is not None and free < MIN_FREE * total:
            free = 0.0
            count = recompute_qkv(self.recomputing)
            logger.info("fp8.recompute_qkv: auto: %d blocks compute q, k and v again", count)
        spare = MAX_SHARE * free
        captures = _limit_graphs(
            self.graphs, most[1:][:n], most[1 + n :][:n], most[1 + 2 * n :], spare
        )
        self.weights_fit = not captures and 0 < self.nbytes < spare
        if self.shares_weights and self.device.type == "cuda":
            torch.cuda.empty_cache()  # idle segments have the sizes of a step without the weights

    def _measure_memory(self) -> tuple[float, float]:
        """Return the bytes that the peak of the steps left, and the bytes of the GPU."""
        if self.device.type != "cuda":
            return float("inf"), float("inf")
        free, total = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.max_memory_allocated(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        limit = total * torch.cuda.get_per_process_memory_fraction(self.device)
        return min(free, limit - reserved) + reserved - allocated, total


def find_largest_of_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value of all ranks; collective if there are several."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [*values]
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def _limit_graphs(
    rows: Sequence[BlockGraphs],
    max_tokens: Sequence[float],
    saved: Sequence[float],
    waits: Sequence[float],
    spare: float,
) -> bool:
    """End the measurement of rows of blocks; return whether any may be captured."""
    chosen = choose_rows(saved, [wait >= MIN_WAITING for wait in waits], spare)
    each = zip(rows, max_tokens, saved, waits, chosen, strict=True)
    for row, tokens, nbytes, waiting, captured in each:
        row.limit(tokens if captured else 0, spare)
        if not tokens:  # on a CPU, or frozen
            continue
        logger.info(
            "fp8.cuda_graphs: auto %s %d FP8 blocks, for which the GPU waits during %.0f%% of a "
            "step; their largest pass had %s tokens and saved %.2f GB, and graphs may take %.2f GB",
            "captures" if captured else "does not capture",
            len(row.blocks),
            100 * waiting,
            f"{tokens:,.0f}",
            nbytes / 1e9,
            spare / 1e9,
        )
    return any(chosen)


def choose_rows(saved: Sequence[float], waits: Sequence[bool], spare: float) -> list[bool]:
    """Choose the rows of blocks to capture: where the GPU waits, if ``spare`` bytes suffice.

    ``saved`` are bytes of the activations of each row. The largest rows are left out first.
    """
    chosen = sorted((i for i, wait in enumerate(waits) if wait), key=saved.__getitem__)
    while chosen and MEMORY_FACTOR * sum(saved[i] for i in chosen) > spare:
        chosen.pop()
    return [i in chosen for i in range(len(saved))]
