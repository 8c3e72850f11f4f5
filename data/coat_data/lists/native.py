"""Our own mixture files: the ``data`` entries of a recipe in a file of their own.

    sources:
      - {name: captions, path: blip_laion_cc_sbu_558k.json, media_root: images}
      - {name: chat, path: "shards/{000..099}.tar", select: random 50%, seed: 1, repeat: 2}

Paths start from the folder of the file.
"""

import dataclasses
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
