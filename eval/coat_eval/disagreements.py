"""Makes the page's cards of the items that only one of two models answers correctly."""

import mimetypes
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from coat_data.containers.remote_file import is_url
from coat_data.limits import Network
from coat_data.media.root import MediaRoot
from coat_data.sample import DataError
from coat_data.tools.html_page import sample_evenly
from coat_eval.compare_models import Comparison, find_disagreements
from coat_eval.data_folder import ParquetImage
from coat_eval.scored_set import ScoredSet
from coat_vlm.report.evaluation import render_media

ITEMS_PER_SET = 40
LONGEST_TEXT = 1000
"""Maximum length of a prediction or reference in characters."""
_CELL = re.compile(r"(.+), row (\d+), (\w+)")
"""How :class:`coat_eval.data_folder.ParquetImage` names an image in a Parquet file."""


def build_sections(
    comparison: Comparison, *, per_set: int = ITEMS_PER_SET, media_root: Path | str | None = None
) -> list[dict[str, Any]]:
    """Build a section per set and pair of models, with cards of the items behind the differences.

    Args:
        comparison: a comparison of at least two models.
        per_set: maximum number of items per set and pair of models, evenly spaced over the set,
            half of them per direction if possible. Images are scaled down to about 20 kB per item.
        media_root: root of relative media paths, a folder or an address; default: the working
            directory.

    Raises:
        ValueError: ``per_set`` is negative.
        DataError: an item's media are not images or videos with a path; names the item.
    """
    if per_set < 0:
        raise ValueError(f"flips={per_set}: give 0 or more items per set")
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
    entries = owner.get("media") or []
    if not isinstance(entries, list):
        entries = [entries]
    where = f"{scored.path}, item {scored.ids[index]}"
    # For a video that is stored as a list of frames, the model got the middle one (SEED-Bench).
    pick = "middle" if first.get("kind") == "video" else "first"
    loaded = [_load_media(_resolve_media(entry, media_root, where), pick) for entry in entries]
    network = Network().with_hosts_of(media_root)
    shown = [entry for entry in loaded if not isinstance(entry, str)]
    images, problems = render_media(shown, network)
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
    """Convert ``{"kind", "path"}`` or ``{"kind", "name"}`` to the fields of :class:`Media`.

    A string is the path of an image, or of a video according to its suffix. A name may end in
    ``#t=START,END``, a part of a video in seconds. A video of which the model got a single frame
    has the kind ``image`` and is shown as a video.
    """
    if isinstance(entry, str):
        entry = {"kind": "image", "path": entry}
    named = entry.get("path", entry.get("name")) if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(named, str) or "kind" not in entry:
        raise DataError(
            where,
            f"the medium {entry!r} has no kind and path",
            'write {"kind": "image", "path": "a.jpg"}, or the path of an image alone',
        )
    name, part, seconds = named.partition("#t=")
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
    """Add the bytes of a medium in a Parquet file; returns a message if it cannot be read."""
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
