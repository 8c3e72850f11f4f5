"""How many images, tiles and frames go through the vision tower for a row of a batch."""

import math

from coat_data.sample import DataError, Media
from coat_vlm.config import ModelConfig, Recipe, StageConfig
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.train.sources import open_sources

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
