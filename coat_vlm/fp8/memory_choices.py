"""Decides what the memory that a training step leaves is used for.

Two uses make a step faster: CUDA graphs of blocks, where the GPU waits for the CPU
(:mod:`coat_vlm.fp8.cuda_graphs`), and FP8 weights that all micro-batches of a step share
(:mod:`coat_vlm.fp8.weights`), where the GPU does not wait. If almost nothing is left, q, k and v
are no longer saved for backward (``fp8.recompute_qkv``). The settings ``auto`` are decided once,
after two steps: in the first one the optimizer creates its states after the passes, so that they
are not in memory together with the activations. At most half of the free memory is used, because
steps differ and memory fragments. All ranks decide by the least free memory of any of them: ranks
that share tokens must quantize weights and repeat attention's exchanges equally often.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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

LAUNCH_S = 4.4e-3
"""Seconds in which the CPU launches both passes of a block: 0.24 to 0.28 s for a tower of 27 blocks
and a language model of 28, on the host of an H200 (docs/experiments/balance.md)."""

FLOPS_PER_S = 850e12
"""Linear layers of both passes on an H200, other kernels included: a Llama-2-7B layer."""

HIDDEN = 2.0
"""If the blocks of a micro-batch compute for this many times as long as their launches take, the
GPU does not wait for them: the CPU is ahead after the first ones of a step."""

HIDDEN_AT_ONCE = 4.0
"""The same for a step of one micro-batch, which begins without a lead: the tower of an 8B model at
a ratio of 3.3 made the GPU wait for 38 of 890 ms (docs/experiments/step_8b.md)."""

MEMORY_FACTOR = 1.5
"""Memory of graphs over that of the activations which the blocks save."""


@dataclass(slots=True)
class SpareMemory:
    """Uses the memory that the steps of a stage leave; call :meth:`after_step` after each step."""

    weights: Literal["auto", "cache", "recompute"]
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
        if self.weights == "auto":
            return self.accumulates and self.weights_fit
        return self.weights == "cache"

    def share_weights(self, micro_batches: int) -> AbstractContextManager[None]:
        """Return the context for the micro-batches of one step."""
        self.accumulates = micro_batches > 1
        return reused_weights(self.shares_weights)

    def after_step(self) -> None:
        """Decide after the second step, by the memory beside its peak."""
        self.steps += 1
        if self.steps != DECIDED_AFTER:
            return
        free, total = self._measure_memory()
        free = find_least_of_ranks(free, self.device)
        if self.recomputing is not None and free < MIN_FREE * total:
            free = 0.0
            count = recompute_qkv(self.recomputing)
            logger.info("fp8.recompute_qkv: auto: %d blocks compute q, k and v again", count)
        spare = MAX_SHARE * free
        captures = _limit_graphs(self.graphs, spare, self.accumulates)
        self.weights_fit = not captures and 0 < self.nbytes < spare
        if self.shares_weights and self.weights == "auto" and self.device.type == "cuda":
            torch.cuda.empty_cache()  # idle segments have the sizes of a step without the weights

    def _measure_memory(self) -> tuple[float, float]:
        """Return the bytes that the peak of the steps left, and those of the GPU."""
        if self.device.type != "cuda":
            return float("inf"), float("inf")
        free, total = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.max_memory_allocated(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        limit = total * torch.cuda.get_per_process_memory_fraction(self.device)
        return min(free, limit - reserved) + reserved - allocated, total


def find_least_of_ranks(value: float, device: torch.device) -> float:
    """Return the smallest value of all ranks; a collective operation if there are several."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    least = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.item()


def _limit_graphs(rows: Sequence[BlockGraphs], spare: float, accumulates: bool) -> bool:
    """End the measurement of rows of blocks; return whether any may be captured."""
    seen = [row for row in rows if row.tokens]
    loads = [
        RowLoad(
            len(row.blocks),
            sum(p.numel() for block in row.blocks for p in block.parameters()),
            row.tokens,
            row.saved,
        )
        for row in seen
    ]
    chosen = dict(zip(seen, choose_rows(loads, spare, accumulates=accumulates), strict=True))
    for row in rows:
        captured = chosen.get(row, False)
        row.limit(row.tokens if captured else 0, spare)
        if not row.tokens:  # on a CPU, or frozen
            continue
        logger.info(
            "fp8.cuda_graphs: auto %s %d FP8 blocks; their largest pass had %s tokens and saved "
            "%.2f GB, and graphs may take %.2f GB",
            "captures" if captured else "does not capture",
            len(row.blocks),
            f"{row.tokens:,}",
            row.saved / 1e9,
            spare / 1e9,
        )
    return any(chosen.values())


@dataclass(frozen=True, slots=True)
class RowLoad:
    """The largest pass of consecutive blocks."""

    blocks: int
    parameters: int
    """Parameters of all blocks."""
    tokens: int
    saved: float
    """Bytes of the activations that the blocks save."""

    @property
    def compute_s(self) -> float:
        """Estimated seconds of the GPU for both passes of one block.

        A linear layer has 6 FLOPs per parameter and token; attention is not counted.
        """
        return 6 * self.parameters / self.blocks * self.tokens / FLOPS_PER_S


def choose_rows(loads: Sequence[RowLoad], spare: float, *, accumulates: bool) -> list[bool]:
    """Choose the rows of blocks to capture: where the GPU waits for launches, if memory suffices.

    Graphs may take ``spare`` bytes. Blocks in BF16 are not counted.
    """
    launching = sum(LAUNCH_S * load.blocks for load in loads)
    computing = sum(load.compute_s * load.blocks for load in loads)
    if computing > (HIDDEN if accumulates else HIDDEN_AT_ONCE) * launching:
        return [False] * len(loads)
    small = sorted((x for x in loads if x.compute_s < LAUNCH_S), key=lambda load: load.saved)
    while small and MEMORY_FACTOR * sum(load.saved for load in small) > spare:
        small.pop()
    return [any(load is x for x in small) for load in loads]
