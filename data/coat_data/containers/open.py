"""Finds out by content how the rows of a path are stored, and opens them."""

import glob
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from coat_data.containers.csv_file import COLUMNS, ClipRows, CsvRows
from coat_data.containers.folder import FolderRows
from coat_data.containers.ingested import MANIFEST_NAME, ShardRows
from coat_data.containers.json_file import JsonRows, has_rows
from coat_data.containers.pickle_file import PickleRows
from coat_data.containers.remote_file import expand_braces
from coat_data.containers.remote_shards import RemoteRows
from coat_data.containers.rows import Rows
from coat_data.containers.table import TableRows
from coat_data.containers.tar import TarRows, is_compressed
from coat_data.containers.text_file import TextRows
from coat_data.sample import DataError

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_SPLIT = re.compile(
    r"(?:^|[-._ 0-9/])"
    r"(train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?=[-._ 0-9/]|$)",
    re.IGNORECASE,
)
_JSON_ROW = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[?\s*\{\s*\"")
"""How rows of JSON may begin, which some keep in files ending in .txt."""
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


@dataclass(frozen=True, slots=True)
class Opened:
    """Rows, and what their folder says about their fields."""

    rows: Rows
    columns: Mapping[str, str] = field(default_factory=dict)
    """The reader's names of fields -> those of the rows (Energon's field map)."""
    paths: tuple[Path, ...] = ()
    """The files that the rows come from; a folder stands for all files below it."""


def open_rows(path: Path | str, *, allow_pickle: bool = False) -> Opened:
    """The rows of a file, a folder, or a pattern of files (``*``, ``{000..099}``, ``{a,b}``).

    Args:
        path: absolute path or pattern, or an address as text; of a folder prepared by Energon also
            ``FOLDER#val``, for another split than ``train``.
        allow_pickle: read .pkl files, through an unpickler that builds plain values only.

    Raises:
        DataError: there is nothing, or nothing that is known, or a folder holds several splits.
    """
    if isinstance(path, str):
        remote = RemoteRows(path)
        return Opened(remote, paths=remote.paths)
    if path.is_dir():
        return replace(_open_folder(path, allow_pickle), paths=(path,))
    if path.is_file():
        rows = _open_files(path, [path], allow_pickle)
        listed = rows.files if isinstance(rows, TarRows) else []  # by a WIDS shard list
        return Opened(rows, paths=tuple(dict.fromkeys([path, *listed])))
    folder, _, split = str(path).rpartition("#")
    if split and (Path(folder) / ".nv-meta").is_dir():
        return replace(_open_energon(Path(folder), split), paths=(Path(folder),))
    files = matching_files(path)
    if not files:
        raise DataError(
            str(path),
            "there is no such file or folder",
            "give a data file, a folder, or a pattern such as shards/{000..099}.tar",
        )
    return Opened(_open_files(path, files, allow_pickle), paths=tuple(files))


def matching_files(pattern: Path) -> list[Path]:
    """The files that a pattern with ``*``, ``{000..099}`` or ``{a,b}`` stands for, in order."""
    return [
        Path(name)
        for text in expand_braces(str(pattern))
        for name in ([text] if Path(text).is_file() else sorted(glob.glob(text)))  # noqa: PTH207
    ]


def _open_folder(folder: Path, allow_pickle: bool) -> Opened:
    if (folder / MANIFEST_NAME).is_file():
        return Opened(ShardRows(folder))
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return Opened(TableRows(folder, []))
    if (folder / ".nv-meta").is_dir():
        return _open_energon(folder)
    if (folder / "wids-meta.json").is_file():
        return Opened(_open_wids(folder / "wids-meta.json"))
    for name in _METADATA:
        if (folder / name).is_file():
            return Opened(_open_files(folder / name, [folder / name], allow_pickle))
    for suffixes in ((".parquet",), _TAR_SUFFIXES, (".pkl",)):
        files = [path for path in sorted(folder.rglob("*")) if path.name.endswith(suffixes)]
        if files:
            _check_one_split(folder, files)
            return Opened(_open_files(folder, files, allow_pickle))
    return Opened(_open_media(folder))


def _check_one_split(folder: Path, files: list[Path]) -> None:
    """Raise if the files' names say that they are training and test data.

    The names are those by which the Hugging Face Hub finds splits (huggingface/datasets,
    docs/source/repository_structure.mdx).
    """
    patterns: dict[str, str] = {}
    for file in files:
        name = file.relative_to(folder).as_posix()
        found = _SPLIT.search(name)
        if found is not None:
            start = name[: found.end(1)]
            if "/" in name[found.end(1) :]:
                start = f"{name.rpartition('/')[0]}/"
            patterns.setdefault(found[1].lower(), f"{start}*{file.suffix}")
    if len(patterns) > 1:
        example = patterns.get("train") or next(iter(patterns.values()))
        raise DataError(
            str(folder),
            f"holds the splits {', '.join(patterns)}",
            f"give a pattern of the files of one, such as {folder}/{example}",
        )


def _open_media(folder: Path) -> Rows:
    rows = FolderRows(folder)
    if len(rows):
        return rows
    listed = [path.name for path in sorted(folder.iterdir()) if path.suffix in _JSON_SUFFIXES]
    if listed:
        raise DataError(
            str(folder), f"this folder holds {', '.join(listed[:5])}", "name one of these files"
        )
    texts = [path for path in sorted(folder.rglob("*.txt")) if path.is_file()]
    if texts:
        return TextRows(texts)
    raise DataError(
        str(folder),
        f"there is no {MANIFEST_NAME} in this folder, and no data file, tar, image or .txt",
        "give a data file, a folder of .txt files, or one written by coat-vlm data ingest",
    )


def _open_files(path: Path, files: list[Path], allow_pickle: bool) -> Rows:
    first = files[0]
    with first.open("rb") as stream:
        head = stream.read(4096)
    name = first.name.lower()
    if head[:4] == b"PAR1":
        return _open_parquet(path, files)
    if name.endswith(_TAR_SUFFIXES) or head[257:262] == b"ustar":
        return TarRows(files)
    if name.endswith((".pkl", ".pickle")):
        if not allow_pickle:
            raise DataError(
                str(first),
                "is a pickle, which can hold code",
                "allow it with --allow-pickle (only plain values are read), or convert it to JSONL",
            )
        return PickleRows(files)
    all_texts = all(file.suffix.lower() == ".txt" for file in files)
    if all_texts and not (_JSON_ROW.match(head) and has_rows(first)):
        return TextRows(files)
    if len(files) > 1:
        raise DataError(
            str(path),
            f"matches {len(files)} files",
            "only Parquet, tar and .txt files go together",
        )
    if first.name == "wids-meta.json":
        return _open_wids(first)
    return _open_text(first, head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1])


