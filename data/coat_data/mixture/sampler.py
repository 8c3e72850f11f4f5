"""Seeded, resumable sampler over a mixture of sources.

Samples have positions 0, 1, 2, ..., counted on from epoch to epoch. The sample at a position
depends only on the seed and the position, so a run resumes at any position, on any number of ranks.
A sampler returns the sequences (one sample, or several packed ones) of the optimizer step that
starts at a :class:`SamplerState`; :func:`assign_to_ranks` assigns them to ranks and micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np


class Stream(IntEnum):
    """Random streams that share a seed but must be independent."""

    EPOCH_ORDER = 0
    PARTIAL_PASS = 1
    SOURCE_PASS = 2
    REPLACEMENT = 4
    ROW_ORDER = 5
    SELECTION = 6


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """Return the random generator of a stream and a key, such as a position."""
    return np.random.default_rng([seed, stream, *key])


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """What one source contributes to an epoch."""

    name: str
    rows: int
    samples: int
    """Samples per epoch."""

    @property
    def passes(self) -> float:
        """Passes over the source per epoch."""
        return self.samples / self.rows


class Mixture:
    """A seeded, endless sequence of (source, row) over several sources.

    With repeats, an epoch is a permutation of ``repeat`` copies of each source; for a fraction of a
    copy, each epoch draws a different random subset of the source. With weights, an epoch has as
    many samples as all sources together, split by weight (largest remainder method); each source
    is then read in passes that continue over epochs, each newly shuffled, so that every row is
    read equally often. Weights are given for all sources or for none; without them a repeat of None
    means 1. ValueError for a source without rows or samples, and for impossible numbers.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        repeats: Sequence[float | None],
        weights: Sequence[float | None],
        seed: int,
        names: Sequence[str] | None = None,
    ) -> None:
        self._names = list(names or (f"source {number}" for number in range(len(sizes))))
        self._sizes = list(sizes)
        self._seed = seed
        self._check(weights)
        given = [weight for weight in weights if weight is not None]
        self._weighted = bool(given)
        if given:
            self._samples = _shares(sum(sizes), given)
        else:
            self._samples = [
                round(size * (1 if repeat is None else repeat))
                for size, repeat in zip(sizes, repeats, strict=True)
            ]
        for name, size, samples in zip(self._names, sizes, self._samples, strict=True):
            if not samples:
                raise ValueError(
                    f"{name}: none of its {size} rows is in an epoch; raise its repeat or weight, "
                    "or remove it"
                )
        self.epoch_size = sum(self._samples)
        self._starts = np.cumsum([0, *self._samples])
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._rows = np.empty(0, dtype=np.int64)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the source index and the row in the source at ``position`` (0 or greater)."""
        sources, rows = self.locate_range(position, position + 1)
        return int(sources[0]), int(rows[0])

    def locate_range(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and rows, int64, of positions ``[start, stop)`` of one epoch."""
        epoch, first = divmod(start, self.epoch_size)
        if epoch != self._epoch:
            self._draw(epoch)
        places = self._order[first : first + stop - start]
        assert len(places) == stop - start, "the positions are of one epoch"
        return np.searchsorted(self._starts, places, side="right") - 1, self._rows[places]

    def count_by_source(self, position: int) -> np.ndarray:
        """Return the number of samples of each source before ``position``: int64, (sources,)."""
        epoch, index = divmod(position, self.epoch_size)
        whole = epoch * np.array(self._samples, dtype=np.int64)
        if not index:
            return whole
        sources, _ = self.locate_range(position - index, position)
        return whole + np.bincount(sources, minlength=len(self._samples))

    def accounting(self) -> list[SourceShare]:
        """Return rows, samples per epoch and passes per epoch of each source, in order."""
        return [
            SourceShare(name=name, rows=rows, samples=samples)
            for name, rows, samples in zip(self._names, self._sizes, self._samples, strict=True)
        ]

    def _check(self, weights: Sequence[float | None]) -> None:
        if None in weights and set(weights) != {None}:
            missing = [name for name, w in zip(self._names, weights, strict=True) if w is None]
            raise ValueError(
                f"{', '.join(missing)}: no weight, but other sources have one; give every source a "
                "weight or none"
            )
        for name, size in zip(self._names, self._sizes, strict=True):
            if size < 1:
                raise ValueError(f"{name}: has no rows; remove it or check its path")

    def _draw(self, epoch: int) -> None:
        """Draw an epoch: ``_rows`` lists the rows by source, ``_order`` is a permutation of it."""
        draw = self._continued_passes if self._weighted else self._repeated
        self._rows = np.concatenate([draw(source, epoch) for source in range(len(self._sizes))])
        self._order = generator(self._seed, Stream.EPOCH_ORDER, epoch).permutation(self.epoch_size)
        self._epoch = epoch

    def _repeated(self, source: int, epoch: int) -> np.ndarray:
        copies, rest = divmod(self._samples[source], self._sizes[source])
        rows = np.tile(np.arange(self._sizes[source]), copies)
        if rest:
            rng = generator(self._seed, Stream.PARTIAL_PASS, source, epoch)
            rows = np.concatenate([rows, rng.permutation(self._sizes[source])[:rest]])
        return rows

    def _continued_passes(self, source: int, epoch: int) -> np.ndarray:
        size, samples = self._sizes[source], self._samples[source]
        first, skipped = divmod(epoch * samples, size)
        last = (epoch * samples + samples - 1) // size
        passes = [
            generator(self._seed, Stream.SOURCE_PASS, source, number).permutation(size)
            for number in range(first, last + 1)
        ]
        return np.concatenate(passes)[skipped : skipped + samples]


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Split ``total`` by weight with the largest remainder method."""
    exact = [total * weight / math.fsum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


class SamplerState(NamedTuple):
    """State of a sampler between two optimizer steps. Checkpoints save it."""

    position: int = 0
    """All samples before this position have been used."""
    rows: int = 0
    """Packing: number of used sequences of the packing window that starts at ``position``."""


class BatchRow(NamedTuple):
    """The samples of one row of a batch."""

    positions: tuple[int, ...]
    tokens: int = 0
    """Measured tokens of all samples; 0 without packing."""
    images: int = 0
    """Measured images (tiles, frames) of all samples; 0 without packing."""
    cost: float = 0.0
    """Estimated work of all samples, in any unit; 0 if rows are not balanced."""


class PlainSampler:
    """Sampler without packing: a step has the samples at the next ``batch_size`` positions.

    ``costs``: estimated work of the rows of each source, (rows,); None does not balance ranks.
    """

    def __init__(
        self, mixture: Mixture, batch_size: int, costs: Sequence[np.ndarray] | None = None
    ) -> None:
        self._mixture = mixture
        self._batch_size = batch_size
        self._costs = costs

    def step(self, state: SamplerState) -> tuple[list[BatchRow], SamplerState]:
        """Return the sequences of the step that starts at ``state``, and the state after it."""
        end = state.position + self._batch_size
        rows = [BatchRow((position,)) for position in range(state.position, end)]
        if self._costs is not None:
            places = [self._mixture.locate(row.positions[0]) for row in rows]
            costs = [float(self._costs[source][index]) for source, index in places]
            rows = [row._replace(cost=cost) for row, cost in zip(rows, costs, strict=True)]
        return rows, SamplerState(end)

    def count_by_source(self, state: SamplerState) -> np.ndarray:
        """Return the number of samples of each source before ``state``: int64, (sources,)."""
        return self._mixture.count_by_source(state.position)


def assign_to_ranks(
    rows: Sequence[BatchRow], micro_batch_size: int, world_size: int
) -> list[list[list[BatchRow]]]:
    """Assign the sequences of a step to micro-steps and ranks.

    With ZeRO-2 and ZeRO-3 ranks wait for each other in every micro-step: sequences are sorted by
    cost, then images, then tokens, largest first, and each joins the group of its micro-step
    with the least work that has fewer than ``micro_batch_size`` sequences (Graham 1969, SIAM
    J. Appl. Math. 17(2), longest processing time first). With ZeRO-0 and ZeRO-1 ranks wait once a
    step: the largest group goes to the rank with the least work so far. Unmeasured ones keep their
    order.
    """
    unit = micro_batch_size * world_size
    ranked = sorted(rows, key=lambda row: _sum_work([row]), reverse=True)  # stable, also reversed
    micro_steps: list[list[list[BatchRow]]] = []
    before: list[tuple[float, ...]] = [(0.0, 0, 0)] * world_size
    for start in range(0, len(ranked), unit):
        groups: list[list[BatchRow]] = [[] for _ in range(world_size)]
        for row in ranked[start : start + unit]:
            free = [group for group in groups if len(group) < micro_batch_size]
            min(free, key=_sum_work).append(row)
        groups.sort(key=_sum_work, reverse=True)
        by_rank = dict(zip(sorted(range(world_size), key=before.__getitem__), groups, strict=True))
        for rank, group in by_rank.items():
            before[rank] = tuple(map(sum, zip(before[rank], _sum_work(group), strict=True)))
        micro_steps.append([by_rank[rank] for rank in range(world_size)])
    return micro_steps


def _sum_work(rows: Sequence[BatchRow]) -> tuple[float, int, int]:
    cost = math.fsum(row.cost for row in rows)
    return cost, sum(row.images for row in rows), sum(row.tokens for row in rows)
