"""Bootstrap confidence intervals, McNemar's test and power for differences of headline metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from coat_data.sample import DataError
from coat_eval.ratios import make_parts
from coat_eval.scored_set import ScoredSet

Mask = NDArray[np.bool_]
Numbers = NDArray[np.float64]

RESAMPLES = 2000
_BLOCK_VALUES = 4_000_000
"""Number of weights per block, 8 bytes each."""
Z_95 = NormalDist().inv_cdf(0.975)
"""Standard normal quantile of a two-sided test at 5%, and of a 95% interval."""
Z_POWER = NormalDist().inv_cdf(0.8)
"""Standard normal quantile of a power of 80%."""
TOLERANCE = 0.0051
"""Reports of question sets are rounded to two decimals."""


@dataclass(frozen=True, slots=True)
class RatioMetric:
    """A percentage ``mean over parts of 100 sum(w * numerator) / sum(w * denominator)`` over items.

    The weights w are 1, or a resample's counts; a ratio of 0 to 0 is 0.
    """

    parts: Sequence[tuple[Numbers, Numbers]]
    """(numerator, denominator) per part, each [items]."""

    @property
    def is_mean(self) -> bool:
        """Whether the metric is the mean of item scores: one part, items count fully or not."""
        return len(self.parts) == 1 and bool(np.isin(self.parts[0][1], (0.0, 1.0)).all())

    def value(self) -> float:
        """Compute the metric."""
        return float(self.values(np.ones((1, len(self.parts[0][0]))))[0])

    def values(self, weights: Numbers) -> Numbers:
        """Compute the metric for each row of ``weights`` [resamples, items]: [resamples]."""
        total = np.zeros(len(weights))
        for numerator, denominator in self.parts:
            above, below = weights @ numerator, weights @ denominator
            total += np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        return 100 * total / len(self.parts)


def bootstrap_intervals(
    pairs: Sequence[tuple[Sequence[RatioMetric], Sequence[RatioMetric]]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> list[tuple[float, float]]:
    """Compute 95% intervals of the second group's mean minus the first's, paired by item.

    Items are drawn with replacement, the same ones for both groups of a pair and for all pairs
    (percentile bootstrap: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter
    13). Returns (2.5th, 97.5th percentile) per pair, in percentage points.
    """
    items = len(pairs[0][0][0].parts[0][0])
    rng = np.random.default_rng(seed)
    block = max(1, min(resamples, _BLOCK_VALUES // items))
    gaps: list[list[Numbers]] = [[] for _ in pairs]
    for begin in range(0, resamples, block):
        rows = min(block, resamples - begin)
        drawn = rng.integers(items, size=(rows, items)) + items * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * items)
        weights = counts.reshape(rows, items).astype(float)
        for own, pair in zip(gaps, pairs, strict=True):
            first, second = (np.mean([one.values(weights) for one in group], 0) for group in pair)
            own.append(second - first)
    limits = [np.percentile(np.concatenate(own), [2.5, 97.5]) for own in gaps]
    return [(float(low), float(high)) for low, high in limits]


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Compute the two-sided p of McNemar's exact test on the numbers b, c of differing items.

    Under the null hypothesis each of these n items favors either model with probability 1/2:
    p = min(1, 2 sum_{k <= min(b, c)} C(n, k) / 2^n). Source: McNemar 1947, Psychometrika 12, in
    the exact (binomial) form; the chi-square form is an approximation for large n.
    """
    n, fewer = only_first + only_second, min(only_first, only_second)
    k = np.arange(1, fewer + 1)
    # log C(n, k) - n log 2, because C(n, k) overflows for large n.
    logs = np.concatenate([[0.0], np.cumsum(np.log(n - k + 1) - np.log(k))]) - n * math.log(2)
    return float(min(1.0, 2 * np.exp(logs).sum()))


def compute_binomial_error(value: float, items: int) -> float:
    """Compute the standard error of a percentage of ``items`` independent questions.

    The variance of a score from 0 to 1 with mean p is at most the binomial p (1 - p), so the error
    of a soft score is at most this.
    """
    share = value / 100
    return 100 * math.sqrt(share * (1 - share) / items)


def find_detectable_difference(discordant: int, items: int) -> float | None:
    """Compute the smallest difference that McNemar's test sees with 80% power at the 5% level.

    With n items, the share psi of items that only one model gets right, and a true difference d of
    the two accuracies, Connor 1987 ("Sample size for testing differences in proportions for the
    paired-sample design", Biometrics 43) requires::

        d sqrt(n) = z_0.975 sqrt(psi) + z_0.8 sqrt(psi - d^2)

    Returns d in percentage points; None if no difference can be seen, because d would exceed psi.
    """
    share, root = discordant / items, math.sqrt(items)
    level = Z_95 * math.sqrt(share)
    spread = items + Z_POWER**2
    inner = (level * root) ** 2 - spread * (level**2 - Z_POWER**2 * share)
    found = (level * root + math.sqrt(max(0.0, inner))) / spread
    return 100 * found if inner > 0 and found <= share else None


def compute_metrics(scored: ScoredSet) -> dict[str, tuple[RatioMetric, Mask]]:
    """Compute the headline metrics that are sums over items, and the masks of their items."""
    found = {}
    for metric in scored.headline:
        made = make_parts(scored.items, metric, task=scored.task, profile=scored.profile)
        if made is None:
            continue
        figure = RatioMetric([(np.array(above), np.array(below)) for above, below in made[0]])
        said = scored.metrics.get(metric)
        if said is not None and abs(said - figure.value()) > TOLERANCE:
            raise DataError(
                str(scored.path),
                f"{metric} is {said:.4f} in the report and {figure.value():.4f} over its items",
                "score the predictions again",
            )
        found[metric] = (figure, np.array(made[1]))
    return found


def get_scores(scored: ScoredSet) -> Numbers:
    """Return the items' scores from 0 to 1, [items]."""
    return np.array([float(item["score"]) for item in scored.items])
