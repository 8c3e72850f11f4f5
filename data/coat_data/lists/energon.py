"""Energon's metadatasets: blends of data sets that Energon prepared.

    __module__: megatron.energon
    __class__: MetadatasetV2
    splits:
      train:
        blend:                      # or blend_epochized, with repetitions instead of weights
          - {weight: 5, path: ./coco}
          - {weight: 1, path: ./more.yaml, split_part: val}

``Metadataset`` (version 1) has ``datasets`` instead of ``blend``. A path is a folder prepared by
Energon, a JSONL file or another metadataset, relative to the folder of the file. The weights of a
nested blend divide the share of that blend; repetitions multiply. As in Energon, the split
``train`` is blended, and the sources of any other split are read once, one after the other.
Source: NVIDIA/Megatron-Energon, docs/source (basic/metadataset.md, advanced/epochized_blending.md,
advanced/subsets.md), and metadataset/metadataset_v2.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from coat_data.containers.remote_file import is_url
from coat_data.lists.entry import SourceEntry, absolute, positive, text
from coat_data.sample import DataError

_CLASSES = ("Metadataset", "MetadatasetV2")
_BLENDS = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}
_FIELDS = {"weight": "weight", "repetitions": "repeat"}
"""Field of :class:`SourceEntry` for the share of a data set in a blend."""
_IGNORED = ("subflavor", "subflavors", "shuffle_over_epochs_multiplier")
"""Tags for the user's own code, and an order of reading: ignored with a warning."""
_CONFIGS = {"dataset_config": "dataset.yaml", "split_config": "split.yaml"}
"""Keys of file names, and the only file names that are read."""
_REFUSED = {
    "join": "join them into one data set beforehand (energon's joiner is code)",
    "joiner": "join them into one data set beforehand (energon's joiner is code)",
    "nonmatch": "join them into one data set beforehand (energon's joiner is code)",
    "aux": "write what your cooker takes from it into the samples",
}
_KEYS = (
    "path", "split_part", "subset", "weight", "repetitions", *_BLENDS, *_CONFIGS, *_IGNORED
)  # fmt: skip
_BOUND = re.compile(r"(?P<rows>\d+)|(?P<percent>\d+(?:\.\d+)?)%|end")


def matches(content: Any) -> bool:
    """Whether the parsed file is a metadataset."""
    return isinstance(content, Mapping) and isinstance(content.get("splits"), Mapping)


def read(content: Any, path: Path, names: Sequence[str] = ()) -> list[SourceEntry]:
    """Read the sources of a split.

    Args:
        content: the parsed file.
        path: its path.
        names: the requested split; ``train`` if empty.

    Raises:
        DataError: the file has a mistake or an unsupported key, such as ``join`` or ``aux``, or the
            split does not exist; names the key.
    """
    if len(names) > 1:
        raise DataError(str(path), f"{len(names)} splits are asked for", "name one")
    split = names[0] if names else "train"
    entries = _split(content, path, split, ())
    if split == "train":
        return entries
    return [replace(entry, weight=None, repeat=None) for entry in entries]


def _split(content: Any, path: Path, split: str, above: tuple[Path, ...]) -> list[SourceEntry]:
    """Read a split of the metadataset ``path``; ``above`` are the metadatasets that include it."""
    found = content.get("__class__", _CLASSES[0])
    if found not in _CLASSES:
        raise DataError(str(path), f"__class__ is {found!r}", f"use {' or '.join(_CLASSES)}")
    unknown = [key for key in content if key not in ("__module__", "__class__", "splits")]
    if unknown:
        raise DataError(str(path), f"unknown key {unknown[0]!r}", "remove it")
    if split not in content["splits"]:
        known = ", ".join(str(name) for name in content["splits"])
        raise DataError(str(path), f"has no split {split!r}", f"choose from {known}")
    node, where = content["splits"][split], f"{path}:splits.{split}"
    for key in ("weight", "repetitions"):
        if isinstance(node, Mapping) and key in node:
            raise DataError(where, f"{key} outside of a blend", "remove it")
    return _node(node, where, split, (*above, path))


def _node(node: Any, where: str, split: str, files: tuple[Path, ...]) -> list[SourceEntry]:
    """Read the data sets of one object in the last of ``files``."""
    ignored = _check_keys(node, where)
    select = None if node.get("subset") is None else _select(node["subset"], where)
    blend = next((key for key in _BLENDS if key in node), None)
    if blend:
        inner = _blended(node, blend, where, split, files)
    else:
        own = node.get("split_part")
        split = split if own is None else text(own, "split_part", where)
        inner = _referred(text(node["path"], "path", where), where, split, files)
    several = blend or node["path"].endswith((".yaml", ".yml"))
    if select is not None and several and not select.endswith("%"):
        raise DataError(
            where,
            "subset counts rows of several data sets",
            "give percentages, or put the subset beside the path of a prepared folder",
        )
    if select is not None and any(one.select for one in inner):
        raise DataError(where, "subset of what is a subset itself", "keep one of them")
    return [
        replace(
            one,
            select=one.select or select,
            ignored=tuple(dict.fromkeys([*one.ignored, *ignored])),
        )
        for one in inner
    ]


