"""Compares models on the same items, and groups of runs of one recipe that differ in their seed.

Intervals and tests of differences are paired, by the units that the benchmark declares
(:mod:`coat_eval.uncertainty`). They measure the uncertainty from the choice of units; a group's
standard deviation measures the uncertainty from seeds.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from coat_eval.scored_set import RULE_ONLY_MARK, ScoredSet, match, read_sets
from coat_eval.tasks import get_benchmark, get_task
from coat_eval.uncertainty import average, compare
from coat_vlm.config.load import load_run_recipe
from coat_vlm.train.tracking import read_entries

logger = logging.getLogger(__name__)

LAST_SHARE = 0.02
"""The training loss of a run is the mean over this last share of its steps."""
LEVEL = 0.05
"""A difference with a smaller p-value is not called chance."""
RIGHT = 0.5
"""Score from which an item with a soft accuracy (VQA) counts as right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """What :func:`coat_eval.uncertainty.compare` finds; None for a metric that is not a mean."""

    standard_error: float | None = None
    """Standard error of the difference, in the metric's unit."""
    interval: tuple[float, float] | None = None
    """95% interval of the difference."""
    test: str | None = None
    """``McNemar`` or ``permutation``."""
    p_value: float | None = None
    detectable: float | None = None
    """Smallest true difference that is seen with 80% power at the 5% level."""
    size: str = "-"
    """What the metric counts and the units, such as ``12578 in 398 images``."""

    def format_test(self) -> list[str]:
        """Format p, the detectable difference and the size."""
        return [
            "-" if self.p_value is None else f"{self.p_value:.3g} ({self.test})",
            "-" if self.detectable is None else f"{self.detectable:.2f}",
            self.size,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Chance):
    """One metric of two models, in percent."""

    first_name: str
    second_name: str
    set_name: str
    metric: str
    first: float
    second: float
    difference: float
    """second - first."""
    items: int
    """Number of items, or figures, that the metric counts."""
    only_first: int
    """Items that only the first model gets right (figures if the metric is over figures)."""
    only_second: int
    mark: str = ""
    """"rule only" for a benchmark without published predictions to check its rule against."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The compared models, and the difference of each from the first."""

    sets: Mapping[str, Mapping[str, ScoredSet]]
    """Scored sets by model and set name."""
    differences: Sequence[Difference]
    not_comparable: Sequence[str] = ()
    """What differs between the models' sets, which then have only the items in common."""

    def to_json(self) -> dict[str, Any]:
        """Return rules, the models' headline metrics and the differences as plain JSON."""
        return {
            "rules": {name: one.rules for name, one in next(iter(self.sets.values())).items()},
            "models": {
                name: {
                    f"{key}.{metric}": value
                    for key, one in sets.items()
                    for metric, value in one.metrics.items()
                }
                for name, sets in self.sets.items()
            },
            "precision": {
                name: {key: one.conditions.get("precision") for key, one in sets.items()}
                for name, sets in self.sets.items()
            },
            "not_comparable": list(self.not_comparable),
            "differences": [asdict(one) for one in self.differences],
        }


def compare_items(paths: Sequence[Path], *, anyway: bool = False) -> Comparison:
    """Compare every model with the first; ValueError and ``anyway`` as in :func:`match`."""
    names = _shorten_names(paths)
    sets = {name: read_sets(path) for name, path in zip(names, paths, strict=True)}
    keys = [key for key in sets[names[0]] if all(key in own for own in sets.values())]
    found = [f"{name} has {', '.join(own)}" for name, own in sets.items() if len(own) > len(keys)]
    if found and not (anyway and keys):
        raise ValueError(f"not comparable: {'; '.join(found)}; all: {', '.join(keys) or 'none'}")
    columns = {key: match(key, [own[key] for own in sets.values()], anyway=anyway) for key in keys}
    found += [text for _, differences in columns.values() for text in differences]
    for index, name in enumerate(names):
        sets[name] = {key: column[index] for key, (column, _) in columns.items()}
    rows = [
        row
        for name in names[1:]
        for key, one in sets[names[0]].items()
        for row in _compare_set((names[0], name), key, one, sets[name][key])
    ]
    return Comparison(sets, rows, found)


def format_differences(comparison: Comparison) -> str:
    """Format the differences as Markdown, after lines that say which model is better."""
    lines = []
    pairs = groupby(comparison.differences, lambda row: (row.first_name, row.second_name))
    for (first, second), group in pairs:
        rows = list(group)
        cells = [
            [
                f"{row.set_name} {row.metric}{row.mark and f' ({row.mark})'}",
                f"{row.first:.2f}",
                f"{row.second:.2f}",
                f"{row.difference:+.2f}",
                _format_interval(row.interval),
                str(row.only_first),
                str(row.only_second),
                *row.format_test(),
            ]
            for row in rows
        ]
        header = ("metric", "A", "B", "B - A", "95% interval", "only A right", "only B right")
        table = _format_table((*header, "p", "detectable", "n"), cells)
        sets = (comparison.sets[first], comparison.sets[second])
        leading = (next(own) for _, own in groupby(rows, lambda row: row.set_name))
        lines += [
            f"A = {first}, B = {second}",
            _describe_comparability(comparison.not_comparable, *sets),
            *_describe_winner((f"{row.set_name} {row.metric}", row) for row in leading),
            *("", table, ""),
        ]
    if lines:
        lines.append(
            "Intervals and tests treat the units in the last column (images, videos, ...) as drawn "
            "at random, paired between the models; they do not cover seed variance. p: McNemar's "
            "exact test on the two columns before it, or a permutation test; not corrected for "
            "the number of rows. Detectable: smallest true difference found with 80% power at "
            "the 5% level."
        )
        first = next(iter(comparison.sets.values()))
        rules = "; ".join(f"{name}: {one.rules}" for name, one in first.items() if one.rules)
        lines += ["", f"Rules: {rules}."]
    return "\n".join(lines)


