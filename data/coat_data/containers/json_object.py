"""Rows of JSON files that are one object, as data sets are published.

- ``data`` (TextVQA): the elements of the list.
- ``{id: {..., "split": "train"}, ...}`` (ScienceQA): the values of one split, with their key as
  ``id``; the splits may also be in ``pid_splits.json`` next to the file.

Other objects of rows, such as GQA's questions, are read by :mod:`coat_data.containers.json_file`.
Sources: TextVQA 0.5.1; lupantech/ScienceQA, README.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coat_data.containers.json_file import BOM, JsonRows, Window
from coat_data.containers.rows import Rows
from coat_data.sample import DataError

_ABOUT = ("info", "license", "licenses", "categories")  # keys whose values describe the data set
_LISTS = ("questions", "annotations", "images", "data")
_SPLITS = "pid_splits.json"
_DEFAULT_SPLIT = "train"
_FIRST_LINE = 16 << 20  # maximum length in bytes of a first line that is tried as a row of JSONL


def open_object(path: Path, split: str | None = None) -> Rows | None:
    """Open the rows of a file that starts with a brace; None if it is JSONL or in another layout.

    DataError if its lists have to be joined (VQA v2, COCO), or there is no such split.
    """
    if _is_jsonl(path):
        return None
    try:
        name, first = _first_row(path)
    except DataError:
        return None  # not JSON: the error of the rows is better
    if not name and ("split" in first or (first and path.with_name(_SPLITS).is_file())):
        return _open_values(path, split)
    if split is not None:
        raise DataError(str(path), f"has no splits, but {split!r} is requested", "remove #SPLIT")
    if not name:
        return None
    if name == "data":
        return ObjectRows(path, "data")
    if not {"question_id", "file_name", "image_id"} & set(first):
        return None
    problem = f"is one object, whose list of {name} has to be joined with another list"
    remedy = "write one row per line with its image and texts, or use Parquet files from the Hub"
    raise DataError(str(path), problem, remedy)


def _open_values(path: Path, split: str | None) -> Rows | None:
    rows = ObjectRows(path, None, split=split or _DEFAULT_SPLIT)
    if not rows.only_objects:
        return None
    if (rows.splits and not len(rows)) or (split and not rows.splits):
        known = ", ".join(rows.splits) or "none"
        problem = f"has no rows of the split {split or _DEFAULT_SPLIT!r} (splits: {known})"
        raise DataError(str(path), problem, f"give {path.name}#SPLIT with one of its splits")
    return rows


def _is_jsonl(path: Path) -> bool:
    """Whether the first line is a complete row and not the only one."""
    with path.open("rb") as stream:
        head = stream.read(_FIRST_LINE).removeprefix(BOM).lstrip()
        line, end, rest = head.partition(b"\n")
        if not end or not (rest.strip() or stream.read(_FIRST_LINE).strip()):
            return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


@contextmanager
def _window(path: Path) -> Iterator[Window]:
    with path.open("rb") as stream:
        if stream.peek(len(BOM)).startswith(BOM):
            stream.read(len(BOM))
        yield Window(stream, str(path))


def _first_row(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the first list of rows by name, or an empty text, with its first row; else nothing."""
    with _window(path) as window:
        for _, name in window.members():
            if window.mark() == "[":
                elements = window.elements()
                first = next(elements, (0, 0, None))[2]
                if name in _LISTS and isinstance(first, Mapping):
                    return name, first
                for _ in elements:
                    pass
                continue
            value = window.value()
            if isinstance(value, Mapping) and name not in _ABOUT:
                return "", value
    return "", {}


class ObjectRows(JsonRows):
    """The elements of list ``name`` of an object, or its values that are in ``split``."""

    reuses_index = False

    def __init__(self, path: Path, name: str | None, split: str | None = None) -> None:
        self._name, self._split = name, split
        self.splits: Counter[str] = Counter()  # rows of each split
        self.only_objects = True  # whether all values are objects
        self._members = _split_members(path) if name is None else {}
        super().__init__([path])
        self._members = {}

    def spans(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield the byte offsets of the rows; a DataError ends a damaged file."""
        with _window(path) as window:
            for start, name in window.members():
                if window.mark() == "[":
                    for begin, end, _ in window.elements():
                        if name == self._name:
                            yield begin, end
                    self.only_objects = self.only_objects and name in _ABOUT
                    continue
                value = window.value()
                if self._name is not None or name in _ABOUT:
                    continue
                if not isinstance(value, Mapping):
                    self.only_objects = False
                elif self._is_wanted(name, value):
                    yield start, window.offset
            if window.mark():
                raise window.error("Extra data")

    def _is_wanted(self, name: str, value: Mapping[str, Any]) -> bool:
        """Count the splits of a row; return whether the row is in the requested one or in none."""
        own = value.get("split")
        splits = self._members.get(name, [own] if isinstance(own, str) else [])
        self.splits.update(splits)
        return not splits or self._split in splits


def _split_members(path: Path) -> dict[str, list[str]]:
    listing = path.with_name(_SPLITS)
    members: dict[str, list[str]] = {}
    if listing.is_file():
        try:
            for split, names in json.loads(listing.read_text(encoding="utf-8")).items():
                for name in names:
                    members.setdefault(str(name), []).append(split)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            problem = f"is not a list of splits: {error}"
            raise DataError(str(listing), problem, "copy it again") from error
    return members
