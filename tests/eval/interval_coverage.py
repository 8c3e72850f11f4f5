"""Coverage of the 95% intervals of every headline metric, by simulation; prints a table.

Questions about made-up units (images, videos, ...) have answers of two models, which are alike
within a unit and between the models. Samples of units are drawn from a population, whose metrics
are the true values. Terms come from the benchmarks, and intervals from coat_eval.uncertainty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from coat_eval.benchmark import Benchmark
from coat_eval.tasks import BENCHMARKS
from coat_eval.tasks.mme import PARTS
from coat_eval.tasks.pope import SPLITS
from coat_eval.uncertainty import (
    Estimate,
    estimate,
    paired_interval,
    subtract,
    wilson_interval,
)

Array = NDArray[Any]
Item = dict[str, Any]

POPULATION, UNITS = 500, 200
"""Units of the population, and of a sample."""
SAMPLES = 10_000
LEVELS = (2, 10, 30, 50, 70, 90, 98)
"""True values in percent of the maximum; the second model is 3 points nearer to 50."""
GAP = 3
WITHIN, BETWEEN = 0.3, 0.7
"""Correlations of the latent skills within a unit, and between the models."""
SIZES = {
    **{"gqa": 8, "vqav2": 5, "docvqa": 4, "infovqa": 5, "nextqa": 9, "tempcompass": 10},
    **{"vizwiz": 1, "mmmu": 1, "mathvision": 1, "tabmwp": 1, "mmvet": 1, "hallusionbench": 3},
    **{"videomme": 3, "videommev2": 4, "mmmupro": 1, "mmvetv2": 1},
}
"""Questions of a unit (hallusionbench: of a figure); of other benchmarks 2."""
SOFT = ("vqav2", "okvqa", "textvqa", "vizwiz", "docvqa", "infovqa", "mmvet", "mmvetv2")
"""Benchmarks with scores between 0 and 1."""
CIRCULAR = ("mmbench", "mmbenchv11", "ccbench")
NO_MEANS = (("gqa", "distribution"), ("mmvet", "std"), ("mmvetv2", "std"))


def make_items(benchmark: Benchmark, metric: str, rng: np.random.Generator) -> Iterator[Item]:
    """Make the questions of the population, without answers."""
    name, numbers = benchmark.name, count()
    table, (head, _, tail) = benchmark.averages.get(metric), metric.partition(".")
    parts = {"mme": PARTS.get(metric), "pope": SPLITS}.get(name, [f"v{i}" for i in range(7)])
    structural = {"structural": "query" if metric == "open" else "verify"}
    for unit in range(POPULATION):
        drawn = str(rng.choice(parts or [""]))
        # POPE asks about an image in all of its splits.
        for part in parts if metric == "mean_f1" else (drawn,):
            for _ in range(SIZES.get(name, 2)):
                number = next(numbers)
                tables = {table: part} if table else {head: tail}
                yield {
                    "unit": f"u{unit}",
                    "kind": metric,
                    "groups": {"fAcc": f"u{unit}", "qAcc": f"u{unit}"},
                    "tables": {**structural, "duration": metric, "part": metric, "split": head}
                    | tables,
                    "reference": list("ABCD") if name in CIRCULAR else ["yes", "no"][number % 2],
                }


def answer(benchmark: Benchmark, metric: str, item: Item, margin: Array) -> Item:
    """Answer a question: right where the margin [rotations] is positive."""
    right, reference = margin > 0, item["reference"]
    score, said = float(right[0]), reference
    if benchmark.name in CIRCULAR:
        said = [gold if one else "" for gold, one in zip(reference, right, strict=True)]
        score = float(right.all())
    elif not right[0]:
        wrong = "no" if reference == "yes" else "yes"
        said = None if benchmark.name == "videomme" and margin[1] > 0 else wrong
    if benchmark.name in SOFT:  # 0.3, 0.6, 0.9 or 1, by how easy the question is
        score = float(np.clip(np.ceil(margin[0] / 0.3) * 0.3, 0, 1))
    if metric == "unanswerable_rate":
        said = "unanswerable" if right[0] else ""
    return {**item, "score": score, "extracted": said}


class Model:
    """A model's answers to the population, at any level of skill."""

    def __init__(self, benchmark: Benchmark, metric: str, items: Sequence[Item], skills: Array):
        self.benchmark, self.metric, self.items, self.skills = benchmark, metric, items, skills
        self.known = [(limit, self.answer(limit)) for limit in np.linspace(-4, 4, 12)]

    def answer(self, limit: float) -> Estimate:
        """Answer all questions that are easier than a limit."""
        rows = zip(self.items, limit - self.skills, strict=True)
        answered = [answer(self.benchmark, self.metric, *row) for row in rows]
        found = self.benchmark.estimate(self.metric, answered, "official")
        assert found is not None
        return found

    def reach(self, share: float) -> Estimate:
        """Find the limit at which the metric has about this share of its maximum."""
        for _ in range(7):
            self.known.sort(key=lambda one: one[0])
            (low, below), (high, above) = next(
                pair
                for pair in zip(self.known, self.known[1:], strict=False)
                if pair[1][1].share >= share
            )
            gap = above.share - below.share
            limit = low + (high - low) * np.clip((share - below.share) / gap, 0.05, 0.95)
            self.known.append((limit, self.answer(limit)))
        return min((one for _, one in self.known), key=lambda one: abs(one.share - share))


