"""Plans the stages of a recipe: memory per rank under ZeRO 0 to 3, and the largest micro-batch."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import cast

import torch
from tqdm import tqdm

from coat_data.load.loader import check_batch_sizes
from coat_vlm.config import (
    BlockPrecision,
    Fp8Config,
    MasterWeights,
    Recipe,
    StageConfig,
    StageName,
)
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.fp8.memory_choices import MAX_SHARE, RowLoad
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import Activations, FramesPlan, trace, trace_frames
from coat_vlm.plan.graphs import PlannedGraphs, add_graphs, plan_graphs
from coat_vlm.plan.published import find_vocab_size, use_published_shapes
from coat_vlm.plan.rows import count_images_per_row, row_tokens
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
from coat_vlm.train.model_setup import (
    build_planned_model,
    refuse_pairs,
    require_composed,
    select_stages,
)

RECOMPUTE_QKV = "recompute_qkv"

COLUMNS: dict[str, tuple[BlockPrecision, bool]] = {
    "bf16": ("bf16", False),
    "fp8_linear": ("fp8_linear", False),
    "coat": ("coat", False),
    RECOMPUTE_QKV: ("coat", True),
}
"""Precisions of all blocks, and ``fp8.recompute_qkv``, whose saved activations a plan compares."""

MARGIN = 1.03
"""Factor on planned peaks: plans were within 3% of the measured ones (guides/performance.md). The
CUDA context and kernels, workspaces of cuBLAS and NCCL, and fragmentation take what a GPU has
beyond the size with which it is sold: an H100 of 80 GB has 85.0e9 bytes, an H200 of 141 GB
150.1e9."""


SOLD = 0.94
"""Size with which a GPU is sold, over the memory that CUDA reports: 80 GB of 85.0e9 bytes."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The memory that one stage needs."""

    name: StageName
    stage: StageConfig
    precision: str
    recompute_qkv: bool
    optimizer: str
    master_weights: MasterWeights
    """The recipe's."""
    ranks: int
    gpu_bytes: float
    """Memory of a GPU as it is sold: 80e9 for one of 80 GB."""
    tokens: int
    """Tokens per row."""
    images: int
    """Images per row, in tiles."""
    images_reason: str
    """Source of the number of images, as text."""
    assumed: str
    """Assumption about the model, as text; empty if none was needed."""
    patches: int
    """Patches per image in the tower."""
    sizes: Sizes
    traced: list[Activations]
    """Activations of micro-batches of 1, 2 and 4 times the recipe's rows."""
    recipe_zero: ZeroStage
    graphs: PlannedGraphs
    """The blocks that CUDA graphs may launch."""
    trace_columns: Callable[[], dict[tuple[str, bool], Activations]]
    """Returns :attr:`saved`, which takes eight times as long as the rest of the plan."""
    trace_frames: Callable[[], FramesPlan | None]

    @cached_property
    def saved(self) -> dict[tuple[str, bool], Activations]:
        """Activations of the recipe's micro-batch by (one of :data:`COLUMNS`, checkpointing)."""
        return self.trace_columns()

    @cached_property
    def frames(self) -> FramesPlan | None:
        """Rows full of frames; None without video settings."""
        return self.trace_frames()

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
        accumulates = self._accumulates(micro_batch)
        memory = estimate_rank_memory(
            zero_stage, sizes or self.sizes, self.ranks, activations, accumulates=accumulates
        )
        if self.graphs.mode is not True or zero_stage == 3:  # auto takes only what is left
            return memory
        captured = self.graphs.find_captured(activations, micro_batch, 0.0, accumulates=accumulates)
        return add_graphs(memory, [*captured.values()])

    def find_captured(self) -> dict[str, RowLoad]:
        """Return the rows of blocks that training captures with the recipe's settings, by part."""
        left = self.gpu_bytes / SOLD - self.memory[self.recipe_zero].peak
        spare = max(0.0, MAX_SHARE * left)
        size = self.stage.micro_batch_size
        return self.graphs.find_captured(
            self.activations, size, spare, accumulates=self._accumulates(size)
        )

    def _accumulates(self, micro_batch: int) -> bool:
        """Return whether a step has several micro-batches."""
        return self.stage.batch_size > micro_batch * self.replicas

    def largest_frames(self) -> int:
        """Find the largest number of frames per row that fits, in tokens and memory, or 0."""
        assert self.frames is not None
        size = self.stage.micro_batch_size
        for frames in range(self.frames.most, 0, -1):
            activations = self.frames.activations(frames)
            memory = self.estimate_memory(self.recipe_zero, size, activations=activations)
            if memory.peak <= self.usable_bytes:
                return frames
        return 0

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
    """Plan the stages of a recipe in order, or ``only_stage``.

    ``gpu_bytes``: nominal memory of each GPU. ``images``: tiles per row, by default counted in the
    data.

    Raises:
        ValueError: training on this number of ranks would raise the same error.
    """
    require_composed(recipe, "coat-vlm plan")
    assumed = ""
    if recipe.init_from is not None and not Path(recipe.init_from).exists():
        assumed = (
            f"init_from={recipe.init_from} does not exist yet; its shapes and vocabulary are "
            "assumed to be those of the recipe's model section"
        )
        recipe = dataclasses.replace(recipe, init_from=None)
    recipe = use_published_shapes(recipe)
    chosen = select_stages(recipe, only_stage)
    for name in chosen:
        stage = recipe.stages[name]
        refuse_pairs(name, stage, "coat-vlm plan")
        replicas = stage.count_replicas(ranks)
        check_batch_sizes(stage.batch_size, stage.micro_batch_size, 0, replicas)
    vocab_size = None if recipe.init_from is not None else find_vocab_size(recipe)
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, torch.device("meta"))
    fp8 = arithmetic.fp8
    optimizer = CoatAdamW if fp8 is not None and fp8.optimizer == "coat" else torch.optim.AdamW
    cached = fp8 is not None and fp8.weights == "cache"
    plans = []
    for name in chosen:
        stage = recipe.stages[name]
        tokens, rows = row_tokens(recipe, stage), stage.micro_batch_size
        model = cast(CoatVlm, build_planned_model(recipe, stage, arithmetic, vocab_size))
        tiles, why = images, "--images"
        if tiles is None:
            config = cast(CoatVlmConfig, model.config)
            tiles, why = count_images_per_row(recipe, stage, tokens, config)
        low_bits = recipe.has_low_bits(gpu=True, zero_stage=0)
        pool = recipe.model.video.pool_frames or 1
        traced = [
            trace(model, n * rows, tokens, tiles, pool_frames=pool, reuse_weights=cached)
            for n in (1, 2, 4)
        ]
        vision = model.config.vision_config
        plans.append(
            StagePlan(
                name=name,
                stage=stage,
                precision=recipe.precision,
                recompute_qkv=fp8 is not None and fp8.recompute_qkv is True,
                optimizer=optimizer.__name__,
                master_weights=recipe.master_weights,
                ranks=ranks,
                gpu_bytes=gpu_bytes,
                tokens=tokens,
                images=tiles,
                images_reason=why,
                assumed=assumed,
                patches=0 if vision is None else (vision.image_size // vision.patch_size) ** 2,
                sizes=count_sizes(model, stage, measure_state_bytes(optimizer), low_bits=low_bits),
                traced=_share_tokens(traced, stage.sequence_parallel),
                recipe_zero=recipe.zero_stage,
                graphs=plan_graphs(model, choose_graphs(recipe, stage, arithmetic), tokens, tiles),
                trace_columns=partial(_trace_columns, recipe, stage, vocab_size, tokens, tiles),
                trace_frames=partial(
                    trace_frames, model, recipe, tokens, rows, reuse_weights=cached
                ),
            )
        )
    return plans


def _share_tokens(traced: list[Activations], ranks: int) -> list[Activations]:
    """Return the activations of one of several ranks that share the tokens of micro-batches.

    A rank has the tokens, images and attention heads of 1 / ``ranks`` of the rows. ``traced`` and
    the result are of micro-batches of 1, 2 and 4 times the rows. What the exchanges of tokens need
    for a moment is not counted.
    """
    one, two, four = traced
    return [
        one.extrapolate(two, 1 / ranks - 1),
        two.extrapolate(four, 1 / ranks - 1),
        two.extrapolate(four, 2 / ranks - 1),
    ]


def _trace_columns(
    recipe: Recipe, stage: StageConfig, vocab_size: int | None, tokens: int, images: int
) -> dict[tuple[str, bool], Activations]:
    """Trace every column that the model supports, without and with checkpointing."""
    found: dict[tuple[str, bool], Activations] = {}
    cases = list(product(COLUMNS, (False, True)))
    for column, checkpointing in tqdm(cases, desc="precisions", leave=False):
        precision, recompute = COLUMNS[column]
        given = recipe.fp8 or Fp8Config()
        fp8 = dataclasses.replace(
            given,
            vision=None,
            language=None,
            group_size=16,
            optimizer=None,
            cuda_graphs=False,
            recompute_qkv=recompute,
            bf16_forward_first=None if precision == "fp8_linear" else given.bf16_forward_first,
        )
        arithmetic = arithmetic_of(precision, fp8, torch.device("meta"))
        changed = dataclasses.replace(stage, gradient_checkpointing=checkpointing)
        try:
            meta_model = cast(CoatVlm, build_planned_model(recipe, changed, arithmetic, vocab_size))
        except ValueError:
            if precision == recipe.precision:
                raise
            continue  # a model without FP8 blocks has no such column
        found[column, checkpointing] = trace(
            meta_model,
            stage.micro_batch_size,
            tokens,
            images,
            pool_frames=recipe.model.video.pool_frames or 1,
        ).scale(1 / stage.sequence_parallel)
    return found
