"""A shuffled order over shards that needs no buffer: every position is computed.

In each epoch the shards come in a new order. A shard is cut into windows of consecutive rows; its
windows are shuffled, and so are the rows within each. A reader that cannot jump to a row needs one
window in memory, and one that can needs nothing: a saved position is enough to continue.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coat_data.mixture import Stream, generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive rows of one shard, read together."""

    shard: int
    start: int
    """First row in the shard."""
    rows: int


class StreamOrder:
    """A seeded, endless sequence of (shard, row).

    Attributes:
        epoch_size: rows of all shards.

    Args:
        shard_sizes: rows of each shard; 0 is allowed.
        window: most rows of a window.
        seed: at least 0.

    Raises:
        ValueError: there are no rows, or a number is out of range.
    """

    def __init__(self, shard_sizes: Sequence[int], window: int, seed: int) -> None:
        self._sizes = np.array(shard_sizes, dtype=np.int64)
        if window < 1 or seed < 0 or (self._sizes < 0).any():
            raise ValueError(
                f"window={window} must be at least 1, seed={seed} and all shard sizes at least 0"
            )
        self.epoch_size = int(self._sizes.sum())
        if not self.epoch_size:
            raise ValueError(f"the {len(self._sizes)} shards hold no rows; check the paths")
        self._size = window
        self._seed = seed
        self._epoch = -1
        self._shards = np.empty(0, dtype=np.int64)
        self._ends = np.empty(0, dtype=np.int64)
        self._window_order: tuple[int, int, np.ndarray, np.ndarray] | None = None
        self._row_order: tuple[int, int, int, np.ndarray] | None = None

    def locate(self, position: int) -> tuple[int, int]:
        """The shard's index and the row in it that stand at ``position`` (0 or greater)."""
        epoch, number, window, offset = self._find(position)
        if self._row_order is None or self._row_order[:3] != (epoch, window.shard, number):
            rng = generator(self._seed, Stream.WINDOW_ROWS, epoch, window.shard, number)
            self._row_order = (epoch, window.shard, number, rng.permutation(window.rows))
        return window.shard, window.start + int(self._row_order[3][offset])

    def window(self, position: int) -> Window:
        """The rows that a reader has to have around ``position``; they stand side by side."""
        return self._find(position)[2]

    def _find(self, position: int) -> tuple[int, int, Window, int]:
        """Epoch, the window's number in its shard, the window, and the place in its new order."""
        epoch, index = divmod(position, self.epoch_size)
        if epoch != self._epoch:
            rng = generator(self._seed, Stream.SHARD_ORDER, epoch)
            self._shards = rng.permutation(len(self._sizes))
            self._ends = np.cumsum(self._sizes[self._shards])
            self._epoch = epoch
        place = int(np.searchsorted(self._ends, index, side="right"))
        shard = int(self._shards[place])
        index -= int(self._ends[place] - self._sizes[shard])
        order, ends = self._windows(epoch, shard)
        turn = int(np.searchsorted(ends, index, side="right"))
        number = int(order[turn])
        start = number * self._size
        rows = min(self._size, int(self._sizes[shard]) - start)
        offset = index - int(ends[turn]) + rows
        return epoch, number, Window(shard=shard, start=start, rows=rows), offset

    def _windows(self, epoch: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """A shard's windows in their new order, and the rows up to the end of each."""
        kept = self._window_order
        if kept is None or kept[:2] != (epoch, shard):
            starts = np.arange(0, self._sizes[shard], self._size)
            rng = generator(self._seed, Stream.WINDOW_ORDER, epoch, shard)
            order = rng.permutation(len(starts))
            rows = np.minimum(self._size, self._sizes[shard] - starts)
            kept = self._window_order = (epoch, shard, order, np.cumsum(rows[order]))
        return kept[2], kept[3]
