"""Compares models on the same items, and groups of runs of one recipe that differ in their seed.

Differences have a 95% interval *paired by item* (bootstrap, Efron and Tibshirani 1993, chapter 13).
It measures the uncertainty from the choice of items, a group's standard deviation that from seeds.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from coat_eval.scored_set import RULE_ONLY_MARK, ScoredSet, check_same_items, read_sets
from coat_eval.significance import (
    Z_95,
    Z_POWER,
    bootstrap_intervals,
    compute_metrics,
    find_detectable_difference,
    get_scores,
    mcnemar_p_value,
)
from coat_eval.tasks import get_task
from coat_vlm.config.load import load_run_recipe
from coat_vlm.train.tracking import read_entries

logger = logging.getLogger(__name__)

LAST_SHARE = 0.02
"""The training loss of a run is the mean over this last share of its steps."""
RIGHT = 0.5
"""Score from which an item with a soft accuracy (VQA) counts as right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One metric of two models, in percent."""

    first_name: str
    second_name: str
    set_name: str
    metric: str
    first: float
    second: float
    difference: float
    """second - first."""
    interval: tuple[float, float] | None
    """95%, by paired bootstrap over items; None for a metric that is not a sum over items."""
    items: int
    only_first: int
    """Items that only the first model gets right."""
    only_second: int
    p_value: float | None
    """McNemar's exact test on these two numbers; None where scores are not 0 or 1."""
    detectable: float | None
    """Smallest true difference that these items show with 80% power at the 5% level; see
    :func:`coat_eval.significance.find_detectable_difference`. None if there is none."""
    mark: str = ""
    """"rule only" for a benchmark without published predictions to check its rule against."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The compared models, and the difference of each from the first."""

    sets: Mapping[str, Mapping[str, ScoredSet]]
    """Scored sets by model and set name."""
    differences: Sequence[Difference]

    def to_json(self) -> dict[str, Any]:
        """Return rules, the models' headline metrics and the differences as plain JSON."""
        return {
            "rules": {name: one.rules for name, one in next(iter(self.sets.values())).items()},
            "models": {name: compute_headline_metrics(sets) for name, sets in self.sets.items()},
            "differences": [asdict(one) for one in self.differences],
        }


def compare_items(paths: Sequence[Path], *, seed: int = 0) -> Comparison:
    """Compare every model with the first; ValueError if they have other sets or items."""
    names = _shorten_names(paths)
    sets = {name: read_sets(path) for name, path in zip(names, paths, strict=True)}
    first = sets[names[0]]
    rows = []
    for name, other in list(sets.items())[1:]:
        if other.keys() != first.keys():
            raise ValueError(
                f"{name} was scored on {', '.join(sorted(other))} and {names[0]} on "
                f"{', '.join(sorted(first))}; compare reports of the same tasks"
            )
        for set_name, one in first.items():
            check_same_items(set_name, one, other[set_name])
            rows += _compare_set((names[0], name), set_name, one, other[set_name], seed)
    return Comparison(sets, rows)


def compute_headline_metrics(sets: Mapping[str, ScoredSet]) -> dict[str, float]:
    """Compute a model's headline metrics by ``set.metric``, from the items if possible."""
    found = {}
    for name, scored in sets.items():
        sums = compute_metrics(scored)
        for metric in scored.headline:
            if metric in sums:
                found[f"{name}.{metric}"] = sums[metric][0].value()
            elif metric in scored.metrics:
                found[f"{name}.{metric}"] = scored.metrics[metric]
    return found


