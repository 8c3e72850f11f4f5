"""Projectors that map vision features to the language model's embedding space, as in VILA.

Layers, order and parameter names (``layers.1.weight``, ...) are as in NVlabs/VILA,
``llava/model/multimodal_projector/base_projector.py``. C is the tower's width, H the LLM's:

    mlp_downsample           2x2 space-to-depth, LN(4C), Linear(4C, H), GELU, Linear(H, H)
    mlp_downsample_3x3_fix   3x3 space-to-depth, LN(9C), Linear(9C, 3C), GELU, LN(3C),
                             Linear(3C, H), GELU, Linear(H, H)
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCK_SIZES = {"linear": 1, "mlp2x_gelu": 1, "mlp_downsample": 2, "mlp_downsample_3x3_fix": 3}
PROJECTOR_TYPES = tuple(_BLOCK_SIZES)


class SpaceToDepth(nn.Module):
    """Concatenates each square block of patches to one token, in row-major order.

    The square grid is zero-padded at the bottom and the right.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map (N, grid * grid, C) to (N, ceil(grid / block) ** 2, block * block * C)."""
        num_images, num_patches, channels = features.shape
        grid = math.isqrt(num_patches)
        block = self.block_size
        blocks = -(-grid // block)
        padding = blocks * block - grid
        x = features.reshape(num_images, grid, grid, channels)
        x = F.pad(x, (0, 0, 0, padding, 0, padding))
        x = x.reshape(num_images, blocks, block, blocks, block, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(num_images, blocks * blocks, -1)


class Projector(nn.Module):
    """One of VILA's projectors; see :func:`build_projector`."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map features (N, P, C) to embeddings (N, T, H); see :func:`count_projected_tokens`."""
        return self.layers(features)


def build_projector(projector_type: str, vision_hidden: int, text_hidden: int) -> Projector:
    """Build a projector with torch's default initialization, as VILA does."""
    block = block_size(projector_type)
    wide = block * block * vision_hidden
    if projector_type == "linear":
        return Projector(nn.Linear(vision_hidden, text_hidden))
    if projector_type == "mlp2x_gelu":
        first = [nn.Linear(vision_hidden, text_hidden)]
    elif projector_type == "mlp_downsample":
        first = [SpaceToDepth(block), nn.LayerNorm(wide), nn.Linear(wide, text_hidden)]
    else:
        middle = 3 * vision_hidden
        first = [
            SpaceToDepth(block),
            nn.LayerNorm(wide),
            nn.Linear(wide, middle),
            nn.GELU(),
            nn.LayerNorm(middle),
            nn.Linear(middle, text_hidden),
        ]
    return Projector(nn.Sequential(*first, nn.GELU(), nn.Linear(text_hidden, text_hidden)))


def block_size(projector_type: str) -> int:
    """Return the side of the block of patches per token; 1 without downsampling."""
    if projector_type not in _BLOCK_SIZES:
        raise ValueError(
            f"unknown projector type {projector_type!r}; allowed: {', '.join(PROJECTOR_TYPES)}"
        )
    return _BLOCK_SIZES[projector_type]


