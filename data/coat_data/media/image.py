"""Opens images and turns them into the vision tower's input.

    pixel = (value / 255 - mean) / std        value in 0..255, mean and std per channel

In mode ``resize`` this equals transformers' SigLIP and CLIP image processors (PIL backend) with a
square ``size`` and without a centre crop. Images of several tiles: :mod:`coat_data.media.tiling`.

JPEGs are decoded whole. ``PIL.Image.draft`` would decode at a half, a quarter or an eighth of the
size in less time, but the pixels after scaling differ from those of the whole picture, and no model
of the field was trained on such pixels.
"""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from coat_data.containers.folder import IMAGE_FORMATS, image_suffixes
from coat_data.containers.remote_file import is_url
from coat_data.media.remote_media import fetched, header_of
from coat_data.sample import DataError, Media

ImageMode = Literal["resize", "pad", "dynamic", "dynamic_s2"]
Augment = Literal["none", "crop_flip"]

_WIDTH, _HEIGHT = 0x0100, 0x0101  # TIFF tags
_ORIENTATION = 0x0112  # EXIF tag; values of 5 to 8 lay the picture on its side


def open_image(media: Media | str | os.PathLike[str], max_pixels: int | None = None) -> Image.Image:
    """The decoded image in RGB, turned upright by its EXIF orientation.

    Transparent pixels are laid over white, as in transformers 5.23 (5.17 and VILA drop the alpha
    channel and show whatever colour is stored under it). Of an animation, the first frame. Of 16
    bits per channel the upper 8, as Pillow does by itself for colour (grey it would clip at 255,
    which turns nearly every such picture white). Palette, CMYK, grey and black-and-white as Pillow
    converts them.

    Args:
        media: the image, or its path.
        max_pixels: most pixels a file may declare, against decompression bombs;
            ``PIL.Image.MAX_IMAGE_PIXELS`` when absent.

    Raises:
        DataError: the file is missing, empty, truncated, not an image, of floating point numbers,
            or has more pixels than allowed; names the path.
    """
    with _opened(media, max_pixels, decode=True) as (image, where):
        ImageOps.exif_transpose(image, in_place=True)
        return _rgb(image, where)


def image_size(
    media: Media | str | os.PathLike[str], max_pixels: int | None = None
) -> tuple[int, int]:
    """Width and height that :func:`open_image` will give, from the file's header alone.

    No pixel is decoded, so a file that is damaged further back passes here.

    Raises:
        DataError: as for :func:`open_image`, as far as the header shows it.
    """
    with _opened(media, max_pixels, decode=False) as (image, _):
        width, height = image.size
        if isinstance(image, TiffImageFile):  # Pillow may have turned the size already
            width, height = image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT]
        if isinstance(image, PngImageFile) and not _describes_itself_behind(image):
            # Pillow's own PNG getexif() decodes the picture to see what stands behind it.
            orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)
        else:
            orientation = image.getexif().get(_ORIENTATION, 1)
        return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


@contextmanager
def _opened(
    media: Media | str | os.PathLike[str], max_pixels: int | None, *, decode: bool
) -> Iterator[tuple[Image.Image, str]]:
    """The image with its header read and its size checked, and its name for messages."""
    if not isinstance(media, Media):
        media = Media(kind="image", path=str(media))
    where = media.path or "<image bytes>"
    try:
        source = _source(media, decode=decode)
        with _limit_of_pillow(max_pixels), Image.open(source, formats=IMAGE_FORMATS) as image:
            _check_size(image, where)
            yield image, where
    except DataError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's, above twice the limit
        raise _too_large(where, str(error)) from error
    except FileNotFoundError as error:
        raise DataError(where, "no such file", "fix the path or the media root") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, and others
        raise DataError(
            where,
            f"the image cannot be read: {type(error).__name__}: {error}",
            "replace the file or remove the row",
        ) from error