def format_differences(comparison: Comparison) -> str:
    """Format the differences as Markdown."""
    lines = []
    pairs = groupby(comparison.differences, lambda row: (row.first_name, row.second_name))
    for (first, second), rows in pairs:
        cells = [
            [
                f"{row.set_name} {row.metric}{row.mark and f' ({row.mark})'}",
                f"{row.first:.2f}",
                f"{row.second:.2f}",
                f"{row.difference:+.2f}",
                _format_interval(row.interval),
                str(row.only_first),
                str(row.only_second),
                "-" if row.p_value is None else f"{row.p_value:.3g}",
                "-" if row.detectable is None else f"{row.detectable:.2f}",
                str(row.items),
            ]
            for row in rows
        ]
        table = _format_table(_COLUMNS, cells)
        lines += [f"A = {first}, B = {second}", "", table, ""]
        for name, one in comparison.sets[first].items():
            a, b = one.image_size, comparison.sets[second][name].image_size
            if a and b and a != b:
                lines += [f"Images of {name}: {a} in A, {b} in B; see --max-pixels.", ""]
    if lines:
        lines.append(
            "Interval: paired bootstrap over items. p: McNemar's exact test on the items that only "
            "one model gets right; not corrected for the number of rows. Detectable: smallest true "
            "difference that such items show with 80% power at the 5% level."
        )
        first = next(iter(comparison.sets.values()))
        rules = "; ".join(f"{name}: {one.rules}" for name, one in first.items() if one.rules)
        lines += ["", f"Rules: {rules}."]
    return "\n".join(lines)


