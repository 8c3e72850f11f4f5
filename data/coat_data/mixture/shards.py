"""The order of a source that is read from shards: rows that lie side by side are used together.

In each pass the shards come in a new order. A shard is cut into windows of consecutive rows; its
windows are shuffled, and so are the rows within each. Which row stands where is computed from the
seed and the pass: nothing is buffered, and a saved position is enough to continue.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How the rows of a source lie."""

    sizes: tuple[int, ...]
    """Rows of each shard, in the order of the source's rows."""
    window: int
    """Consecutive rows of a shard that are shuffled among themselves."""
    jumps: bool = True
    """Whether a shard can be read from any window on; else its windows keep their order."""

    kept: np.ndarray | None = None
    """(n,) int64, ascending: the rows that take part; None for all. They are numbered anew."""

    def order(self, rng: np.random.Generator) -> np.ndarray:
        """The rows of one pass: a permutation of all that take part, (n,) int64."""
        starts = np.cumsum([0, *self.sizes])
        windows: list[np.ndarray] = []
        for shard in rng.permutation(len(self.sizes)):
            first, stop = int(starts[shard]), int(starts[shard + 1])
            begins = np.arange(first, stop, self.window)
            for begin in rng.permutation(begins) if self.jumps else begins:
                rows = np.arange(begin, min(begin + self.window, stop))
                windows.append(rng.permutation(rows))
        rows = np.concatenate([np.empty(0, dtype=np.int64), *windows])
        if self.kept is None:
            return rows
        return np.searchsorted(self.kept, rows[np.isin(rows, self.kept)])
