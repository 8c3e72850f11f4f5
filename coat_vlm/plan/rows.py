"""The rows that a plan assumes: their tokens, and the images, tiles and frames in them."""

import math

from coat_data.sample import DataError, Media
from coat_vlm.config import ModelConfig, Recipe, StageConfig
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.train.open_sources import access_of, open_sources

_ROWS = 64
"""Rows of each source that are read to count images."""


def row_tokens(recipe: Recipe, stage: StageConfig) -> int:
    """Return the tokens of a full row of a stage: ``model.max_length``, or of a packed row.

    Raises:
        ValueError: ``packing.tokens`` does not fit ``model.max_length``.
    """
    longest = recipe.model.max_length
    return longest if stage.packing is None else stage.packing.row_tokens(longest)


def count_images_per_row(
    recipe: Recipe, stage: StageConfig, tokens: int, model: CoatVlmConfig
) -> tuple[int, str]:
    """Count the tiles per row of ``tokens`` tokens, and return the source of the number as text.

    The first rows of each source of the stage are read. Packed rows are assumed to contain as many
    tiles as possible.
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