def read_published() -> dict[str, dict[str, Any]]:
    """Read percent by ``task.metric``, and ``source`` (repository and file), by published model."""
    text = files("coat_eval").joinpath("published.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def find_disagreements(first: ScoredSet, second: ScoredSet) -> tuple[list[int], list[int]]:
    """Return the indices of the items that only the first, and only the second, gets right."""
    a, b = get_scores(first) >= RIGHT, get_scores(second) >= RIGHT
    return np.flatnonzero(a & ~b).tolist(), np.flatnonzero(b & ~a).tolist()


_COLUMNS = (
    *("metric", "A", "B", "B - A", "95% interval", "only A right", "only B right", "p"),
    *("detectable", "n"),
)


def _compare_set(
    names: tuple[str, str], set_name: str, one: ScoredSet, other: ScoredSet, seed: int
) -> list[Difference]:
    first, second = compute_metrics(one), compute_metrics(other)
    common = [metric for metric in first if metric in second]
    pairs = [([first[metric][0]], [second[metric][0]]) for metric in common]
    found = bootstrap_intervals(pairs, seed=seed) if pairs else []
    intervals = dict(zip(common, found, strict=True))
    binary = bool(np.isin(np.concatenate([get_scores(one), get_scores(other)]), (0.0, 1.0)).all())
    flipped = find_disagreements(one, other)
    rows = []
    for metric in one.headline:
        mask = first[metric][1] if metric in intervals else np.ones(len(one.items), bool)
        values = [
            sums[metric][0].value() if metric in sums else scored.metrics.get(metric)
            for sums, scored in ((first, one), (second, other))
        ]
        if values[0] is None or values[1] is None:
            continue
        counts = [int(mask[indices].sum()) for indices in flipped]
        plain = metric in intervals and all(own[metric][0].is_mean for own in (first, second))
        rows.append(
            Difference(
                first_name=names[0],
                second_name=names[1],
                set_name=set_name,
                metric=metric,
                first=values[0],
                second=values[1],
                difference=values[1] - values[0],
                interval=intervals.get(metric),
                items=int(mask.sum()),
                only_first=counts[0],
                only_second=counts[1],
                p_value=mcnemar_p_value(*counts) if binary and metric in intervals else None,
                detectable=(
                    find_detectable_difference(sum(counts), int(mask.sum()))
                    if binary and plain
                    else _scale_interval(intervals.get(metric))
                ),
                mark=RULE_ONLY_MARK if RULE_ONLY_MARK in one.deviations else "",
            )
        )
    return rows


def _scale_interval(interval: tuple[float, float] | None) -> float | None:
    """Return (z_0.975 + z_0.8) SE, the detectable difference of a metric with this 95% interval.

    Source: Miller 2024 (arXiv:2411.00640), section 5; SE is half the width over z_0.975.
    """
    if interval is None or interval[0] == interval[1]:
        return None
    return (interval[1] - interval[0]) / 2 * (Z_95 + Z_POWER) / Z_95


def _shorten_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths that are unique."""
    whole = [Path(path).resolve() for path in paths]
    if len(set(whole)) != len(whole):
        raise ValueError(f"the same path is given twice: {', '.join(map(str, paths))}")
    lengths = range(1, max(len(path.parts) for path in whole) + 1)
    endings = (["/".join(path.parts[-length:]) for path in whole] for length in lengths)
    return next(names for names in endings if len(set(names)) == len(names))


@dataclass(frozen=True, slots=True)
class SetComparison:
    """One metric of both groups, in percent (losses: in nats per token)."""

    name: str
    """Name of the evaluation set or of the loss."""
    metric: str
    first: list[float]
    """One value per run of the first group."""
    second: list[float]
    """One value per run of the second group; empty with one group only."""
    interval: tuple[float, float] | None = None
    """95% interval of mean(second) - mean(first), paired by item."""

    @property
    def difference(self) -> float | None:
        """mean(second) - mean(first)."""
        return float(np.mean(self.second) - np.mean(self.first)) if self.second else None


def compare_runs(
    first: Sequence[Path], second: Sequence[Path] = (), *, seed: int = 0
) -> list[SetComparison]:
    """Compare groups of runs, one per seed, by evaluation set (headline metric) and loss."""
    places = Counter(run.resolve() for run in (*first, *second))
    twice = [str(run) for run, count in places.items() if count > 1]
    if twice:
        raise ValueError(
            f"{twice[0]} is given twice, and would count as two independent runs; name it once"
        )
    files = [run / "recipe.yaml" for run in (*first, *second)]
    sets = [load_run_recipe(file, unset_variables=True).eval_sets for file in files]
    common = [name for name in sets[0] if all(name in one for one in sets)]
    some = sorted(set().union(*sets) - set(common))
    if some:
        logger.warning("not compared, as not all runs have these eval_sets: %s", ", ".join(some))
    rows = []
    for name in common:
        metric = get_task(sets[0][name].task).headline[0]
        runs = [compute_metrics(one)[metric][0] for one in _read_runs([*first, *second], name)]
        pair = runs[: len(first)], runs[len(first) :]
        interval = bootstrap_intervals([pair], seed=seed)[0] if second else None
        ours, theirs = ([run.value() for run in group] for group in pair)
        rows.append(SetComparison(name, metric, ours, theirs, interval))
    losses = [_read_losses(run) for run in (*first, *second)]
    for run, names in zip((*first, *second), losses, strict=True):
        if names.keys() != losses[0].keys():
            raise ValueError(
                f"{run} has the losses {sorted(names)} and {first[0]} has {sorted(losses[0])}; "
                "only runs of one recipe compare"
            )
    for loss in losses[0]:
        values = [run[loss] for run in losses]
        rows.append(SetComparison(loss, "loss", values[: len(first)], values[len(first) :]))
    return rows


def _read_runs(runs: Sequence[Path], name: str) -> list[ScoredSet]:
    """Read one scored set of every run."""
    sets: list[ScoredSet] = []
    for run in runs:
        found = read_sets(run)
        if name not in found:
            raise FileNotFoundError(
                f"{run / 'eval' / name / 'report.json'} does not exist; evaluate it: "
                f"coat-vlm eval --model {run}"
            )
        check_same_items(name, sets[0] if sets else found[name], found[name])
        sets.append(found[name])
    return sets


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
    """Format the rows as a Markdown table."""
    both = any(row.second for row in rows)
    header = ["metric", "first: mean", "sd", "runs"]
    if both:
        header += ["second: mean", "sd", "runs", "difference", "95% interval, paired by item"]
    lines = []
    for row in rows:
        digits = 4 if row.metric == "loss" else 2
        cells = [f"{row.name} {row.metric}"]
        for values in (row.first, row.second) if both else (row.first,):
            cells.append(f"{np.mean(values):.{digits}f}")
            cells.append(f"{np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "-")
            cells.append(", ".join(f"{value:.{digits}f}" for value in values))
        if both:
            cells += [f"{row.difference:+.{digits}f}", _format_interval(row.interval)]
        lines.append(cells)
    return _format_table(header, lines)


def _format_interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else "{:+.2f} .. {:+.2f}".format(*interval)


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table without a final newline."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
