"""The sequences that plans assume: full ones, with as many images as the data has.

Images of a composed model are tiles. Images of a published model are as large as in the data, and
pass the model's own processor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor

from coat_data.load.collate import Batch, collate, collate_packed
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.media.image import image_size
from coat_data.sample import DataError, Media
from coat_vlm.config import ModelConfig, Recipe, StageConfig
from coat_vlm.config.stage import ROW_MULTIPLE, PackingConfig
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.family_processor import FamilyEncoder
from coat_vlm.model.folder import start_processor
from coat_vlm.model.projector import Grid
from coat_vlm.model.sequence_parallel import SequenceGroup, shard_batch
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.plan.activations import Activations, trace_inputs
from coat_vlm.train.open_sources import access_of, open_sources
from coat_vlm.train.passes import copy_batch_to_device

ROWS = 64
"""Rows of each source that are read to count images."""

_SIZE = (640, 480)
"""Width and height of an image where the data shows none: the most common ones of COCO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A full sequence of a stage: a token of text, images, and text."""

    tokens: int
    images: int
    """Images, or tiles and frames of a composed model."""
    reason: str = ""
    """Source of the number and size of images, as text."""
    shown: EncodedSample
    """The images without text, of a composed model with pixels on ``meta``; for 0 images of a
    published model the one that training adds to a text."""
    text_ids: Tensor
    """Token ids of text."""
    complete: Callable[[Batch], Batch] | None = None
    """See :attr:`coat_data.load.encode.Encoder.complete`."""
    shares: int = 1
    """Ranks for which :meth:`trace` divides the tokens of a micro-batch."""

    def count_patches(self, config: Any) -> int:
        """Count the patches of an image in the tower; 0 without images."""
        if not self.images:
            return 0
        pixels = self.shown.pixel_values
        patches = pixels.shape[:-1].numel()
        if pixels.ndim > 3:  # of tiles
            size = config.vision_config.patch_size
            sizes = (size, size) if isinstance(size, int) else size
            patches = pixels.shape[:-3].numel()
            for pixels_of_side, side in zip(pixels.shape[-2:], sizes, strict=True):
                patches *= pixels_of_side // side
        return patches // self.images

    def trace(self, model: Any, rows: int) -> Activations:
        """Trace a rank's shard of so many sequences, packed or not.

        See :func:`coat_vlm.plan.activations.trace_inputs`; ValueError if it cannot trace the model.
        """
        on_meta = replace(self.shown, pixel_values=self.shown.pixel_values.to("meta"))
        row = replace(self, shown=on_meta).make(None)
        batch: Mapping[str, Any] = self.collate([row] * rows, None)
        if self.shares > 1:
            model.prepare_attention(packed=True)
            batch = shard_batch(batch, SequenceGroup(0, self.shares), model)
        try:
            return trace_inputs(model, copy_batch_to_device(batch, torch.device("meta")))
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise ValueError(
                f"the memory of {type(model).__name__} cannot be planned, because its forward pass "
                "reads values of tensors; train a few steps and read peak_memory_mb in "
                "metrics.jsonl"
            ) from error

    def make(self, generator: torch.Generator | None) -> EncodedSample:
        """Make a sequence with random text and pixels; None: one token and the planned pixels."""
        shown, shape = self.shown, self.shown.pixel_values.shape
        ids = self.text_ids[:1].repeat(self.tokens)
        if generator is not None:
            chosen = torch.randint(len(self.text_ids), (self.tokens,), generator=generator)
            ids = self.text_ids[chosen]
        labels = ids.clone()
        if not self.images and len(shown.input_ids):
            counts = dict.fromkeys(shown.counts, 0)
            return EncodedSample(ids, labels, torch.empty(0), counts=counts, filler=shown)
        images = slice(1, 1 + len(shown.input_ids))
        ids[images], labels[images] = shown.input_ids, IGNORE_INDEX
        pixels = shown.pixel_values
        if generator is not None:
            pixels = torch.randn(shape, generator=generator)
        return replace(shown, input_ids=ids, labels=labels, pixel_values=pixels)

    def collate(self, samples: Sequence[EncodedSample], packing: PackingConfig | None) -> Batch:
        """Collate sequences as training does; with packing they become one."""
        if packing is None:
            batch = collate(samples, pad_token_id=0)
        else:
            batch = collate_packed(samples, pad_token_id=0, align=ROW_MULTIPLE)
        return batch if self.complete is None else self.complete(batch)


def row_tokens(recipe: Recipe, stage: StageConfig) -> int:
    """Return the tokens of a full sequence of a stage: ``model.max_length``, or packed."""
    longest = recipe.model.max_length
    return longest if stage.packing is None else stage.packing.row_tokens(longest)


def plan_row(recipe: Recipe, stage: StageConfig, model: Any, images: int | None) -> Row:
    """Plan a full sequence of a stage, by default with as many images as the data has.

    Raises ValueError if they leave no tokens for text.
    """
    tokens = row_tokens(recipe, stage)
    if not isinstance(model, CoatVlm):
        return _plan_published(recipe, stage, model.config, tokens, images)
    why = "--images"
    if images is None:
        config = cast(CoatVlmConfig, model.config)
        images, why = count_images_per_row(recipe, stage, tokens, config)
    return compose_row(model, tokens, images, recipe.model.video.pool_frames, why)


def compose_row(
    model: CoatVlm, tokens: int, images: int, pool_frames: int | None = None, reason: str = ""
) -> Row:
    """Make a sequence of a composed model, in which ``pool_frames`` images share the tokens of one.

    With ``s2_scales`` only the tiles of the largest scale have tokens. Raises ValueError if the
    images have more tokens than the sequence, or there is no tower.
    """
    config, tower = cast(CoatVlmConfig, model.config), model.vision_tower
    if tower is None and images:
        raise ValueError(f"--images {images}: the model has no vision tower; remove the option")
    groups = [min(pool_frames or 1, images - n) for n in range(0, images, pool_frames or 1)]
    grids = None
    if config.s2_scales is not None:
        grids = _image_grids(config.s2_scales, images)
        groups = [1] * sum(columns for _, columns in grids)
    count, size = len(groups) * config.tokens_per_image, 0 if tower is None else tower.image_size
    if count >= tokens:
        raise ValueError(
            f"{len(groups)} images of {config.tokens_per_image} tokens leave no tokens for text in "
            f"sequences of {tokens}; raise model.max_length or lower --images"
        )
    every = torch.arange(config.text_config.vocab_size)
    ids = torch.full((count,), config.image_token_id or 0)
    shown = EncodedSample(
        input_ids=ids,
        labels=ids,
        pixel_values=torch.empty(images, 3, size, size, device="meta"),
        image_grids=None if grids is None else torch.tensor(grids).reshape(-1, 2),
        frame_groups=None if pool_frames is None else torch.tensor(groups, dtype=torch.int64),
        image_positions=None if tower is None else torch.arange(1, 1 + count),
    )
    text_ids = every if tower is None else every[every != config.image_token_id]
    return Row(tokens=tokens, images=images, reason=reason, shown=shown, text_ids=text_ids)


def _image_grids(scales: Sequence[int], tiles: int) -> list[Grid]:
    """Distribute tiles over images at all scales; single tiles if they do not fill one image."""
    sides = [scale // scales[0] for scale in scales]
    smaller, largest = sum(side * side for side in sides[:-1]), sides[-1] ** 2
    full, rest = divmod(tiles, smaller + largest)
    if full == 0:
        return [(1, 1)] * tiles
    return [(1, largest)] * (full - 1) + [(1, largest + rest)]


def _plan_published(
    recipe: Recipe, stage: StageConfig, config: Any, tokens: int, images: int | None
) -> Row:
    processor = start_processor(recipe, recipe.init_from)
    encoder = cast(FamilyEncoder, processor.encoder(template=stage.template))
    needed, sizes, problem, notes = _read_data(recipe, stage, encoder)
    size = sorted(sizes, key=math.prod)[len(sizes) // 2] if sizes else _SIZE
    each = len(encoder.show_blank(size, 1).input_ids)
    if images is not None:
        why = "--images"
    elif stage.packing is not None:
        images, why = stage.packing.images, "packing.images"
        if images is None:
            images, why = (
                _count_fitting(encoder, size, tokens),
                "as many as fit into a packed sequence",
            )
    elif needed:
        images, why = math.ceil(mean(needed) / each), "mean of the data's first rows, rounded up"
        why += notes
    else:
        images, why = 1, f"assumed: {problem or 'the data has no rows'}"
    shown = encoder.show_blank(size, images) if images else encoder.filler
    if images and len(shown.input_ids) >= tokens:
        raise ValueError(
            f"{images} images of {size[0]} x {size[1]} pixels have {len(shown.input_ids):,} tokens "
            f"and leave none for text in sequences of {tokens:,}; raise model.max_length, or lower "
            "--images or model.max_pixels"
        )
    names = ("_token_id", "_token_index")
    special = [value for name, value in config.to_dict().items() if name.endswith(names)]
    every = torch.arange(config.get_text_config().vocab_size)
    kinds = torch.tensor([value for value in special if isinstance(value, int)])
    return Row(
        tokens=tokens,
        images=images,
        reason=f"{why}; {size[0]} x {size[1]} pixels" if images else why,
        shown=shown,
        text_ids=every[~torch.isin(every, kinds)],
        complete=encoder.complete,
        shares=stage.sequence_parallel,
    )


def _count_fitting(encoder: FamilyEncoder, size: tuple[int, int], tokens: int) -> int:
    """Count the images that leave a token before and after them."""
    one, two, three = (len(encoder.show_blank(size, n).input_ids) for n in (1, 2, 3))
    if two > tokens - 2:
        return int(one <= tokens - 2)
    return 2 + (tokens - 2 - two) // (three - two)  # one image may have more tokens than one of two


def _read_data(
    recipe: Recipe, stage: StageConfig, encoder: FamilyEncoder
) -> tuple[list[int], list[tuple[int, int]], str, str]:
    """Return tokens of media per row, sizes of images, why there are none, and what to know."""
    tokens: list[int] = []
    sizes: list[tuple[int, int]] = []
    bad, videos = 0, False
    try:
        datasets = open_sources(stage.data, recipe.seed, access_of(recipe))[1]
    except (DataError, OSError) as error:
        return tokens, sizes, f"the data cannot be read ({str(error).split(' -> ')[0]})", ""
    for dataset in datasets:
        for row in range(min(ROWS, len(dataset))):
            try:
                sample = dataset[row]
                # In a layout each image or video is one token.
                text = len(encoder.layout(sample)[0]) - len(sample.media)
                tokens.append(encoder.measure(sample).tokens - text)
                sizes += [image_size(one) for one in sample.media if one.kind == "image"]
            except DataError:  # training counts it as a bad sample
                bad += 1
            else:
                videos |= any(one.kind == "video" for one in sample.media)
    notes = f", without {bad} bad ones" * (bad > 0) + ", videos counted as images" * videos
    return tokens, sizes, f"all {bad} rows read are bad samples" if bad else "", notes


def count_images_per_row(
    recipe: Recipe, stage: StageConfig, tokens: int, model: CoatVlmConfig
) -> tuple[int, str]:
    """Count the tiles per sequence of ``tokens`` tokens; return where the number is from as text.

    Packed sequences are assumed to contain as many tiles as possible.
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
        return most, "as many as fit into a packed sequence"
    counts: list[int] = []
    try:
        for dataset in open_sources(stage.data, recipe.seed, access_of(recipe))[1]:
            for row in range(min(ROWS, len(dataset))):
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