def _blended(
    node: Mapping[str, Any], blend: str, where: str, split: str, files: tuple[Path, ...]
) -> list[SourceEntry]:
    """Read the data sets of a blend, with their shares of it."""
    entries, name = node[blend], _BLENDS[blend]
    field = _FIELDS[name]
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{where}.{blend}", "is no list of data sets", "give at least one path")
    found: list[SourceEntry] = []
    shares: list[float] = []
    for number, entry in enumerate(entries):
        at = f"{where}.{blend}.{number}"
        inner = _node(entry, at, split, files)
        wrong = "repetitions" if name == "weight" else "weight"
        if wrong in entry or any(getattr(one, _FIELDS[wrong]) is not None for one in inner):
            raise DataError(
                at, f"{wrong} within {blend}", "use blend or blend_epochized throughout, not both"
            )
        shares.append(positive(entry.get(name, 1), name, at))
        found += [
            replace(one, **{field: (getattr(one, field) or 1.0) * shares[-1]}) for one in inner
        ]
    total = sum(shares) if name == "weight" else 1.0
    return [replace(one, **{field: getattr(one, field) / total}) for one in found]


def _referred(name: str, where: str, split: str, files: tuple[Path, ...]) -> list[SourceEntry]:
    """Read the data set at a path, or those of another metadataset."""
    if is_url(name):
        raise DataError(
            where, f"path {name!r} is an address", "download the data set, and name its folder"
        )
    path = Path(absolute(name, files[-1]))
    if path.is_dir() and not (path / ".nv-meta").is_dir():
        raise DataError(where, f"path {name!r} has no .nv-meta", "run energon prepare on it")
    if not path.exists():
        raise DataError(where, f"path {name!r} does not exist", "paths start from this file")
    if path.suffix not in (".yaml", ".yml"):
        train = split == "train"
        return [
            SourceEntry(
                name=path.stem if train else f"{path.stem}-{split}",
                path=str(path) if train or path.is_file() else f"{path}#{split}",
            )
        ]
    if path.resolve() in [file.resolve() for file in files]:
        raise DataError(where, f"path {name!r} leads back to itself", "remove it")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(str(path), f"cannot be read: {error}", "fix it") from error
    if not matches(content):
        raise DataError(str(path), "is no metadataset: it has no splits", "name another file")
    return _split(content, path, split, files)


def _check_keys(node: Any, where: str) -> list[str]:
    """Return the ignored keys of an object; DataError for keys that cannot be supported."""
    if not isinstance(node, Mapping):
        raise DataError(where, "is no object", "give it a path, blend or blend_epochized")
    for key, remedy in _REFUSED.items():
        if node.get(key) is not None:
            raise DataError(where, f"{key} cannot be read here", remedy)
    for key, only in _CONFIGS.items():
        if node.get(key) not in (None, only):
            raise DataError(where, f"{key} is {node[key]!r}", f"name that file {only}")
    unknown = [key for key in node if key not in _KEYS and key not in _REFUSED]
    if unknown:
        raise DataError(where, f"unknown key {unknown[0]!r}", f"allowed: {', '.join(_KEYS)}")
    sources = [key for key in ("path", *_BLENDS) if key in node]
    if len(sources) != 1:
        raise DataError(
            where,
            f"has {' and '.join(sources) or 'no data'}",
            f"give it one of path, {', '.join(_BLENDS)}",
        )
    return [key for key in _IGNORED if node.get(key) not in (None, 1)]


def _select(subset: Any, where: str) -> str | None:
    """Convert ``subset: {range: [start, stop]}`` to a ``select``; None selects all rows."""
    given = subset.get("range") if isinstance(subset, Mapping) and len(subset) == 1 else None
    if not isinstance(given, list) or len(given) != 2:
        raise DataError(where, f"subset is {subset!r}", "write subset: {range: [0%, 50%]}")
    bounds: list[re.Match[str]] = []
    for value in given:
        bound = _BOUND.fullmatch(str(value).strip())
        if bound is None or float(bound["percent"] or 0) > 100:
            problem = f"subset has the bound {value!r}"
            raise DataError(where, problem, "give 0% to 100%, a row, or end")
        bounds.append(bound)
    start, stop = bounds
    unit = start.lastgroup
    if unit is None or stop.lastgroup not in (unit, None):
        raise DataError(where, f"subset is {given}", "give two percentages, or two rows")
    end = 100.0 if unit == "percent" else math.inf
    first, last = float(start[unit]), float(stop[unit] or end)
    if not first < last:
        raise DataError(where, f"subset {given} is no row", "start before the end")
    if first == 0:
        some = f"{last:.10g}%" if unit == "percent" else stop["rows"]
        return None if last == end else f"first {some}"
    if last == end and unit == "percent":
        return f"last {100 - first:.10g}%"
    raise DataError(
        where,
        "subset lies in the middle of a data set",
        "only the first rows, or the last ones in percent, can be taken",
    )
