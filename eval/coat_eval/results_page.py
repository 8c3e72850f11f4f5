"""Writes the results page: plots and a table of models and published results, and items."""

import mimetypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from coat_data.containers.remote_file import is_url
from coat_data.media.root import MediaRoot
from coat_data.sample import DataError
from coat_data.tools.html_page import sample_evenly, write_page
from coat_eval.compare_models import Comparison, Difference, find_disagreements, read_published
from coat_eval.data_folder import ParquetImage
from coat_eval.scored_set import ScoredSet
from coat_eval.uncertainty import wilson_interval
from coat_vlm.report.evaluation import render_media

_OTHER_QUESTIONS = ("vqav2", "vizwiz")
"""Published on test-dev, so no difference from a score on other questions is tested."""
_NUM_TICKS = 4
ITEMS_PER_SET = 40
LONGEST_TEXT = 1000
"""Maximum length of a prediction or reference in characters."""
_CELL = re.compile(r"(.+), row (\d+), (\w+)")
"""How :class:`coat_eval.data_folder.ParquetImage` names an image."""


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
    """95%."""
    items: int
    """Number of items, or figures, that the metric counts."""
    size: str
    """The same with the units, such as ``12578 in 398 images``."""
    difference: float | None = None
    """From the first model; None for that model itself."""
    tested: Difference | None = None
    """None for that model itself and for published ones."""

    @property
    def verdict(self) -> str:
        """``higher`` or ``lower`` if the interval of the difference excludes 0."""
        if self.tested is None or self.tested.interval is None:
            return "" if self.difference is None else "not tested"
        low, high = self.tested.interval
        return "higher" if low > 0 else "lower" if high < 0 else "not distinguishable"


def build_results(comparison: Comparison) -> list[list[Result]]:
    """Build the rows of every metric: the compared models, then comparable published ones."""
    models, published = list(comparison.sets), read_published()
    differences = {
        (row.set_name, row.metric, row.second_name): row for row in comparison.differences
    }
    groups = []
    for set_name, first in comparison.sets[models[0]].items():
        sets = {model: comparison.sets[model][set_name] for model in models}
        whole = not any(one.deviations for one in sets.values())
        for metric in first.metrics:
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
    per_set: int,
    media_root: Path | str | None,
) -> None:
    """Write one self-contained HTML file with plots, table and the items behind the differences."""
    groups = build_results(comparison)
    published = read_published()
    shown = {row.model for rows in groups for row in rows if row.published}
    write_page(
        path,
        "coat_eval",
        "results.html.jinja",
        not_comparable=comparison.not_comparable,
        groups=groups,
        plots=[_make_plot(rows) for rows in groups],
        sources=dict.fromkeys(row["source"] for name, row in published.items() if name in shown),
        sections=build_sections(comparison, per_set, media_root),
    )


def _make_result(
    model: str, set_name: str, metric: str, scored: ScoredSet, row: Difference | None
) -> Result | None:
    """Make the row of a compared model; None without a value of this metric."""
    found, value = scored.estimates.get(metric), scored.metrics.get(metric)
    if value is None:
        return None
    return Result(
        name=f"{set_name} {metric}",
        rules=f"{set_name}: {scored.rules}" if scored.follows else "",
        model=model,
        precision=scored.conditions.get("precision", ""),
        published=False,
        value=value,
        interval=found.interval if found else None,
        items=len(found.terms) if found else len(scored.items),
        size=found.size if found else f"{len(scored.items)} questions",
        difference=row and row.difference,
        tested=row,
    )


