"""A page of the items that flipped: one model right and the other wrong, with their images."""

import mimetypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from tqdm import tqdm

from coat_data.containers.remote_file import is_url
from coat_data.media.root import MediaRoot
from coat_data.sample import DataError
from coat_eval.compare_models import Comparison, only_right
from coat_eval.data_folder import ShownCell
from coat_eval.files import write_text
from coat_eval.scored_set import ScoredSet
from coat_vlm.report.evaluation import shown_media, spread

FLIPS_PER_SET = 40
LONGEST_TEXT = 1000
"""Characters of a prediction or reference that are shown."""
_CELL = re.compile(r"(.+), row (\d+), (\w+)")
"""How :class:`coat_eval.data_folder.ShownCell` names an image in a Parquet file."""


def write_flips(
    comparison: Comparison,
    path: Path,
    *,
    per_set: int = FLIPS_PER_SET,
    media_root: Path | str | None = None,
) -> Path:
    """Write one self-contained HTML file: the differences, and the items that flipped.

    Args:
        comparison: of at least two models.
        path: the file; its folder is made.
        per_set: most items shown per set and pair of models, half of each direction where there
            are as many, at even distances over the set. Images are made small, so a set adds about
            20 kB times this.
        media_root: folder or address where relative media paths start; the working directory by
            default.

    Raises:
        ValueError: ``per_set`` is negative.
        DataError: naming the item whose media are no images or videos with a path.
        OSError: the file cannot be written.
    """
    if per_set < 0:
        raise ValueError(f"flips={per_set}: give 0 or more items per set")
    environment = Environment(
        loader=PackageLoader("coat_eval", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = list(comparison.sets)
    sections = [
        _section(
            (names[0], name), set_name, one, comparison.sets[name][set_name], per_set, media_root
        )
        for name in names[1:]
        for set_name, one in comparison.sets[names[0]].items()
    ]
    html = environment.get_template("flips.html.jinja").render(
        differences=comparison.differences, sections=sections
    )
    write_text(path, html)
    return path


def _section(
    names: tuple[str, str],
    set_name: str,
    one: ScoredSet,
    other: ScoredSet,
    per_set: int,
    media_root: Path | str | None,
) -> dict[str, Any]:
    """The flipped items of one set and two models, as the page's template names them."""
    lost, won = only_right(one, other)
    num_won = min(len(won), max(per_set // 2, per_set - len(lost)))
    shown = sorted([*spread(lost, per_set - num_won), *spread(won, num_won)])
    bar = tqdm(shown, desc=f"flips {set_name}", unit="item", delay=2.0, leave=False)
    won_items = set(won)
    return {
        "set_name": set_name,
        "first_name": names[0],
        "second_name": names[1],
        "only_first": len(lost),
        "only_second": len(won),
        "cards": [
            {"second_is_right": index in won_items, **_card(one, other, index, media_root)}
            for index in bar
        ],
    }


def _card(
    one: ScoredSet, other: ScoredSet, index: int, media_root: Path | str | None
) -> dict[str, Any]:
    """One item as shown; its images are ``data:`` addresses."""
    first, second = one.items[index], other.items[index]
    owner, scored = (first, one) if first.get("media") else (second, other)
    entries = owner.get("media") or []
    if not isinstance(entries, list):
        entries = [entries]
    where = f"{scored.path}, item {scored.ids[index]}"
    # Of a video stored as a list of frames the model saw the middle one (SEED-Bench).
    pick = "middle" if first.get("kind") == "video" else "first"
    loaded = [_loaded(_rooted(entry, media_root, where), pick) for entry in entries]
    images, problems = shown_media([entry for entry in loaded if not isinstance(entry, str)])
    return {
        "item": one.ids[index],
        "question": _cut(first.get("question") or second.get("question") or ""),
        "reference": _cut(first["reference"]),
        "first": _said(first),
        "second": _said(second),
        "images": images,
        "problems": [*problems, *(entry for entry in loaded if isinstance(entry, str))],
    }


def _rooted(entry: object, media_root: Path | str | None, where: str) -> dict[str, Any]:
    """One medium of ``{"kind", "path"}`` or ``{"kind", "name"}``, as :class:`Media` has it.

    A text is the path of an image, or of a video by its ending.
    A name may end in ``#t=START,END``, the seconds of a part of a video. A video that the model saw
    one frame of has the kind ``image``; here its frames are shown.
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
    elif not is_url(name):  # an absolute path stays itself below another root
        path = str(Path(media_root or "") / name)
    return {"kind": "video" if is_video else entry["kind"], "path": path, **times}


def _loaded(entry: Mapping[str, Any], pick: Literal["first", "middle"]) -> Mapping[str, Any] | str:
    """A medium with its bytes if it lies in a Parquet file, or why it cannot be read."""
    cell = _CELL.fullmatch(entry["path"])
    if cell is None:
        return entry
    path, row, column = cell.groups()
    try:
        media = ShownCell(Path(path), int(row) - 1, column, pick).load()
    except (ValueError, OSError, IndexError) as error:
        return f"{entry['path']}: {error}"
    return {**entry, "data": media.data}


def _said(item: Mapping[str, Any]) -> str:
    text = item.get("prediction")
    return "(no prediction)" if text is None else _cut(text) or "(empty)"


def _cut(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = ", ".join(map(str, value))
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."