@contextmanager
def _limit_of_pillow(max_pixels: int | None) -> Iterator[None]:
    """Pillow's own limit, which is global, replaced while ours is in force."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = before if max_pixels is None else max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _rgb(image: Image.Image, where: str) -> Image.Image:
    if image.mode == "F":
        raise DataError(
            where,
            "the pixels are floating point numbers, of which nobody can say which one is white",
            "convert the file to 8 or 16 bits per channel",
        )
    if image.mode.startswith("I"):  # grey of 16 bits, or of 32 with the values of 16
        high = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(high.clip(0, 255).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _describes_itself_behind(image: PngImageFile) -> bool:
    """Whether a PNG may have EXIF or XMP data behind its pixels, where no header shows it."""
    file = image.fp
    if file is None:
        return True
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


def _source(media: Media, *, decode: bool) -> BinaryIO | str:
    if media.path is not None and is_url(media.path):
        if media.data is None and not decode:
            return header_of(media)
        media = fetched(media)
    if media.data is not None:
        return io.BytesIO(media.data)
    if media.path is None:
        raise DataError("<image>", "the media has neither a path nor data", "give it one of them")
    return media.path


def _check_size(image: Image.Image, where: str) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        found = f"{image.width} x {image.height} pixels, and the limit is {limit}"
        raise _too_large(where, found)


def _too_large(where: str, found: str) -> DataError:
    return DataError(
        where,
        f"the image is larger than allowed: {found}",
        "scale the image down, or raise model.image.max_pixels if you trust the file",
    )


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How an image is cut into tiles of the tower's size."""

    num_tiles: int
    """Tiles that the vision tower sees."""
    rows: int
    columns: int
    """The grid whose tiles become tokens, row-major; a thumbnail is no part of it."""
    num_token_tiles: int
    """Tiles whose features become tokens (``tokens_per_image`` each)."""
    separated: bool
    """Whether a line break stands between the tiles in the token sequence."""


ONE_TILE = TilePlan(num_tiles=1, rows=1, columns=1, num_token_tiles=1, separated=False)
"""The plan of modes ``resize`` and ``pad``, and of every frame of a video."""


class ImageTransform:
    """Scales an image to one square, optionally augments it, and normalizes it.

    Attributes:
        size: side of the output in pixels.
        mean: mean of each channel, in 0..1.
        std: standard deviation of each channel, in 0..1.
        mode: ``resize`` stretches to a square; ``pad`` first pads to a square with the mean colour
            (``int(255 * mean)``; expand2square of haotian-liu/LLaVA, llava/mm_utils.py).
        augment: ``crop_flip`` moves the scaled image by up to an eighth of its side in both
            directions (a random crop of the image padded with the mean colour) and mirrors it with
            probability 1/2.
    """

    modes: tuple[ImageMode, ...] = ("resize", "pad")
    one_tile = True
    """Whether every image is one tile, whatever its size."""

    def __init__(
        self,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        mode: ImageMode = "resize",
        resample: Image.Resampling = Image.Resampling.BICUBIC,
        augment: Augment = "none",
    ) -> None:
        """Check the settings.

        Raises:
            ValueError: a setting is out of range or unknown.
        """
        if mode not in self.modes:
            raise ValueError(f"image mode is {mode!r}; allowed: {', '.join(self.modes)}")
        if augment not in ("none", "crop_flip"):
            raise ValueError(f"image augment is {augment!r}; allowed: none, crop_flip")
        if size <= 0 or len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError(
                f"image size={size}, mean={list(mean)}, std={list(std)}; need a size above 0 and "
                "three values each, std above 0"
            )
        self.size = size
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        self.mode = mode
        self.resample = Image.Resampling(resample)
        self.augment = augment
        self._mean_colour = tuple(int(255 * value) for value in self.mean)
        self._blank = np.full((size, size, 3), self._mean_colour, dtype=np.uint8)
        self._steps = [_steps(*channel) for channel in zip(self.mean, self.std, strict=True)]

    def __call__(
        self, image: Image.Image, rng: np.random.Generator | None = None
    ) -> torch.FloatTensor:
        """The tower's input for ``image`` as one square.

        Args:
            image: an RGB image of any size.
            rng: source of the augmentation's draws; without it nothing is augmented.

        Returns:
            float32 (3, size, size).
        """
        pixels = np.empty((3, self.size, self.size), dtype=np.float32)
        self.write_square(image, pixels, rng)
        return torch.from_numpy(pixels)  # pyright: ignore[reportReturnType]

    def plan(self, width: int, height: int) -> TilePlan:  # noqa: ARG002 - subclasses need them
        """How an image of this size is cut; known before it is decoded."""
        return ONE_TILE

    def write(
        self, image: Image.Image, out: NDArray[np.float32], rng: np.random.Generator | None = None
    ) -> None:
        """Write the tiles of ``plan(*image.size)`` into ``out``, float32 (tiles, 3, size, size)."""
        self.write_square(image, out[0], rng)

    def write_square(
        self, image: Image.Image, out: NDArray[np.float32], rng: np.random.Generator | None = None
    ) -> None:
        """Write the image as one square into ``out``, float32 (3, size, size)."""
        if self.mode == "pad" and image.width != image.height:
            image = self._padded_to_square(image)
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), self.resample)
        channels = channels_of(image)
        if rng is not None and self.augment == "crop_flip":
            moved = self._cropped_and_flipped(np.stack(channels, axis=-1), rng)
            channels = list(moved.transpose(2, 0, 1))
        self.normalize(channels, out)

    def normalize(self, channels: Sequence[NDArray[np.uint8]], out: NDArray[np.float32]) -> None:
        """Write normalized ``channels``, three of (size, size), into ``out`` (3, size, size)."""
        for values, pixels, (divisor, mean, std) in zip(channels, out, self._steps, strict=True):
            pixels[...] = values
            pixels /= divisor
            pixels -= mean
            if std is not None:
                pixels /= std

    def _padded_to_square(self, image: Image.Image) -> Image.Image:
        side = max(image.size)
        square = Image.new("RGB", (side, side), self._mean_colour)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square

    def _cropped_and_flipped(
        self, values: NDArray[np.uint8], rng: np.random.Generator
    ) -> NDArray[np.uint8]:
        """A crop of the padded image equals the image moved over the mean colour."""
        reach = self.size // 8
        down, right = int(rng.integers(-reach, reach + 1)), int(rng.integers(-reach, reach + 1))
        if rng.random() < 0.5:
            values = values[:, ::-1]
        moved = self._blank.copy()
        moved[_target(down), _target(right)] = values[_target(-down), _target(-right)]
        return moved


