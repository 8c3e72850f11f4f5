"""Plans the stages of a recipe: memory per rank under ZeRO 0 to 3, and the largest micro-batch.

:func:`count_images_per_row` counts the images, tiles and frames per row of a batch that the vision
tower reads.

Contains the shapes of the published models that built-in recipes name, so that planning needs no
download. The values are from the models' ``config.json``; settings that are absent here have
transformers' default for the model type.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from tqdm import tqdm

from coat_data.load.loader import check_batch_sizes
from coat_data.sample import DataError, Media
from coat_vlm.config import (
    BlockPrecision,
    Fp8Config,
    LanguageConfig,
    MasterWeights,
    ModelConfig,
    Recipe,
    StageConfig,
    StageName,
)
from coat_vlm.config.model import TokenizerConfig
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.fp8.memory_choices import MAX_SHARE, RowLoad
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.processor import load_tokenizer
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import Activations, FramesPlan, trace, trace_frames
from coat_vlm.plan.graphs import PlannedGraphs, add_graphs, plan_graphs
from coat_vlm.plan.zero import (
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
from coat_vlm.train.open_sources import access_of, open_sources

RECOMPUTE_QKV = "recompute_qkv"

COLUMNS: dict[str, tuple[BlockPrecision, bool]] = {
    "bf16": ("bf16", False),
    "fp8_linear": ("fp8_linear", False),
    "coat": ("coat", False),
    RECOMPUTE_QKV: ("coat", True),
}
"""Precisions of all blocks, and ``fp8.recompute_qkv``, whose saved activations a plan compares."""

_ROWS = 64
"""Rows of each source that are read to count images."""

TOWERS: dict[str, Mapping[str, Any]] = {
    "Efficient-Large-Model/paligemma-siglip-so400m-patch14-448": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 448, "patch_size": 14,
    },
    "openai/clip-vit-large-patch14-336": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
    },
}  # fmt: skip
"""Configurations of vision towers by ``model.vision.name_or_path``."""

_QWEN = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip

LANGUAGES: dict[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-7B-Instruct": _QWEN | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-14B-Instruct": _QWEN | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "lmsys/vicuna-7b-v1.5": {
        "model_type": "llama",
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Configurations of language models by ``model.language.name_or_path``."""

TOKENIZERS = {
    "Qwen/Qwen2.5-7B-Instruct": 151665,
    "Qwen/Qwen2.5-14B-Instruct": 151665,
    "Qwen/Qwen2.5-1.5B-Instruct": 151665,
    "lmsys/vicuna-7b-v1.5": 32000,
}
"""Vocabulary sizes without ``<image>`` by ``model.tokenizer.name_or_path``."""


