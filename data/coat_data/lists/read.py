"""Tells a list of sources from a source, and reads it."""

import dataclasses
import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from coat_data.containers.remote_file import expand_braces, is_url
from coat_data.lists import energon, internvl, llama_factory, llava_next, native
from coat_data.lists.entry import SourceEntry
from coat_data.lists.native import is_phrase, read_phrase
from coat_data.sample import DataError

_LARGEST_LIST = 16 << 20
"""Bytes; a larger JSON file is data."""
_TEXT_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")


def read_list(path: str | Path) -> list[SourceEntry] | None:
    """The sources of a list, or None if ``path`` is something else.

    Lists are the files of LLaVA-NeXT, InternVL, LlamaFactory and our own, each also with the names
    of the sources wanted (``dataset_info.json#demo,other``); Energon's, with the split wanted
    (``metadataset.yaml#val``); and lines such as ``a.json+b.json*2``.

    Raises:
        DataError: it is a list with a mistake.
    """
    if is_url(path):
        return None  # shards of one source
    file, names = _wanted(str(path))
    content = _content(file)
    if content is not None:
        for form in (native, llava_next, internvl):
            if form.matches(content):
                return _unique(_chosen(form.read(content, file), names, file))
        for form in (energon, llama_factory):
            if form.matches(content):
                return _unique(form.read(content, file, names))
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
    if is_phrase(str(path)) and not any(mark in Path(path).name for mark in "?["):
        entries = read_phrase(str(path))
        alone = len(entries) == 1 and not (entries[0].select or entries[0].repeat)
        return None if alone else _unique(entries)
    return None


def list_file(path: str | Path) -> Path | None:
    """The file that a list is written in; None for a line or a pattern of sources."""
    file, _ = _wanted(str(path))
    return file if file.is_file() else None


def _wanted(text: str) -> tuple[Path, Sequence[str]]:
    """The file, and the names behind ``#``."""
    file, mark, names = text.rpartition("#")
    if mark and not Path(text).exists() and Path(file).is_file() and not names.isdigit():
        return Path(file).absolute(), names.split(",")
    return Path(text).absolute(), ()


def _content(path: Path) -> Any:
    """The object in a small JSON or YAML file; None for anything else."""
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
        return None  # data, which its own reader explains


def _files(pattern: Path) -> list[Path]:
    """Several text files that a pattern stands for; shards of one source are none."""
    if pattern.exists():
        return []
    found = [
        Path(name)
        for text in expand_braces(str(pattern))
        for name in ([text] if Path(text).is_file() else sorted(glob.glob(text)))  # noqa: PTH207
    ]
    return found if len(found) > 1 and found[0].suffix in _TEXT_SUFFIXES else []


def _chosen(entries: list[SourceEntry], names: Sequence[str], path: Path) -> list[SourceEntry]:
    known = {entry.name: entry for entry in entries}
    for name in names:
        if name not in known:
            raise DataError(str(path), f"has no source {name!r}", f"choose from {', '.join(known)}")
    return [known[name] for name in names] if names else entries


def _unique(entries: list[SourceEntry]) -> list[SourceEntry]:
    """The entries with names made different by a number, none of them another entry's own name."""
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
