"""How the norms' kernels walk over the rows of a matrix: pieces of a row, warps, programs.

A row is held in one or two pieces whose widths are powers of two: 1152 channels are 1024 and 128,
with no lane idle, where one power of two would be 2048. Each program takes every n-th row, of which
the next is on its way while one is worked on. ``WALKS`` is the one table of choices.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from coat_kernels.launch import Tile, chosen

MULTIPROCESSORS = 132
"""Of an H200. The kernels have as many programs as these hold; each takes every n-th row, so
this also is the order in which weight gradients are summed."""

REGISTER_FILE = 65536
"""Registers of a multiprocessor."""

MAX_PROGRAMS = 32
"""That a multiprocessor holds at most."""

LEAST_WIDTH = 128
"""Of a row's first piece."""


@dataclass(frozen=True, slots=True)
class Walk:
    """What a program may use for a row."""

    warps: int
    registers: int
    """Most of a thread. Without a bound the compiler takes so many that one or two programs fill a
    multiprocessor."""


WALKS: dict[str, tuple[tuple[int, Walk], ...]] = {
    "stats": (
        (1280, Walk(1, 128)), (2048, Walk(2, 128)), (4096, Walk(4, 128)), (8192, Walk(16, 80)),
    ),
    "sum": ((2048, Walk(2, 128)), (4096, Walk(8, 80)), (8192, Walk(16, 128))),
    "bwd": (
        (1152, Walk(1, 255)), (1536, Walk(2, 168)), (2048, Walk(4, 128)), (4096, Walk(8, 128)),
        (8192, Walk(16, 128)),
    ),
}  # fmt: skip
"""By kernel: the widest row, in lanes of both pieces, and the walk for it; the last one is for all
others too. ``sum`` is ``norm_stats`` with a delta. All compile without spills;
those for 1152 and 4096 lanes were chosen among a few on an H200, of which no figures are kept."""


def pieces(columns: int) -> tuple[int, int]:
    """Widths of the two pieces that hold a row; the second is 0 if the first holds all of it.

    Where both together would be as wide as the next power of two, that is the first.
    """
    whole = max(LEAST_WIDTH, 1 << (columns - 1).bit_length())
    head = whole // 2
    if columns <= head or head < LEAST_WIDTH:
        return whole, 0
    tail = 1 << (columns - head - 1).bit_length()
    return (whole, 0) if tail == head else (head, tail)


def walked(kernel: str, M: int, N: int) -> tuple[int, dict[str, int]]:
    """How many programs walk over the rows of [M, N], and their launch options.

    Args:
        kernel: one of ``WALKS``.
        M: rows.
        N: columns.
    """
    head, tail = pieces(N)
    table = WALKS[kernel]
    walk = next((walk for widest, walk in table if head + tail <= widest), table[-1][1])
    warps = chosen(Tile(1, head, walk.warps)).warps
    each = max(1, min(MAX_PROGRAMS, REGISTER_FILE // (32 * walk.registers * warps)))
    options = {"HEAD": head, "TAIL": tail, "num_warps": warps, "maxnreg": walk.registers}
    return min(M, MULTIPROCESSORS * each), options


@triton.jit
def load_row(ptr, row, o_n, M, N):
    """A row as it is stored [1, WIDTH]; zeros beyond the last, for which no one waits."""
    mask = (o_n[None, :] < N) & (row < M)
    return tl.load(ptr + row.to(tl.int64) * N + o_n[None, :], mask=mask, other=0.0)


@triton.jit
def store_row(values, ptr, row, o_n, N):
    """Store [1, WIDTH] in a row of N channels, rounded to what is stored there."""
    o = row.to(tl.int64) * N + o_n[None, :]
    tl.store(ptr + o, values.to(ptr.dtype.element_ty), mask=o_n[None, :] < N)


@triton.jit
def row_sum(x):
    """The sum of [1, WIDTH], a scalar.

    A vector of one element has the layout of its piece; adding two of them makes the compiler pass
    one piece through shared memory, so that both have the same.
    """
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def load_channels(ptr, o_n, N):
    """[1, WIDTH] of N channels as they are stored; zeros beyond."""
    return tl.load(ptr + o_n[None, :], mask=o_n[None, :] < N, other=0.0)
