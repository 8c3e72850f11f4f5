"""Recognizes by content how the rows of a path are stored, and opens them."""

import glob
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from coat_data.containers.compressed import unpack
from coat_data.containers.csv_file import CsvRows
from coat_data.containers.folder import FolderRows
from coat_data.containers.ingested import MANIFEST_NAME, ShardRows
from coat_data.containers.json_file import BOM, JsonRows
from coat_data.containers.media_files import check_regular_file
from coat_data.containers.remote_file import expand_braces, local_copies
from coat_data.containers.rows import Rows
from coat_data.containers.table import TableRows, is_arrow
from coat_data.containers.tar import TarRows
from coat_data.containers.text_file import TextRows
from coat_data.limits import Limits, Network
from coat_data.sample import DataError

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_SPLIT = re.compile(
    r"(?:^|[-._ 0-9/])"
    r"(train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?=[-._ 0-9/]|$)",
    re.IGNORECASE,
)
_JSON_ROW = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[?\s*\{\s*\"")  # in files that end in .txt
_SHARD_SUFFIXES = (".parquet", *_TAR_SUFFIXES, ".arrow", ".pkl")
_MAPPED = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")
"""Results of ``datasets``' map and filter, which are next to the data in its cache."""
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def open_rows(
    path: Path | str,
    *,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    network: Network = "allow",
) -> Rows:
    """Open the rows of a file, a folder, or a pattern of files (``*``, ``{000..099}``, ``{a,b}``).

    A URL is given as text. DataError if nothing is there, the format is unknown, or a folder
    has several splits.
    """
    if isinstance(path, str):
        if network == "deny":
            raise DataError(path, "URLs are not read (network: deny)", "download the file")
        copies = local_copies(path)
        rows = _open_files(next(iter(copies)), list(copies), limits, copies)
        rows.media_root = Path.cwd()  # a URL has no folder on this machine
        rows.paths = tuple(copies)
        return rows
    if path.is_dir():
        rows, paths = _open_folder(path, limits), [path]
    elif path.is_file():
        rows, paths = _open_files(path, [path], limits), [path]
    else:
        paths = matching_files(path)
        if not paths:
            problem = "there is no such file or folder"
            remedy = "give a data file, a folder, or a pattern such as shards/{000..099}.tar"
            raise DataError(str(path), problem, remedy)
        rows = _open_files(path, paths, limits)
    rows.paths = tuple(dict.fromkeys(paths))
    return rows


def matching_files(pattern: Path) -> list[Path]:
    """Return the files that match a pattern with ``*``, ``{000..099}`` or ``{a,b}``, in order."""
    return [
        Path(name)
        for text in expand_braces(str(pattern))
        for name in ([text] if Path(text).is_file() else sorted(glob.glob(text)))  # noqa: PTH207
    ]


def _open_folder(folder: Path, limits: Limits) -> Rows:
    if (folder / MANIFEST_NAME).is_file():
        return ShardRows(folder)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return TableRows(folder, [])
    for name in _METADATA:
        if (folder / name).is_file():
            return _open_files(folder / name, [folder / name], limits)
    return _open_shards(folder, limits)


def _open_shards(folder: Path, limits: Limits) -> Rows:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.name.endswith(_SHARD_SUFFIXES) and not _MAPPED.fullmatch(path.name)
    ]
    tars = {path.with_suffix(".parquet") for path in files if path.suffix == ".tar"}
    files = [path for path in files if path not in tars]  # img2dataset's tables next to its tars
    for suffixes in ((".parquet",), _TAR_SUFFIXES, (".arrow",), (".pkl",)):
        found = [path for path in files if path.name.endswith(suffixes)]
        if found:
            _check_one_split(folder, found)
            return _open_files(folder, found, limits)
    return _open_media(folder)


def _check_one_split(folder: Path, files: list[Path]) -> None:
    """Reject files of several splits, by huggingface/datasets, repository_structure.mdx."""
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
        problem = f"holds the splits {', '.join(patterns)}"
        remedy = f"give a pattern of the files of one, such as {folder}/{example}"
        raise DataError(str(folder), problem, remedy)