def _describe_comparability(
    differences: Sequence[str], first: Mapping[str, ScoredSet], second: Mapping[str, ScoredSet]
) -> str:
    """Say what was not comparable, and how the answers were made differently."""
    remarks = ["Comparable: same items, references and rules"]
    if differences:
        remarks = [
            f"NOT COMPARABLE, only what they have in common is used: {'; '.join(differences)}"
        ]
    for key, one in first.items():
        for name, value in one.conditions.items():
            if (other := second[key].conditions.get(name, value)) != value:
                remarks.append(f"{name} {value or 'default'} in A, {other or 'default'} in B")
            elif name == "precision":
                remarks.append(f"{name} {value}")
    return f"{'; '.join(dict.fromkeys(remarks))}."


def _describe_winner(rows: Iterable[tuple[str, "Difference | SetComparison"]]) -> list[str]:
    """Say by how much either model is better in named metrics, and where that may be chance."""
    titles = ("B is better, beyond chance", "A is better, beyond chance", "May be chance")
    changes: dict[str, list[str]] = {title: [] for title in titles}
    for name, row in rows:
        change, (low, high) = row.difference or 0.0, row.interval or (0.0, 0.0)
        chance = low <= 0 <= high if row.p_value is None else row.p_value >= LEVEL
        p = "not tested" if row.interval is None else f"95% {_format_interval(row.interval)}"
        p += "" if row.p_value is None else f", p {row.p_value:.2g}"
        changes[titles[2 if chance else change < 0]].append(f"{name} {change:+.2f} ({p})")
    return [f"{title} (B - A): {'; '.join(texts)}." for title, texts in changes.items() if texts]


