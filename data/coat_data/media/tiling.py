"""Splits an image into tiles of the tower's input size, as InternVL and VILA do.

``dynamic`` (InternVL 1.5, arXiv:2404.16821, section 3.3; OpenGVLab/InternVL,
``dynamic_preprocess``; NVlabs/VILA, ``llava/mm_utils.py``): the image is scaled to the grid of
``min_tiles`` to ``max_tiles`` tiles with the closest aspect ratio and split row by row; if there is
more than one tile, the whole image scaled to one tile (the thumbnail) follows.

``dynamic_s2`` (VILA's ``dynamic_s2_preprocess``; S2 is Shi et al. 2024, arXiv:2403.13043): the
image at several scales: squares of 1, 4, ... tiles, then the closest grid with at least as many
tiles as the largest square and at most ``max_tiles``. Only that grid becomes tokens
(:mod:`coat_vlm.model.projector`). Frames of a video are one tile in both modes.
"""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coat_data.media.image import ImageMode, ImageTransform, TilePlan


@functools.lru_cache(maxsize=4096)
def closest_grid(
    width: int, height: int, tile: int, min_tiles: int, max_tiles: int
) -> tuple[int, int]:
    """Return rows and columns of the grid for an image of ``width`` x ``height`` pixels.

    Grids are compared in the order of their number of tiles, then of their columns (as
    transformers' GOT-OCR2 and InternVL image processors do). A grid with the same distance as the
    best one replaces it if the image has more than half as many pixels as the grid, which limits
    upscaling.
    """
    wanted, area = width / height, width * height
    best, best_distance = (0, 0), float("inf")
    grids = [
        (rows, columns)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if rows * columns >= min_tiles
    ]
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(wanted - columns / rows)
        fits = area > 0.5 * tile * tile * rows * columns
        if distance < best_distance or (distance == best_distance and fits):
            best, best_distance = (rows, columns), distance
    return best


class TiledTransform(ImageTransform):
    """Splits an image into normalized tiles; a frame of a video is one tile.

    Args: as of :class:`ImageTransform`, and
        max_tiles: maximum tiles of a grid, as ``min_tiles`` without the thumbnail.
        scales: sides of the scales in pixels for mode ``dynamic_s2``, ascending multiples of
            ``size``; empty in mode ``dynamic``.
    """

    modes: tuple[ImageMode, ...] = ("dynamic", "dynamic_s2")
    one_tile = False

    def __init__(
        self,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        mode: ImageMode = "dynamic",
        resample: Image.Resampling = Image.Resampling.BICUBIC,
        *,
        min_tiles: int = 1,
        max_tiles: int = 12,
        scales: Sequence[int] = (),
    ) -> None:
        super().__init__(size, mean, std, mode, resample)
        self.scales = tuple(scales)
        if mode == "dynamic_s2":
            min_tiles = (self.scales[-1] // size) ** 2
        elif self.scales:
            raise ValueError(f"scales={list(scales)} have no effect in mode {mode!r}; remove them")
        if not 1 <= min_tiles <= max_tiles:
            raise ValueError(
                f"image tiles are {min_tiles} to {max_tiles}; need at least 1, and "
                f"in mode dynamic_s2 room for the square of the largest scale: set max_tiles to "
                f"{min_tiles} or more"
            )
        self.min_tiles = min_tiles
        self.max_tiles = max_tiles

    def plan(self, width: int, height: int) -> TilePlan:
        """Return the tiles of an image of this size, before it is decoded."""
        rows, columns = closest_grid(width, height, self.size, self.min_tiles, self.max_tiles)
        tiles = rows * columns
        if self.mode == "dynamic_s2":
            smaller = sum((scale // self.size) ** 2 for scale in self.scales[:-1])
            return TilePlan(smaller + tiles, rows, columns, tiles, separated=False)
        tiles += tiles > 1  # the thumbnail
        return TilePlan(tiles, rows, columns, tiles, separated=True)

    def write(self, image: Image.Image, out: NDArray[np.float32]) -> None:
        """Write the tiles of ``plan(*image.size)`` into ``out``, float32 (tiles, 3, size, size).

        Mode ``dynamic``: the grid row by row, then the thumbnail; ``dynamic_s2``: ascending scales.
        """
        plan = self.plan(*image.size)
        grids = [(scale // self.size, scale // self.size) for scale in self.scales[:-1]]
        grids.append((plan.rows, plan.columns))
        if self.mode == "dynamic" and plan.num_tiles > 1:
            grids.append((1, 1))
        size, places = self.size, iter(out)
        for rows, columns in grids:
            target = (columns * size, rows * size)
            values = np.asarray(
                image if image.size == target else image.resize(target, self.resample)
            )
            for top in range(0, rows * size, size):
                for left in range(0, columns * size, size):
                    tile = values[top : top + size, left : left + size]
                    self.normalize(tile, next(places))