def _open_media(folder: Path) -> Rows:
    rows = FolderRows(folder)
    if len(rows):
        return rows
    listed = [path.name for path in sorted(folder.iterdir()) if path.suffix in _JSON_SUFFIXES]
    if listed:
        problem = f"this folder holds {', '.join(listed[:5])}"
        raise DataError(str(folder), problem, "name one of these files")
    texts = [path for path in sorted(folder.rglob("*.txt")) if path.is_file()]
    if texts:
        return TextRows(texts)
    problem = f"there is no {MANIFEST_NAME} in this folder, and no data file, tar, image or .txt"
    remedy = "give a data file, a folder of .txt files, or one written by coat-vlm data ingest"
    raise DataError(str(folder), problem, remedy)


def _open_files(
    path: Path, files: list[Path], limits: Limits, urls: Mapping[Path, str] = MappingProxyType({})
) -> Rows:
    """Unpack and open files of one kind; ``path`` is for messages, ``urls`` are their origins."""
    for file in files:
        check_regular_file(file)
    names = dict(urls)
    try:
        copies = [unpack(file, limits) for file in files]
        for file, copy in zip(files, copies, strict=True):
            if copy != file:
                names[copy] = urls.get(file, str(file))
        rows = _open_plain_files(path, copies)
    except DataError as error:
        raise _renamed(error, names) from error
    if names:
        rows.names = names
        rows.media_root = files[0].parent
        rows.damage = rows.damage and _renamed(rows.damage, names)
    return rows


def _renamed(error: DataError, names: Mapping[Path, str]) -> DataError:
    where = error.where
    for copy, name in names.items():
        where = where.replace(str(copy), name)
    return DataError(where, error.problem, error.remedy)


def _open_plain_files(path: Path, files: list[Path]) -> Rows:
    first = files[0]
    with first.open("rb") as stream:
        head = stream.read(4096)
    name = first.name.lower()
    if head[:4] == b"PAR1" or is_arrow(first):
        rows = TableRows(path, files)
        if {"turns", "media", "row"} <= set(rows.columns):  # media paths mean nothing by themselves
            problem = f"shards of an ingested folder, but there is no {MANIFEST_NAME}"
            remedy = "copy the whole folder and name it, or ingest again"
            raise DataError(str(path), problem, remedy)
        return rows
    if name.endswith(".tar") or head[257:262] == b"ustar":
        return TarRows(files)
    if name.endswith((".pkl", ".pickle")):
        problem = "is a pickle, which can hold code"
        raise DataError(str(first), problem, "convert it to JSONL with code that you trust")
    if all(file.suffix.lower() == ".txt" for file in files):
        # A plain text may also start with {" or [{", and the first row may be damaged.
        probed = islice(JsonRows([first]).stream(), 16) if _JSON_ROW.match(head) else ()
        if not any(isinstance(row, dict) for row in probed):
            return TextRows(files)
    if len(files) > 1:
        if all(file.suffix.lower() in _JSON_SUFFIXES for file in files):
            return JsonRows(files)
        problem = f"matches {len(files)} files"
        remedy = "only JSON, JSONL, Parquet, Arrow, tar and .txt files can be combined"
        raise DataError(str(path), problem, remedy)
    return _open_text(first, head.removeprefix(BOM).lstrip()[:1])


def _open_text(path: Path, first_character: bytes) -> Rows:
    suffix = path.suffix.lower()
    if suffix in _JSON_SUFFIXES or first_character in (b"[", b"{"):
        return JsonRows([path])
    if suffix in (".csv", ".tsv"):
        return CsvRows(path)
    problem = "is not JSON, JSONL, CSV, Parquet, Arrow, tar or .txt"
    remedy = "give a data file, or a folder written by coat-vlm data ingest"
    raise DataError(str(path), problem, remedy)
