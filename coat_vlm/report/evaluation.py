"""Evaluation results as rows, and questions as sample cards.

A row has the value, the baselines and the required value of a metric. A card has a question with
its images, the reference and the prediction, right or wrong.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from coat_data.media.image import open_image
from coat_data.sample import DataError, Media

BASELINES = ("chance", "majority")

CARDS_PER_SET = 12
LONGEST_SIDE = 256
"""Pixels; larger images are shrunk before they go into the file."""
MEDIA_PER_CARD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One metric of one evaluation set; percentages, None where there is no such number."""

    set_name: str
    task: str
    metric: str
    value: float | None
    chance: float | None
    majority: float | None
    required: float | None

    @property
    def verdict(self) -> str:
        """``ok`` or ``missed`` for a required metric, ``not run`` without a value, else empty."""
        if self.value is None:
            return "not run"
        if self.required is None:
            return ""
        return "ok" if self.value >= self.required else "missed"


def evaluation_rows(
    eval_json: Mapping[str, Any],
    eval_sets: Mapping[str, Mapping[str, Any]],
    headlines: Mapping[str, str],
) -> list[EvaluationRow]:
    """The headline metric of every set, followed by the set's other required metrics.

    Args:
        eval_json: content of RUN/eval.json (``{set: {metric: percent}}`` and ``precision``).
        eval_sets: the recipe's evaluation sets: ``task`` and ``require`` of each.
        headlines: the headline metric of each set; ``accuracy`` where it is not known.
    """
    measured = [name for name, value in eval_json.items() if isinstance(value, Mapping)]
    rows = []
    for name in dict.fromkeys([*eval_sets, *measured]):
        settings = eval_sets.get(name) or {}
        values = eval_json.get(name) or {}
        require = settings.get("require") or {}
        for metric in dict.fromkeys([headlines.get(name, "accuracy"), *require]):
            rows.append(
                EvaluationRow(
                    set_name=name,
                    task=str(settings.get("task", "")),
                    metric=metric,
                    value=values.get(metric),
                    chance=baseline(values, metric, "chance"),
                    majority=baseline(values, metric, "majority"),
                    required=require.get(metric),
                )
            )
    return rows


def baseline(values: Mapping[str, float], metric: str, kind: str) -> float | None:
    """The ``chance`` or ``majority`` value that belongs to a metric, or None.

    ``chance`` and ``majority`` are accuracies; another metric's are called ``f1_chance`` and so on.
    A category's metric ``colour.accuracy`` goes with ``colour.chance``.
    """
    category, dot, own = metric.rpartition(".")
    return values.get(f"{category}{dot}{kind if own == 'accuracy' else f'{own}_{kind}'}")


def category_tables(reports: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every set with categories: its metrics for all items and for each category.

    Args:
        reports: content of RUN/eval/<set>/report.json by set.

    Returns:
        Tables ``{"name", "n_unparsed", "columns", "rows"}`` with rows ``(category, n, values)``.
    """
    tables = []
    for name, report in reports.items():
        values = report["metrics"]
        columns = [m for m in values if "." not in m and not m.endswith(BASELINES)]
        columns = [metric for metric in columns if metric != "mean_f1"] + list(BASELINES)
        rows = [("all", report["n"], [values.get(metric) for metric in columns])]
        for category, n in (report.get("categories") or {}).items():
            rows.append((category, n, [values.get(f"{category}.{metric}") for metric in columns]))
        table = {"name": name, "n_unparsed": report["n_unparsed"], "columns": columns, "rows": rows}
        tables.append(table)
    return tables


def percent_text(value: float | None) -> str:
    """A percentage with two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def sample_cards(folder: Path, number: int = CARDS_PER_SET) -> list[dict[str, Any]]:
    """At most ``number`` cards of ``folder/items.jsonl``: half wrong and half right if there are.

    Both halves are taken at even distances over the file, so the same run gives the same cards. An
    absent file gives no card.

    Returns:
        Rows of the file with ``images`` and ``problems`` of :func:`shown_media`.
    """
    path = folder / "items.jsonl"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    cards = []
    for index in choose([row["correct"] for row in rows], number):
        images, problems = shown_media(rows[index]["media"])
        cards.append(rows[index] | {"images": images, "problems": problems})
    return cards


def choose(correct: Sequence[bool], number: int) -> list[int]:
    """Indices of ``number`` items, half of them wrong where possible, in ascending order."""
    right = [index for index, value in enumerate(correct) if value]
    wrong = [index for index, value in enumerate(correct) if not value]
    num_wrong = min(len(wrong), max(number // 2, number - len(right)))
    return sorted(spread(wrong, num_wrong) + spread(right, number - num_wrong))


def shown_media(entries: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Images and frames of videos as ``data:`` addresses, made small, at most MEDIA_PER_CARD.

    Args:
        entries: rows with ``kind`` and ``path``.

    Returns:
        The addresses, and what cannot be shown and why.
    """
    images: list[str] = []
    problems: list[str] = []
    for entry in entries:
        try:
            media = Media(**entry)
            read = [open_image(media)] if media.kind == "image" else _frames(media)
            images += [_data_address(picture) for picture in read]
        except (DataError, OSError) as error:
            problems.append(str(error))
    hidden = len(images) - MEDIA_PER_CARD
    if hidden > 0:
        problems.append(f"{hidden} more images are not shown")
    return images[:MEDIA_PER_CARD], problems


def spread(indices: Sequence[int], number: int) -> list[int]:
    """At most ``number`` of the indices, at even distances, so the same ones each time."""
    number = min(number, len(indices))
    return [indices[position * len(indices) // number] for position in range(number)]


def _frames(media: Media) -> list[Image.Image]:
    from coat_data.media.video import read_frames  # reports without videos need no decoder

    return read_frames(media, MEDIA_PER_CARD)


def _data_address(picture: Image.Image) -> str:
    """The picture, at most LONGEST_SIDE pixels long, as a ``data:`` address."""
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    buffer = io.BytesIO()
    # JPEG blurs small pictures (CIFAR has 32 x 32 pixels) and saves nothing there.
    kind = "PNG" if max(picture.size) <= 96 else "JPEG"
    picture.convert("RGB").save(buffer, kind, **({} if kind == "PNG" else {"quality": 85}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
