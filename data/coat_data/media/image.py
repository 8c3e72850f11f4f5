"""Opens images and converts them to the input of the vision tower.

    pixel = (value / 255 - mean) / std        value in 0..255, mean and std per channel

In mode ``resize`` this equals transformers' SigLIP and CLIP image processors (PIL backend) with a
square ``size`` and without a centre crop. JPEGs are decoded at full size: ``PIL.Image.draft`` is
faster, but gives different pixels from what published models were trained on.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from coat_data.containers.media_files import IMAGE_FORMATS, check_regular_file
from coat_data.media.remote_media import fetch_media
from coat_data.sample import DataError, Media

ImageMode = Literal["resize", "pad", "dynamic", "dynamic_s2"]

_STRIP_PIXELS = 1 << 20
_MAX_SIDE = 65_535
"""Maximum side of an image in pixels, as of JPEG: resizing a line of millions of pixels to a square
takes a buffer of as many rows."""

_WIDTH, _HEIGHT = 0x0100, 0x0101  # TIFF tags
_ORIENTATION = 0x0112  # EXIF tag; values 5 to 8 rotate the image by 90 degrees


def open_image(media: Media, max_pixels: int | None = None) -> Image.Image:
    """Decode an image to RGB, rotated upright by its EXIF orientation.

    Transparent pixels are composited over white, as in transformers (VILA drops the
    alpha channel and uses the color stored under it). An animation gives its first frame. 16-bit
    channels give their upper 8 bits, as Pillow does for color images (it would clip gray at 255).

    DataError if the file is missing or not an intact image, has floating point pixels, or declares
    more than ``max_pixels`` (default ``PIL.Image.MAX_IMAGE_PIXELS``); names the path.
    """
    with _opened(media, max_pixels) as (image, where):
        ImageOps.exif_transpose(image, in_place=True)
        return _rgb(image, where)


def image_size(media: Media, max_pixels: int | None = None) -> tuple[int, int]:
    """Return width and height of :func:`open_image`'s result from the header; raises as it does."""
    with _opened(media, max_pixels) as (image, _):
        width, height = image.size
        if isinstance(image, TiffImageFile):  # Pillow may have swapped width and height already
            width, height = image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT]
        if isinstance(image, PngImageFile) and not _has_metadata_after_pixels(image):
            # Pillow's own PNG getexif() decodes the image to read metadata after the pixels.
            orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)
        else:
            orientation = image.getexif().get(_ORIENTATION, 1)
        return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def is_animated(media: Media) -> bool:
    """Whether an image file has several frames; raises as :func:`open_image`."""
    with _opened(media, None) as (image, _):
        return getattr(image, "is_animated", False)


@contextmanager
def _opened(media: Media, max_pixels: int | None) -> Iterator[tuple[Image.Image, str]]:
    where = media.name
    try:
        source = _source(media)
        with _limit_of_pillow(max_pixels), Image.open(source, formats=IMAGE_FORMATS) as image:
            _check_size(image, where)
            yield image, where
    except DataError:
        raise
    except Image.DecompressionBombError as error:  # raised by Pillow above twice the limit
        raise _too_large(where, str(error)) from error
    except FileNotFoundError as error:
        raise DataError(where, "no such file", "fix the path or the media root") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, and others
        problem = f"the image cannot be read: {type(error).__name__}: {error}"
        remedy = "replace the file or remove the row"
        if isinstance(error, UnidentifiedImageError) and _is_heic(media):
            remedy = "it is HEIC: pip install pillow-heif, or convert it to JPEG"
        raise DataError(where, problem, remedy) from error


