r"""List formats: coat-vlm's own, LLaVA-NeXT's, InternVL's, LlamaFactory's.

Paths are relative to the folder of the list. coat-vlm's own: a recipe's ``data`` entries::

    sources:
      - {name: captions, path: blip_laion_cc_sbu_558k.json, media_root: images}
      - {name: chat, path: "shards/{000..099}.tar", select: random 50%, seed: 1, repeat: 2}

LLaVA-NeXT (LLaVA-VL/LLaVA-NeXT, llava/train/train.py, LazySupervisedDataset); ``json_path`` may
have braces, ``{a,b,c}.json``::

    datasets:
      - json_path: a.json
        sampling_strategy: first:50%      # all, first:N, end:N, random:N, each also in percent

InternVL (OpenGVLab/InternVL, internvl_chat_finetune.py); ``repeat_time`` below 1 selects the first
part of the file, above 1 it is a whole number of repeats; ``data_augment`` and
``max_dynamic_patch`` are ignored, as they are settings of the model here::

    {"name": {"root": "images", "annotation": "a.jsonl", "repeat_time": 1, "length": 1000}}

LlamaFactory's dataset_info.json (hiyouga/LLaMA-Factory, data/README.md); files and media paths are
relative to the folder of the file::

    {"name": {"file_name": "a.json", "formatting": "sharegpt",
              "columns": {"messages": "messages", "images": "images"},
              "tags": {"role_tag": "role", "content_tag": "content",
                       "user_tag": "user", "assistant_tag": "assistant"}}}
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from coat_data.containers.remote_file import expand_braces
from coat_data.lists.entry import SourceEntry, absolute, positive, text
from coat_data.sample import DataError

_KEYS = tuple(
    field.name
    for field in dataclasses.fields(SourceEntry)
    if field.name not in ("ignored", "field_map")
)


def _native(entry: Any, path: Path, where: str) -> SourceEntry:
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
    _check_fields(given, where)
    if "path" not in given:
        raise DataError(where, "the source has no path", "give it a file or folder")
    for key in ("path", "media_root"):
        if key in given:
            given[key] = absolute(given[key], path)
    return SourceEntry(**{"name": Path(given["path"]).stem, **given})


def _check_fields(given: dict[str, Any], where: str) -> None:
    """Check columns, ignore_fields and supervise; columns of earlier versions are a field map."""
    columns = given.get("columns", {})
    if not isinstance(columns, Mapping):
        raise DataError(where, f"columns is {columns!r}", "write {image: img_path, ...}")
    if columns.keys() & _FIELD_MAP:
        given["field_map"] = given.pop("columns")
    ignored = given.get("ignore_fields", [])
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise DataError(where, f"ignore_fields is {ignored!r}", "give a list of names of fields")
    if "ignore_fields" in given:
        given["ignore_fields"] = tuple(ignored)
    if given.get("supervise", "all") not in ("all", "last"):
        raise DataError(where, f"supervise is {given['supervise']!r}", "use all or last")


def _check_seed(given: Mapping[str, Any], where: str) -> None:
    seed = given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DataError(where, f"seed is {seed!r}", "give a whole number of at least 0")
    if "seed" in given and not given.get("select", "").startswith("random"):
        raise DataError(where, f"seed {seed} has no effect", "it is for select: random; remove it")


_STRATEGY = re.compile(r"(first|end|random):(\d+(?:\.\d+)?%?)")


def read_llava_next(content: Mapping[str, Any], path: Path) -> list[SourceEntry]:
    """Read the sources of LLaVA-NeXT's list.

    Raises:
        DataError: an entry is wrong; names its number.
    """
    found: list[SourceEntry] = []
    for number, entry in enumerate(content["datasets"]):
        where = f"{path}:{number}"
        strategy = entry.get("sampling_strategy", "all")
        match = _STRATEGY.fullmatch(str(strategy))
        if match is None and strategy != "all":
            raise DataError(
                where,
                f"sampling_strategy is {strategy!r}",
                "use all, first:N, end:N or random:N, N a number or a percentage",
            )
        select = f"{'last' if match[1] == 'end' else match[1]} {match[2]}" if match else None
        for name in expand_braces(text(entry["json_path"], "json_path", where)):
            found.append(
                SourceEntry(name=Path(name).stem, path=absolute(name, path), select=select)
            )
    return found


def read_internvl(content: Mapping[str, Any], path: Path) -> list[SourceEntry]:
    """Read the sources of InternVL's meta file.

    Raises:
        DataError: an entry is wrong; names it.
    """
    found: list[SourceEntry] = []
    for name, entry in content.items():
        where = f"{path}:{name}"
        repeat = positive(entry.get("repeat_time", 1), "repeat_time", where)
        if repeat > 1 and repeat != int(repeat):
            raise DataError(
                where, f"repeat_time is {repeat}", "above 1 it is a whole number in InternVL"
            )
        root = entry.get("root")
        found.append(
            SourceEntry(
                name=str(name),
                path=absolute(text(entry["annotation"], "annotation", where), path),
                media_root=absolute(text(root, "root", where), path) if root else None,
                select=f"first {repeat * 100:.10g}%" if repeat < 1 else None,
                repeat=repeat if repeat > 1 else None,
            )
        )
    return found


_REMOTE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_FORMATS = {"alpaca": "query", "sharegpt": "llava", "openai": "messages"}
_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag")
_FIELD_MAP = {"prompt", "query", "response", "history", *_TAGS}
"""Names of a field map alone, which lists of earlier versions had in ``columns``."""
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": ""},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
"""Fields that ``columns`` may rename, with LlamaFactory's default names."""


