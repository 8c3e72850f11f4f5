"""Sampling uncertainty of a metric: standard error, 95% interval, test of a difference.

``metric = maximum * mean over parts of sum(numerator) / sum(denominator)`` over :class:`Term`: an
accuracy has one part with denominator 1, F1 = 2 TP / (2 TP + FP + FN) one part, a mean over tasks
or splits one part each. Questions about the same image or video are not independent, so the
*units* that a benchmark declares, not questions, are treated as drawn at random everywhere.
Importing this module imports no numpy.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, fmean
from typing import Any

Z_95 = NormalDist().inv_cdf(0.975)
"""Standard normal quantile of a two-sided test at 5%, and of a 95% interval."""
Z_POWER = NormalDist().inv_cdf(0.8)
"""Standard normal quantile of a power of 80%."""
PERMUTATIONS = 9_999
_BLOCK_VALUES = 4_000_000
_EQUAL = 1e-9
"""Differences of shares and errors below this are rounding."""


@dataclass(frozen=True, slots=True)
class Term:
    """What a question, or a group of questions that counts as one, adds to a metric."""

    numerator: float
    denominator: float = 1.0
    unit: str = ""
    """Name of the unit; a term without one is a unit of its own."""
    part: str = ""


@dataclass(frozen=True)
class Estimate:
    """A metric with what its uncertainty is computed from."""

    terms: Sequence[Term]
    value: float
    """The metric, mostly in percent."""
    errors: Sequence[float]
    """Derivative of ``share`` with respect to the weight of each term, [terms]: of a mean of n
    scores (score - mean) / n; of a ratio its linearization (delta method)."""
    maximum: float = 100.0
    unit: str = "questions"
    """What a unit is, in the plural."""

    @property
    def share(self) -> float:
        """The metric as a share of its maximum, 0 to 1."""
        return self.value / self.maximum

    @property
    def standard_error(self) -> float:
        """Standard error in the metric's own unit: :func:`compute_variances`."""
        return self.maximum * math.sqrt(compute_variances(self.errors, self.units)[0])

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval: Wilson's with the effective number of terms, as if they were independent.

        With share p this is p (1 - p) / SE^2 + 1, for independent scores of 0 and 1 the number of
        terms itself; the number of units if all terms are equal. Source: Dean and Pagano 2015,
        "Evaluating confidence interval methods for binomial proportions in clustered surveys", J.
        Surv. Stat. Methodol. 3.
        """
        variance = (self.standard_error / self.maximum) ** 2
        size = self.share * (1 - self.share) / variance + 1 if variance else len(self.units)
        low, high = wilson_interval(self.share, size)
        return self.maximum * low, self.maximum * high

    @cached_property
    def units(self) -> list[list[int]]:
        """Indices of the terms of each unit."""
        units: dict[str | int, list[int]] = {}
        for index, term in enumerate(self.terms):
            units.setdefault(term.unit or index, []).append(index)
        return list(units.values())

    @property
    def size(self) -> str:
        """Numbers of terms and units, such as ``12578 in 398 images``."""
        inside = f"{len(self.terms)} in " if len(self.terms) != len(self.units) else ""
        return f"{inside}{len(self.units)} {self.unit}"


def estimate(terms: Sequence[Term], unit: str = "questions", maximum: float = 100.0) -> Estimate:
    """Estimate a metric from its terms, at least one."""
    above, below = defaultdict(float), defaultdict(float)
    for term in terms:
        above[term.part] += term.numerator
        below[term.part] += term.denominator
    ratios = {part: above[part] / total if total else 0.0 for part, total in below.items()}
    errors = [
        (term.numerator - ratios[term.part] * term.denominator)
        / (below[term.part] or 1.0)
        / len(ratios)
        for term in terms
    ]
    values = [maximum * above[part] / (below[part] or 1.0) for part in sorted(below)]
    named = unit if any(term.unit for term in terms) else "questions"
    return Estimate(terms, sum(values) / len(values), errors, maximum, named)


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Average a metric over models that answered the same terms."""
    value = fmean(one.value for one in estimates)
    errors = [fmean(one) for one in zip(*(one.errors for one in estimates), strict=True)]
    terms = [
        replace(column[0], numerator=fmean(term.numerator for term in column))
        for column in zip(*(one.terms for one in estimates), strict=True)
    ]
    return replace(estimates[0], terms=terms, value=value, errors=errors)


def compare(first: Estimate, second: Estimate) -> dict[str, Any]:
    """Compare two models on the same terms.

    Returns ``standard_error`` and ``interval`` of second - first; ``test`` and ``p_value``:
    McNemar's exact test of a mean of units that are right or wrong, with the numbers of units that
    only either model gets right as ``discordant``, else a permutation test; and ``detectable``, the
    smallest true difference that is seen with 80% power at the 5% level, 2.80 standard errors
    (Miller 2024, arXiv:2411.00640, section 5), None if too few units differ for any.
    """
    error, interval = subtract(first, second)
    counts = count_discordant(first, second)
    most = math.inf if counts is None else first.maximum * sum(counts) / len(first.terms)
    detectable = (Z_95 + Z_POWER) * error
    return {
        "discordant": counts,
        "standard_error": error,
        "interval": interval,
        "test": "McNemar" if counts else "permutation",
        "p_value": mcnemar_p_value(*counts) if counts else permutation_p_value(first, second),
        "detectable": detectable if 0 < detectable <= most else None,
    }