def count_projected_tokens(projector_type: str, grid: int) -> int:
    """Count the tokens of an image with ``grid`` x ``grid`` patches."""
    return (-(-grid // block_size(projector_type))) ** 2


Grid = tuple[int, int]
"""Rows and columns of the largest scale of an image, in tiles."""


def project_scales(
    features: Tensor,
    grids: Sequence[Grid],
    scales: Sequence[int],
    project: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute the embeddings (tokens, H) of images with tiles of several scales (S2).

    VILA's ``merge_features_for_dynamic_s2`` (Shi et al. 2024, arXiv:2403.13043, section 3.1;
    NVlabs/VILA, ``llava/model/llava_arch.py``). An image consists of ``(scale / size)^2`` tiles of
    each smaller scale, then the grid of rows x columns tiles of the largest. The maps of the
    smaller scales are resized to the largest and concatenated along channels. The result is split
    into tiles for the projector, so that its blocks of patches stay inside a tile.

    ``features`` are (N, P, C), of all tiles of all images in order, P = g * g patches; ValueError
    if ``grids`` have another number of tiles. ``scales`` are sides in pixels, ascending from the
    tower's input size. ``project`` maps (n, P, K * C) for K scales to (n, T, H), T a square.
    """
    counts = [count_tiles(grid, scales) for grid in grids]
    if sum(counts) != len(features):
        raise ValueError(
            f"image_grids {list(grids)} need {sum(counts)} tiles at the scales {list(scales)}, but "
            f"pixel_values contain {len(features)}; pass both as the processor returns them"
        )
    tiles = [
        _concatenate_scales(image, grid, scales)
        for image, grid in zip(features.split(counts), grids, strict=True)
    ]
    projected = project(torch.cat(tiles))
    images = projected.split([rows * columns for rows, columns in grids])
    return torch.cat(
        [_merge_tiles(image, grid).flatten(0, 1) for image, grid in zip(images, grids, strict=True)]
    )


def count_tiles(grid: Grid, scales: Sequence[int]) -> int:
    """Count the tiles of all scales of an image."""
    rows, columns = grid
    if grid == (1, 1):
        return 1
    return sum((scale // scales[0]) ** 2 for scale in scales[:-1]) + rows * columns


def list_image_sizes(
    tokens: int, images: int, grids: Tensor | None, groups: Tensor | None, scales: Sequence[int]
) -> list[tuple[int, int]]:
    """List features and tiles of each image, or group of frames; ``tokens`` are a tile's."""
    if groups is not None:
        return [(tokens, tiles) for tiles in groups.tolist()]
    if grids is not None and scales:
        return [(r * c * tokens, count_tiles((r, c), scales)) for r, c in grids.tolist()]
    return [(tokens, 1)] * images


def _concatenate_scales(features: Tensor, grid: Grid, scales: Sequence[int]) -> Tensor:
    """Concatenate the scales of one image: (all tiles, P, C) to (rows * columns, P, K * C)."""
    if grid == (1, 1):
        return features.repeat(1, 1, len(scales))
    sides = [scale // scales[0] for scale in scales[:-1]]
    counts = [side * side for side in sides]
    *smaller, largest = features.split([*counts, len(features) - sum(counts)])
    whole = _merge_tiles(largest, grid)
    size = whole.shape[:2]
    maps = [
        area_average(_merge_tiles(tiles, (side, side)), size)
        for side, tiles in zip(sides, smaller, strict=True)
    ]
    rows, columns = grid
    x = torch.cat([*maps, whole], dim=-1)  # split again into tiles
    x = x.reshape(rows, size[0] // rows, columns, size[1] // columns, -1)
    return x.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _merge_tiles(tiles: Tensor, grid: Grid) -> Tensor:
    """Merge tiles (rows * columns, g * g, C) to a map (rows * g, columns * g, C)."""
    rows, columns = grid
    side = round(tiles.shape[1] ** 0.5)
    x = tiles.reshape(rows, columns, side, side, -1)
    return x.transpose(1, 2).reshape(rows * side, columns * side, -1)


def area_average(features: Tensor, size: Sequence[int]) -> Tensor:
    """Resize a map (h, w, C) to (H, W, C) by area averaging in FP32, as VILA does.

    Two matrix products, because the gradient of ``interpolate(mode="area")`` is nondeterministic on
    a GPU.
    """
    rows = _averaging_matrix(features.shape[0], size[0], features)
    columns = _averaging_matrix(features.shape[1], size[1], features)
    resized = torch.einsum("Hh,Ww,hwc->HWc", rows, columns, features.float())
    return resized.to(features.dtype)


def _averaging_matrix(old: int, new: int, like: Tensor) -> Tensor:
    """Row i of (new, old) averages places floor(i old / new) to ceil((i + 1) old / new) - 1."""
    place = torch.arange(old, device=like.device)
    index = torch.arange(new, device=like.device).unsqueeze(1)
    first = index * old // new
    end = -(-(index + 1) * old // new)
    inside = ((place >= first) & (place < end)).float()
    return inside / inside.sum(1, keepdim=True)
