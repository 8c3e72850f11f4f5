"""Lists of sources: coat-vlm's own, LLaVA-NeXT's, InternVL's and LlamaFactory's.

Paths start from the folder of the list. coat-vlm's own is like a recipe's ``data``::

    sources:
      - {name: captions, path: blip_laion_cc_sbu_558k.json, media_root: images}
      - {name: chat, path: "shards/{000..099}.tar", select: random 50%, repeat: 2}

The others as in llava/train/train.py (LLaVA-NeXT), internvl_chat_finetune.py (InternVL) and
data/README.md (LlamaFactory); keys that are settings of the model are ignored::

    {"datasets": [{"json_path": "a.json", "sampling_strategy": "first:50%"}]}
    {"NAME": {"root": "images", "annotation": "a.jsonl", "repeat_time": 2}}
    {"NAME": {"file_name": "a.json", "formatting": "sharegpt", "columns": {}, "tags": {}}}
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from coat_data.containers.open import matching_files
from coat_data.containers.remote_file import is_url
from coat_data.sample import DataError

_MAX_BYTES = 16 << 20  # a larger file is data
_TEXT_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")

_Text = Annotated[str, Field(min_length=1)]
_Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A source of a list: the keys of a recipe's ``data`` entries, with absolute paths."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: _Text
    path: _Text
    media_root: _Text | None = None
    format: _Text | None = None
    select: _Text | None = None
    repeat: _Positive | None = None
    weight: _Positive | None = None
    columns: dict[str, str] = field(default_factory=dict)
    ignore_fields: list[str] = field(default_factory=list)
    supervise: Literal["all", "last"] = "all"
    boxes: Literal["convert", "keep"] = "convert"
    field_map: dict[str, str] = field(default_factory=dict)
    """The reader's field names -> field names of the file; not a key of recipes."""


_ENTRY = TypeAdapter(SourceEntry)


