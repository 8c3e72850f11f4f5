"""Cuts an image into tiles of the tower's size, as InternVL and VILA do.

``dynamic`` (InternVL 1.5, Chen et al. 2024, arXiv:2404.16821, section 3.3; OpenGVLab/InternVL,
``dynamic_preprocess``; NVlabs/VILA, ``llava/mm_utils.py``): of all grids of ``min_tiles`` to
``max_tiles`` tiles the one whose width over height is closest to the image's. The image is scaled
to the whole grid, not keeping its proportions, and cut row by row; unless the grid is one tile, the
whole image scaled to one tile (the thumbnail) follows. Each tile is an image of its own to the
model, with a line break between them, as in VILA's prompts.

``dynamic_s2`` (VILA's ``dynamic_s2_preprocess``; S2 is Shi et al. 2024, arXiv:2403.13043): the
image at several scales. All but the largest are squares of 1, 4, ... tiles. The largest is the
closest grid of at least as many tiles as its square would have, and at most ``max_tiles``. The
model puts the features of each scale together again and concatenates the scales by channels, so
that only the largest grid becomes tokens (:mod:`coat_vlm.model.projector`).

Frames of a video are one tile each in both modes.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coat_data.media.image import ImageMode, ImageTransform, TilePlan, channels_of


@functools.lru_cache(maxsize=4096)
def closest_grid(
    width: int, height: int, tile: int, min_tiles: int, max_tiles: int
) -> tuple[int, int]:
    """Rows and columns of the grid for an image of ``width`` x ``height`` pixels.

    Grids are tried by their number of tiles, then by their columns. One as close as the best so far
    replaces it if it does not blow the image up too far: if the image has more than half its
    pixels. (InternVL and VILA try grids of equal number in the order of a Python set of pairs,
    which is the interpreter's affair; the order here is that of transformers' GOT-OCR2 and InternVL
    image processors.)

    Raises:
        ValueError: there is no such grid.
    """
    wanted, area = width / height, width * height
    best, best_distance = (0, 0), float("inf")
    for rows, columns in _grids(min_tiles, max_tiles):
        distance = abs(wanted - columns / rows)
        fits = area > 0.5 * tile * tile * rows * columns
        if distance < best_distance or (distance == best_distance and fits):
            best, best_distance = (rows, columns), distance
    if best == (0, 0):
        raise ValueError(f"no grid has {min_tiles} to {max_tiles} tiles; raise max_tiles")
    return best


@functools.lru_cache(maxsize=64)
def _grids(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    """(rows, columns) with ``min_tiles`` to ``max_tiles`` tiles."""
    grids = [
        (rows, columns)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if rows * columns >= min_tiles
    ]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


class TiledTransform(ImageTransform):
    """Cuts an image into normalized tiles; a frame of a video is one tile.

    Attributes:
        min_tiles: fewest tiles of a grid in mode ``dynamic``, without the thumbnail.
        max_tiles: most tiles of a grid, likewise.
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
        """Check the settings.

        Raises:
            ValueError: a setting is out of range, or contradicts the mode.
        """
        super().__init__(size, mean, std, mode, resample)
        self.scales = tuple(scales)
        if mode == "dynamic_s2":
            check_scales(self.scales, size)
            min_tiles = (self.scales[-1] // size) ** 2
        elif self.scales:
            raise ValueError(f"scales={list(scales)} have no effect in mode {mode!r}; remove them")
        if not 1 <= min_tiles <= max_tiles:
            raise ValueError(
                f"image tiles are {min_tiles} (least) to {max_tiles} (most); need at least 1, and "
                f"in mode dynamic_s2 room for the square of the largest scale: set max_tiles to "
                f"{min_tiles} or more"
            )
        self.min_tiles = min_tiles
        self.max_tiles = max_tiles

    def plan(self, width: int, height: int) -> TilePlan:
        """How an image of this size is cut; known before it is decoded."""
        rows, columns = closest_grid(width, height, self.size, self.min_tiles, self.max_tiles)
        tiles = rows * columns
        if self.mode == "dynamic_s2":
            smaller = sum((scale // self.size) ** 2 for scale in self.scales[:-1])
            return TilePlan(smaller + tiles, rows, columns, tiles, separated=False)
        tiles += tiles > 1  # the thumbnail
        return TilePlan(tiles, rows, columns, tiles, separated=True)

    def write(
        self,
        image: Image.Image,
        out: NDArray[np.float32],
        rng: np.random.Generator | None = None,  # noqa: ARG002 - nothing is augmented
    ) -> None:
        """Write the tiles of ``plan(*image.size)`` into ``out``, float32 (tiles, 3, size, size).

        Mode ``dynamic``: the grid, then the thumbnail. Mode ``dynamic_s2``: scale after scale,
        ascending. Each grid row by row.
        """
        for tile, place in zip(self._cut(image), out, strict=True):
            self.normalize(tile, place)

    def _cut(self, image: Image.Image) -> Iterator[list[NDArray[np.uint8]]]:
        """The channels of each tile, three of (size, size)."""
        plan = self.plan(*image.size)
        for scale in self.scales[:-1]:
            side = scale // self.size
            yield from self._grid(image, side, side)
        yield from self._grid(image, plan.rows, plan.columns)
        if self.mode == "dynamic" and plan.num_tiles > 1:
            yield from self._grid(image, 1, 1)

    def _grid(
        self, image: Image.Image, rows: int, columns: int
    ) -> Iterator[list[NDArray[np.uint8]]]:
        size = self.size
        target = (columns * size, rows * size)
        channels = channels_of(
            image if image.size == target else image.resize(target, self.resample)
        )
        for top in range(0, rows * size, size):
            for left in range(0, columns * size, size):
                yield [values[top : top + size, left : left + size] for values in channels]


def check_scales(scales: Sequence[int], size: int) -> None:
    """Check the scales of mode ``dynamic_s2`` for a tower of ``size`` pixels.

    Raises:
        ValueError: they are fewer than two, do not begin with the tower's size, or are not
            ascending multiples of it.
    """
    ascending = all(a < b for a, b in itertools.pairwise(scales))
    multiples = all(scale % size == 0 for scale in scales)
    if len(scales) < 2 or scales[0] != size or not ascending or not multiples:
        raise ValueError(
            f"s2_scales={list(scales)} do not fit a tower of {size} pixels; give two or more "
            f"ascending multiples of {size} that begin with it, e.g. [{size}, {2 * size}, "
            f"{3 * size}]"
        )
