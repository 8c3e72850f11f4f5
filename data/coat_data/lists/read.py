"""Recognizes and reads lists of sources."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from coat_data.containers.open import matching_files
from coat_data.containers.remote_file import is_url
from coat_data.lists import energon
from coat_data.lists.entry import SourceEntry
from coat_data.lists.formats import read_form
from coat_data.sample import DataError

_LARGEST_LIST = 16 << 20
"""Bytes; a larger JSON file is data."""
_TEXT_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")


def read_list(path: str | Path) -> list[SourceEntry] | None:
    """Read a list of sources; return None if ``path`` is not a list.

    Lists are the files of LLaVA-NeXT, InternVL, LlamaFactory and coat-vlm, optionally with the
    names of the requested sources (``dataset_info.json#demo,other``); Energon's, with the requested
    split (``metadataset.yaml#val``); and lines such as ``a.json+b.json*2``.

    Raises:
        DataError: the list has a mistake.
    """
    if is_url(path):
        return None  # shards of one source
    file, names = _wanted(str(path))
    content = _content(file)
    if isinstance(content, Mapping):
        form = energon.read if energon.matches(content) else read_form
        entries = form(content, file, names)
        if entries is not None:
            return _unique(entries)
    if file.suffix in (".yaml", ".yml") and file.is_file():
        raise DataError(
            str(file),
            "is no list of sources",
            'give it "sources" (ours), "datasets" with json_path (LLaVA-NeXT), or "splits" '
            "(Energon)",
        )
    several = _files(file)
    if several:
        return _unique([SourceEntry(name=one.stem, path=str(one)) for one in several])
    line = str(path)
    marked = any(mark in line for mark in "+,%#*") and not Path(line).exists()
    if marked and not any(mark in Path(path).name for mark in "?["):
        entries = [_named(item.strip(), line) for item in _BETWEEN.split(line)]
        alone = len(entries) == 1 and not (entries[0].select or entries[0].repeat)
        return None if alone else _unique(entries)
    return None


def list_file(path: str | Path) -> Path | None:
    """Return the file of a list; None for a line or a pattern of sources."""
    file, _ = _wanted(str(path))
    return file if file.is_file() else None


def _wanted(text: str) -> tuple[Path, Sequence[str]]:
    """Split a path into the file and the names behind ``#``."""
    file, mark, names = text.rpartition("#")
    if mark and not Path(text).exists() and Path(file).is_file() and not names.isdigit():
        return Path(file).absolute(), names.split(",")
    return Path(text).absolute(), ()


def _content(path: Path) -> Any:
    """Parse the object in a small JSON or YAML file; None for any other file."""
    if not path.is_file():
        return None
    is_yaml = path.suffix in (".yaml", ".yml")
    if not is_yaml and (path.suffix != ".json" or path.stat().st_size > _LARGEST_LIST):
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")
        if is_yaml:
            return yaml.safe_load(text)
        return json.loads(text) if text.lstrip()[:1] == "{" else None
    except yaml.YAMLError as error:
        raise DataError(str(path), f"is not YAML: {error}", "fix it") from error
    except (ValueError, RecursionError):
        return None  # not a list; the reader of the data reports the error


def _files(pattern: Path) -> list[Path]:
    """Return the text files of a pattern, if several; shards of one source are not text files."""
    if pattern.exists():
        return []
    found = matching_files(pattern)
    return found if len(found) > 1 and found[0].suffix in _TEXT_SUFFIXES else []


_ITEM = re.compile(
    r"(?P<path>.+?)(?:\*(?P<repeat>\d+(?:\.\d+)?))?(?:%(?P<percent>\d+(?:\.\d+)?)|#(?P<rows>\d+))?"
    r"(?:\*(?P<late>\d+(?:\.\d+)?))?"
)
_BETWEEN = re.compile(r"[+,](?![^{]*\})")
"""Separators of a line, outside the braces of a pattern."""


def _named(item: str, line: str) -> SourceEntry:
    """Parse one source of a line in the syntax of VILA's, Qwen's and ms-swift's command lines.

    ``a.json+b.json*2`` reads b twice (VILA), ``a.json%50,b.json`` half of a (Qwen),
    ``a.jsonl#1000`` 1000 random rows (ms-swift). Names are paths relative to the current folder;
    the marks may be combined.

    Raises:
        DataError: a mark has no number, or a repeat or share is 0.
    """
    match = _ITEM.fullmatch(item)
    if match is None:
        raise DataError(
            line, f"the source {item!r} is not understood", "write PATH, PATH*2, PATH%50 or PATH#N"
        )
    repeat = match["repeat"] or match["late"]
    amount = f"{match['percent']}%" if match["percent"] else match["rows"]
    for value in (repeat, match["percent"], match["rows"]):
        if value is not None and not float(value) > 0:
            raise DataError(line, f"{item!r} takes nothing", "remove the source")
    path = Path(match["path"]).expanduser().absolute()
    return SourceEntry(
        name=path.stem,
        path=str(path),
        select=None if amount in (None, "100%") else f"random {amount}",
        repeat=float(repeat) if repeat else None,
    )


def _unique(entries: list[SourceEntry]) -> list[SourceEntry]:
    """Make the names unique by appending a number that gives no other entry's name."""
    own = {entry.name for entry in entries}
    taken: set[str] = set()
    unique: list[SourceEntry] = []
    for entry in entries:
        name, number = entry.name, 1
        while name in taken or (number > 1 and name in own):
            number += 1
            name = f"{entry.name}_{number}"
        taken.add(name)
        unique.append(dataclasses.replace(entry, name=name))
    return unique
