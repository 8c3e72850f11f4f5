"""The headline metrics of a scored set as sums over its items, which can be drawn again.

Not every metric is one (GQA's distribution, SEED-Bench's macro averages): those are left out, and
keep their value without an interval.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coat_data.sample import DataError
from coat_eval.scored_set import ScoredSet
from coat_eval.statistics import Figure, Numbers

Mask = NDArray[np.bool_]

TOLERANCE = 0.0051
"""Reports of own sets are rounded to two decimals, so a figure may be off by half of the last."""


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
        counted = mask & (_where(scored, _answered) | (not official))
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


def _answered(item: Mapping[str, Any]) -> bool:
    return item.get("extracted") is not None


def _split(item: Mapping[str, Any]) -> str:
    """POPE's split; a report of before items had their tables has it as category, if at all."""
    return _table(item, "split") or str(item.get("category") or "")


def _table(item: Mapping[str, Any], name: str) -> str | None:
    return (item.get("tables") or {}).get(name)


def _where(scored: ScoredSet, test: Callable[..., bool]) -> Mask:
    return np.array([test(item) for item in scored.items], bool)


def same_items(first: ScoredSet, second: ScoredSet) -> str | None:
    """Why two sets cannot be compared item by item, or None."""
    if first.task != second.task:
        return f"{first.path} is {first.task} and {second.path} is {second.task}"
    if first.profile != second.profile:
        return (
            f"{first.path} was scored by profile {first.profile} and {second.path} by "
            f"{second.profile}; score both by one"
        )
    if first.ids != second.ids:
        return _other_ids(first, second)
    for name, one, other in zip(first.ids, first.items, second.items, strict=True):
        if one["reference"] != other["reference"]:
            return (
                f"item {name} has the reference {one['reference']!r} in {first.path} and "
                f"{other['reference']!r} in {second.path}"
            )
    return None


def _other_ids(first: ScoredSet, second: ScoredSet) -> str:
    missing: Sequence[str] = sorted(set(first.ids) ^ set(second.ids))
    where = first.path if missing[0] in set(first.ids) else second.path
    return (
        f"{first.path} has {len(first.ids)} items and {second.path} {len(second.ids)}; "
        f"{len(missing)} of them are in one only, first {missing[0]!r} of {where}"
    )
