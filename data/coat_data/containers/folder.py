"""Rows that are the files of a folder: images by class, images with texts beside them, frames.

A row is ``{"path": "cat/1.jpg", "class": "cat"}``, with ``"text"`` where a file of the same name
ending in .txt lies beside it.
"""

import functools
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from coat_data.containers.rows import Rows
from coat_data.sample import DataError

IMAGE_FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "DIB", "ICO", "ICNS",
    "CUR", "DDS", "PCX", "PSD", "QOI", "SGI", "SUN", "TGA", "XBM", "XPM",
)  # fmt: skip
"""Pillow's names of them; for every ``Image.open``, since Pillow goes by content and not by ending.

Left out are EPS, which Pillow hands to Ghostscript, a program that can be made to run code; IPTC,
which opens another image inside of it with all formats; WMF, HDF5, GRIB, BUFR and MPEG, which other
programs read; and formats that no data set is stored in.
"""

VIDEO_SUFFIXES = frozenset(
    {".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".gifv", ".flv", ".ts"}
)


@functools.cache
def image_suffixes() -> frozenset[str]:
    """File name endings of :data:`IMAGE_FORMATS`, in lower case with the dot."""
    Image.init()
    return frozenset(suffix for suffix, name in Image.EXTENSION.items() if name in IMAGE_FORMATS)


class FolderRows(Rows):
    """The media files below a folder, in the order of their paths.

    Links are not followed and are no rows.

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
