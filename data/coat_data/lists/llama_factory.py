"""LlamaFactory's ``dataset_info.json`` (hiyouga/LLaMA-Factory, data/README.md and data/parser.py).

    {"demo": {"file_name": "demo.json", "formatting": "sharegpt",
              "columns": {"messages": "messages", "images": "images"},
              "tags": {"role_tag": "role", "content_tag": "content",
                       "user_tag": "user", "assistant_tag": "assistant"}}}

Files and media paths start from the folder of the file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coat_data.lists.entry import SourceEntry, absolute, positive, text
from coat_data.sample import DataError

_REMOTE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_FORMATS = {"alpaca": "query", "sharegpt": "llava", "openai": "messages"}
_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag")
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": ""},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
"""The names of fields that ``columns`` may change, with LlamaFactory's own."""


def matches(content: Any) -> bool:
    """Whether the parsed file is such a list."""
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(
            isinstance(entry, Mapping) and any(key in entry for key in ("file_name", *_REMOTE))
            for entry in content.values()
        )
    )


def read(content: Any, path: Path, names: Sequence[str] = ()) -> list[SourceEntry]:
    """The sources called ``names``, or all.

    Raises:
        DataError: there is no such source, it lies on a hub, or its formatting is unknown.
    """
    missing = [name for name in names if name not in content]
    if missing:
        raise DataError(
            str(path), f"has no data set {missing[0]!r}", f"choose from {', '.join(content)}"
        )
    return [_entry(name, content[name], path) for name in names or content]


def _entry(name: str, entry: Mapping[str, Any], path: Path) -> SourceEntry:
    where = f"{path}:{name}"
    remote = next((key for key in _REMOTE if key in entry), None)
    if "file_name" not in entry:
        raise DataError(
            where,
            f"{remote} is {entry.get(remote or '')!r}, not a file on this machine",
            f"download it and set file_name, or choose others by {path.name}#NAME,NAME",
        )
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _FORMATS:
        raise DataError(where, f"formatting is {formatting!r}", f"use one of {', '.join(_FORMATS)}")
    if entry.get("ranking"):
        raise DataError(where, "is preference data (ranking)", "choose data with one answer")
    number = entry.get("num_samples")
    return SourceEntry(
        name=name,
        path=absolute(text(entry["file_name"], "file_name", where), path),
        media_root=str(path.parent),
        format=_FORMATS[formatting],
        select=f"random {positive(number, 'num_samples', where):.0f}" if number else None,
        columns=_columns(entry, formatting),
    )


def _columns(entry: Mapping[str, Any], formatting: str) -> dict[str, str]:
    """Where LlamaFactory looks: its defaults, or with ``columns`` only what they name."""
    given = entry.get("columns") or {}
    own = dict(_COLUMNS[formatting])
    if given:
        own = {name: given.get(name) or "" for name in own}
    for name in ("system", "images", "videos"):
        if given.get(name):
            own[name] = given[name]
    if formatting == "sharegpt":
        tags = entry.get("tags") or {}
        own |= {tag: str(tags[tag]) for tag in _TAGS if tags.get(tag)}
    return own
