"""Projectors: from vision features to the language model's embedding space, as in VILA.

Layers, their order and their parameter names (``layers.1.weight``, ...) are those of NVlabs/VILA,
``llava/model/multimodal_projector/base_projector.py``, so VILA's projector weights fit unchanged:

    linear                   Linear(C, H)
    mlp2x_gelu               Linear(C, H), GELU, Linear(H, H)
    mlp_downsample           2x2 space-to-depth, LN(4C), Linear(4C, H), GELU, Linear(H, H)
    mlp_downsample_3x3_fix   3x3 space-to-depth, LN(9C), Linear(9C, 3C), GELU, LN(3C),
                             Linear(3C, H), GELU, Linear(H, H)

C is the tower's width and H the language model's.

:func:`project_scales` stitches the features of an image seen at several scales (S2) together as
VILA does (Shi et al. 2024, arXiv:2403.13043, section 3.1; NVlabs/VILA,
``llava/model/llava_arch.py``, ``merge_features_for_dynamic_s2``). An image comes as tiles of the
tower's size: of each scale but the largest the square of ``(scale / size)^2`` tiles, then the grid
of rows x columns tiles of the largest scale. The tiles of a scale are laid together to one map of
features; the maps of the smaller scales are resized to the largest by averaging areas; all are
concatenated by channels:

    map_k (C, h_k, w_k)  ->  area_average(map_k) (C, h, w)  ->  (K C, h, w),     K scales

That map is cut into tiles again for the projector, so that its blocks of patches stay inside a
tile, and the projected tiles are laid together and read row by row over the whole image: an image
has rows * columns * ``tokens_per_image`` tokens. An image of grid (1, 1) is one tile; its features
stand for all scales.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCK_SIZES = {"linear": 1, "mlp2x_gelu": 1, "mlp_downsample": 2, "mlp_downsample_3x3_fix": 3}
PROJECTOR_TYPES = tuple(_BLOCK_SIZES)


class SpaceToDepth(nn.Module):
    """Concatenates each ``block_size`` x ``block_size`` block of patches into one token.

    The square grid is padded with zeros at the bottom and the right to a multiple of the block
    size. Tokens stay in row-major order; inside a token the patches are row-major too.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Concatenate blocks.

        Args:
            features: (N, grid * grid, C), row-major patches of square images.

        Returns:
            (N, ceil(grid / block) ** 2, block * block * C).

        Raises:
            ValueError: the number of patches is not a square.
        """
        num_images, num_patches, channels = features.shape
        grid = math.isqrt(num_patches)
        if grid * grid != num_patches:
            raise ValueError(
                f"a downsampling projector needs a square grid of patches, got {num_patches} "
                "features per image; use select_feature=patch, which drops a class token"
            )
        block = self.block_size
        blocks = -(-grid // block)
        padding = blocks * block - grid
        x = features.reshape(num_images, grid, grid, channels)
        x = F.pad(x, (0, 0, 0, padding, 0, padding))
        x = x.reshape(num_images, blocks, block, blocks, block, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(num_images, blocks * blocks, -1)

    def extra_repr(self) -> str:
        """The block size, for ``print(model)``."""
        return f"block_size={self.block_size}"


class Projector(nn.Module):
    """One of VILA's projectors; see :func:`build_projector`."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map features (N, P, C) to embeddings (N, T, H), T as :func:`projected_tokens` says."""
        return self.layers(features)


def build_projector(projector_type: str, vision_hidden: int, text_hidden: int) -> Projector:
    """A projector with torch's default initialisation, as VILA's.

    Args:
        projector_type: one of ``PROJECTOR_TYPES``.
        vision_hidden: C, width of the vision features.
        text_hidden: H, width of the language model's embeddings.

    Raises:
        ValueError: the type is unknown.
    """
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
    """Side of the block of patches that becomes one token; 1 for projectors without downsampling.

    Raises:
        ValueError: the type is unknown.
    """
    if projector_type not in _BLOCK_SIZES:
        raise ValueError(
            f"unknown projector type {projector_type!r}; allowed: {', '.join(PROJECTOR_TYPES)}"
        )
    return _BLOCK_SIZES[projector_type]


