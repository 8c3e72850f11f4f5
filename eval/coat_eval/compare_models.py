"""Compares models on the same items: metric differences, their intervals, and flipped items.

Whole benchmarks stand beside the figures that papers and repositories publish (published.yaml).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from coat_eval.scored_set import ScoredSet, read_sets, same_items
from coat_eval.significance import bootstrap_intervals, figures, mcnemar, scores

RIGHT = 0.5
"""A graded item (VQA's accuracy) counts as right from this score on, where items are counted."""


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
    """95%, by paired bootstrap over items; None for a metric that is no sum over items."""
    items: int
    only_first: int
    """Items that only the first model gets right."""
    only_second: int
    p_value: float | None
    """McNemar's exact test on these two numbers; None where scores are not 0 or 1."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The models that were compared, and each one against the first."""

    sets: Mapping[str, Mapping[str, ScoredSet]]
    """By model, then by set."""
    differences: Sequence[Difference]

    def to_json(self) -> dict[str, Any]:
        """Models with their headline metrics, and the differences, as JSON-ready data."""
        return {
            "models": {name: own_figures(sets) for name, sets in self.sets.items()},
            "differences": [asdict(one) for one in self.differences],
        }


def compare_items(paths: Sequence[Path], *, seed: int = 0) -> Comparison:
    """Compare every model with the first, over the same items.

    Args:
        paths: run folders, reports or folders of reports, see
            :func:`coat_eval.scored_set.read_sets`.
        seed: of the bootstrap.

    Raises:
        ValueError: the models were asked other sets or other items, or a path is named twice.
        FileNotFoundError: a path holds nothing scored.
        DataError: a report has no items, or its items do not add up to its metrics.
    """
    names = _names(paths)
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
            why = same_items(one, other[set_name])
            if why is not None:
                raise ValueError(f"set {set_name!r} does not compare: {why}")
            rows += _set_rows((names[0], name), set_name, one, other[set_name], seed)
    return Comparison(sets, rows)


def own_figures(sets: Mapping[str, ScoredSet]) -> dict[str, float]:
    """The headline metrics of one model by ``set.metric``, from the items where possible."""
    found = {}
    for name, scored in sets.items():
        sums = figures(scored)
        for metric in scored.headline:
            if metric in sums:
                found[f"{name}.{metric}"] = sums[metric][0].value()
            elif metric in scored.metrics:
                found[f"{name}.{metric}"] = scored.metrics[metric]
    return found


def format_differences(comparison: Comparison) -> str:
    """The differences as Markdown, and the models beside published ones."""
    lines = []
    pairs = groupby(comparison.differences, lambda row: (row.first_name, row.second_name))
    for (first, second), rows in pairs:
        table = markdown_table(_COLUMNS, [_row_cells(row) for row in rows])
        lines += [f"A = {first}, B = {second}", "", table, ""]
    if lines:
        lines.append(
            "Interval: paired bootstrap over items. p: McNemar's exact test on the items that only "
            "one model gets right; not corrected for the number of rows."
        )
    parts = [part for part in _beside_published(comparison) if part]
    return "\n".join([*lines, *(line for part in parts for line in ("", part))])


def _beside_published(comparison: Comparison) -> tuple[str, str]:
    """The table of whole benchmarks scored officially, and what is left out of it and why."""
    known = {name for row in published().values() for name in row}
    own: dict[str, dict[str, float]] = {}
    left_out = []
    for model, sets in comparison.sets.items():
        own[model] = {}
        for name, scored in sets.items():
            found = own_figures({name: scored})
            if not scored.deviations:
                own[model] |= found
            elif known & found.keys():
                left_out.append(f"{name} of {model} ({', '.join(scored.deviations)})")
    table = format_published({model: found for model, found in own.items() if found})
    return table, f"Not beside published figures: {'; '.join(left_out)}." if left_out else ""


def only_right(first: ScoredSet, second: ScoredSet) -> tuple[list[int], list[int]]:
    """Indices of the items that only the first, and only the second, gets right."""
    a, b = scores(first) >= RIGHT, scores(second) >= RIGHT
    return np.flatnonzero(a & ~b).tolist(), np.flatnonzero(b & ~a).tolist()


_COLUMNS = ("figure", "A", "B", "B - A", "95% interval", "only A right", "only B right", "p", "n")


def _set_rows(
    names: tuple[str, str], set_name: str, one: ScoredSet, other: ScoredSet, seed: int
) -> list[Difference]:
    first, second = figures(one), figures(other)
    common = [metric for metric in first if metric in second]
    pairs = [(first[metric][0], second[metric][0]) for metric in common]
    found = bootstrap_intervals(pairs, seed=seed) if pairs else []
    intervals = dict(zip(common, found, strict=True))
    binary = bool(np.isin(np.concatenate([scores(one), scores(other)]), (0.0, 1.0)).all())
    flipped = only_right(one, other)
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
                p_value=mcnemar(*counts) if binary and metric in intervals else None,
            )
        )
    return rows


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    whole = [Path(path).resolve() for path in paths]
    if len(set(whole)) != len(whole):
        raise ValueError(f"the same path is named twice: {', '.join(map(str, paths))}")
    for length in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in whole]


def _row_cells(row: Difference) -> list[str]:
    return [
        f"{row.set_name} {row.metric}",
        f"{row.first:.2f}",
        f"{row.second:.2f}",
        f"{row.difference:+.2f}",
        "-" if row.interval is None else "{:+.2f} .. {:+.2f}".format(*row.interval),
        str(row.only_first),
        str(row.only_second),
        "-" if row.p_value is None else f"{row.p_value:.3g}",
        str(row.items),
    ]


def published() -> dict[str, dict[str, Any]]:
    """Percent by ``task.metric``, and ``source`` (repository and file), by published model."""
    text = files("coat_eval").joinpath("published.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def format_published(own: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table: one's own models, then the published ones, by benchmark.

    Args:
        own: percent by ``task.metric``, by the name of the model.

    Returns:
        The table with the sources below; empty if none of the benchmarks has a published figure.
    """
    known = {name for row in published().values() for name in row}
    columns = [name for name in dict.fromkeys(n for v in own.values() for n in v) if name in known]
    if not columns:
        return ""
    theirs = {model: row for model, row in published().items() if row.keys() & set(columns)}
    rows = {f"**{name}**": values for name, values in own.items()} | theirs
    cells = [
        [model, *(f"{values[name]:.1f}" if name in values else "-" for name in columns)]
        for model, values in rows.items()
    ]
    sources = "; ".join(dict.fromkeys(row["source"] for row in theirs.values()))
    return (
        f"{markdown_table(['model', *columns], cells)}\n\nPublished figures (VQAv2 and VizWiz: "
        f"test-dev). Sources: {sources}."
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, without a line break at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
