"""Writes the results page: a table and a plot of runs, precisions and published models.

Every metric of the compared models is one plot of dots with 95% intervals, own models filled,
published ones hollow. The table adds the differences from the first model: paired by item between
the compared models; from the binomial variance against published numbers, whose answers are not
known. The page also shows the items behind the differences (:mod:`coat_eval.disagreements`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coat_data.tools.html_page import write_page
from coat_eval.compare_models import Comparison, Difference, read_published
from coat_eval.disagreements import ITEMS_PER_SET, build_sections
from coat_eval.ratios import compute_standard_error
from coat_eval.scored_set import ScoredSet
from coat_eval.significance import (
    Z_95,
    RatioMetric,
    compare_proportions,
    compute_binomial_error,
    compute_metrics,
)

_OTHER_QUESTIONS = ("vqav2", "vizwiz")
"""Published on test-dev, so no difference from a score on other questions is tested."""
_NUM_TICKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One metric of one model; numbers are in the metric's unit, mostly percent."""

    name: str
    """Set and metric."""
    rules: str
    """Profile, and repository and commit of its scorer; empty for a question set."""
    model: str
    precision: str
    published: bool
    value: float
    interval: tuple[float, float] | None
    """95%: 1.96 standard errors to both sides, within the possible values."""
    items: int
    difference: float | None = None
    """From the first model; None for that model itself."""
    difference_interval: tuple[float, float] | None = None
    p_value: float | None = None
    detectable: float | None = None
    """Smallest true difference that would be seen with 80% power at the 5% level."""
    paired: bool = False
    """Whether the difference is paired by item."""

    @property
    def verdict(self) -> str:
        """``higher`` or ``lower`` if the interval of the difference excludes 0."""
        if self.difference_interval is None:
            return "" if self.difference is None else "not tested"
        low, high = self.difference_interval
        return "higher" if low > 0 else "lower" if high < 0 else "not distinguishable"


def build_results(comparison: Comparison) -> list[list[Result]]:
    """Build the rows of every metric: the compared models, then the published ones.

    Published models stand beside complete benchmarks only, under the official rules.
    """
    models, published = list(comparison.sets), read_published()
    differences = {
        (row.set_name, row.metric, row.second_name): row for row in comparison.differences
    }
    groups = []
    for set_name, first in comparison.sets[models[0]].items():
        sets = {model: comparison.sets[model][set_name] for model in models}
        whole = not any(one.deviations for one in sets.values())
        for metric in first.headline:
            found = [
                _make_result(
                    model, set_name, metric, one, differences.get((set_name, metric, model))
                )
                for model, one in sets.items()
            ]
            rows = [row for row in found if row is not None]
            if len(rows) == len(models):
                theirs = published if whole else {}
                groups.append(rows + _list_published(rows[0], set_name, metric, theirs))
    return groups


def write_results(
    comparison: Comparison,
    path: Path,
    *,
    per_set: int = ITEMS_PER_SET,
    media_root: Path | str | None = None,
) -> Path:
    """Write one self-contained HTML file with plots, table and the items behind the differences.

    Args:
        comparison: a comparison of at least two models.
        path: the file; its folder is created.
        per_set: maximum number of items, see :func:`coat_eval.disagreements.build_sections`.
        media_root: root of relative media paths, a folder or an address; default: the working
            directory.

    Raises:
        ValueError: ``per_set`` is negative.
        DataError: an item's media are not images or videos with a path; names the item.
        OSError: the file cannot be written.
    """
    groups = build_results(comparison)
    published = read_published()
    shown = {row.model for rows in groups for row in rows if row.published}
    write_page(
        path,
        "coat_eval",
        "results.html.jinja",
        groups=groups,
        plots=[_make_plot(rows) for rows in groups],
        sources=dict.fromkeys(row["source"] for name, row in published.items() if name in shown),
        sections=build_sections(comparison, per_set=per_set, media_root=media_root),
    )
    return path


def _make_result(
    model: str, set_name: str, metric: str, scored: ScoredSet, row: Difference | None
) -> Result | None:
    """Make the row of a compared model; None without a value of this metric."""
    found = compute_metrics(scored).get(metric)
    value = found[0].value() if found else scored.metrics.get(metric)
    if value is None:
        return None
    error = scored.standard_errors.get(metric)
    if error is None and found:
        error = _compute_item_error(*found)
    tested = {} if row is None else {
        "difference": row.difference,
        "difference_interval": row.interval,
        "p_value": row.p_value,
        "detectable": row.detectable,
        "paired": row.interval is not None,
    }  # fmt: skip
    return Result(
        name=f"{set_name} {metric}",
        rules=f"{set_name}: {scored.rules}" if scored.follows else "",
        model=model,
        precision=scored.precision,
        published=False,
        value=value,
        interval=_make_interval(value, error),
        items=int(found[1].sum()) if found else len(scored.items),
        **tested,
    )


def _compute_item_error(metric: RatioMetric, mask: np.ndarray) -> float:
    """Compute the standard error from the items of a report that does not state it."""
    parts = [(above.tolist(), below.tolist()) for above, below in metric.parts]
    return compute_standard_error(parts, mask.tolist(), [""] * len(mask))


def _make_interval(value: float, error: float | None) -> tuple[float, float] | None:
    """Return 1.96 standard errors to both sides, cut at 0 and, for a percentage, at 100."""
    if error is None:
        return None
    high = value + Z_95 * error
    return max(0.0, value - Z_95 * error), min(100.0, high) if value <= 100 else high


def _list_published(
    first: Result, set_name: str, metric: str, published: Mapping[str, Mapping[str, Any]]
) -> list[Result]:
    """Return published values of a metric, compared with the first model if it is an accuracy."""
    rows = []
    for model, figures in published.items():
        value = figures.get(f"{set_name}.{metric}")
        if value is None:
            continue
        known: dict[str, Any] = {}
        if set_name not in _OTHER_QUESTIONS and "f1" not in metric:
            interval, p_value, detectable = compare_proportions(first.value, value, first.items)
            known = {
                "interval": _make_interval(value, compute_binomial_error(value, first.items)),
                "difference_interval": interval,
                "p_value": p_value,
                "detectable": detectable,
            }
        row = {"interval": None, **known, "difference": value - first.value}
        rows.append(
            Result(
                name=first.name,
                rules=first.rules,
                model=model,
                precision="",
                published=True,
                value=value,
                items=first.items,
                **row,
            )
        )
    return rows


def _make_plot(rows: Sequence[Result]) -> dict[str, Any]:
    """Return the axis of a plot, and the places of dots and intervals in percent of its width."""
    from matplotlib.ticker import MaxNLocator

    ends = [end for row in rows for end in (row.value, *(row.interval or ()))]
    locator = MaxNLocator(nbins=_NUM_TICKS, steps=[1, 2, 5, 10], min_n_ticks=2)
    ticks = [float(tick) for tick in locator.tick_values(min(ends), max(ends))]
    width = ticks[-1] - ticks[0]

    def place(value: float) -> float:
        return round(100 * (value - ticks[0]) / width, 2)

    return {
        "name": rows[0].name,
        "items": rows[0].items,
        "first": place(rows[0].value),
        "ticks": [(place(tick), f"{tick:g}") for tick in ticks],
        "rows": [
            {
                "result": row,
                "dot": place(row.value),
                "ends": row.interval and [*map(place, row.interval)],
            }
            for row in rows
        ],
    }
