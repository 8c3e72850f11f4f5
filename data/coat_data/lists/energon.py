"""Energon's metadatasets: blends of data sets that Energon prepared.

    __module__: megatron.energon
    __class__: MetadatasetV2
    splits:
      train:
        blend:                      # or blend_epochized, with repetitions instead of weights
          - {weight: 5, path: ./coco}
          - {weight: 1, path: ./more.yaml, split_part: val}

``Metadataset`` (version 1) says ``datasets`` for ``blend``. A path is a folder that Energon
prepared, a JSONL file or another metadataset, and starts from the folder of the file. The weights
of a blend share out what the blend has in the one around it; repetitions multiply. As in Energon,
the split ``train`` is blended, and the sources of any other split come once, one after the other.
Source: NVIDIA/Megatron-Energon, docs/source (basic/metadataset.md, advanced/epochized_blending.md,
advanced/subsets.md), and metadataset/metadataset_v2.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml

from coat_data.containers.remote_file import is_url
from coat_data.lists.entry import SourceEntry, absolute, positive, text
from coat_data.sample import DataError

_CLASSES = ("Metadataset", "MetadatasetV2")
_BLENDS = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}
_WITHOUT_MEANING = ("subflavor", "subflavors", "shuffle_over_epochs_multiplier")
"""Tags for the user's own code, and an order of reading: told, and passed over."""
_CONFIGS = {"dataset_config": "dataset.yaml", "split_config": "split.yaml"}
"""With the only names that are read."""
_REFUSED = {
    "join": "join them into one data set beforehand (energon's joiner is code)",
    "joiner": "join them into one data set beforehand (energon's joiner is code)",
    "nonmatch": "join them into one data set beforehand (energon's joiner is code)",
    "aux": "write what your cooker takes from it into the samples",
}
_KEYS = (
    "path", "split_part", "subset", "weight", "repetitions", *_BLENDS, *_CONFIGS, *_WITHOUT_MEANING
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """Rows from ``start`` to before ``stop``: numbers of rows, or shares of all."""

    start: Fraction
    stop: Fraction | None
    """None for the end of a source of unknown size."""
    in_rows: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A data set, and its part of what was read so far."""

    path: Path
    split: str
    where: str
    blended: Literal["weight", "repetitions"] | None = None
    share: float = 1.0
    """Of the weights, or repetitions."""
    rows: _Range | None = None
    ignored: tuple[str, ...] = ()


def matches(content: Any) -> bool:
    """Whether the parsed file is such a list."""
    return isinstance(content, Mapping) and isinstance(content.get("splits"), Mapping)


def read(content: Any, path: Path, names: Sequence[str] = ()) -> list[SourceEntry]:
    """The sources of a split.

    Args:
        content: the parsed file.
        path: its path.
        names: the split that is wanted; ``train`` when empty.

    Raises:
        DataError: the file has a mistake or asks for what cannot be done here, such as ``join`` and
            ``aux``, or there is no such split; names the key.
    """
    if len(names) > 1:
        raise DataError(str(path), f"{len(names)} splits are asked for", "name one")
    split = names[0] if names else "train"
    return [_entry(leaf, training=split == "train") for leaf in _split(content, path, split, ())]


def _entry(leaf: _Leaf, *, training: bool) -> SourceEntry:
    train = leaf.split == "train"
    is_file = leaf.path.is_file()
    blended = leaf.blended if training else None
    return SourceEntry(
        name=leaf.path.stem if train else f"{leaf.path.stem}-{leaf.split}",
        path=str(leaf.path) if train or is_file else f"{leaf.path}#{leaf.split}",
        select=None if leaf.rows is None else _select(leaf.rows, leaf.where),
        repeat=leaf.share if blended == "repetitions" else None,
        weight=leaf.share if blended == "weight" else None,
        ignored=leaf.ignored,
    )


def _split(content: Any, path: Path, split: str, above: tuple[Path, ...]) -> list[_Leaf]:
    """The data sets of a split of the metadataset in ``path``, which the files ``above`` name."""
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


def _node(node: Any, where: str, split: str, files: tuple[Path, ...]) -> list[_Leaf]:
    """The data sets of an object of the last of ``files``."""
    ignored = _check_keys(node, where)
    rows = _range(node.get("subset"), where)
    blend = next((key for key in _BLENDS if key in node), None)
    inner = _blended(node, blend, where, split, files) if blend else None
    if inner is None:
        own = node.get("split_part")
        split = split if own is None else text(own, "split_part", where)
        inner = _referred(text(node["path"], "path", where), where, split, files)
    alone = len(inner) == 1 and inner[0].where == where
    if rows is not None and rows.in_rows and not alone:
        raise DataError(
            where,
            "subset counts rows of several data sets",
            "give percentages, or put the subset beside the path of a prepared folder",
        )
    return [
        replace(
            leaf,
            rows=_within(leaf.rows, rows, where),
            ignored=tuple(dict.fromkeys([*leaf.ignored, *ignored])),
        )
        for leaf in inner
    ]


def _blended(
    node: Mapping[str, Any], blend: str, where: str, split: str, files: tuple[Path, ...]
) -> list[_Leaf]:
    """The data sets of a blend, with their shares in it."""
    entries, name = node[blend], _BLENDS[blend]
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{where}.{blend}", "is no list of data sets", "give at least one path")
    found: list[_Leaf] = []
    shares: list[float] = []
    for number, entry in enumerate(entries):
        at = f"{where}.{blend}.{number}"
        inner = _node(entry, at, split, files)
        wrong = "repetitions" if name == "weight" else "weight"
        if wrong in entry or any(leaf.blended == wrong for leaf in inner):
            raise DataError(
                at, f"{wrong} within {blend}", "use blend or blend_epochized throughout, not both"
            )
        shares.append(positive(entry.get(name, 1), name, at))
        found += [replace(leaf, blended=name, share=leaf.share * shares[-1]) for leaf in inner]
    total = sum(shares) if name == "weight" else 1.0
    return [replace(leaf, share=leaf.share / total) for leaf in found]


def _referred(name: str, where: str, split: str, files: tuple[Path, ...]) -> list[_Leaf]:
    """The data set that a path stands for, or those of another metadataset."""
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
        return [_Leaf(path=path, split=split, where=where)]
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
    """The keys of an object that mean nothing here; raises for those that cannot be obeyed."""
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
    return [key for key in _WITHOUT_MEANING if node.get(key) not in (None, 1)]


def _range(subset: Any, where: str) -> _Range | None:
    """The rows that ``subset: {range: [start, stop]}`` names."""
    if subset is None:
        return None
    given = subset.get("range") if isinstance(subset, Mapping) and len(subset) == 1 else None
    if not isinstance(given, list) or len(given) != 2:
        raise DataError(where, f"subset is {subset!r}", "write subset: {range: [0%, 50%]}")
    start, stop = (_bound(value, where) for value in given)
    in_rows = isinstance(start, int)
    if start is None or (stop is not None and isinstance(stop, int) != in_rows):
        raise DataError(where, f"subset is {given}", "give two percentages, or two rows")
    if stop is None and not in_rows:
        stop = Fraction(1)
    if stop is not None and not 0 <= start < stop:
        raise DataError(where, f"subset {given} is no row", "start before the end")
    return _Range(
        start=Fraction(start), stop=None if stop is None else Fraction(stop), in_rows=in_rows
    )


def _bound(value: Any, where: str) -> int | Fraction | None:
    """A number of rows, or a share from 0 to 1; None for ``end``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    name = str(value).strip()
    try:
        share = Fraction(name.removesuffix("%")) / 100 if name.endswith("%") else Fraction(-1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if name == "end" or 0 <= share <= 1:
        return None if name == "end" else share
    raise DataError(where, f"subset has the bound {value!r}", "give 0% to 100%, a row, or end")


def _within(inner: _Range | None, outer: _Range | None, where: str) -> _Range | None:
    """The rows of ``outer`` in what ``inner`` leaves."""
    if inner is None or outer is None:
        return inner or outer
    if inner.stop is None:
        raise DataError(where, "subset of rows up to an open end", "give that end as a number")
    length = inner.stop - inner.start
    start, stop = (inner.start + (bound or 0) * length for bound in (outer.start, outer.stop))
    if inner.in_rows:
        start, stop = Fraction(int(start)), Fraction(int(stop))
    return _Range(start=start, stop=stop, in_rows=inner.in_rows)


def _select(rows: _Range, where: str) -> str | None:
    """The rows as ``select`` names them."""
    if rows.start == 0 and rows.stop is None:
        return None
    if rows.start == 0 and rows.stop is not None:
        if rows.in_rows:
            return f"first {int(rows.stop)}"
        return None if rows.stop == 1 else f"first {float(100 * rows.stop):.10g}%"
    if rows.stop == 1 and not rows.in_rows:
        return f"last {float(100 * (1 - rows.start)):.10g}%"
    raise DataError(
        where,
        "subset lies in the middle of a data set",
        "only the first rows, or the last ones in percent, can be taken",
    )
