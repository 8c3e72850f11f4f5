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

from coat_data.containers.media_files import VIDEO_SUFFIXES, image_suffixes
from coat_data.containers.rows import Rows
from coat_data.sample import DataError, printable


class FolderRows(Rows):
    """The media files below a folder, in the order of their paths.

    Symbolic links are not followed and are not rows.

    Attributes:
        media_root: the folder.
    """

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
        if path != printable(path):
            raise DataError(
                f"{self.media_root}:{index}", f"the file name {path} is not UTF-8", "rename it"
            )
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