def projected_tokens(projector_type: str, grid: int) -> int:
    """Tokens per image that a projector makes of a ``grid`` x ``grid`` map of patches.

    For example 1024 patches (448 pixels, patches of 14) become 256 tokens with 2x2 blocks and 121
    with 3x3 blocks.

    Raises:
        ValueError: the type is unknown.
    """
    return (-(-grid // block_size(projector_type))) ** 2


Grid = tuple[int, int]
"""Rows and columns of the largest scale of an image, in tiles."""


def project_scales(
    features: Tensor,
    grids: Sequence[Grid],
    scales: Sequence[int],
    project: Callable[[Tensor], Tensor],
) -> Tensor:
    """Embeddings of images whose tiles are of several scales.

    Args:
        features: (N, P, C), the tower's features of all tiles of all images in order; P = g * g
            patches in row-major order.
        grids: the grid of each image.
        scales: sides of the scales in pixels, ascending; the first is the tower's.
        project: maps (n, P, K * C) to (n, T, H), T a square.

    Returns:
        (tokens, H): the embeddings of all images in order, row by row over each whole image.

    Raises:
        ValueError: the number of tiles is not what the grids need.
    """
    counts = [num_tiles(grid, scales) for grid in grids]
    if sum(counts) != len(features):
        raise ValueError(
            f"image_grids {list(grids)} need {sum(counts)} tiles at the scales {list(scales)}, but "
            f"pixel_values hold {len(features)}; pass both as the processor gives them"
        )
    tiles = [
        _concatenated(image, grid, scales)
        for image, grid in zip(features.split(counts), grids, strict=True)
    ]
    projected = project(torch.cat(tiles))
    images = projected.split([rows * columns for rows, columns in grids])
    return torch.cat(
        [
            _laid_together(image, grid).flatten(0, 1)
            for image, grid in zip(images, grids, strict=True)
        ]
    )


def num_tiles(grid: Grid, scales: Sequence[int]) -> int:
    """Tiles that the tower sees of an image of this grid."""
    rows, columns = grid
    if grid == (1, 1):
        return 1
    return sum((scale // scales[0]) ** 2 for scale in scales[:-1]) + rows * columns


def tiles_per_row(
    num_placeholders: Sequence[int], grids: Sequence[Grid], scales: Sequence[int], tokens: int
) -> list[tuple[int, int]]:
    """Images and tiles that belong to each row of a batch.

    Args:
        num_placeholders: image placeholders of each row.
        grids: the grids of all rows' images in order.
        scales: the scales in pixels.
        tokens: placeholders per tile of the largest scale.

    Returns:
        For each row the number of its images and of their tiles.
    """
    remaining = list(grids)
    found: list[tuple[int, int]] = []
    for wanted in num_placeholders:
        images = tiles = 0
        while wanted > 0 and remaining:
            rows, columns = remaining.pop(0)
            wanted -= rows * columns * tokens
            images += 1
            tiles += num_tiles((rows, columns), scales)
        found.append((images, tiles))
    return found


def _concatenated(features: Tensor, grid: Grid, scales: Sequence[int]) -> Tensor:
    """(tiles of all scales, P, C) of one image to (rows * columns, P, K * C)."""
    if grid == (1, 1):
        return features.repeat(1, 1, len(scales))
    sides = [scale // scales[0] for scale in scales[:-1]]
    counts = [side * side for side in sides]
    *smaller, largest = features.split([*counts, len(features) - sum(counts)])
    whole = _laid_together(largest, grid)
    size = whole.shape[:2]
    maps = [
        area_average(_laid_together(tiles, (side, side)), size)
        for side, tiles in zip(sides, smaller, strict=True)
    ]
    return _cut(torch.cat([*maps, whole], dim=-1), grid)


def _laid_together(tiles: Tensor, grid: Grid) -> Tensor:
    """(rows * columns, g * g, C) to the map (rows * g, columns * g, C)."""
    rows, columns = grid
    side = round(tiles.shape[1] ** 0.5)
    x = tiles.reshape(rows, columns, side, side, -1)
    return x.transpose(1, 2).reshape(rows * side, columns * side, -1)


def _cut(whole: Tensor, grid: Grid) -> Tensor:
    """The inverse of :func:`_laid_together`."""
    rows, columns = grid
    height, width = whole.shape[0] // rows, whole.shape[1] // columns
    x = whole.reshape(rows, height, columns, width, -1)
    return x.transpose(1, 2).reshape(rows * columns, height * width, -1)


def area_average(features: Tensor, size: Sequence[int]) -> Tensor:
    """Resize a map (h, w, C) to (H, W, C) by averaging areas, in FP32.

    Equals ``torch.nn.functional.interpolate(mode="area")``, which VILA uses. That one's gradient
    adds up in an order that changes from run to run on a GPU; two matrix products do not.
    """
    rows = _averages(features.shape[0], size[0], features)
    columns = _averages(features.shape[1], size[1], features)
    resized = torch.einsum("Hh,Ww,hwc->HWc", rows, columns, features.float())
    return resized.to(features.dtype)


def _averages(old: int, new: int, like: Tensor) -> Tensor:
    """(new, old) FP32: row i averages places floor(i old / new) to ceil((i + 1) old / new) - 1."""
    place = torch.arange(old, device=like.device)
    index = torch.arange(new, device=like.device).unsqueeze(1)
    first = index * old // new
    end = -(-(index + 1) * old // new)
    inside = ((place >= first) & (place < end)).float()
    return inside / inside.sum(1, keepdim=True)
