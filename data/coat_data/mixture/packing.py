"""Packs samples into rows of a token budget, in the global order.

An epoch's positions are cut into windows of at most ``buffer``, as equal as possible. The samples
of a window are put into bins (two heuristics, under two budgets; the fewer bins are kept), and the
window's bins are shuffled. So the bins are a function of the seed, the order and the measured
lengths; ranks and workers get whole bins (:func:`coat_data.mixture.sampler.deal`). A sample is
never
cut.

Minimum bin slack: the longest sample that is left opens a bin, and of all sets of others the one
that fills it best joins (Gupta and Ho 1999, "A new heuristic algorithm for the one-dimensional
bin-packing problem", Production Planning & Control 10(6); with the longest one fixed as in Fleszar
and Hindi 2002, Computers & Operations Research 29(7)). Where images are scarce, of sets that
fill it alike the one with the most images, so that the last bins are not short of one budget only.

Best fit decreasing: the longest sample that is left joins the fullest bin that has room (Johnson
1974, "Near-optimal bin packing algorithms", MIT). It leaves twice the slack where rows hold about
five samples of similar length, as images make them, and less where they hold two: bins that are
filled without slack one after the other leave the samples over that fit in twos only
(data/README.md).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coat_data.mixture.sampler import Bin, Cursor, Mixture, Stream, generator

MAX_DRAWS = 1000
"""Rows drawn in search of one that is good, and short enough, in place of a bad one."""

_TRIED_UNDER_BOTH = 64
"""Samples of all lengths that are tried where the image budget matters, which takes longer."""

_SCARCE = 0.75
"""Share of the image budget that rows full of tokens would need on the average; above it a bin
filled by tokens alone would take the samples without images first, and leave to the last ones what
fits by tokens only."""

_WINDOWS_KEPT = 4
"""A loader looks a few windows ahead of what is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a bin may hold."""

    tokens: int
    """LLM tokens, image tokens included; a multiple of ``align``."""
    images: int | None = None
    """Images, tiles or frames; None for any number."""
    buffer: int = 1000
    """Most samples that are looked at together."""
    align: int = 128
    """Rows are filled up to a multiple of this many tokens."""

    def __post_init__(self) -> None:
        sizes = (self.tokens, self.buffer, self.align, 1 if self.images is None else self.images)
        if min(sizes) < 1 or self.tokens % self.align:
            raise ValueError(
                f"{self}: all must be positive and tokens a multiple of align; "
                f"{-(-self.tokens // max(1, self.align)) * self.align} tokens would be"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What packing makes of an epoch."""

    epoch_bins: float
    """Bins per epoch."""
    samples_per_bin: float
    images_per_bin: float
    fill: float
    """Tokens over the bins' budgets."""


class Lengths:
    """Measured sizes of every row of every source.

    Attributes:
        tokens: (rows,) int32 of each source; 0 marks a row that cannot be used.
        images: (rows,) int32 of each source.

    Args:
        tokens: see above.
        images: see above.
    """

    def __init__(self, tokens: Sequence[np.ndarray], images: Sequence[np.ndarray]) -> None:
        self.tokens = list(tokens)
        self.images = list(images)

    def of(self, source: int, row: int) -> tuple[int, int]:
        """Tokens and images of a row; (0, 0) if it cannot be used."""
        return int(self.tokens[source][row]), int(self.images[source][row])


def pack(tokens: Sequence[int], images: Sequence[int], budget: Budget) -> list[list[int]]:
    """Few bins, under both budgets: those of the better one of two heuristics.

    Args:
        tokens: of each sample, 1 to ``budget.tokens``.
        images: of each sample, up to ``budget.images``.
        budget: what a bin may hold.

    Returns:
        Indices of the samples in each bin, each in one.
    """
    bins = minimum_bin_slack(tokens, images, budget)
    others = best_fit_decreasing(tokens, images, budget)
    return bins if len(bins) <= len(others) else others