def subtract(first: Estimate, second: Estimate) -> tuple[float, tuple[float, float]]:
    """Compute the standard error and the 95% interval of second - first, paired by term.

    The effective number of terms is their number over the design effect, the variance by unit over
    the variance of independent terms, and at most their number.
    """
    errors = [b - a for a, b in zip(first.errors, second.errors, strict=True)]
    variance, independent = compute_variances(errors, first.units)
    size = len(errors) * min(1.0, independent / variance) if variance else len(first.units)
    low, high = paired_interval(second.share - first.share, variance, size)
    maximum = first.maximum
    return maximum * math.sqrt(variance), (maximum * low, maximum * high)


def compute_variances(
    errors: Sequence[float], units: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Compute the variance of a share with terms clustered by unit, and with independent terms.

    With n terms and errors e_i / n, this is equation 4 of Miller 2024, "Adding Error Bars to Evals"
    (arXiv:2411.00640)::

        SE^2 = sum_i e_i^2 / (n (n - 1))  +  1 / n^2 sum_units sum_{i != j} e_i e_j
    """
    squares = math.fsum(error * error for error in errors)
    if len(errors) < 2 or squares < _EQUAL**2:
        return 0.0, 0.0
    sums = [math.fsum(errors[index] for index in unit) for unit in units]
    rest = squares / (len(errors) - 1)
    return math.fsum(one * one for one in sums) + rest, squares + rest


def wilson_interval(share: float, size: float) -> tuple[float, float]:
    """Compute the 95% interval of a share of ``size`` independent questions.

    With z = 1.96: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n). Source:
    Wilson 1927, "Probable inference, the law of succession, and statistical inference", JASA 22.
    """
    z2 = Z_95**2 / size
    half = math.sqrt(z2 * share * (1 - share) + z2 * z2 / 4)
    low, high = ((share + z2 / 2 + sign * half) / (1 + z2) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def paired_interval(difference: float, variance: float, size: float) -> tuple[float, float]:
    """Compute the 95% interval of a difference of shares with ``size`` independent pairs.

    With difference d and n pairs, b + c of which differ, it is d* -+ 1.96 s, where d* = n d / (n +
    2) and s^2 = ((b + c + 2) / (n + 2) - d*^2) / (n + 2): the usual interval after one more pair in
    favor of either model, which does not collapse where models hardly differ. (b + c) / n is the
    mean square (n - 1) variance + d^2. Source: Bonett and Price 2012, "Adjusted Wald confidence
    interval for a difference of binomial proportions based on paired data", J. Educ. Behav. Stat.
    37.
    """
    squares = size * ((size - 1) * variance + difference**2)
    center = size * difference / (size + 2)
    half = Z_95 * math.sqrt(max(0.0, (squares + 2) / (size + 2) - center**2) / (size + 2))
    return center - half, center + half


def count_discordant(first: Estimate, second: Estimate) -> tuple[int, int] | None:
    """Count the units that only either model gets right, for McNemar's test.

    None unless the metric is a mean of units that are right or wrong.
    """
    if len(first.units) != len(first.terms) or len({term.part for term in first.terms}) > 1:
        return None
    pairs = [(a.numerator, b.numerator) for a, b in zip(first.terms, second.terms, strict=True)]
    ones = all(term.denominator == 1 for term in (*first.terms, *second.terms))
    if not ones or {score for pair in pairs for score in pair} - {0, 1}:
        return None
    return sum(a > b for a, b in pairs), sum(b > a for a, b in pairs)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Compute the two-sided p of McNemar's exact test on the numbers b, c of differing units.

    Under the null hypothesis each of these n units favors either model with probability 1/2:
    p = min(1, 2 sum_{k <= min(b, c)} C(n, k) / 2^n). Source: McNemar 1947, Psychometrika 12, in
    the exact (binomial) form; the chi-square form is an approximation for large n.
    """
    n, fewer = only_first + only_second, min(only_first, only_second)
    whole = math.lgamma(n + 1) - n * math.log(2)  # C(n, k) overflows for large n
    logs = (whole - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(fewer + 1))
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def permutation_p_value(first: Estimate, second: Estimate) -> float:
    """Compute the two-sided p of a permutation test that flips the signs of the units' differences.

    Under the null hypothesis the models are interchangeable in each unit; p is the share of
    :data:`PERMUTATIONS` random flips (with a fixed seed), and of no flip, after which the sum is as
    large as it is. The units' differences add up to the difference, for ratios to first order.
    Source: Noreen 1989, "Computer-Intensive Methods for Testing Hypotheses" (approximate
    randomization); Phipson and Smyth 2010, arXiv:1603.05766.
    """
    import numpy as np

    difference, count = second.share - first.share, len(first.terms)
    gaps = np.array(second.errors) - np.array(first.errors) + difference / count
    sums = np.array([gaps[unit].sum() for unit in first.units])
    sums = sums[np.abs(sums) > _EQUAL / count]
    rng, extreme = np.random.default_rng(0), 1
    block = max(1, _BLOCK_VALUES // max(1, len(sums)))
    for begin in range(0, PERMUTATIONS, block):
        rows = min(block, PERMUTATIONS - begin)
        flips = rng.integers(2, size=(rows, len(sums)), dtype=np.int8)
        found = sums.sum() - 2 * (flips @ sums)
        extreme += int((np.abs(found) >= abs(difference) - _EQUAL).sum())
    return extreme / (PERMUTATIONS + 1)