def channels_of(image: Image.Image) -> list[NDArray[np.uint8]]:
    """The channels of an RGB image, three of (height, width), not to be written to.

    Pillow keeps four bytes per pixel: to part the channels takes as long as to pack three of them,
    and channels are read several times as fast as every third byte.
    """
    return [_values(channel) for channel in image.split()]


def _values(channel: Image.Image) -> NDArray[np.uint8]:
    """The values (height, width) of an image of one channel, where Pillow can share its memory."""
    import pyarrow  # half a second, which headers do not need

    data: Any = None
    if hasattr(channel, "__arrow_c_array__"):  # Pillow 11.2
        with suppress(ValueError):  # more than 16 MiB, in several blocks, which are copied below
            data = pyarrow.array(channel).buffers()[1]
    data = channel.tobytes() if data is None else data
    return np.frombuffer(data, np.uint8).reshape(channel.height, channel.width)


def _steps(mean: float, std: float) -> tuple[np.float32, np.float32, np.float32 | None]:
    """What a channel is divided by, less what, and divided by in the end.

    The formula has two divisions in float32. Where one, by 255 std and less mean / std, gives the
    same bits for all 256 values (so for std 1/2), it takes two thirds of the time.
    """
    divisor, mean32, std32 = np.float32(255), np.float32(mean), np.float32(std)
    values = np.arange(256, dtype=np.float32)
    folded = values / (divisor * std32) - mean32 / std32
    if np.array_equal(folded, (values / divisor - mean32) / std32):
        return divisor * std32, mean32 / std32, None
    return divisor, mean32, std32


def _target(shift: int) -> slice:
    """Where an axis lands inside its own range when it is moved by ``shift``."""
    return slice(shift, None) if shift >= 0 else slice(None, shift)


def list_frames(folder: Path) -> list[Path]:
    """The image files of a folder of video frames, in the order of their names."""
    suffixes = image_suffixes()
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)
