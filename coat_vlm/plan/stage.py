"""Plans the stages of a recipe: memory per rank under ZeRO 0 to 3, and what would fit.

:func:`images_per_row` counts the images, tiles and frames that go through the vision tower for a
row of a batch.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import torch
from tqdm import tqdm

from coat_data.load.loader import check_batch_sizes
from coat_data.sample import DataError, Media
from coat_vlm.config import (
    BlockPrecision,
    Fp8Config,
    ModelConfig,
    Recipe,
    StageConfig,
    StageName,
)
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import Activations, trace
from coat_vlm.plan.frames import (
    BLOCK_PRECISIONS,
    gpu_arithmetic,
    stage_frame,
    vocabulary,
    with_published_shapes,
)
from coat_vlm.plan.zero import (
    RankMemory,
    Sizes,
    ZeroStage,
    rank_memory,
    sizes_of,
    state_bytes_per_parameter,
)
from coat_vlm.train.sources import open_sources
from coat_vlm.train.stages import stage_names

_ROWS = 64
"""Rows of each source that are looked at."""


def images_per_row(
    recipe: Recipe, stage: StageConfig, tokens: int, model: CoatVlmConfig
) -> tuple[int, str]:
    """Tiles of a row, and how that was found.

    Args:
        recipe: says what an image and a video become.
        stage: whose data; of each source the first rows are looked at. Packed rows are taken to
            hold what they may at most.
        tokens: of a row.
        model: says how many tokens a tile has, and how large its scales are.
    """
    if not model.has_vision:
        return 0, "no vision tower"
    sides = [scale // (model.s2_scales or [1])[0] for scale in model.s2_scales or [1]]
    if stage.packing is not None:
        if stage.packing.images is not None:
            return stage.packing.images, "packing.images"
        # Of an image at several scales only the largest becomes tokens, all pass the tower.
        tiles_per_tile = sum(side * side for side in sides) / sides[-1] ** 2
        tiles_per_tile *= recipe.model.video.pool_frames or 1
        most = math.ceil((tokens - 1) // model.tokens_per_image * tiles_per_tile)
        return most, "as many as a packed row has room for"
    counts: list[int] = []
    try:
        for dataset in open_sources(stage.data, recipe.seed)[1]:
            for row in range(min(_ROWS, len(dataset))):
                media = dataset[row].media
                counts.append(sum(_tiles(medium, recipe.model, sides) for medium in media))
    except (DataError, OSError) as error:
        return 1, f"assumed: the data cannot be read ({str(error).split(' -> ')[0]})"
    if not counts:
        return 1, "assumed: the data has no rows"
    return math.ceil(sum(counts) / len(counts)), "mean of the data's first rows, rounded up"


def _tiles(medium: Media, model: ModelConfig, sides: list[int]) -> int:
    """Tiles of an image or frames of a video; at most, where that depends on the file."""
    if medium.kind == "video":
        if model.video.sampling == "uniform":
            return model.video.num_frames or model.image.num_video_frames or 8
        return model.video.max_frames or 64
    if model.image.mode in ("resize", "pad"):
        return 1
    largest = model.image.max_tiles or 12
    if model.image.mode == "dynamic":
        return largest + (largest > 1)  # and the thumbnail
    return max(largest, sides[-1] ** 2) + sum(side * side for side in sides[:-1])


USABLE = 0.94
"""Share of a GPU's memory that tensors may take. The rest is an allowance, not measured: CUDA's
context and kernels, workspaces of cuBLAS and NCCL, and gaps between tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """What one stage needs."""

    name: StageName
    stage: StageConfig
    precision: str
    optimizer: str
    ranks: int
    gpu_bytes: float
    """Memory of a GPU."""
    tokens: int
    """Of a row."""
    images: int
    """Of a row."""
    images_why: str
    """Where that number comes from."""
    patches: int
    """The tower computes for an image."""
    sizes: Sizes
    traced: list[Activations]
    """Of the recipe's micro-batch, and of twice and four times as many rows."""
    recipe_zero: ZeroStage
    zero_stages: list[ZeroStage]
    """Those to compare, the recipe's among them."""
    kept: dict[tuple[BlockPrecision, bool], Activations]
    """Activations of the recipe's micro-batch by precision of all blocks, and checkpointing."""

    @property
    def activations(self) -> Activations:
        """Of the recipe's micro-batch."""
        return self.traced[0]

    @property
    def usable_bytes(self) -> float:
        """What tensors may take of a GPU."""
        return USABLE * self.gpu_bytes

    @property
    def memory(self) -> dict[ZeroStage, RankMemory]:
        """By ZeRO stage, of the recipe's micro-batch."""
        size = self.stage.micro_batch_size
        return {zero: self.with_micro_batch(zero, size) for zero in self.zero_stages}

    def rows(self, micro_batch: int) -> Activations:
        """Activations of another micro-batch."""
        times = micro_batch / self.stage.micro_batch_size
        exact, doubled, fourfold = self.traced
        if times <= 2:
            return exact.towards(doubled, times - 1)
        # Small batches have their logits in one chunk, whose gradient needs no FP32 sum.
        return doubled.towards(fourfold, times / 2 - 1)

    def with_micro_batch(
        self,
        zero_stage: ZeroStage,
        micro_batch: int,
        sizes: Sizes | None = None,
        activations: Activations | None = None,
    ) -> RankMemory:
        """Memory under a ZeRO stage with another micro-batch and the recipe's batch."""
        return rank_memory(
            zero_stage,
            sizes or self.sizes,
            self.ranks,
            activations or self.rows(micro_batch),
            accumulates=self.stage.batch_size > micro_batch * self.ranks,
        )

    def largest_micro_batch(self, zero_stage: ZeroStage) -> int:
        """Largest micro-batch that fits, at most the rank's part of the batch; 0 if none does."""
        low, high = 0, max(1, self.stage.batch_size // self.ranks) + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.with_micro_batch(zero_stage, middle).peak <= self.usable_bytes
            low, high = (middle, high) if fits else (low, middle)
        return low


def plan_recipe(
    recipe: Recipe,
    *,
    ranks: int,
    gpu_bytes: float,
    zero_stages: Sequence[ZeroStage],
    images: int | None = None,
    tokens: int | None = None,
    only_stage: str | None = None,
) -> list[StagePlan]:
    """Plan the stages of a recipe in order.

    Args:
        recipe: what would be trained.
        ranks: GPUs, one process each.
        gpu_bytes: memory of each.
        zero_stages: those to compare; the recipe's own is always among them.
        images: tiles of a row; counted in the data, or 1, when absent.
        tokens: tokens of a row; ``model.max_length``, or a packed row's, when absent.
        only_stage: this stage alone.

    Raises:
        ValueError: the recipe could not be trained on so many ranks: as training would say.
    """
    recipe = with_published_shapes(recipe)
    chosen = stage_names(recipe, only_stage)
    for name in chosen:
        stage = recipe.stages[name]
        check_batch_sizes(stage.batch_size, stage.micro_batch_size, 0, ranks)
    vocab_size = None if recipe.init_from is not None else vocabulary(recipe)
    arithmetic = gpu_arithmetic(recipe.precision, recipe.fp8)
    coat = arithmetic.fp8 is not None and arithmetic.fp8.optimizer == "coat"
    optimizer = CoatAdamW if coat else torch.optim.AdamW
    cached = arithmetic.fp8 is not None and arithmetic.fp8.weights == "cache"
    plans = []
    for name in chosen:
        stage = recipe.stages[name]
        length = tokens or row_tokens(recipe, stage)
        frame = stage_frame(recipe, stage, arithmetic, vocab_size)
        tiles, why = images, "--images"
        if tiles is None:
            config = cast(CoatVlmConfig, frame.config)
            tiles, why = images_per_row(recipe, stage, length, config)
        sizes = sizes_of(frame, stage, state_bytes_per_parameter(optimizer))
        frames = recipe.model.video.pool_frames or 1
        traced = [
            trace(
                frame,
                factor * stage.micro_batch_size,
                length,
                tiles,
                pool_frames=frames,
                reuse_weights=cached,
            )
            for factor in (1, 2, 4)
        ]
        tower = frame.vision_tower
        plan = StagePlan(
            name=name,
            stage=stage,
            precision=recipe.precision,
            optimizer=optimizer.__name__,
            ranks=ranks,
            gpu_bytes=gpu_bytes,
            tokens=length,
            images=tiles,
            images_why=why,
            patches=0 if tower is None else (tower.image_size // tower.patch_size) ** 2,
            sizes=sizes,
            traced=traced,
            recipe_zero=recipe.zero_stage,
            zero_stages=sorted({*zero_stages, recipe.zero_stage}),
            kept=_by_precision(recipe, stage, vocab_size, length, tiles),
        )
        plans.append(plan)
    return plans


def row_tokens(recipe: Recipe, stage: StageConfig) -> int:
    """Tokens of a full row of a stage: ``model.max_length``, or those of a packed row.

    Raises:
        ValueError: ``packing.tokens`` does not fit ``model.max_length``.
    """
    longest = recipe.model.max_length
    return longest if stage.packing is None else stage.packing.row_tokens(longest)


def _by_precision(
    recipe: Recipe, stage: StageConfig, vocab_size: int | None, tokens: int, images: int
) -> dict[tuple[BlockPrecision, bool], Activations]:
    """Activations in every precision that the model allows, without and with checkpointing."""
    found: dict[tuple[BlockPrecision, bool], Activations] = {}
    cases = list(product(BLOCK_PRECISIONS, (False, True)))
    for precision, checkpointing in tqdm(cases, desc="precisions", leave=False):
        given = recipe.fp8 or Fp8Config()
        fp8 = dataclasses.replace(
            given,
            vision=None,
            language=None,
            group_size=16,
            optimizer=None,
            released_constants=False,
            second_moment="auto",
            cuda_graphs=False,
            bf16_forward_first=None if precision == "fp8_linear" else given.bf16_forward_first,
        )
        arithmetic = gpu_arithmetic(precision, None if precision == "bf16" else fp8)
        changed = dataclasses.replace(stage, gradient_checkpointing=checkpointing)
        try:
            frame = stage_frame(recipe, changed, arithmetic, vocab_size)
        except ValueError:
            if precision == recipe.precision:
                raise
            continue  # a model that has no FP8 blocks: the table then leaves a gap
        found[precision, checkpointing] = trace(
            frame,
            stage.micro_batch_size,
            tokens,
            images,
            pool_frames=recipe.model.video.pool_frames or 1,
        )
    return found