def _llava_next(_: str, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    strategy = str(entry.get("sampling_strategy", "all"))
    match = re.fullmatch(r"(first|end|random):(\d+(?:\.\d+)?%?)", strategy)
    if match is None and strategy != "all":
        remedy = "use all, first:N, end:N or random:N, N a number or a percentage"
        raise DataError(where, f"sampling_strategy is {strategy!r}", remedy)
    select = match and f"{match[1].replace('end', 'last')} {match[2]}"
    return {"path": entry["json_path"], "select": select}


def _internvl(name: str, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    repeat = entry.get("repeat_time", 1)
    if not isinstance(repeat, int | float) or not (0 < repeat < 1 or repeat in range(1, 1 << 20)):
        remedy = "give a fraction below 1, or a whole number of repeats"
        raise DataError(where, f"repeat_time is {repeat!r}", remedy)
    return {
        "name": name,
        "path": entry["annotation"],
        "media_root": entry.get("root") or None,
        "select": f"first {repeat * 100:.10g}%" if repeat < 1 else None,
        "repeat": float(repeat) if repeat > 1 else None,
    }


_HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": ""}
_FORMATTINGS = {  # reader, and the fields that ``columns`` may rename
    "alpaca": ("query", _ALPACA),
    "sharegpt": ("llava", {"messages": "conversations"}),
    "openai": ("messages", {"messages": "messages"}),
}


def _llama_factory(name: str, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "file_name" not in entry:
        remedy = "download it and set file_name, or choose others: LIST#NAME,NAME"
        raise DataError(where, "the data set is on a hub, not in a file", remedy)
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _FORMATTINGS:
        raise DataError(where, f"formatting is {formatting!r}", f"use one of {[*_FORMATTINGS]}")
    reader, fields = _FORMATTINGS[formatting]
    columns = entry.get("columns") or {}
    # With columns LlamaFactory reads only the named fields, without it the defaults.
    mapped = {key: columns.get(key) or "" for key in fields} if columns else dict(fields)
    if entry.get("ranking") and formatting == "alpaca":
        mapped["response"] = "output"  # where a pair's chosen answer is read
    mapped |= {k: columns[k] for k in ("system", "tools", "images", "videos") if columns.get(k)}
    mapped |= {tag: str(name) for tag, name in (entry.get("tags") or {}).items()}
    number = entry.get("num_samples")
    return {
        "name": name,
        "path": entry["file_name"],
        "media_root": ".",
        "format": reader,
        "select": f"random {number}" if number else None,
        "field_map": mapped,
    }


_FORMS: Sequence[tuple[str | None, Sequence[str], Callable[..., dict[str, Any]]]] = (
    ("sources", ("path", "name"), lambda _, entry, __: dict(entry)),
    ("datasets", ("json_path",), _llava_next),
    (None, ("annotation",), _internvl),
    (None, ("file_name", *_HUBS), _llama_factory),
)
"""Key of the entries (None: the file itself), keys of which each entry has one, conversion."""


def read_list(path: str | Path) -> list[SourceEntry] | None:
    """Read a list file, or its entries ``dataset_info.json#demo,other``; None for a source."""
    if is_url(path):
        return None  # shards of one source
    listing, _, wanted = str(path).rpartition("#")
    names = wanted.split(",") if Path(listing).is_file() and not Path(path).exists() else []
    file = Path(listing if names else path).absolute()
    entries = _parse(file, names)
    if entries is None:
        several = [] if file.exists() else matching_files(file)
        if len(several) < 2 or several[0].suffix not in _TEXT_SUFFIXES:
            return None
        entries = [SourceEntry(name=text.stem, path=str(text)) for text in several]
    known = [entry.name for entry in entries]
    for name in names:
        if name not in known:
            raise DataError(str(file), f"has no source {name!r}", f"choose from {', '.join(known)}")
    entries = [entries[known.index(name)] for name in names] or entries
    unique: dict[str, SourceEntry] = {}
    for entry in entries:
        number, name = 1, entry.name
        while name in unique or (number > 1 and name in known):
            number += 1
            name = f"{entry.name}_{number}"
        unique[name] = dataclasses.replace(entry, name=name)
    return list(unique.values())


def _parse(file: Path, names: Sequence[str]) -> list[SourceEntry] | None:
    """Read the entries of a list, only ``names`` if they are keys of it; None for other files."""
    is_yaml = file.suffix in (".yaml", ".yml")
    small = file.is_file() and file.stat().st_size <= _MAX_BYTES
    if not small or not (is_yaml or file.suffix == ".json"):
        return None
    try:
        text = file.read_text(encoding="utf-8-sig")
        content = yaml.safe_load(text) if is_yaml else json.loads(text)
    except yaml.YAMLError as error:
        raise DataError(str(file), f"is not YAML: {error}", "correct the file") from error
    except (ValueError, RecursionError):
        return None  # the reader of the data reports the error
    for section, keys, convert in _FORMS if isinstance(content, dict) else ():
        found = content.get(section) if section else content
        listed: dict[Any, Any] = dict(enumerate(found)) if isinstance(found, list) else {}
        named = found if isinstance(found, dict) else listed
        if named and all(isinstance(e, dict) and set(keys) & set(e) for e in named.values()):
            if isinstance(found, dict) and named.keys() >= set(names):
                named = {name: named[name] for name in names} or named
            places = [(str(name), entry, f"{file}:{name}") for name, entry in named.items()]
            return [_check(convert(*place), file, place[-1]) for place in places]
    if is_yaml:
        remedy = "give it sources with a path each, or datasets with a json_path each"
        raise DataError(str(file), "is not a list of sources", remedy)
    return None


def _check(given: dict[str, Any], file: Path, where: str) -> SourceEntry:
    for key in ("path", "media_root"):
        if isinstance(given.get(key), str) and not is_url(given[key]):
            given[key] = str((file.parent / Path(given[key]).expanduser()).absolute())
    try:
        return _ENTRY.validate_python({"name": Path(str(given.get("path"))).stem, **given})
    except ValidationError as error:
        wrong = error.errors()[0]
        problem = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        raise DataError(where, problem, "write it as in a recipe's data") from error
