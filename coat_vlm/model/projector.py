"""Projectors: from vision features to the language model's embedding space, as in VILA.

Layers, their order and their parameter names (``layers.1.weight``, ...) are those of NVlabs/VILA,
``llava/model/multimodal_projector/base_projector.py``, so VILA's projector weights fit unchanged:

    linear                   Linear(C, H)
    mlp2x_gelu               Linear(C, H), GELU, Linear(H, H)
    mlp_downsample           2x2 space-to-depth, LN(4C), Linear(4C, H), GELU, Linear(H, H)
    mlp_downsample_3x3_fix   3x3 space-to-depth, LN(9C), Linear(9C, 3C), GELU, LN(3C),
                             Linear(3C, H), GELU, Linear(H, H)

C is the tower's width and H the language model's.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

PROJECTOR_TYPES = ("linear", "mlp2x_gelu", "mlp_downsample", "mlp_downsample_3x3_fix")

_BLOCK_SIZES = {"linear": 1, "mlp2x_gelu": 1, "mlp_downsample": 2, "mlp_downsample_3x3_fix": 3}


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