class Samples:
    """Samples of units with replacement, and sums over their terms by part."""

    def __init__(self, like: Estimate, samples: int, rng: np.random.Generator):
        self.units = like.units
        names = list(dict.fromkeys(term.part for term in like.terms))
        self.parts = np.array([names.index(term.part) for term in like.terms])
        self.unit = np.empty(len(like.terms), int)
        for index, unit in enumerate(like.units):
            self.unit[unit] = index
        self.drawn = rng.integers(len(like.units), size=(samples, UNITS))
        counts = [np.bincount(one, minlength=len(like.units)) for one in self.drawn]
        self.weights = np.array(counts, float)
        self.counts = self.sum(np.ones(len(self.parts)))
        self.size = self.counts.sum(1)

    def by_unit(self, values: Array) -> Array:
        """Sum values of terms by unit and part, [population, parts]."""
        sums = np.zeros((len(self.units), self.parts.max() + 1))
        np.add.at(sums, (self.unit, self.parts), values)
        return sums

    def sum(self, values: Array) -> Array:
        """Sum values of terms over each sample by part, [samples, parts]."""
        return self.weights @ self.by_unit(values)

    def measure(self, one: Estimate) -> tuple[Array, ...]:
        """Compute numerators, denominators [terms]; shares; ratios and weights [samples, parts]."""
        above = np.array([term.numerator for term in one.terms], float)
        below = np.array([term.denominator for term in one.terms], float)
        top, bottom = self.sum(above), self.sum(below)
        ratios = np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)
        number = (self.counts > 0).sum(1, keepdims=True)
        weights = np.where(bottom > 0, bottom, 1) * number
        return above, below, ratios.sum(1) / number[:, 0], ratios, weights

    def find_variances(self, *signed: tuple[Estimate, int]) -> tuple[Array, Array]:
        """Compute equation 4 of Miller 2024 of a sum of models, by unit and independent."""
        errors, squares = np.zeros(self.weights.shape), np.zeros(len(self.drawn))
        models = [(sign, *self.measure(one)) for one, sign in signed]
        for sign, above, below, _, ratios, weights in models:
            errors += sign / weights @ self.by_unit(above).T
            errors -= sign * ratios / weights @ self.by_unit(below).T
        for (s, a, b, _, r, w), (s2, a2, b2, _, r2, w2) in product(models, models):
            square = self.sum(a * a2) - r * self.sum(b * a2) - r2 * self.sum(a * b2)
            squares += s * s2 * ((square + r * r2 * self.sum(b * b2)) / w / w2).sum(1)
        rest = squares / (self.size - 1)
        return (self.weights * errors**2).sum(1) + rest, squares + rest

    def estimate_first(self, one: Estimate) -> Estimate:
        """Estimate the first sample by the module itself."""
        terms = [
            replace(one.terms[index], unit=str(place))
            for place, unit in enumerate(self.drawn[0])
            for index in one.units[unit]
        ]
        return estimate(terms)