def _list_published(
    first: Result, set_name: str, metric: str, published: Mapping[str, Mapping[str, Any]]
) -> list[Result]:
    """Return published values of a metric, with Wilson's interval if it is an accuracy."""
    rows = []
    for model, figures in published.items():
        value = figures.get(f"{set_name}.{metric}")
        if value is None:
            continue
        interval = None
        if set_name not in _OTHER_QUESTIONS and "f1" not in metric:
            low, high = wilson_interval(value / 100, first.items)
            interval = 100 * low, 100 * high
        rows.append(
            Result(
                name=first.name,
                rules=first.rules,
                model=model,
                precision="",
                published=True,
                value=value,
                items=first.items,
                size=first.size,
                interval=interval,
                difference=value - first.value,
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
        "size": rows[0].size,
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


def build_sections(
    comparison: Comparison, per_set: int, media_root: Path | str | None
) -> list[dict[str, Any]]:
    """Build a section per set and pair of models, with cards of the items that differ."""
    first_name, *other_names = comparison.sets
    sections: list[dict[str, Any]] = []
    for second_name, (set_name, one) in product(other_names, comparison.sets[first_name].items()):
        other = comparison.sets[second_name][set_name]
        lost, won = find_disagreements(one, other)
        num_won = min(len(won), max(per_set // 2, per_set - len(lost)))
        shown = sorted([*sample_evenly(lost, per_set - num_won), *sample_evenly(won, num_won)])
        bar = tqdm(shown, desc=f"flips {set_name}", unit="item", delay=2.0, leave=False)
        won_items = set(won)
        cards = [
            {"second_is_right": index in won_items, **_make_card(one, other, index, media_root)}
            for index in bar
        ]
        section = {
            "set_name": set_name,
            "first_name": first_name,
            "second_name": second_name,
            "only_first": len(lost),
            "only_second": len(won),
            "cards": cards,
        }
        sections.append(section)
    return sections


def _make_card(
    one: ScoredSet, other: ScoredSet, index: int, media_root: Path | str | None
) -> dict[str, Any]:
    """Make the template's fields of one item; images are ``data:`` addresses."""
    first, second = one.items[index], other.items[index]
    owner, scored = (first, one) if first.get("media") else (second, other)
    where = f"{scored.path}, item {scored.ids[index]}"
    # For a video that is stored as a list of frames, the model got the middle one (SEED-Bench).
    pick = "middle" if first.get("kind") == "video" else "first"
    entries = owner.get("media") or ()
    loaded = [_load_media(_resolve_media(entry, media_root, where), pick) for entry in entries]
    shown = [entry for entry in loaded if not isinstance(entry, str)]
    images, problems = render_media(shown, str(media_root or ""))
    return {
        "item": one.ids[index],
        "question": _truncate(first.get("question") or second.get("question") or ""),
        "reference": _truncate(first["reference"]),
        "first": _get_prediction(first),
        "second": _get_prediction(second),
        "images": images,
        "problems": [*problems, *(entry for entry in loaded if isinstance(entry, str))],
    }


def _resolve_media(entry: object, media_root: Path | str | None, where: str) -> dict[str, Any]:
    """Convert ``{"kind", "path"}``, whose path may end in ``#t=START,END``, to fields of Media."""
    if not (isinstance(entry, Mapping) and {"kind", "path"} <= entry.keys()):
        problem = f"the media entry {entry!r} has no kind and path"
        raise DataError(where, problem, 'write {"kind": "image", "path": "a.jpg"}')
    name, part, seconds = str(entry["path"]).partition("#t=")
    times: dict[str, float] = {}
    if part:
        times = dict(zip(("start", "end"), map(float, seconds.split(",")), strict=True))
    is_video = (mimetypes.guess_type(name)[0] or "").startswith("video")
    path = name
    if is_url(media_root or "") and not Path(name).is_absolute():
        path = MediaRoot(media_root or "").file(name, where)
    elif not is_url(name):  # an absolute path ignores the root
        path = str(Path(media_root or "") / name)
    return {"kind": "video" if is_video else entry["kind"], "path": path, **times}


def _load_media(
    entry: Mapping[str, Any], pick: Literal["first", "middle"]
) -> Mapping[str, Any] | str:
    """Add the bytes of an image or video in a Parquet file; returns a message if unreadable."""
    cell = _CELL.fullmatch(entry["path"])
    if cell is None:
        return entry
    path, row, column = cell.groups()
    try:
        media = ParquetImage(Path(path), row=int(row) - 1, column=column, pick=pick).load()
    except (ValueError, OSError, IndexError) as error:
        return f"{entry['path']}: {error}"
    return {**entry, "data": media.data}


def _get_prediction(item: Mapping[str, Any]) -> str:
    text = item.get("prediction")
    return "(no prediction)" if text is None else _truncate(text) or "(empty)"


def _truncate(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = ", ".join(map(str, value))
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."
