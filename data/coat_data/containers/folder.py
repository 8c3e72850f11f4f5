"""Rows that are the files of a folder: images by class, images with texts beside them, frames.

A row is ``{"path": "cat/1.jpg", "class": "cat"}``, with ``"text"`` where a file of the same name
ending in .txt lies beside it.
"""

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coat_data.media.image import image_suffixes
from coat_data.sample import DataError

VIDEO_SUFFIXES = frozenset(
    {".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".gifv", ".flv", ".ts"}
)


class FolderRows:
    """The media files below a folder, in the order of their paths.

    Links are not followed and are no rows.

    Attributes:
        media_root: the folder.
    """

    random_access = True
    damage: DataError | None = None

    def __init__(self, folder: Path) -> None:
        self.media_root = folder
        suffixes = image_suffixes() | VIDEO_SUFFIXES
        block, ends = bytearray(), array("q")
        for path, names in _files(folder):
            present = set(names)
            for name in sorted(names):
                stem, suffix = os.path.splitext(name)  # noqa: PTH122 - a million names
                if suffix.lower() in suffixes:
                    relative = f"{path}/{name}" if path else name
                    block += json.dumps([relative, f"{stem}.txt" in present]).encode("ascii")
                    ends.append(len(block))
        self._block, self._ends = bytes(block), np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self._ends[index - 1]) if index else 0
        path, has_text = json.loads(self._block[start : int(self._ends[index])])
        row = {"path": path, "class": Path(path).parent.name}
        if has_text:
            text = (self.media_root / path).with_suffix(".txt")
            try:
                row["text"] = text.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(
                    f"{self.media_root}:{index}", f"{text.name}: {error}", "save it as UTF-8"
                ) from error
        return row

    def stream(self) -> Iterator[Any]:
        """Rows in order; a DataError in the place of an unreadable text."""
        for index in range(len(self)):
            try:
                yield self[index]
            except DataError as error:
                yield error

    def place(self, index: int) -> tuple[str, int]:
        """The folder and ``index``."""
        return str(self.media_root), index


def _files(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Relative paths of the folders below, in order, and the plain files in each."""
    waiting = [""]
    while waiting:
        current = waiting.pop()
        folders: list[str] = []
        names: list[str] = []
        with os.scandir(folder / current) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{current}/{entry.name}" if current else entry.name)
                elif entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
        waiting += sorted(folders, reverse=True)
        yield current, names