def _open_parquet(path: Path, files: list[Path]) -> Rows:
    rows = TableRows(path, files)
    if {"turns", "media", "row"} <= set(rows.columns):  # media paths mean nothing by themselves
        raise DataError(
            str(path),
            f"shards of an ingested folder, but there is no {MANIFEST_NAME}",
            "copy the whole folder and name it, or ingest again",
        )
    return rows


def _open_text(path: Path, first_character: bytes) -> Rows:
    suffix = path.suffix.lower()
    if suffix in _JSON_SUFFIXES or first_character in (b"[", b"{"):
        return JsonRows(path)
    if suffix in (".csv", ".tsv"):
        rows = CsvRows(path)
        return ClipRows(path) if set(rows.columns) >= COLUMNS else rows
    if is_compressed(path):
        raise DataError(str(path), "is compressed", "unpack it first")
    raise DataError(
        str(path),
        "is not JSON, JSONL, CSV, Parquet, tar or .txt",
        "give a data file, or a folder written by coat-vlm data ingest",
    )


def _open_wids(path: Path) -> Rows:
    """The tars that a WIDS shard list names (webdataset, wids; VILA's simple_vila_webdataset)."""
    content = _described(path, json.loads)
    shards = content.get("shardlist")
    if not isinstance(shards, list) or not shards:
        raise DataError(str(path), "has no shardlist", "make the list again")
    try:
        names = [str(shard["url"]) for shard in shards]
    except (TypeError, KeyError) as error:
        raise DataError(str(path), f"a shard has no url: {error}", "make it again") from error
    files = [_shard_file(path, name) for name in names]
    rows = TarRows(files)
    expected = [shard.get("nsamples") for shard in shards]
    counted = sum(number for number in expected if isinstance(number, int))
    if None not in expected and rows.random_access and not rows.damage and len(rows) != counted:
        raise DataError(
            str(path),
            f"the shards hold {len(rows)} samples, the list says {counted}",
            "make the list again, or copy the shards again",
        )
    return rows


def _shard_file(listing: Path, name: str) -> Path:
    path = listing.parent / name
    if not path.resolve().is_relative_to(listing.parent.resolve()):
        raise DataError(
            str(listing), f"the shard {name!r} lies outside of the folder", "move it there"
        )
    if not path.is_file():
        raise DataError(str(path), "this shard is missing", "copy the whole folder")
    return path


def _open_energon(folder: Path, name: str = "train") -> Opened:
    """The shards of a split and the field map of a folder prepared by Energon."""
    meta = folder / ".nv-meta"
    split = _described(meta / "split.yaml", yaml.safe_load)
    parts = split.get("split_parts")
    if not isinstance(parts, Mapping) or not parts.get(name):
        known = [key for key, shards in parts.items() if shards] if parts else []
        raise DataError(
            str(meta / "split.yaml"),
            f"names no {name} shards",
            f"choose from {', '.join(known)}" if known else "run energon prepare again",
        )
    excluded = set(split.get("exclude") or [])
    shards = [shard for part in parts[name] for shard in expand_braces(str(part))]
    files = [_shard_file(folder / "split.yaml", shard) for shard in shards if shard not in excluded]
    columns: dict[str, str] = {}
    if (meta / "dataset.yaml").is_file():
        field_map = _described(meta / "dataset.yaml", yaml.safe_load).get("field_map") or {}
        if isinstance(field_map, Mapping):
            columns = {str(name): str(value) for name, value in field_map.items()}
    return Opened(TarRows(files), columns)


def _described(path: Path, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    """The object in a small JSON or YAML file."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(str(path), f"cannot be read: {error}", "make it again") from error
    if not isinstance(content, Mapping):
        raise DataError(str(path), "is not an object", "make it again")
    return content
