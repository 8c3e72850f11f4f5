"""Rows that are the files of a folder: images by class, images with captions, frames.

A row is ``{"path": "cat/1.jpg", "class": "cat"}``, with ``"text"`` where a file of the same name
that ends in .txt is next to it.
"""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coat_data.containers.media_files import VIDEO_SUFFIXES, image_suffixes
from coat_data.containers.rows import Rows
from coat_data.sample import DataError, printable


class FolderRows(Rows):
    """The media files below a folder, in the order of their paths; not of symbolic links."""

    def __init__(self, folder: Path) -> None:
        self._folder = self.media_root = folder
        suffixes = image_suffixes() | VIDEO_SUFFIXES
        block, ends = bytearray(), array("q")  # a million names in one object
        for path, names in _files(folder):
            for name in sorted(names):
                if os.path.splitext(name)[1].lower() in suffixes:  # noqa: PTH122
                    block += os.fsencode(f"{path}/{name}" if path else name)
                    ends.append(len(block))
        self._block, self._ends = bytes(block), np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self._ends[index - 1]) if index else 0
        path = os.fsdecode(self._block[start : int(self._ends[index])])
        if path != printable(path):
            raise DataError(self.where(index), f"the file name {path} is not UTF-8", "rename it")
        row = {"path": path, "class": Path(path).parent.name}
        text = (self._folder / path).with_suffix(".txt")
        try:
            if text.is_file() and not text.is_symlink():
                row["text"] = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"{text.name}: {error}"
            raise DataError(self.where(index), problem, "save it as UTF-8") from error
        return row

    def place(self, index: int) -> tuple[str, int]:
        """Return the folder and ``index``."""
        return str(self.media_root), index


def _files(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the relative path of each folder below, in order, with the plain files in it."""
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