@contextmanager
def _limit_of_pillow(max_pixels: int | None) -> Iterator[None]:
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = before if max_pixels is None else max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _rgb(image: Image.Image, where: str) -> Image.Image:
    if image.mode == "F":
        problem = "floating-point pixels without a known white level"
        raise DataError(where, problem, "convert the file to 8 or 16 bits per channel")
    if image.mode.startswith("I"):  # 16-bit gray, or 32-bit gray with 16-bit values
        high = np.asarray(image) >> 8
        return Image.fromarray(high.clip(0, 255).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _over_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    """Composite an image over white in strips: at once, it would be held five times."""
    out = Image.new("RGB", image.size)
    for box in _strips(*image.size):
        strip = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        out.paste(Image.alpha_composite(white, strip).convert("RGB"), box)
    return out


def _strips(width: int, height: int) -> Iterator[tuple[int, int, int, int]]:
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        yield 0, top, width, min(top + rows, height)


def _has_metadata_after_pixels(image: PngImageFile) -> bool:
    """Whether a PNG may have EXIF or XMP data after its pixels, where headers do not show it."""
    file = image.fp
    assert file is not None  # nothing has read the pixels yet
    before = file.tell()
    try:
        file.seek(8)
        behind = False
        while len(head := file.read(8)) == 8:
            kind = head[4:]
            if behind and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            behind = behind or kind == b"IDAT"
            file.seek(int.from_bytes(head[:4], "big") + 4, io.SEEK_CUR)
        return False
    finally:
        file.seek(before)


def _source(media: Media) -> BinaryIO | str:
    media = fetch_media(media)
    if media.data is not None:
        return io.BytesIO(media.data)
    if media.path is None:
        raise DataError("<image>", "the media has neither a path nor data", "give it one of them")
    check_regular_file(media.path)
    return media.path


def _is_heic(media: Media) -> bool:
    source = _source(media)
    with Path(source).open("rb") if isinstance(source, str) else source as file:
        head = file.read(12)
    return head[4:8] == b"ftyp" and head[8:] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1")


def _check_size(image: Image.Image, where: str) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        found = f"{image.width} x {image.height} pixels, and the limit is {limit}"
        raise _too_large(where, found)
    if max(image.size) > _MAX_SIDE:
        raise DataError(
            where,
            f"the image has {image.width} x {image.height} pixels; a side has at most {_MAX_SIDE}",
            "scale the image down, or remove the row",
        )


def _too_large(where: str, found: str) -> DataError:
    return DataError(
        where,
        f"the image is larger than allowed: {found}",
        "scale the image down; for a composed model you may also raise model.image.max_pixels",
    )


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How an image is split into tiles of the tower's input size."""

    num_tiles: int
    """Tiles that the vision tower processes."""
    rows: int
    columns: int
    """Grid of the tiles that become tokens, row-major; it does not include a thumbnail."""
    num_token_tiles: int
    """Tiles whose features become tokens (``tokens_per_image`` each)."""
    separated: bool
    """Whether a line break separates the tiles in the token sequence."""


ONE_TILE = TilePlan(num_tiles=1, rows=1, columns=1, num_token_tiles=1, separated=False)
"""The plan of modes ``resize`` and ``pad``, and of every frame of a video."""


class ImageTransform:
    """Scales an image to a square of ``size`` pixels, and normalizes it.

    ``mean`` and ``std`` are per channel, in 0..1. ``resize`` stretches to a square; ``pad`` first
    pads to a square with the mean color (``int(255 * mean)``; expand2square of haotian-liu/LLaVA,
    llava/mm_utils.py).
    """

    modes: tuple[ImageMode, ...] = ("resize", "pad")
    one_tile = True
    """Whether every image is one tile, for any image size."""

    def __init__(
        self,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        mode: ImageMode = "resize",
        resample: Image.Resampling = Image.Resampling.BICUBIC,
    ) -> None:
        if mode not in self.modes:
            raise ValueError(f"image mode is {mode!r}; allowed: {', '.join(self.modes)}")
        self.size = size
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        self.mode = mode
        self.resample = Image.Resampling(resample)
        self._mean_color = tuple(int(255 * value) for value in self.mean)
        self._mean, self._std = (np.array(one, np.float32).reshape(3, 1, 1) for one in (mean, std))

    def plan(self, width: int, height: int) -> TilePlan:  # noqa: ARG002 - subclasses need them
        """Return the tiles of an image of this size, before it is decoded."""
        return ONE_TILE

    def write(self, image: Image.Image, out: NDArray[np.float32]) -> None:
        """Write the tiles of ``plan(*image.size)`` into ``out``, float32 (tiles, 3, size, size)."""
        self.normalize(np.asarray(self.square(image)), out[0])

    def square(self, image: Image.Image) -> Image.Image:
        """Return the image as a square of ``size`` pixels, padded before in mode ``pad``.

        A padded image is resized in strips, first in width, then in height, to save memory.
        """
        if self.mode == "pad" and image.width != image.height:
            side = max(image.size)
            left, upper = (side - image.width) // 2, (side - image.height) // 2
            narrow = Image.new("RGB", (self.size, side), self._mean_color)
            for box in _strips(side, image.height):
                strip = Image.new("RGB", (side, box[3] - box[1]), self._mean_color)
                strip.paste(image.crop((0, box[1], image.width, box[3])), (left, 0))
                strip = strip.resize((self.size, strip.height), self.resample)
                narrow.paste(strip, (0, upper + box[1]))
            image = narrow
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), self.resample)
        return image

    def normalize(self, values: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Write ``(values / 255 - mean) / std`` of (size, size, 3) into ``out`` (3, size, size)."""
        out[...] = values.transpose(2, 0, 1)
        out /= np.float32(255)
        out -= self._mean
        out /= self._std