def count_images_per_row(
    recipe: Recipe, stage: StageConfig, tokens: int, model: CoatVlmConfig
) -> tuple[int, str]:
    """Count the tiles per row, and return the source of the number as text.

    Args:
        recipe: contains the image and video settings.
        stage: the stage; the first rows of each of its sources are read. Packed rows are assumed
            to contain as many tiles as possible.
        tokens: tokens per row.
        model: gives the tokens per tile and the scales.
    """
    if not model.has_vision:
        return 0, "no vision tower"
    sides = [scale // (model.s2_scales or [1])[0] for scale in model.s2_scales or [1]]
    if stage.packing is not None:
        if stage.packing.images is not None:
            return stage.packing.images, "packing.images"
        # The tower reads the tiles of all scales; only tiles of the largest scale become tokens.
        placed = (tokens - 1) // model.tokens_per_image
        smaller = placed // sides[-1] ** 2 * sum(side * side for side in sides[:-1])
        most = placed * (recipe.model.video.pool_frames or 1) + smaller
        return most, "as many as fit into a packed row"
    counts: list[int] = []
    try:
        for dataset in open_sources(stage.data, recipe.seed, access_of(recipe))[1]:
            for row in range(min(_ROWS, len(dataset))):
                media = dataset[row].media
                counts.append(sum(_tiles(medium, recipe.model, sides) for medium in media))
    except (DataError, OSError) as error:
        return 1, f"assumed: the data cannot be read ({str(error).split(' -> ')[0]})"
    if not counts:
        return 1, "assumed: the data has no rows"
    return math.ceil(sum(counts) / len(counts)), "mean of the data's first rows, rounded up"


def _tiles(medium: Media, model: ModelConfig, sides: list[int]) -> int:
    """Return the tiles of an image or frames of a video; the maximum if it depends on the file."""
    if medium.kind == "video":
        if model.video.sampling == "uniform":
            return model.video.num_frames or 8
        return model.video.max_frames or 64
    if model.image.mode in ("resize", "pad"):
        return 1
    largest = model.image.max_tiles or 12
    if model.image.mode == "dynamic":
        return largest + (largest > 1)  # plus the thumbnail
    return max(largest, sides[-1] ** 2) + sum(side * side for side in sides[:-1])


MARGIN = 1.03
"""Factor on planned peaks: plans were within 3% of the measured ones (guides/performance.md). The
CUDA context and kernels, workspaces of cuBLAS and NCCL, and fragmentation take what a GPU has
beyond the size with which it is sold: an H100 of 80 GB has 85.0e9 bytes, an H200 of 141 GB
150.1e9."""


SOLD = 0.94
"""Size with which a GPU is sold, over the memory that CUDA reports: 80 GB of 85.0e9 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    zero_stages: list[ZeroStage]
    """ZeRO stages to compare, including the recipe's."""
    saved: dict[tuple[str, bool], Activations]
    """Activations of the recipe's micro-batch by (one of :data:`COLUMNS`, checkpointing)."""
    graphs: PlannedGraphs
    """The blocks that CUDA graphs may launch."""
    frames: FramesPlan | None = None
    """Rows full of frames; None without video settings."""

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
        return {zero: self.estimate_memory(zero, size) for zero in self.zero_stages}

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
            zero_stage,
            sizes or self.sizes,
            self.ranks,
            activations,
            accumulates=accumulates,
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
    zero_stages: Sequence[ZeroStage],
    images: int | None = None,
    tokens: int | None = None,
    only_stage: str | None = None,
    compare: bool = True,
) -> list[StagePlan]:
    """Plan the stages of a recipe in order.

    Args:
        recipe: the recipe to plan.
        ranks: number of GPUs, with one process each.
        gpu_bytes: memory of each GPU as it is sold.
        zero_stages: ZeRO stages to compare; the recipe's stage is always added.
        images: tiles per row. Default: counted in the data, or 1.
        tokens: tokens per row. Default: ``model.max_length``, or the length of a packed row.
        only_stage: plan only this stage.
        compare: also trace other precisions, for :attr:`StagePlan.saved`.

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
    coat = arithmetic.fp8 is not None and arithmetic.fp8.optimizer == "coat"
    optimizer = CoatAdamW if coat else torch.optim.AdamW
    cached = arithmetic.fp8 is not None and arithmetic.fp8.weights == "cache"
    plans = []
    for name in chosen:
        stage = recipe.stages[name]
        length = tokens or row_tokens(recipe, stage)
        meta_model = cast(CoatVlm, build_planned_model(recipe, stage, arithmetic, vocab_size))
        tiles, why = images, "--images"
        if tiles is None:
            config = cast(CoatVlmConfig, meta_model.config)
            tiles, why = count_images_per_row(recipe, stage, length, config)
        low_bits = recipe.has_low_bits(gpu=True, zero_stage=0)
        sizes = count_sizes(meta_model, stage, measure_state_bytes(optimizer), low_bits=low_bits)
        frames = recipe.model.video.pool_frames or 1
        traced = [
            trace(
                meta_model,
                factor * stage.micro_batch_size,
                length,
                tiles,
                pool_frames=frames,
                reuse_weights=cached,
            )
            for factor in (1, 2, 4)
        ]
        traced = share_tokens(traced, stage.sequence_parallel)
        vision = meta_model.config.vision_config
        plan = StagePlan(
            name=name,
            stage=stage,
            precision=recipe.precision,
            recompute_qkv=arithmetic.fp8 is not None and arithmetic.fp8.recompute_qkv is True,
            optimizer=optimizer.__name__,
            master_weights=recipe.master_weights,
            ranks=ranks,
            gpu_bytes=gpu_bytes,
            tokens=length,
            images=tiles,
            images_reason=why,
            assumed=assumed,
            patches=0 if vision is None else (vision.image_size // vision.patch_size) ** 2,
            sizes=sizes,
            traced=traced,
            recipe_zero=recipe.zero_stage,
            zero_stages=sorted({*zero_stages, recipe.zero_stage}),
            saved=_trace_precisions(recipe, stage, vocab_size, length, tiles) if compare else {},
            graphs=plan_graphs(meta_model, choose_graphs(recipe, stage, arithmetic), length, tiles),
            frames=trace_frames(
                meta_model, recipe, length, stage.micro_batch_size, reuse_weights=cached
            )
            if compare
            else None,
        )
        plans.append(plan)
    return plans


def share_tokens(traced: list[Activations], ranks: int) -> list[Activations]:
    """Return the activations of one of several ranks that share the tokens of micro-batches.

    A rank has the tokens, images and attention heads of 1 / ``ranks`` of the rows. What the
    exchanges of tokens need for a moment is not counted.

    Args:
        traced: micro-batches of 1, 2 and 4 times the rows.
        ranks: ``sequence_parallel`` of the stage.
    """
    one, two, four = traced
    return [
        one.extrapolate(two, 1 / ranks - 1),
        two.extrapolate(four, 1 / ranks - 1),
        two.extrapolate(four, 2 / ranks - 1),
    ]


def row_tokens(recipe: Recipe, stage: StageConfig) -> int:
    """Return the tokens of a full row of a stage: ``model.max_length``, or of a packed row.

    Raises:
        ValueError: ``packing.tokens`` does not fit ``model.max_length``.
    """
    longest = recipe.model.max_length
    return longest if stage.packing is None else stage.packing.row_tokens(longest)


def _trace_precisions(
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


def use_published_shapes(recipe: Recipe) -> Recipe:
    """Replace the names of published models in a recipe by their configurations.

    Unknown names and local folders are unchanged: transformers reads their ``config.json``. Use the
    result only for shapes, not for weights.

    Args:
        recipe: any recipe; a recipe with ``init_from`` is returned unchanged.
    """
    if recipe.init_from is not None:
        return recipe
    model = recipe.model
    changes: dict[str, Any] = {}
    vision, language, tokenizer = model.vision, model.language, model.tokenizer
    if vision is not None and vision.library == "transformers":
        tower = _find_published(vision.name_or_path, TOWERS)
        if tower is not None:
            changes["vision"] = dataclasses.replace(vision, name_or_path=None, config=dict(tower))
    shape = _find_published(language.name_or_path, LANGUAGES)
    if shape is not None:
        changes["language"] = LanguageConfig(config=dict(shape))
    if tokenizer.train_vocab_size is None:
        tokens = _find_published(tokenizer.name_or_path or language.name_or_path, TOKENIZERS)
        if tokens is not None:
            tokens += vision is not None  # <image>, for every model with a tower
            changes["tokenizer"] = TokenizerConfig(train_vocab_size=tokens)
        elif tokenizer.name_or_path is None:
            # The language model's name, which may be replaced above, also names its tokenizer.
            changes["tokenizer"] = TokenizerConfig(name_or_path=language.name_or_path)
    return dataclasses.replace(recipe, model=dataclasses.replace(model, **changes))


def _find_published(name: str | None, table: Mapping[str, Any]) -> Any:
    return None if name is None or Path(name).exists() else table.get(name)


def find_vocab_size(recipe: Recipe) -> int:
    """Return the size of the recipe's tokenizer; the maximum size if the run trains it.

    Raises:
        ValueError: the recipe names no tokenizer.
        OSError: no tokenizer has this name.
    """
    if recipe.model.tokenizer.train_vocab_size is not None:
        return recipe.model.tokenizer.train_vocab_size
    return len(load_tokenizer(recipe.model))
