"""The image formats that are read."""

import functools

from PIL import Image

IMAGE_FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "DIB", "ICO", "ICNS",
    "CUR", "DDS", "PCX", "PSD", "QOI", "SGI", "SUN", "TGA", "XBM", "XPM",
)  # fmt: skip
"""Pillow's names of them; for every ``Image.open``, since Pillow goes by content and not by ending.

Left out are EPS, which Pillow hands to Ghostscript, a program that can be made to run code; IPTC,
which opens another image inside of it with all formats; WMF, HDF5, GRIB, BUFR and MPEG, which other
programs read; and formats that no data set is stored in.
"""


@functools.cache
def image_suffixes() -> frozenset[str]:
    """File name endings of :data:`IMAGE_FORMATS`, in lower case with the dot."""
    Image.init()
    return frozenset(suffix for suffix, name in Image.EXTENSION.items() if name in IMAGE_FORMATS)