def read_llama_factory(
    content: Mapping[str, Any], path: Path, names: Sequence[str]
) -> list[SourceEntry]:
    """Read the sources ``names``, or all sources, of LlamaFactory's list.

    Raises:
        DataError: a source does not exist, is stored on a hub, or has an unknown formatting.
    """
    missing = [name for name in names if name not in content]
    if missing:
        raise DataError(
            str(path), f"has no data set {missing[0]!r}", f"choose from {', '.join(content)}"
        )
    return [_llama_factory(name, content[name], path) for name in names or content]


def _llama_factory(name: str, entry: Mapping[str, Any], path: Path) -> SourceEntry:
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
    number = entry.get("num_samples")
    return SourceEntry(
        name=name,
        path=absolute(text(entry["file_name"], "file_name", where), path),
        media_root=str(path.parent),
        format=_FORMATS[formatting],
        select=f"random {positive(number, 'num_samples', where):.0f}" if number else None,
        field_map=_columns(entry, formatting, where),
    )


def _columns(entry: Mapping[str, Any], formatting: str, where: str) -> dict[str, str]:
    """Return LlamaFactory's field names: the defaults, or only those in ``columns`` if given."""
    given = entry.get("columns") or {}
    ranking = bool(entry.get("ranking"))
    if ranking and any(given.get(name, name) != name for name in ("chosen", "rejected")):
        raise DataError(
            where,
            "the columns of the pair are not named chosen and rejected",
            "give the file itself, with columns: {chosen: NAME, rejected: NAME}",
        )
    own = dict(_COLUMNS[formatting])
    if given:
        own = {name: given.get(name) or "" for name in own}
    if ranking and formatting == "alpaca":
        own["response"] = _COLUMNS[formatting]["response"]  # where a pair's chosen answer is read
    for name in ("system", "images", "videos"):
        if given.get(name):
            own[name] = given[name]
    if formatting == "sharegpt":
        tags = entry.get("tags") or {}
        own |= {tag: str(tags[tag]) for tag in _TAGS if tags.get(tag)}
    return own


def read_form(
    content: Mapping[str, Any], path: Path, names: Sequence[str]
) -> list[SourceEntry] | None:
    """Read the sources ``names``, or all sources, of a parsed list; None if it is no list.

    Raises:
        DataError: the list has a mistake, or no source of a requested name.
    """
    datasets = content.get("datasets")
    if isinstance(content.get("sources"), list):
        sources = enumerate(content["sources"])
        entries = [_native(entry, path, f"{path}:{number}") for number, entry in sources]
    elif isinstance(datasets, list) and _all_have(datasets, "json_path"):
        entries = read_llava_next(content, path)
    elif _all_have(content.values(), "annotation"):
        entries = read_internvl(content, path)
    elif _all_have(content.values(), "file_name", *_REMOTE):
        return read_llama_factory(content, path, names)
    else:
        return None
    known = {entry.name: entry for entry in entries}
    for name in names:
        if name not in known:
            raise DataError(str(path), f"has no source {name!r}", f"choose from {', '.join(known)}")
    return [known[name] for name in names] if names else entries


def _all_have(entries: Collection[Any], *keys: str) -> bool:
    """Whether there are entries, and all are objects with one of the keys."""
    return bool(entries) and all(
        isinstance(entry, Mapping) and any(key in entry for key in keys) for entry in entries
    )
