"""Media files: their formats and extensions, and a check for special files; imports no NumPy."""

import functools
import os
import re
import stat
from importlib.util import find_spec

from PIL import Image

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

if find_spec("pillow_heif") is not None:  # an optional package, for photos of phones
    from pillow_heif import register_heif_opener  # pyright: ignore[reportMissingImports]

    register_heif_opener()
    IMAGE_FORMATS = (*IMAGE_FORMATS, "HEIF")

VIDEO_SUFFIXES = frozenset(
    {".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".gifv", ".flv", ".ts"}
)


@functools.cache
def image_suffixes() -> frozenset[str]:
    """File name endings of :data:`IMAGE_FORMATS`, in lower case with the dot."""
    Image.init()
    return frozenset(suffix for suffix, name in Image.EXTENSION.items() if name in IMAGE_FORMATS)


def natural_key(name: str) -> list[str | int]:
    """Return a key that sorts digits as whole numbers: ``a9_2`` before ``a10_1``."""
    parts = re.split("([0-9]+)", name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def check_regular_file(path: str | os.PathLike[str]) -> None:
    """Raise DataError for a pipe, a device or a socket, whose opening or reading may never end."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a million paths
    except OSError:
        return  # opening the file reports this
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    kinds = {stat.S_IFIFO: "a named pipe (FIFO)", stat.S_IFSOCK: "a socket"}
    problem = f"is {kinds.get(stat.S_IFMT(mode), 'a device')}, which may never end"
    raise DataError(os.fspath(path), problem, "give a regular file")
