"""Sources in one line, as VILA, Qwen and ms-swift write them on their command lines.

``a.json+b.json*2`` reads b twice (VILA), ``a.json%50,b.json`` half of a (Qwen), ``a.jsonl#1000``
1000 random rows (ms-swift). The names are paths here, and the marks may be combined.
"""

import re
from pathlib import Path

from coat_data.lists.entry import SourceEntry
from coat_data.sample import DataError

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
    return [_entry(item.strip(), text) for item in _BETWEEN.split(text)]


def _entry(item: str, whole: str) -> SourceEntry:
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
