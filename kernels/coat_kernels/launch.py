"""How kernels are launched: tile sizes, warps, grids. Device code is in ``tile.py``."""

from typing import Any

BLOCK_M, BLOCK_N = 64, 128
"""Rows and columns of a tile of the kernels that work on any tile of a matrix."""

TOKENS = ("M",)
"""Arguments that Triton must not compile special cases of: a kernel takes any number of tokens.
(Compiled for M = 1, Triton 3.6 wrote wrong bytes into transposed FP8 tiles on an H200.)"""

NUM_WARPS = 8
"""Warps per program. With four, the backward kernels' tiles spill registers on sm_90."""


def cdiv(a: int, b: int) -> int:
    """Quotient, rounded up."""
    return -(-a // b)


def tiles(M: int, N: int, block_m: int = BLOCK_M, block_n: int = BLOCK_N) -> tuple[int, int]:
    """Number of tiles of a matrix, and of one row of tiles."""
    tiles_n = cdiv(N, block_n)
    return cdiv(M, block_m) * tiles_n, tiles_n


def launch(kernel: Any, grid: tuple[int, ...], *, num_warps: int = NUM_WARPS, **args: Any) -> None:
    """Run ``kernel`` on the current stream; an empty grid, for an empty tensor, is not launched."""
    if all(grid):
        kernel[grid](**args, num_warps=num_warps)
