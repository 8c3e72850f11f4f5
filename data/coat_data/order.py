"""What an optimizer step holds: the part of the order that is the same for any number of ranks.

A :class:`Cursor` says how far training has got, an :class:`Order` what the step after it holds. A
step is a list of bins; a bin is the samples of one row of a batch, one sample where nothing is
packed. Only then :func:`deal` gives the bins to ranks and micro-batches.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from coat_data.mixture import Mixture


class Cursor(NamedTuple):
    """How far the order has been used: all that has to be saved of it."""

    position: int = 0
    """Positions before this one are used."""
    bins: int = 0
    """Packing: and this many bins of the window that starts there."""


class Bin(NamedTuple):
    """The samples of one row of a batch."""

    positions: tuple[int, ...]
    tokens: int = 0
    """Measured tokens of all of them; 0 where nothing is packed."""
    images: int = 0
    """Measured images (tiles, frames), likewise."""


class Order(Protocol):
    """The sequence of optimizer steps."""

    def step(self, cursor: Cursor) -> tuple[list[Bin], Cursor]:
        """The bins of the step that starts at ``cursor``, and the cursor after it."""
        ...

    def met(self, cursor: Cursor) -> np.ndarray:
        """Samples used before ``cursor`` of each source: int64, (sources,)."""
        ...


class PlainOrder:
    """One sample per bin: a step holds the next ``batch_size`` positions.

    Args:
        mixture: what stands at a position.
        batch_size: samples per optimizer step.
    """

    def __init__(self, mixture: Mixture, batch_size: int) -> None:
        self._mixture = mixture
        self._batch_size = batch_size

    def step(self, cursor: Cursor) -> tuple[list[Bin], Cursor]:
        """The bins of the step that starts at ``cursor``, and the cursor after it."""
        end = cursor.position + self._batch_size
        return [Bin((position,)) for position in range(cursor.position, end)], Cursor(end)

    def met(self, cursor: Cursor) -> np.ndarray:
        """Samples used before ``cursor`` of each source: int64, (sources,)."""
        return self._mixture.met(cursor.position)


def deal(bins: Sequence[Bin], micro_batch_size: int, world_size: int) -> list[list[list[Bin]]]:
    """Give a step's bins to its micro-steps and ranks.

    Ranks wait for each other in every micro-step, so the bins of one should cost alike: those with
    the most images (then tokens) come first, and within a micro-step each bin goes to the rank that
    has the fewest images (then tokens) so far and still has room. Bins that were not measured keep
    their order.

    Args:
        bins: a multiple of ``micro_batch_size * world_size``.
        micro_batch_size: bins per rank and micro-step.
        world_size: number of ranks.

    Returns:
        Bins by micro-step and rank.
    """
    unit = micro_batch_size * world_size
    ranked = sorted(bins, key=lambda bin: (-bin.images, -bin.tokens))  # stable
    micro_steps: list[list[list[Bin]]] = []
    for start in range(0, len(ranked), unit):
        ranks: list[list[Bin]] = [[] for _ in range(world_size)]
        for number, bin in enumerate(ranked[start : start + unit]):
            rank = ranks[number // micro_batch_size]
            if bin.tokens:
                rank = min((r for r in ranks if len(r) < micro_batch_size), key=_load)
            rank.append(bin)
        micro_steps.append(ranks)
    return micro_steps


def _load(bins: Sequence[Bin]) -> tuple[int, int]:
    return sum(bin.images for bin in bins), sum(bin.tokens for bin in bins)
