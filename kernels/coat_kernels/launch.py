"""How kernels are launched: tile sizes, warps, grids. Device code is in ``tile.py``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

NUM_WARPS = 8
"""Warps per program. With four, the backward kernels' tiles spill registers on sm_90."""

TOKENS = ("M",)
"""Arguments that Triton must not compile special cases of: a kernel takes any number of tokens.
(Compiled for M = 1, Triton 3.6 wrote wrong bytes into transposed FP8 tiles on an H200.)"""


COUNTS = ("programs",)
"""The same for the number of programs that walk over rows, which follows the number of tokens."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on, and with how many warps: powers of two."""

    rows: int
    """At least 4 where codes are written transposed."""
    columns: int
    """A multiple of the group size."""
    warps: int = NUM_WARPS


TILE = Tile(64, 128)
"""That of the kernels which work on any tile of a matrix."""

_forced: Tile | None = None


def transposing_tile(group: int = 1) -> Tile:
    """That of the kernels which write codes transposed, from a copy with groups of this size.

    Long in the direction of the tokens, which then follow each other in memory; and with half the
    warps, each of which then exchanges twice as much at a time.
    """
    columns = max(64, group)
    return Tile(8192 // columns, columns, NUM_WARPS // 2)


@contextmanager
def forced_tile(tile: Tile) -> Iterator[None]:
    """Let all kernels take this tile, so that tiles can be compared; see ``bench kernels --sweep``.

    Kernels that walk over rows take its warps only, those without a choice of tiles nothing.
    """
    global _forced
    before, _forced = _forced, tile
    try:
        yield
    finally:
        _forced = before


def chosen(tile: Tile) -> Tile:
    """``tile``, unless another one is forced."""
    return _forced or tile


def cdiv(a: int, b: int) -> int:
    """Quotient, rounded up."""
    return -(-a // b)


def tiled(M: int, N: int, tile: Tile = TILE) -> tuple[tuple[int], dict[str, int]]:
    """The grid of a matrix [M, N], tiles counted along the row first, and its launch options."""
    tile = chosen(tile)
    tiles_n = cdiv(N, tile.columns)
    options = {"tiles_n": tiles_n, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    return (cdiv(M, tile.rows) * tiles_n,), {**options, "num_warps": tile.warps}


def one_or_two_passes(rows: bool, transposed: bool, columns: int) -> list[tuple[bool, bool]]:
    """The layouts (row-major, transposed) that each launch of a kernel writes.

    Both at once, unless rows are no multiple of 16 codes: a thread may then hold four tokens of one
    channel for both layouts, the compiler makes one cast of the two, and the ptxas 12.8 of Triton
    3.6 reads its result before it is computed (seen for heads of 24 channels on an H200).
    """
    if rows and transposed and columns % 16:
        return [(True, False), (False, True)]
    return [(rows, transposed)]


def launch(kernel: Any, grid: tuple[int, ...], *, num_warps: int = NUM_WARPS, **args: Any) -> None:
    """Run ``kernel`` on the current stream; an empty grid, for an empty tensor, is not launched."""
    if all(grid):
        kernel[grid](**args, num_warps=num_warps)
