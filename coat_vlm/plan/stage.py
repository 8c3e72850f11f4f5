"""Plans the stages of a recipe: memory per rank under ZeRO 0 to 3, and the largest micro-batch.

CUDA graphs of FP8 blocks (``fp8.cuda_graphs``) hold the activations that their blocks save, also in
the optimizer step, with the temporary tensors of one block and static copies of its input and
output. Training measures which blocks it captures, a plan estimates it for an H200.
:data:`GRAPH_OVERHEAD` was measured on an H200 (docs/experiments/cuda_graphs.md): the graphs
of 26 and 24 blocks took 1.20 to 1.33 times the activations, and the peak of a step rose by 0.16 to
0.38 of them.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from coat_data.load.loader import check_batch_sizes
from coat_vlm.config import Fp8Config, Recipe, StageConfig, StageName
from coat_vlm.config.fp8 import CudaGraphs
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.fp8.cuda_graphs import find_known_blocks
from coat_vlm.fp8.memory_choices import MAX_SHARE, choose_rows
from coat_vlm.model.vlm import module_parameters
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import Activations
from coat_vlm.plan.published import find_vocab_size, use_published_shapes
from coat_vlm.plan.rows import Row, plan_row
from coat_vlm.plan.zero import (
    ZERO_STAGES,
    RankMemory,
    Sizes,
    ZeroStage,
    count_sizes,
    estimate_rank_memory,
    measure_state_bytes,
)
from coat_vlm.train.engine import choose_graphs
from coat_vlm.train.gradient_sums import Sums, choose_sums
from coat_vlm.train.model_setup import build_planned_model, refuse_unmeasured, select_stages

MARGIN = 1.03
"""Factor on planned peaks: plans were within 3% of the measured ones (guides/performance.md). The
CUDA context, workspaces and fragmentation take what a GPU has beyond its nominal memory: an
H100 of 80 GB has 85.0e9 bytes, an H200 of 141 GB 150.1e9."""

SOLD = 0.94
"""Nominal GPU memory over the memory that CUDA reports: 80 GB of 85.0e9 bytes."""

GRAPH_OVERHEAD = 0.33
"""Extra memory of CUDA graphs, as a share of the saved activations."""

LAUNCH_S = 4.4e-3
"""Seconds in which the CPU launches both passes of a block without adapters: 0.24 to 0.28 s for a
tower of 27 blocks and a language model of 28, on the host of an H200
(docs/experiments/balance.md)."""

FLOPS_PER_S = 850e12
"""Linear layers of both passes on an H200, other kernels included: a Llama-2-7B layer."""

HIDDEN = 2.0
"""If the blocks of a micro-batch compute for this many times as long as their launches take, the
GPU does not wait for them: the CPU is ahead after the first ones of a step."""

HIDDEN_AT_ONCE = 4.0
"""The same for a step of one micro-batch, which begins without a lead: the tower of an 8B model at
a ratio of 3.3 made the GPU wait for 38 of 890 ms (docs/experiments/step_8b.md)."""


class RowLoad(NamedTuple):
    """The largest pass of consecutive blocks."""

    blocks: int
    compute_s: float
    """Estimated seconds of an H200 for both passes of one block."""
    saved: float
    """Bytes of the activations that the blocks save."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePlan:
    """The memory that one stage needs."""

    name: StageName
    recipe: Recipe  # with shapes in place of names of published models
    stage: StageConfig
    ranks: int
    gpu_bytes: float  # of a GPU as it is sold: 80e9 for one of 80 GB
    row: Row
    assumed: str  # assumption about the model, as text, or empty
    model: Any  # converted, on meta
    vocab_size: int | None
    fp8: Fp8Config | None  # resolved
    optimizer: type[torch.optim.Optimizer]
    sizes: Sizes
    traced: list[Activations]  # micro-batches of 1, 2 and 4 times the recipe's size
    graphs: CudaGraphs  # fp8.cuda_graphs; False where graphs are not supported
    graph_blocks: dict[str, tuple[int, int]]
    """Part of the model -> number of its FP8 blocks that may be captured, and their parameters."""

    @property
    def activations(self) -> Activations:
        """Activations of the recipe's micro-batch."""
        return self.traced[0]

    @property
    def replicas(self) -> int:
        """Number of data parallel replicas of the ranks."""
        return self.stage.count_replicas(self.ranks)

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU that are usable for tensors."""
        return self.gpu_bytes / MARGIN

    @property
    def memory(self) -> dict[ZeroStage, RankMemory]:
        """Memory with the recipe's micro-batch by ZeRO stage."""
        size = self.stage.micro_batch_size
        return {zero: self.estimate_memory(zero, size) for zero in ZERO_STAGES}

    @property
    def own_memory(self) -> RankMemory:
        """Memory with the recipe's settings, without graphs that only take what is left."""
        return self.estimate_memory(self.recipe.zero_stage, self.stage.micro_batch_size)

    def interpolate(self, micro_batch: int) -> Activations:
        """Estimate the activations of another micro-batch."""
        times = micro_batch / self.stage.micro_batch_size
        exact, doubled, fourfold = self.traced
        if times <= 2:
            return exact.extrapolate(doubled, times - 1)
        # The logits of small batches are one chunk, whose gradient needs no FP32 sum.
        return doubled.extrapolate(fourfold, times / 2 - 1)

    def estimate_memory(
        self,
        zero_stage: ZeroStage,
        micro_batch: int,
        sizes: Sizes | None = None,
        activations: Activations | None = None,
    ) -> RankMemory:
        """Estimate the memory under a ZeRO stage with another micro-batch and the same batch."""
        activations = activations or self.interpolate(micro_batch)
        memory = estimate_rank_memory(
            zero_stage,
            sizes or self.sizes,
            self.ranks,
            activations,
            accumulates=self._accumulates(micro_batch),
            fp32_sums=self.choose_sums(zero_stage, micro_batch, sizes) == "fp32",
        )
        if self.graphs is not True or zero_stage == 3:  # auto takes only what is left
            return memory
        return add_graphs(memory, [*self._count_loads(activations, micro_batch).values()])

    def find_captured(self) -> dict[str, RowLoad]:
        """Return the rows of blocks that training captures with the recipe's settings, by part."""
        size = self.stage.micro_batch_size
        loads = self._count_loads(self.activations, size)
        if self.graphs != "auto":
            return loads if self.graphs else {}
        spare = max(0.0, MAX_SHARE * (self.gpu_bytes / SOLD - self.own_memory.peak))
        waits = estimate_waits([*loads.values()], accumulates=self._accumulates(size))
        chosen = choose_rows([load.saved for load in loads.values()], waits, spare)
        return {part: loads[part] for part, taken in zip(loads, chosen, strict=True) if taken}

    def _count_loads(self, activations: Activations, micro_batch: int) -> dict[str, RowLoad]:
        tokens = {
            "vision": self.row.images * self.row.count_patches(self.model.config),
            "language": self.row.tokens,
        }
        loads = {}
        for part, (blocks, parameters) in self.graph_blocks.items():
            # Per parameter and token 6 FLOPs of linear layers; attention is not counted.
            compute_s = 6 * parameters / blocks * (tokens[part] * micro_batch) / FLOPS_PER_S
            loads[part] = RowLoad(blocks, compute_s, activations.saved[part])
        return loads

    def _accumulates(self, micro_batch: int) -> bool:
        return self.stage.batch_size > micro_batch * self.replicas

    def choose_sums(
        self, zero_stage: ZeroStage, micro_batch: int, sizes: Sizes | None = None
    ) -> Sums:
        """Return how training sums the gradients of micro-batches of this size."""
        sizes = sizes or self.sizes
        return choose_sums(
            self.stage.batch_size // (micro_batch * self.replicas),
            sizes.trained,
            self.gpu_bytes / SOLD,
            bf16=sizes.weight_bytes == 2,
            low_bits=sizes.low_bits and zero_stage == 0,
        )

    def largest_micro_batch(self, zero_stage: ZeroStage) -> int:
        """Find the largest micro-batch that fits, up to the rank's part of the batch, or 0."""
        low, high = 0, max(1, self.stage.batch_size // self.replicas) + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.estimate_memory(zero_stage, middle).peak <= self.usable_bytes
            low, high = (middle, high) if fits else (low, middle)
        return low


def plan_recipe(
    recipe: Recipe,
    *,
    ranks: int,
    gpu_bytes: float,
    images: int | None = None,
    only_stage: str | None = None,
) -> list[StagePlan]:
    """Plan the stages of a recipe in order, or ``only_stage``; raises ValueError as training does.

    ``gpu_bytes``: nominal memory of each GPU. ``images``: tiles per sequence, by default counted in
    the data.
    """
    chosen = select_stages(recipe, only_stage)
    refuse_unmeasured(recipe, chosen)
    assumed = ""
    if recipe.init_from is not None and not Path(recipe.init_from).exists():
        assumed = (
            f"init_from={recipe.init_from} does not exist yet; its shapes and vocabulary are "
            "assumed to match the recipe's model section"
        )
        recipe = dataclasses.replace(recipe, init_from=None)
    recipe = use_published_shapes(recipe)
    for name in chosen:
        stage = recipe.stages[name]
        replicas = stage.count_replicas(ranks)
        check_batch_sizes(stage.batch_size, stage.micro_batch_size, 0, replicas)
    vocab_size = find_vocab_size(recipe)
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, torch.device("meta"))
    fp8 = arithmetic.fp8
    optimizer = CoatAdamW if fp8 is not None and fp8.optimizer == "coat" else torch.optim.AdamW
    plans = []
    for name in chosen:
        stage = recipe.stages[name]
        rows = stage.micro_batch_size
        model = build_planned_model(recipe, stage, arithmetic, vocab_size)
        row = plan_row(recipe, stage, model, images)
        low_bits = recipe.has_low_bits(gpu=True)
        traced = [row.trace(model, n * rows) for n in (1, 2, 4)]
        plans.append(
            StagePlan(
                name=name,
                recipe=recipe,
                stage=stage,
                ranks=ranks,
                gpu_bytes=gpu_bytes,
                assumed=assumed,
                row=row,
                model=model,
                vocab_size=vocab_size,
                fp8=fp8,
                optimizer=optimizer,
                sizes=count_sizes(model, stage, measure_state_bytes(optimizer), low_bits=low_bits),
                traced=_share_tokens(traced, stage.sequence_parallel // row.shares),
                graphs=choose_graphs(recipe, stage, arithmetic),
                graph_blocks=_count_graph_blocks(model),
            )
        )
    return plans


def _share_tokens(traced: list[Activations], ranks: int) -> list[Activations]:
    """Return the activations of one of several ranks that share the tokens of traced micro-batches.

    A rank has the tokens, images and attention heads of 1 / ``ranks`` of the sequences. What the
    exchanges of tokens need for a moment is not counted.
    """
    one, two, four = traced
    return [
        one.extrapolate(two, 1 / ranks - 1),
        two.extrapolate(four, 1 / ranks - 1),
        two.extrapolate(four, 2 / ranks - 1),
    ]


@cache
def trace_variant(
    plan: StagePlan, *, recompute_qkv: bool, checkpointing: bool
) -> Activations | None:
    """Trace the recipe's micro-batch with other settings; None for a model without FP8 blocks."""
    recipe = plan.recipe
    given = recipe.fp8 or Fp8Config()
    precision = "coat" if recompute_qkv else recipe.precision
    fp8 = dataclasses.replace(
        given,
        vision=None,
        language=None,
        group_size=16,
        optimizer=None,
        cuda_graphs=False,
        recompute_qkv=recompute_qkv,
        bf16_forward=None if precision == "fp8_linear" else given.bf16_forward,
    )
    arithmetic = arithmetic_of(precision, fp8, torch.device("meta"))
    stage = dataclasses.replace(plan.stage, gradient_checkpointing=checkpointing)
    try:
        model = build_planned_model(recipe, stage, arithmetic, plan.vocab_size)
    except ValueError:
        if precision == recipe.precision:
            raise
        return None
    traced = plan.row.trace(model, stage.micro_batch_size)
    return traced.scale(plan.row.shares / stage.sequence_parallel)


def _count_graph_blocks(model: Any) -> dict[str, tuple[int, int]]:
    """Count the FP8 blocks that graphs capture, and their parameters, by part.

    A frozen language model has one, for the gradients of what is before it.
    """
    blocks: dict[str, tuple[int, int]] = {}
    vision = module_parameters(model).get("vision", nn.Module())
    tower = {id(parameter) for parameter in vision.parameters()}
    for block in find_known_blocks(model).values():
        part = "vision" if id(next(block.parameters())) in tower else "language"
        if part == "vision" and not any(p.requires_grad for p in block.parameters()):
            continue
        number, parameters = blocks.get(part, (0, 0))
        own = sum(p.numel() for p in block.parameters())
        blocks[part] = (number + 1, parameters + own)
    return blocks


def estimate_waits(loads: Sequence[RowLoad], *, accumulates: bool) -> list[bool]:
    """Estimate for which rows of blocks an H200 waits for launches; training measures it.

    Blocks in BF16 are not counted.
    """
    launching = sum(LAUNCH_S * load.blocks for load in loads)
    computing = sum(load.compute_s * load.blocks for load in loads)
    hidden = computing > (HIDDEN if accumulates else HIDDEN_AT_ONCE) * launching
    return [not hidden and load.compute_s < LAUNCH_S for load in loads]


def add_graphs(memory: RankMemory, captured: Sequence[RowLoad]) -> RankMemory:
    """Add the memory of captured rows of blocks to both peaks of a rank."""
    saved = sum(load.saved for load in captured)
    return dataclasses.replace(
        memory,
        backward_peak=memory.backward_peak + GRAPH_OVERHEAD * saved,
        step_peak=memory.step_peak + (1 + GRAPH_OVERHEAD) * saved,
    )