def read_published() -> dict[str, dict[str, Any]]:
    """Read percent by ``task.metric``, and ``source`` (repository and file), by published model."""
    text = files("coat_eval").joinpath("published.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def find_disagreements(first: ScoredSet, second: ScoredSet) -> tuple[list[int], list[int]]:
    """Return the indices of the items that only the first, and only the second, gets right."""
    a, b = (np.array([item["score"] for item in one.items]) >= RIGHT for one in (first, second))
    return np.flatnonzero(a & ~b).tolist(), np.flatnonzero(b & ~a).tolist()


def _compare_set(
    names: tuple[str, str], set_name: str, one: ScoredSet, other: ScoredSet
) -> list[Difference]:
    flipped, benchmark, rows = find_disagreements(one, other), get_benchmark(one.task), []
    for metric in (name for name in one.metrics if name in other.metrics):
        counts = [
            sum(benchmark.counts(metric, one.items[index]) for index in side) for side in flipped
        ]
        first, second = one.estimates.get(metric), other.estimates.get(metric)
        items, size, tested = len(one.items), f"{len(one.items)} questions", {}
        if first is not None and second is not None:
            items, size, tested = len(first.terms), first.size, compare(first, second)
            counts = tested.pop("discordant") or counts
        rows.append(
            Difference(
                first_name=names[0],
                second_name=names[1],
                set_name=set_name,
                metric=metric,
                first=one.metrics[metric],
                second=other.metrics[metric],
                difference=other.metrics[metric] - one.metrics[metric],
                items=items,
                size=size,
                only_first=counts[0],
                only_second=counts[1],
                mark=RULE_ONLY_MARK if RULE_ONLY_MARK in one.deviations else "",
                **tested,
            )
        )
    return rows


def _shorten_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths that are unique."""
    whole = [path.resolve() for path in paths]
    if len(set(whole)) != len(whole):
        raise ValueError(f"the same path is given twice: {', '.join(map(str, paths))}")
    lengths = range(1, max(len(path.parts) for path in whole) + 1)
    endings = (["/".join(path.parts[-length:]) for path in whole] for length in lengths)
    return next(names for names in endings if len(set(names)) == len(names))


@dataclass(frozen=True, slots=True)
class SetComparison(Chance):
    """One metric of both groups, in percent (losses: in nats per token)."""

    name: str
    """Name of the evaluation set or of the loss."""
    metric: str
    first: list[float]
    """One value per run of the first group."""
    second: list[float]
    """One value per run of the second group; empty with one group only."""
    precision: str = ""
    """Precision of the forward passes of both groups; ``bf16 and coat`` if they differ."""
    not_comparable: Sequence[str] = ()
    """What differs between the runs' sets, which then have only the items in common."""

    @property
    def difference(self) -> float | None:
        """mean(second) - mean(first)."""
        return float(np.mean(self.second) - np.mean(self.first)) if self.second else None


def compare_runs(
    first: Sequence[Path], second: Sequence[Path] = (), *, anyway: bool = False
) -> list[SetComparison]:
    """Compare groups of runs, one per seed, by evaluation set (headline metric) and loss."""
    _shorten_names([*first, *second])  # a run that is named twice is not two runs
    files = [run / "recipe.yaml" for run in (*first, *second)]
    recipes = [load_run_recipe(file, unset_variables=True) for file in files]
    sets = [recipe.eval_sets for recipe in recipes]
    common = [name for name in sets[0] if all(name in one for one in sets)]
    some = sorted(set().union(*sets) - set(common))
    if some:
        logger.warning("not compared, as not all runs have these eval_sets: %s", ", ".join(some))
    scored = {run: read_sets(run) for run in (*first, *second) if common}
    rows = []
    for name in common:
        metric = get_task(sets[0][name].task).headline[0]
        if lacking := [run for run, own in scored.items() if name not in own]:
            raise FileNotFoundError(
                f"{lacking[0] / 'eval' / name / 'report.json'} does not exist; evaluate it: "
                f"coat-vlm eval --model {lacking[0]}"
            )
        read, differences = match(name, [own[name] for own in scored.values()], anyway=anyway)
        runs = [one.estimates[metric] for one in read]
        pair = runs[: len(first)], runs[len(first) :]
        tested = compare(*map(average, pair)) if second else {}
        tested.pop("discordant", None)
        ours, theirs = ([run.value for run in group] for group in pair)
        precisions = [one.conditions.get("precision", "") for one in read]
        tested |= {"size": runs[0].size, "precision": _join(precisions, len(first))}
        rows.append(SetComparison(name, metric, ours, theirs, not_comparable=differences, **tested))
    losses = [_read_losses(run) for run in (*first, *second)]
    for run, names in zip((*first, *second), losses, strict=True):
        if names.keys() != losses[0].keys():
            raise ValueError(
                f"{run} has the losses {sorted(names)} and {first[0]} has {sorted(losses[0])}; "
                "only runs of one recipe compare"
            )
    precision = _join([recipe.precision for recipe in recipes], len(first))
    for loss in losses[0]:
        values = [run[loss] for run in losses]
        pair = values[: len(first)], values[len(first) :]
        rows.append(SetComparison(loss, "loss", *pair, precision=precision))
    return rows


def _join(values: Sequence[str], num_first: int) -> str:
    """Join the distinct values of both groups."""
    groups = (dict.fromkeys(own) for own in (values[:num_first], values[num_first:]))
    return " and ".join(dict.fromkeys(filter(None, map("/".join, groups))))


def _read_losses(run: Path) -> dict[str, float]:
    """Read the last stage's final training loss and last validation losses."""
    rows = list(read_entries(run / "metrics.jsonl"))
    stages = [row["stage"] for row in rows if row.get("kind") == "step"]
    if not stages:
        raise ValueError(f"{run}/metrics.jsonl has no steps yet; compare runs that have trained")
    stage = stages[-1]
    rows = [row for row in rows if row["stage"] == stage]
    steps = [row["loss"] for row in rows if row.get("kind") == "step"]
    tail = steps[-max(1, round(LAST_SHARE * len(steps))) :]
    losses = {k: v for row in rows if row.get("kind") == "val" for k, v in row["losses"].items()}
    validations = {f"{stage} validation {name}": value for name, value in losses.items()}
    return {f"{stage} training": float(np.mean(tail)), **validations}


def format_comparison(rows: Sequence[SetComparison]) -> str:
    """Format the rows as a Markdown table, after lines that say which group is better."""
    both = any(row.second for row in rows)
    header = ["metric", "first: mean", "sd", "runs"]
    if both:
        header += ["second: mean", "sd", "runs"]
        header += ["difference", "95% interval", "p", "detectable", "n"]
    lines, tested = [], [row for row in rows if row.interval is not None]
    differences = [text for row in rows for text in row.not_comparable]
    head = ["A = first group, B = second group"] * bool(tested)
    head += [_describe_comparability(differences, {}, {})] * bool(differences or tested)
    head += _describe_winner((f"{row.name} {row.metric}", row) for row in tested)
    for row in rows:
        digits = 4 if row.metric == "loss" else 2
        cells = [f"{row.name} {row.metric}{row.precision and f' ({row.precision})'}"]
        for values in (row.first, row.second) if both else (row.first,):
            cells.append(f"{np.mean(values):.{digits}f}")
            cells.append(f"{np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "-")
            cells.append(", ".join(f"{value:.{digits}f}" for value in values))
        if both:
            cells += [f"{row.difference:+.{digits}f}", _format_interval(row.interval)]
            cells += row.format_test()
        lines.append(cells)
    return "\n".join([*head, "", _format_table(header, lines)])


def _format_interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else "{:+.2f} .. {:+.2f}".format(*interval)


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table without a final newline."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
