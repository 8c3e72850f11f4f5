"""Headline metrics as ratios of sums over items, and their standard errors; without numpy.

``metric = mean over parts of 100 sum(numerator) / sum(denominator)``: an accuracy has one part with
denominator 1, F1 = 2 TP / (2 TP + FP + FN) one part, POPE's mean F1 one part per split, and MME's
scores are sums over one part per task. Metrics that are not such sums (GQA's distribution, macro
averages) have neither error nor interval.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Item = Mapping[str, Any]
_OVER_ALL = frozenset(
    {
        *("overall", "total", "accuracy", "all", "f1", "mean_f1", "unanswered_wrong.overall"),
        *("aAcc", "fAcc", "qAcc"),
    }
)
"""Metrics over all items."""
Part = tuple[list[float], list[float]]
"""Numerator and denominator of every item."""


def make_parts(
    items: Sequence[Item], metric: str, *, task: str, profile: str
) -> tuple[list[Part], list[bool]] | None:
    """Make the parts of a metric, and for each item whether the metric selects it.

    None if the metric is not a sum over items, or selects none of them.
    """
    mask = _select_items(items, metric)
    if mask is None or not any(mask):
        return None
    if metric == "mean_f1":
        splits = sorted({_get_split(item) for item in items})
        masks = [[_get_split(item) == split for item in items] for split in splits]
        return [_make_f1_part(items, own, profile) for own in masks], mask
    if task == "mme":
        return _make_mme_parts(items, mask), mask
    if all(metric in item.get("groups", ()) for item in items):
        return [_make_group_part(items, metric)], mask
    if metric.rpartition(".")[2] == "f1":
        return [_make_f1_part(items, mask, profile)], mask
    counted = mask
    if task == "videomme" and profile.startswith("official") and "unanswered" not in metric:
        answered = (item.get("extracted") is not None for item in items)
        counted = [own and said for own, said in zip(mask, answered, strict=True)]
    above = [item["score"] if own else 0.0 for item, own in zip(items, counted, strict=True)]
    return [(above, [float(own) for own in counted])], mask


def compute_standard_error(
    parts: Sequence[Part], mask: Sequence[bool], clusters: Sequence[str]
) -> float:
    """Compute the standard error of a metric, clustered by image or video, in percentage points.

    With n items and e_i = s_i - mean(s) this is equation 4 of Miller 2024, "Adding Error Bars to
    Evals" (arXiv:2411.00640)::

        SE^2 = sum_i e_i^2 / (n (n - 1))  +  1 / n^2 sum_clusters sum_{i != j} e_i e_j

    A ratio of sums has the linearized e_i = n (numerator_i - ratio denominator_i) /
    sum(denominator) instead (delta method); the e_i of several parts are averaged. An empty cluster
    name is a cluster of its own.
    """
    count = sum(mask)
    if count < 2:
        return 0.0
    errors = [0.0] * len(mask)  # e_i / n
    for above, below in parts:
        total = sum(below) or 1.0
        ratio = sum(above) / total
        for index, (one, other) in enumerate(zip(above, below, strict=True)):
            errors[index] += (one - ratio * other) / total / len(parts)
    sums: dict[str, float] = {}
    for name, error in zip(clusters, errors, strict=True):
        if name:
            sums[name] = sums.get(name, 0.0) + error
    squares = sum(error * error for error in errors)
    alone = sum(error * error for name, error in zip(clusters, errors, strict=True) if not name)
    clustered = alone + sum(one * one for one in sums.values())
    return 100.0 * math.sqrt(squares / (count - 1) + clustered)


def _select_items(items: Sequence[Item], metric: str) -> list[bool] | None:
    """Select the items of a metric; None if it is not a sum over items."""

    def where(test: Callable[[Item], bool]) -> list[bool]:
        return [test(item) for item in items]

    if metric in _OVER_ALL:
        return [True] * len(items)
    if metric in ("perception", "cognition"):
        return where(lambda item: _get_table(item, "part") == metric)
    if metric in ("image", "video"):
        return where(lambda item: item.get("kind") == metric)
    if metric in ("short", "medium", "long"):
        return where(lambda item: _get_table(item, "duration") == metric)
    if metric in ("binary", "open"):
        return where(
            lambda item: (
                _get_table(item, "structural") is not None
                and (_get_table(item, "structural") == "query") == (metric == "open")
            )
        )
    table, dot, value = metric.partition(".")
    if dot and value == "f1":
        return where(lambda item: _get_split(item) == table)
    return where(lambda item: _get_table(item, table) == value) if dot else None


def _make_f1_part(items: Sequence[Item], mask: Sequence[bool], profile: str) -> Part:
    """Make the terms of F1 = 2 TP / (2 TP + FP + FN); every wrong answer is an FP or FN.

    In POPE's profile lmms an answer that is neither yes nor no is neither an FP nor an FN.
    """
    known = ("yes", "no", None)
    above, below = [], []
    for item, own in zip(items, mask, strict=True):
        said, label = item["extracted"], item["reference"]
        wrong = own and said != label and (profile != "lmms" or said in known)
        above.append(2.0 * (own and said == "yes" == label))
        below.append(above[-1] + wrong)
    return above, below


def _make_group_part(items: Sequence[Item], kind: str) -> Part:
    """Make the terms of the share of groups with all items right, each item 1 / group size."""
    groups = [item["groups"][kind] for item in items]
    sizes, wrong = Counter(groups), {item["groups"][kind] for item in items if item["score"] < 1}
    below = [1.0 / sizes[group] for group in groups]
    above = [0.0 if group in wrong else one for group, one in zip(groups, below, strict=True)]
    return above, below


def _make_mme_parts(items: Sequence[Item], mask: Sequence[bool]) -> list[Part]:
    """Make one part per task, whose sum (not mean) over the tasks is MME's score."""
    both, _ = _make_group_part(items, "image")
    names = [
        _get_table(item, "task") if own else None for item, own in zip(items, mask, strict=True)
    ]
    tasks = sorted({name for name in names if name})
    return [
        (
            [
                len(tasks) * (item["score"] + float(right > 0)) * (name == task)
                for item, right, name in zip(items, both, names, strict=True)
            ],
            [float(name == task) for name in names],
        )
        for task in tasks
    ]


def _get_split(item: Item) -> str:
    """Return POPE's split."""
    return _get_table(item, "split") or ""


def _get_table(item: Item, name: str) -> str | None:
    return (item.get("tables") or {}).get(name)
