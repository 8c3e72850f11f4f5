"""Our own mixture files: the ``data`` entries of a recipe in a file of their own.

    sources:
      - {name: captions, path: blip_laion_cc_sbu_558k.json, media_root: images}
      - {name: chat, path: "shards/{000..099}.tar", select: random 50%, seed: 1, repeat: 2}

Paths start from the folder of the file.

Sources in one line, as VILA, Qwen and ms-swift write them on their command lines.

``a.json+b.json*2`` reads b twice (VILA), ``a.json%50,b.json`` half of a (Qwen), ``a.jsonl#1000``
1000 random rows (ms-swift). The names are paths here, and the marks may be combined.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coat_data.lists.entry import SourceEntry, absolute, positive, text
from coat_data.sample import DataError

_KEYS = tuple(field.name for field in dataclasses.fields(SourceEntry) if field.name != "ignored")


def matches(content: Any) -> bool:
    """Whether the parsed file is such a list."""
    return isinstance(content, Mapping) and isinstance(content.get("sources"), list)


def read(content: Any, path: Path) -> list[SourceEntry]:
    """The sources of the file.

    Raises:
        DataError: an entry is wrong or has an unknown key; names its number.
    """
    return [_entry(entry, path, f"{path}:{n}") for n, entry in enumerate(content["sources"])]


def _entry(entry: Any, path: Path, where: str) -> SourceEntry:
    if not isinstance(entry, Mapping):
        raise DataError(where, "the source is not an object", "give it name and path")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise DataError(where, f"unknown key {unknown[0]!r}", f"allowed: {', '.join(_KEYS)}")
    given = {key: value for key, value in entry.items() if value is not None}
    for key in ("repeat", "weight"):
        if key in given:
            given[key] = positive(given[key], key, where)
    for key in ("name", "path", "media_root", "format", "select"):
        if key in given:
            given[key] = text(given[key], key, where)
    _check_seed(given, where)
    if "path" not in given:
        raise DataError(where, "the source has no path", "give it a file or folder")
    for key in ("path", "media_root"):
        if key in given:
            given[key] = absolute(given[key], path)
    return SourceEntry(**{"name": Path(given["path"]).stem, **given})


def _check_seed(given: Mapping[str, Any], where: str) -> None:
    seed = given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DataError(where, f"seed is {seed!r}", "give a whole number of at least 0")
    if "seed" in given and not given.get("select", "").startswith("random"):
        raise DataError(where, f"seed {seed} has no effect", "it is for select: random; remove it")


_ITEM = re.compile(
    r"(?P<path>.+?)(?:\*(?P<repeat>\d+(?:\.\d+)?))?(?:%(?P<percent>\d+(?:\.\d+)?)|#(?P<rows>\d+))?"
    r"(?:\*(?P<late>\d+(?:\.\d+)?))?"
)
_BETWEEN = re.compile(r"[+,](?![^{]*\})")
"""Not inside the braces of a pattern."""


def is_phrase(text: str) -> bool:
    """Whether the text has one of the marks, and is not a path that exists."""
    return any(mark in text for mark in "+,%#*") and not Path(text).exists()


def read_phrase(text: str) -> list[SourceEntry]:
    """The sources of the line; paths start from the current folder.

    Raises:
        DataError: a mark has no number, or a repeat or share is 0.
    """
    return [_entry_phrase(item.strip(), text) for item in _BETWEEN.split(text)]


def _entry_phrase(item: str, whole: str) -> SourceEntry:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise DataError(
            whole, f"the source {item!r} is not understood", "write PATH, PATH*2, PATH%50 or PATH#N"
        )
    repeat = match["repeat"] or match["late"]
    amount = f"{match['percent']}%" if match["percent"] else match["rows"]
    for value in (repeat, match["percent"], match["rows"]):
        if value is not None and not float(value) > 0:
            raise DataError(whole, f"{item!r} takes nothing", "remove the source")
    path = Path(match["path"]).expanduser().absolute()
    return SourceEntry(
        name=path.stem,
        path=str(path),
        select=None if amount in (None, "100%") else f"random {amount}",
        repeat=float(repeat) if repeat else None,
    )
