"""Bootstrap confidence intervals and McNemar's test for differences of headline metrics.

:func:`figures` has the headline metrics of a scored set, but for those that are no sums over items
(GQA's distribution, SEED-Bench's macro averages): they keep their value without an interval.
:func:`bootstrap_intervals` and :func:`mcnemar` compare models by them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coat_data.sample import DataError
from coat_eval.scored_set import ScoredSet

Mask = NDArray[np.bool_]
Numbers = NDArray[np.float64]

RESAMPLES = 2000
_BLOCK_VALUES = 4_000_000
"""Weights drawn at a time, 8 bytes each."""
TOLERANCE = 0.0051
"""Reports of own sets are rounded to two decimals, so a figure may be off by half of the last."""


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


Figures = Figure | Sequence[Figure]


def bootstrap_intervals(
    pairs: Sequence[tuple[Figures, Figures]], *, seed: int = 0, resamples: int = RESAMPLES
) -> list[tuple[float, float]]:
    """95% intervals of second minus first, paired by item; of groups, of their means.

    Items are drawn with replacement, the same draw for both figures of a pair and for all pairs
    (percentile bootstrap: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter
    13), so what makes an item hard for both models cancels. It is about the choice of items only.

    Args:
        pairs: figures over the same items in the same order, or groups of them.
        seed: of the draws.
        resamples: number of draws.

    Returns:
        (2.5th, 97.5th percentile) per pair, in percentage points.
    """
    groups = [[_group(first), _group(second)] for first, second in pairs]
    items = len(groups[0][0][0].parts[0][0])
    rng = np.random.default_rng(seed)
    block = max(1, min(resamples, _BLOCK_VALUES // items))
    gaps: list[list[Numbers]] = [[] for _ in pairs]
    for begin in range(0, resamples, block):
        rows = min(block, resamples - begin)
        drawn = rng.integers(items, size=(rows, items)) + items * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * items)
        weights = counts.reshape(rows, items).astype(float)
        for own, pair in zip(gaps, groups, strict=True):
            first, second = (np.mean([one.values(weights) for one in group], 0) for group in pair)
            own.append(second - first)
    limits = [np.percentile(np.concatenate(own), [2.5, 97.5]) for own in gaps]
    return [(float(low), float(high)) for low, high in limits]


def _group(figures: Figures) -> Sequence[Figure]:
    return [figures] if isinstance(figures, Figure) else figures


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


def figures(scored: ScoredSet) -> dict[str, tuple[Figure, Mask]]:
    """Every headline metric that is a sum over items, with the items that it is about.

    Returns:
        By metric: the figure over all items, and a mask [items].

    Raises:
        DataError: the items do not add up to what the report says: one of them was changed.
    """
    found = {}
    for metric in scored.headline:
        mask = _mask(scored, metric)
        if mask is None or not mask.any():
            continue
        figure = Figure(_parts(scored, metric, mask))
        said = scored.metrics.get(metric)
        if said is not None and abs(said - figure.value()) > TOLERANCE:
            raise DataError(
                str(scored.path),
                f"{metric} is {said:.4f} in the report and {figure.value():.4f} over its items",
                "score the predictions again",
            )
        found[metric] = (figure, mask)
    return found


def scores(scored: ScoredSet) -> Numbers:
    """The items' scores from 0 to 1, [items]."""
    return np.array([float(item["score"]) for item in scored.items])


def _mask(scored: ScoredSet, metric: str) -> Mask | None:
    """Which items a metric is about; None for one that is no sum over items."""
    everything = np.ones(len(scored.items), bool)
    if metric in ("overall", "accuracy", "all", "f1", "mean_f1", "unanswered_wrong.overall"):
        return everything
    if metric in ("image", "video"):
        return _where(scored, lambda item: item.get("kind") == metric)
    if metric in ("short", "medium", "long"):
        return _where(scored, lambda item: _table(item, "duration") == metric)
    if metric in ("binary", "open"):
        is_open = _where(scored, lambda item: _table(item, "structural") == "query")
        known = _where(scored, lambda item: _table(item, "structural") is not None)
        return known & (is_open if metric == "open" else ~is_open)
    table, dot, value = metric.partition(".")
    if dot and value == "f1":
        return _where(scored, lambda item: _split(item) == table)
    return _where(scored, lambda item: _table(item, table) == value) if dot else None


def _parts(scored: ScoredSet, metric: str, mask: Mask) -> list[tuple[Numbers, Numbers]]:
    if metric == "mean_f1":
        names = sorted({_split(item) for item in scored.items})
        splits = [_where(scored, lambda item, n=name: _split(item) == n) for name in names]
        return [_f1_part(scored, split) for split in splits]
    if metric.rpartition(".")[2] == "f1":
        return [_f1_part(scored, mask)]
    counted = mask
    if scored.task == "videomme" and not metric.startswith("unanswered_wrong"):
        official = scored.profile.startswith("official")
        answered = _where(scored, lambda item: item.get("extracted") is not None)
        counted = mask & (answered | (not official))
    return [(scores(scored) * counted, counted.astype(float))]


def _f1_part(scored: ScoredSet, mask: Mask) -> tuple[Numbers, Numbers]:
    """F1 = 2 TP / (2 TP + FP + FN); every wrong answer is one of the latter two.

    In the profile lmms of POPE an answer that is neither yes nor no is no false anything.
    """
    tp = mask & _where(scored, lambda item: item["extracted"] == "yes" == item["reference"])
    wrong = mask & ~tp & _where(scored, lambda item: item["extracted"] != item["reference"])
    if scored.profile == "lmms":
        wrong &= _where(scored, lambda item: item["extracted"] in ("yes", "no", None))
    twice = 2 * tp.astype(np.float64)
    return twice, twice + wrong


def _split(item: Mapping[str, Any]) -> str:
    """POPE's split; a report of before items had their tables has it as category, if at all."""
    return _table(item, "split") or str(item.get("category") or "")


def _table(item: Mapping[str, Any], name: str) -> str | None:
    return (item.get("tables") or {}).get(name)


def _where(scored: ScoredSet, test: Callable[..., bool]) -> Mask:
    return np.array([test(item) for item in scored.items], bool)
