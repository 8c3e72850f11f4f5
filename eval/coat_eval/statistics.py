"""What a difference between two models is worth: paired bootstrap and McNemar's exact test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
_BLOCK_VALUES = 4_000_000
"""Weights drawn at a time, 8 bytes each."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figure:
    """A percentage that is a mean of ratios of sums over items.

    ``value = mean over parts of 100 sum(w * numerator) / sum(w * denominator)`` with w = 1; an
    accuracy has one part with denominator 1, POPE's mean F1 three. A ratio of 0 to 0 is 0.
    """

    parts: Sequence[tuple[Numbers, Numbers]]
    """(numerator, denominator) per part, each [items]."""

    def value(self) -> float:
        """The figure itself."""
        return float(self.values(np.ones((1, len(self.parts[0][0]))))[0])

    def values(self, weights: Numbers) -> Numbers:
        """The figure under each row of ``weights`` [resamples, items], [resamples]."""
        total = np.zeros(len(weights))
        for numerator, denominator in self.parts:
            above, below = weights @ numerator, weights @ denominator
            total += np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        return 100 * total / len(self.parts)


def bootstrap_intervals(
    pairs: Sequence[tuple[Figure, Figure]], *, seed: int = 0, resamples: int = RESAMPLES
) -> list[tuple[float, float]]:
    """95% intervals of second minus first, paired by item.

    Items are drawn with replacement, the same draw for both figures of a pair and for all pairs
    (percentile bootstrap: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter
    13), so what makes an item hard for both models cancels. It is about the choice of items only.

    Args:
        pairs: figures over the same items in the same order.
        seed: of the draws.
        resamples: number of draws.

    Returns:
        (2.5th, 97.5th percentile) per pair, in percentage points.
    """
    items = len(pairs[0][0].parts[0][0])
    rng = np.random.default_rng(seed)
    block = max(1, min(resamples, _BLOCK_VALUES // items))
    gaps: list[list[Numbers]] = [[] for _ in pairs]
    for begin in range(0, resamples, block):
        rows = min(block, resamples - begin)
        drawn = rng.integers(items, size=(rows, items)) + items * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * items)
        weights = counts.reshape(rows, items).astype(float)
        for own, (first, second) in zip(gaps, pairs, strict=True):
            own.append(second.values(weights) - first.values(weights))
    limits = [np.percentile(np.concatenate(own), [2.5, 97.5]) for own in gaps]
    return [(float(low), float(high)) for low, high in limits]


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p of McNemar's exact test on items that one model alone gets right.

    If neither model were better, each of these n items would fall to either side like a fair coin:
    p = min(1, 2 sum_{k <= min(b, c)} C(n, k) / 2^n). Source: McNemar 1947, Psychometrika 12, in
    the exact (binomial) form; the chi-square form is an approximation for large n.

    Args:
        only_first: items that only the first model gets right, b.
        only_second: items that only the second gets right, c.

    Returns:
        p; 1 when no item differs.
    """
    n, fewer = only_first + only_second, min(only_first, only_second)
    k = np.arange(1, fewer + 1)
    # log C(n, k) - n log 2: the numbers themselves have more digits than a float for large n.
    logs = np.concatenate([[0.0], np.cumsum(np.log(n - k + 1) - np.log(k))]) - n * math.log(2)
    return float(min(1.0, 2 * np.exp(logs).sum()))
