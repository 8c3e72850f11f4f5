"""Reads SubRip subtitles, and picks what is said while certain frames are shown."""

import re
from collections.abc import Sequence
from pathlib import Path

from coat_data.sample import DataError

_SPAN = re.compile(r"(\d+):(\d+):(\d+)[,.](\d+)\s*-->\s*(\d+):(\d+):(\d+)[,.](\d+)")
_TAG = re.compile(r"<[^>]*>")


def read_subtitles(path: Path) -> list[tuple[float, float, str]]:
    """Start and end in seconds and the text of each entry, in file order, without markup.

    Raises:
        DataError: the file is not UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"is not UTF-8 text: {error}", "convert the file") from error
    entries = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        found = _SPAN.search(block)
        if found:
            times = [_seconds(*found.groups()[i : i + 4]) for i in (0, 4)]
            words = _TAG.sub("", block[found.end() :]).split()
            entries.append((times[0], times[1], " ".join(words)))
    return entries


def spoken_at(path: Path, times: Sequence[float] | None) -> str:
    """The entries on screen at one of ``times`` (seconds), one line each, in file order.

    VILA and lmms-eval show the same entries, from a set, so that their order may differ there.
    All entries if the times are not known.
    """
    return "\n".join(
        words
        for start, end, words in read_subtitles(path)
        if words and (times is None or any(start <= time <= end for time in times))
    )


def _seconds(hours: str, minutes: str, seconds: str, fraction: str) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction}")
