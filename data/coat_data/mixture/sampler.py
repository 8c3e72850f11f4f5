"""Which samples each optimizer step holds: the seeded, resumable order over a mixture of sources.

Positions 0, 1, 2, ... run through epoch after epoch. Everything is a pure function of the seed and
the position, so a run can start anywhere, on any number of ranks, and see what it would have seen.

A :class:`Cursor` says how far training has got, an :class:`Order` what the optimizer step after it
holds. A step is a list of bins; a bin is the samples of one row of a batch, one sample where
nothing is packed. Only then :func:`deal` gives the bins to ranks and micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from coat_data.containers.rows import Shards


class Stream(IntEnum):
    """Uses of a seed that must not draw the same numbers."""

    EPOCH_ORDER = 0
    PARTIAL_PASS = 1
    SOURCE_PASS = 2
    AUGMENTATION = 3
    REPLACEMENT = 4
    BIN_ORDER = 5
    SELECTION = 6
    STREAM_PASS = 7


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """The random generator of one use and key, such as a position; equal keys draw equally."""
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

    With repeats, an epoch is a permutation of ``repeat`` copies of each source; a fraction of a
    copy is a random part of the source, drawn anew each epoch. With weights, an epoch has as many
    samples as all sources together, shared out by weight (largest remainder); each source is then
    read in passes, shuffled anew and continued over epochs, so that its rows are seen equally
    often.

    A source that is read from shards stands at the positions that it would have otherwise, but its
    rows come in the order of its shards (:class:`~coat_data.containers.rows.Shards`), pass after
    pass.

    Attributes:
        epoch_size: samples per epoch.

    Args:
        sizes: rows of each source.
        repeats: passes per epoch of each source; None is 1.
        weights: relative share of each source; for all sources or for none.
        seed: at least 0.
        names: names of the sources in messages.
        shards: how the rows of each source lie, where that matters.

    Raises:
        ValueError: a source has no rows or no samples in an epoch, a repeat or weight is not a
            positive number, only some sources have a weight, or a weight comes with a repeat.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        repeats: Sequence[float | None],
        weights: Sequence[float | None],
        seed: int,
        names: Sequence[str] | None = None,
        shards: Sequence[Shards | None] = (),
    ) -> None:
        self._names = list(names or (f"source {number}" for number in range(len(sizes))))
        self._sizes = list(sizes)
        self._seed = seed
        self._shards = list(shards) or [None] * len(self._sizes)
        self._check(repeats, weights)
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
        """The source's index and the row in it that stand at ``position`` (0 or greater)."""
        sources, rows = self.locate_range(position, position + 1)
        return int(sources[0]), int(rows[0])

    def locate_range(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`locate` for the positions from ``start`` to before ``stop``, of one epoch.

        Returns:
            Indices of sources and rows in them, int64, (stop - start,) each.
        """
        epoch, first = divmod(start, self.epoch_size)
        if epoch != self._epoch:
            self._draw(epoch)
        places = self._order[first : first + stop - start]
        assert len(places) == stop - start, "the positions are of one epoch"
        return np.searchsorted(self._starts, places, side="right") - 1, self._rows[places]

    def met(self, position: int) -> np.ndarray:
        """How many of the positions before ``position`` are of each source: int64, (sources,)."""
        epoch, index = divmod(position, self.epoch_size)
        whole = epoch * np.array(self._samples, dtype=np.int64)
        if not index:
            return whole
        sources, _ = self.locate_range(position - index, position)
        return whole + np.bincount(sources, minlength=len(self._samples))

    def accounting(self) -> list[SourceShare]:
        """Rows, samples per epoch and passes per epoch of each source, in order."""
        return [
            SourceShare(name=name, rows=rows, samples=samples)
            for name, rows, samples in zip(self._names, self._sizes, self._samples, strict=True)
        ]

    def _check(self, repeats: Sequence[float | None], weights: Sequence[float | None]) -> None:
        if not len(self._names) == len(self._sizes) == len(repeats) == len(weights) > 0:
            raise ValueError(
                f"{len(self._sizes)} sizes, {len(self._names)} names, {len(repeats)} repeats and "
                f"{len(weights)} weights; give one of each for every source (at least one)"
            )
        if self._seed < 0:
            raise ValueError(f"seed={self._seed} is negative; choose 0 or greater")
        if None in weights and set(weights) != {None}:
            missing = [name for name, w in zip(self._names, weights, strict=True) if w is None]
            raise ValueError(
                f"{', '.join(missing)}: no weight, but other sources have one; give every source a "
                "weight or none"
            )
        for name, size, repeat, weight in zip(
            self._names, self._sizes, repeats, weights, strict=True
        ):
            if size < 1:
                raise ValueError(f"{name}: has no rows; remove it or check its path")
            if repeat is not None and weight is not None:
                raise ValueError(f"{name}: repeat={repeat} and weight={weight}; keep one of them")
            for what, value in (("repeat", repeat), ("weight", weight)):
                if value is not None and not (value > 0 and math.isfinite(value)):
                    raise ValueError(f"{name}: {what}={value} must be greater than 0 and finite")

    def _draw(self, epoch: int) -> None:
        """Draw the epoch: ``_rows`` lists it source by source, ``_order`` shuffles that list."""
        draw = self._continued_passes if self._weighted else self._repeated
        sources = range(len(self._sizes))
        self._rows = np.concatenate(
            [
                draw(source, epoch) if shards is None else self._continued_passes(source, epoch)
                for source, shards in zip(sources, self._shards, strict=True)
            ]
        )
        self._order = generator(self._seed, Stream.EPOCH_ORDER, epoch).permutation(self.epoch_size)
        for source, shards in zip(sources, self._shards, strict=True):
            if shards is not None:  # in the order drawn, at the places that it was dealt
                first, stop = int(self._starts[source]), int(self._starts[source + 1])
                own = (self._order >= first) & (self._order < stop)
                self._order[own] = np.arange(first, stop)
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
        passes = [self._pass(source, number) for number in range(first, last + 1)]
        return np.concatenate(passes)[skipped : skipped + samples]

    def _pass(self, source: int, number: int) -> np.ndarray:
        """All rows of a source, shuffled for its pass ``number``."""
        shards = self._shards[source]
        if shards is None:
            rng = generator(self._seed, Stream.SOURCE_PASS, source, number)
            return rng.permutation(self._sizes[source])
        return shards.order(generator(self._seed, Stream.STREAM_PASS, source, number))


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` shared out by weight: floors, then the largest remainders get one more each."""
    exact = [total * weight / math.fsum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


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
                free = [rank for rank in ranks if len(rank) < micro_batch_size]
                rank = min(free, key=lambda r: (sum(b.images for b in r), sum(b.tokens for b in r)))
            rank.append(bin)
        micro_steps.append(ranks)
    return micro_steps