def measure_coverage(
    name: str, metric: str, levels: Sequence[float] = LEVELS, samples: int = SAMPLES
) -> list[tuple[float, float]]:
    """Measure the coverage in percent of a metric's interval and of a difference's, by level."""
    seed = crc32(f"{name} {metric}".encode())
    rng, benchmark = np.random.default_rng(seed), BENCHMARKS[name]
    items = list(make_items(benchmark, metric, rng))
    units = np.array([int(item["unit"][1:]) for item in items])

    def draw() -> Array:
        inside = rng.standard_normal((POPULATION, 1))[units]
        return np.sqrt(WITHIN) * inside + np.sqrt(1 - WITHIN) * rng.standard_normal((len(items), 4))

    common = np.sqrt(BETWEEN) * draw()
    models = [
        Model(benchmark, metric, items, common + np.sqrt(1 - BETWEEN) * draw()) for _ in range(2)
    ]
    drawn = Samples(models[0].known[0][1], samples, rng)
    found = []
    for level in levels:
        first = models[0].reach(level / 100)
        second = models[1].reach((level + (GAP if level < 50 else -GAP)) / 100)
        shares, others = drawn.measure(first)[2], drawn.measure(second)[2]
        variances, _ = drawn.find_variances((first, 1))
        paired, independent = drawn.find_variances((second, 1), (first, -1))
        made = [drawn.estimate_first(one) for one in (first, second)]
        assert np.isclose(made[0].standard_error, 100 * variances[0] ** 0.5)
        assert np.isclose(subtract(*made)[0], 100 * paired[0] ** 0.5)
        sizes = np.full(samples, float(UNITS))
        np.divide(shares * (1 - shares), variances, out=sizes, where=variances > 1e-15)
        sizes += variances > 1e-15
        pairs = np.full(samples, float(UNITS))
        np.divide(drawn.size * independent, paired, out=pairs, where=paired > 1e-15)
        pairs = np.minimum(pairs, drawn.size)
        differences = others - shares
        ends = np.array(
            [
                (*wilson_interval(*one[:2]), *paired_interval(*one[2:]))
                for one in zip(shares, sizes, differences, paired, pairs, strict=True)
            ]
        )
        truth = first.share, second.share - first.share
        found.append(
            tuple(
                100 * float(np.mean((ends[:, 2 * i] <= true) & (true <= ends[:, 2 * i + 1])))
                for i, true in enumerate(truth)
            )
        )
    return found


def list_metrics() -> list[tuple[str, str]]:
    """List benchmark and name of every headline metric that is a mean."""
    pairs = [(one.name, metric) for one in BENCHMARKS.values() for metric in one.headline]
    return [pair for pair in pairs if pair not in NO_MEANS]


def format_row(name: str, metric: str, found: Sequence[tuple[float, float]]) -> str:
    """Format a row: the range for true values from 10 to 90%, and the coverage at 2 and 98%."""
    cells = [f"{name} {metric}", BENCHMARKS[name].get_unit(metric)]
    for first, *inner, last in zip(*found, strict=True):
        cells += [f"{min(inner):.1f} to {max(inner):.1f}", f"{first:.1f}, {last:.1f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("| metric | units | value: 10 to 90% | 2, 98% | difference: 10 to 90% | 2, 98% |")
    print("|---|---|---|---|---|---|")
    for pair in list_metrics():
        print(format_row(*pair, measure_coverage(*pair)), flush=True)