def minimum_bin_slack(
    tokens: Sequence[int], images: Sequence[int], budget: Budget
) -> list[list[int]]:
    """Bins with the least slack in tokens, one after the other; arguments as :func:`pack`'s."""
    left = _longest_first(tokens, images)
    most = sum(images) if budget.images is None else budget.images
    needed = sum(images) * budget.tokens / sum(tokens) if tokens else 0.0
    scarce = budget.images is not None and needed > _SCARCE * most
    bins: list[list[int]] = []
    while left:
        first, *left = left
        room = budget.tokens - tokens[first]
        free_images = most - images[first]
        chosen = [] if scarce else _fullest(left, tokens, room, [0] * len(tokens), 0)
        if scarce or sum(images[sample] for sample in chosen) > free_images:
            some = left[:: max(1, -(-len(left) // _TRIED_UNDER_BOTH))]
            chosen = _fullest(some, tokens, room, images, free_images)
        bins.append([first, *chosen])
        taken = set(chosen)
        left = [sample for sample in left if sample not in taken]
    return bins


def best_fit_decreasing(
    tokens: Sequence[int], images: Sequence[int], budget: Budget
) -> list[list[int]]:
    """Each sample in the fullest bin with room, long ones first; arguments as :func:`pack`'s."""
    bins: list[list[int]] = []
    by_room: list[tuple[int, int, int]] = []  # free tokens, free images, bin; ascending
    most = sum(images) if budget.images is None else budget.images
    for sample in _longest_first(tokens, images):
        length, shown = tokens[sample], images[sample]
        place = bisect_left(by_room, (length, 0, 0))
        while place < len(by_room) and by_room[place][1] < shown:
            place += 1
        if place < len(by_room):
            room, free_images, number = by_room.pop(place)
        else:
            room, free_images, number = budget.tokens, most, len(bins)
            bins.append([])
        bins[number].append(sample)
        insort(by_room, (room - length, free_images - shown, number))
    return bins


def _longest_first(tokens: Sequence[int], images: Sequence[int]) -> list[int]:
    return sorted(range(len(tokens)), key=lambda i: (-tokens[i], -images[i], i))


def _fullest(
    samples: Sequence[int], tokens: Sequence[int], room: int, images: Sequence[int], most: int
) -> list[int]:
    """The samples that fill ``room`` best with at most ``most`` images.

    Of sets that fill it alike, one with the most images, as those are the harder ones to place; and
    of these one with early samples.

    Subset sums as bits of one integer: bit ``i * stride + t`` stands for t tokens with i images.
    """
    stride = 2 * room + 1  # so that one sample more never reaches the next block's sums
    block = (1 << (room + 1)) - 1
    mask = sum(block << (i * stride) for i in range(most + 1))
    full = 1 << (most * stride + room)
    sums, tried = 1, []
    for sample in samples:
        if tokens[sample] <= room and images[sample] <= most:
            tried.append((sample, sums))
            sums |= (sums << (images[sample] * stride + tokens[sample])) & mask
            if sums & full:
                break
    place = max(((sums >> (i * stride) & block).bit_length() - 1, i) for i in range(most + 1))
    rest = place[1] * stride + place[0]
    chosen: list[int] = []
    for sample, before in reversed(tried):
        if not before >> rest & 1:  # without this sample the sum is out of reach
            chosen.append(sample)
            rest -= images[sample] * stride + tokens[sample]
    return chosen[::-1]


class PackedOrder:
    """Steps of packed bins.

    Attributes:
        budget: what a bin may hold.

    Args:
        mixture: what stands at a position.
        lengths: sizes of the mixture's rows.
        budget: what a bin may hold.
        batch_size: bins per optimizer step.
        seed: of the bins' order and of replacements.

    Raises:
        ValueError: no row can be used.
    """

    def __init__(
        self, mixture: Mixture, lengths: Lengths, budget: Budget, batch_size: int, seed: int
    ) -> None:
        self.budget = budget
        self._mixture = mixture
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._windows = -(-mixture.epoch_size // budget.buffer)
        self._kept: dict[int, list[Bin]] = {}
        if not any(tokens.any() for tokens in lengths.tokens):
            raise ValueError("packing: no row can be used; check the data with coat-vlm data lint")

    def step(self, cursor: Cursor) -> tuple[list[Bin], Cursor]:
        """The bins of the step that starts at ``cursor``, and the cursor after it."""
        bins: list[Bin] = []
        position, used = cursor
        while len(bins) < self._batch_size:
            start, stop = self._window(position)
            window = self._bins(start, stop)
            if used > len(window):
                raise ValueError(
                    f"packing: the checkpoint has used {used} rows of the window at position "
                    f"{position}, which now has {len(window)}: the data are not those that were "
                    "packed; restore them, or start the stage over"
                )
            taken = window[used : used + self._batch_size - len(bins)]
            bins += taken
            used += len(taken)
            if used == len(window):
                position, used = stop, 0
        return bins, Cursor(position, used)

    def met(self, cursor: Cursor) -> np.ndarray:
        """Samples used before ``cursor`` of each source: int64, (sources,)."""
        found = self._mixture.met(cursor.position)
        used = self._bins(*self._window(cursor.position))[: cursor.bins]
        for position in (position for bin in used for position in bin.positions):
            found[self._mixture.locate(position)[0]] += 1
        return found

    def outlook(self, max_windows: int = 20) -> "Outlook":
        """What an epoch comes to, from its first ``max_windows`` windows."""
        bins: list[Bin] = []
        position = 0
        for _ in range(min(self._windows, max_windows)):
            start, position = self._window(position)
            bins += self._bins(start, position)
        per_position = len(bins) / position
        tokens = sum(bin.tokens for bin in bins)
        return Outlook(
            epoch_bins=per_position * self._mixture.epoch_size,
            samples_per_bin=1 / per_position,
            images_per_bin=sum(bin.images for bin in bins) / len(bins),
            fill=tokens / (len(bins) * self.budget.tokens),
        )

    def replaced(self, position: int, attempt: int) -> int:
        """The position whose row is tried for ``position``; see :func:`replacement`."""
        return replacement(self._mixture, self._seed, position, attempt)

    def size(self, position: int) -> tuple[int, int]:
        """Tokens and images that are planned for a position.

        Those of the row that stands there; if it cannot be used, of the first usable one that is
        drawn for it.

        Raises:
            ValueError: none of the rows drawn can be used.
        """
        for attempt in range(1 + MAX_DRAWS):
            source, row = self._mixture.locate(self.replaced(position, attempt))
            tokens, images = self._lengths.of(source, row)
            if tokens:
                return tokens, images
        raise ValueError(
            f"packing: none of {MAX_DRAWS} rows drawn for position {position} can be used; check "
            "the data with coat-vlm data lint"
        )

    def usable(self, position: int, tokens: int, images: int | None) -> bool:
        """Whether the row at ``position`` can be used and takes no more than that."""
        own_tokens, own_images = self._lengths.of(*self._mixture.locate(position))
        return 0 < own_tokens <= tokens and (images is None or own_images <= images)

    def _window(self, position: int) -> tuple[int, int]:
        """First position of the window around ``position``, and the one after its last."""
        epoch, index = divmod(position, self._mixture.epoch_size)
        size, windows = self._mixture.epoch_size, self._windows
        number = ((index + 1) * windows - 1) // size  # largest with start <= index
        first = epoch * size
        return first + number * size // windows, first + (number + 1) * size // windows

    def _bins(self, start: int, stop: int) -> list[Bin]:
        """The bins of a window, shuffled."""
        kept = self._kept.pop(start, None)
        if kept is None:
            kept = self._pack(start, stop)
        self._kept[start] = kept
        while len(self._kept) > _WINDOWS_KEPT:
            del self._kept[next(iter(self._kept))]
        return kept

    def _pack(self, start: int, stop: int) -> list[Bin]:
        sources, rows = self._mixture.locate_range(start, stop)
        tokens = np.zeros(stop - start, dtype=np.int64)
        images = np.zeros_like(tokens)
        for source in np.unique(sources):
            here = sources == source
            tokens[here] = self._lengths.tokens[source][rows[here]]
            images[here] = self._lengths.images[source][rows[here]]
        for index in np.flatnonzero(tokens == 0):
            tokens[index], images[index] = self.size(start + int(index))
        bins = [
            Bin(
                tuple(start + index for index in sorted(bin)),
                int(tokens[bin].sum()),
                int(images[bin].sum()),
            )
            for bin in pack(tokens.tolist(), images.tolist(), self.budget)
        ]
        order = generator(self._seed, Stream.BIN_ORDER, start).permutation(len(bins))
        return [bins[index] for index in order]


def replacement(mixture: Mixture, seed: int, position: int, attempt: int) -> int:
    """The position whose row is tried for ``position``; one of the same epoch.

    Args:
        mixture: what stands at a position.
        seed: of the replacements.
        position: where a row is wanted.
        attempt: 0 is the position itself; later ones are drawn by hash of seed and position.
    """
    if attempt == 0:
        return position
    size = mixture.epoch_size
    rng = generator(seed, Stream.REPLACEMENT, position, attempt)
    return position // size * size + int(rng.integers(size))
