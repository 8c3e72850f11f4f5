"""Sampler that packs samples into sequences of a fixed token budget.

The positions of an epoch are split into windows of at most ``buffer`` consecutive positions. The
samples of a window are packed by two heuristics under a token and an image budget; the result with
fewer sequences is used, in shuffled order. So the sequences depend only on the seed, the mixture
and the measured lengths. Samples are never truncated or split.

Minimum bin slack: the longest remaining sample opens a bin, and the set of other samples that fills
it best is added (Gupta and Ho 1999, Production Planning & Control 10(6); Fleszar and Hindi 2002,
Computers & Operations Research 29(7)). Best fit decreasing: the longest remaining sample joins the
fullest bin that it fits (Johnson 1974, "Near-optimal bin packing algorithms", MIT). The first is
better with about five samples of similar length, the second with two.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coat_data.mixture.sampler import (
    BatchRow,
    Mixture,
    PlainSampler,
    SamplerState,
    Stream,
    generator,
)

MAX_DRAWS = 1000
"""Rows drawn at most to replace a bad row by a good one that fits."""

_TRIED_UNDER_BOTH = 64
"""Samples, spread over all lengths, that are tried if the image budget matters: it is slower."""

_SCARCE = 0.75
"""Mean share of the image budget that full sequences need, above which images are scarce:
filling bins only by tokens would use up the samples without images, and the last bins would be
limited by images."""

_CACHED_WINDOWS = 4  # packed windows in memory: worker processes prefetch a few windows ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a packed sequence, and the size of the packing windows."""

    tokens: int
    """LLM tokens, image tokens included; a multiple of ``align``."""
    images: int | None = None
    """Images (tiles, frames); None for no limit."""
    buffer: int = 1000
    """Maximum samples of a packing window."""
    align: int = 128
    """Sequences are padded to a multiple of this number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingEstimate:
    """Estimated result of packing an epoch."""

    samples_per_row: float
    images_per_row: float
    fill: float
    """Tokens divided by the token budgets of all sequences."""


def pack(tokens: Sequence[int], images: Sequence[int], budget: Budget) -> list[list[int]]:
    """Pack samples into few bins with the better one of two heuristics."""
    bins = minimum_bin_slack(tokens, images, budget)
    others = best_fit_decreasing(tokens, images, budget)
    return bins if len(bins) <= len(others) else others


def minimum_bin_slack(
    tokens: Sequence[int], images: Sequence[int], budget: Budget
) -> list[list[int]]:
    """Fill bins one after the other with the least token slack; arguments as in :func:`pack`."""
    left = _longest_first(tokens, images)
    most = sum(images) if budget.images is None else budget.images
    needed = sum(images) * budget.tokens / sum(tokens) if tokens else 0.0
    scarce = budget.images is not None and needed > _SCARCE * most
    bins: list[list[int]] = []
    while left:
        first, *left = left
        free_tokens = budget.tokens - tokens[first]
        free_images = most - images[first]
        chosen = [] if scarce else _fullest(left, tokens, free_tokens, [0] * len(tokens), 0)
        if scarce or sum(images[sample] for sample in chosen) > free_images:
            some = left[:: max(1, -(-len(left) // _TRIED_UNDER_BOTH))]
            chosen = _fullest(some, tokens, free_tokens, images, free_images)
        bins.append([first, *chosen])
        taken = set(chosen)
        left = [sample for sample in left if sample not in taken]
    return bins


def best_fit_decreasing(
    tokens: Sequence[int], images: Sequence[int], budget: Budget
) -> list[list[int]]:
    """Put samples, longest first, into the fullest bin they fit; arguments as in :func:`pack`."""
    bins: list[list[int]] = []
    bins_by_free: list[tuple[int, int, int]] = []  # free tokens, free images, bin; ascending
    most = sum(images) if budget.images is None else budget.images
    for sample in _longest_first(tokens, images):
        length, shown = tokens[sample], images[sample]
        place = bisect_left(bins_by_free, (length, 0, 0))
        while place < len(bins_by_free) and bins_by_free[place][1] < shown:
            place += 1
        if place < len(bins_by_free):
            free_tokens, free_images, number = bins_by_free.pop(place)
        else:
            free_tokens, free_images, number = budget.tokens, most, len(bins)
            bins.append([])
        bins[number].append(sample)
        insort(bins_by_free, (free_tokens - length, free_images - shown, number))
    return bins


def _longest_first(tokens: Sequence[int], images: Sequence[int]) -> list[int]:
    return sorted(range(len(tokens)), key=lambda i: (-tokens[i], -images[i], i))


def _fullest(
    samples: Sequence[int],
    tokens: Sequence[int],
    free_tokens: int,
    images: Sequence[int],
    most: int,
) -> list[int]:
    """Return the samples that fill ``free_tokens`` best with at most ``most`` images.

    Ties are broken in favor of the set with the most images, which are harder to place, then in
    favor of early samples. Subset sums are the bits of one integer: bit ``i * stride + t`` is set
    if some subset has t tokens and i images.
    """
    stride = 2 * free_tokens + 1  # adding a sample never carries into the next block
    block = (1 << (free_tokens + 1)) - 1
    mask = sum(block << (i * stride) for i in range(most + 1))
    full = 1 << (most * stride + free_tokens)
    sums, tried = 1, []
    for sample in samples:
        if tokens[sample] <= free_tokens and images[sample] <= most:
            tried.append((sample, sums))
            sums |= (sums << (images[sample] * stride + tokens[sample])) & mask
            if sums & full:
                break
    place = max(((sums >> (i * stride) & block).bit_length() - 1, i) for i in range(most + 1))
    rest = place[1] * stride + place[0]
    chosen: list[int] = []
    for sample, before in reversed(tried):
        if not before >> rest & 1:  # the sum needs this sample
            chosen.append(sample)
            rest -= images[sample] * stride + tokens[sample]
    return chosen[::-1]


class PackedSampler:
    """Sampler whose sequences are packed.

    ``sizes``: tokens and images, the first two columns, of the rows of each source; 0 tokens mark a
    bad row.
    ``costs``: estimated work of the rows, (rows,); None balances ranks by images.
    """

    def __init__(
        self,
        mixture: Mixture,
        sizes: Sequence[np.ndarray],
        budget: Budget,
        batch_size: int,
        seed: int,
        costs: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.budget = budget
        self._costs = costs
        self._mixture = mixture
        self._sizes = [own[:, :2] for own in sizes]
        self._batch_size = batch_size
        self._seed = seed
        self._windows = -(-mixture.epoch_size // budget.buffer)
        self._cache: dict[int, list[BatchRow]] = {}
        if not any(own[:, 0].any() for own in sizes):
            raise ValueError("packing: no row can be used; check the data with coat-vlm data lint")

    def step(self, state: SamplerState) -> tuple[list[BatchRow], SamplerState]:
        """Return the sequences of the step that starts at ``state``, and the state after it."""
        rows: list[BatchRow] = []
        position, used = state
        while len(rows) < self._batch_size:
            start, stop = self._window(position)
            window = self._pack_window(start, stop)
            if used > len(window):
                raise ValueError(
                    f"packing: the checkpoint has used {used} sequences of the packing window at "
                    f"position {position}, which now has {len(window)}: the data has changed; "
                    "restore it, continue with --allow-changed-data, or start the stage over"
                )
            taken = window[used : used + self._batch_size - len(rows)]
            rows += taken
            used += len(taken)
            if used == len(window):
                position, used = stop, 0
        return rows, SamplerState(position, used)

    def count_by_source(self, state: SamplerState) -> np.ndarray:
        """Return the number of samples of each source before ``state``: int64, (sources,)."""
        counts = self._mixture.count_by_source(state.position)
        used = self._pack_window(*self._window(state.position))[: state.rows]
        for position in (position for row in used for position in row.positions):
            counts[self._mixture.locate(position)[0]] += 1
        return counts

    def estimate(self) -> PackingEstimate:
        """Estimate the packing of an epoch from its first 20 windows."""
        rows: list[BatchRow] = []
        position = 0
        for _ in range(min(self._windows, 20)):
            start, position = self._window(position)
            rows += self._pack_window(start, position)
        return PackingEstimate(
            samples_per_row=1 / (len(rows) / position),
            images_per_row=sum(row.images for row in rows) / len(rows),
            fill=sum(row.tokens for row in rows) / (len(rows) * self.budget.tokens),
        )

    def size(self, position: int) -> tuple[int, int]:
        """Return the measured tokens and images of the row at a position, or of its replacement."""
        for attempt in range(1 + MAX_DRAWS):
            place = replacement(self._mixture, self._seed, position, attempt)
            source, row = self._mixture.locate(place)
            tokens, images = self._sizes[source][row].tolist()
            if tokens:
                return tokens, images
        raise ValueError(
            f"packing: none of {MAX_DRAWS} rows drawn for position {position} can be used; check "
            "the data with coat-vlm data lint"
        )

    def usable(self, position: int, tokens: float, images: float) -> bool:
        """Whether the row at ``position`` can be used and has at most these tokens and images."""
        source, row = self._mixture.locate(position)
        own_tokens, own_images = self._sizes[source][row].tolist()
        return 0 < own_tokens <= tokens and own_images <= images

    def _window(self, position: int) -> tuple[int, int]:
        epoch, index = divmod(position, self._mixture.epoch_size)
        size, windows = self._mixture.epoch_size, self._windows
        number = ((index + 1) * windows - 1) // size  # largest with start <= index
        first = epoch * size
        return first + number * size // windows, first + (number + 1) * size // windows

    def _pack_window(self, start: int, stop: int) -> list[BatchRow]:
        if start in self._cache:
            self._cache[start] = self._cache.pop(start)
            return self._cache[start]
        sources, rows = self._mixture.locate_range(start, stop)
        tokens = np.zeros(stop - start, dtype=np.int64)
        images = np.zeros_like(tokens)
        costs = np.zeros(stop - start)
        for source in np.unique(sources):
            here = sources == source
            tokens[here], images[here] = self._sizes[source][rows[here]].T
            if self._costs is not None:
                costs[here] = self._costs[source][rows[here]]
        for index in np.flatnonzero(tokens == 0):
            tokens[index], images[index] = self.size(start + int(index))
        packed = [
            BatchRow(
                tuple(start + index for index in sorted(bin)),
                int(tokens[bin].sum()),
                int(images[bin].sum()),
                float(costs[bin].sum()),
            )
            for bin in pack(tokens.tolist(), images.tolist(), self.budget)
        ]
        order = generator(self._seed, Stream.ROW_ORDER, start).permutation(len(packed))
        self._cache[start] = [packed[index] for index in order]
        while len(self._cache) > _CACHED_WINDOWS:
            del self._cache[next(iter(self._cache))]
        return self._cache[start]


Sampler = PlainSampler | PackedSampler
"""Returns the sequences of optimizer steps."""


def replacement(mixture: Mixture, seed: int, position: int, attempt: int) -> int:
    """Return the position, in the same epoch, whose row replaces the one at ``position``.

    ``attempt`` 0 returns ``position``; others are drawn from the seed, position and attempt.
    """
    if attempt == 0:
        return position
    size = mixture.epoch_size
    rng = generator(seed, Stream.REPLACEMENT, position, attempt)
    return position // size * size + int(rng.integers(size))
