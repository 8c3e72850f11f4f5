"""Builds the rows of evaluation results, and the cards of sample questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coat_data.media.pictures import read_pictures
from coat_data.sample import Media
from coat_data.tools.html_page import data_address, sample_evenly

CARDS_PER_SET = 12
LONGEST_SIDE = 256  # pixels of embedded images
MEDIA_PER_CARD = 4
_PROBLEMS = {
    "unparsed": "n_unparsed",
    "needing a judge": "n_needs_judge",
    "empty": "n_empty",
    "missing": "n_missing",
    "not a text": "n_not_text",
    "with unreadable media": "n_media_problems",
    "random": "n_random_fallback",
}
"""Kind of answer and its number in report.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One metric of an evaluation set, in percent; None for a missing number."""

    set_name: str
    metric: str
    value: float | None
    chance: float | None
    majority: float | None
    required: float | None
    n: int | None = None  # questions behind the value
    interval: tuple[float, float] | None = None  # 95%, over the choice of questions
    problems: str = ""  # numbers of unparsed, empty, missing and other answers

    @property
    def verdict(self) -> str:
        """``ok`` or ``missed`` for a required metric, ``not run`` without a value, else empty."""
        if self.value is None:
            return "not run"
        if self.required is None:
            return ""
        return "ok" if self.value >= self.required else "missed"

    @property
    def baseline(self) -> str:
        """The name of the highest baseline that the value does not exceed, else empty."""
        baselines = (("chance", self.chance), ("majority", self.majority))
        known = [(name, value) for name, value in baselines if value is not None]
        name, highest = max(known, key=lambda pair: pair[1], default=("", 0.0))
        return name if self.value is not None and self.value <= highest else ""


def build_evaluation_rows(
    eval_json: Mapping[str, Any],
    eval_sets: Mapping[str, Mapping[str, Any]],
    reports: Mapping[str, Mapping[str, Any]],
) -> list[EvaluationRow]:
    """Build the rows of each set: its headline metric, then its other required metrics.

    ``eval_json`` is ``{set: {metric: percent}}`` and ``precision``; ``reports`` has
    RUN/eval/<set>/report.json by set; only ``headline`` is required.
    """
    measured = [name for name, value in eval_json.items() if isinstance(value, Mapping)]
    rows = []
    for name in dict.fromkeys([*eval_sets, *measured]):
        settings = eval_sets.get(name) or {}
        values = eval_json.get(name) or {}
        require = settings.get("require") or {}
        report = reports.get(name) or {}
        counts = report.get("counts") or {}
        for metric in dict.fromkeys([report.get("headline", "accuracy"), *require]):
            rows.append(
                EvaluationRow(
                    set_name=name,
                    metric=metric,
                    value=values.get(metric),
                    chance=baseline(values, metric, "chance"),
                    majority=baseline(values, metric, "majority"),
                    required=require.get(metric),
                    n=counts.get(f"category.{metric.rpartition('.')[0]}")
                    if "." in metric
                    else report.get("n"),
                    interval=(report.get("intervals") or {}).get(metric),
                    problems=", ".join(
                        f"{report[key]} {kind}"
                        for kind, key in _PROBLEMS.items()
                        if report.get(key)
                    ),
                )
            )
    return rows


def baseline(values: Mapping[str, float], metric: str, kind: str) -> float | None:
    """Return the ``chance`` or ``majority`` baseline of a metric, or None.

    ``colour.chance`` is one of ``colour.accuracy``, ``f1_chance`` of ``f1``.
    """
    category, dot, name = metric.rpartition(".")
    return values.get(f"{category}{dot}{kind if name == 'accuracy' else f'{name}_{kind}'}")


def format_percent(value: float | None) -> str:
    """Format a percentage with two decimals; None as a dash."""
    return "-" if value is None else f"{value:.2f}"


def format_interval(interval: tuple[float, float] | None) -> str:
    """Format an interval as ``48.8 to 80.8``; None as a dash."""
    return "-" if interval is None else "{:.1f} to {:.1f}".format(*interval)


def build_sample_cards(
    items: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Build up to CARDS_PER_SET cards from the items of a set, half of them of wrong answers.

    Wrong answers come first, and both halves are evenly spaced over the set. A card is the item
    with ``images`` and ``problems`` of :func:`render_media`; ``settings`` come from the recipe.
    """
    right = [item for item in items if item["score"] == 1.0]
    wrong = [item for item in items if item["score"] != 1.0]
    num_wrong = min(len(wrong), max(CARDS_PER_SET // 2, CARDS_PER_SET - len(right)))
    cards = []
    for item in (
        *(wrong[index] for index in sample_evenly(range(len(wrong)), num_wrong)),
        *(right[index] for index in sample_evenly(range(len(right)), CARDS_PER_SET - num_wrong)),
    ):
        images, problems = render_media(item["media"], settings.get("media_root") or "")
        category = (item.get("tables") or {}).get("category", "")
        shown = {"images": images, "problems": problems, "correct": item["score"] == 1.0}
        cards.append({**item, **shown, "category": category})
    return cards


def render_media(
    entries: Sequence[Mapping[str, Any]], media_root: str = ""
) -> tuple[list[str], list[str]]:
    """Encode up to MEDIA_PER_CARD images and video frames as small ``data:`` URLs.

    Returns the URLs, and the problems of media that cannot be shown.
    """
    media = [Media(**entry, root=media_root) for entry in entries]
    pictures, problems = read_pictures(media, MEDIA_PER_CARD)
    return [data_address(picture, LONGEST_SIDE) for picture in pictures], problems
