"""Opens images and turns them into the vision tower's input.

    pixel = (value / 255 - mean) / std        value in 0..255, mean and std per channel

In mode ``resize`` this equals transformers' SigLIP and CLIP image processors (PIL backend) with a
square ``size`` and without a centre crop.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from coat_data.sample import DataError, Media

ImageMode = Literal["resize", "pad"]
Augment = Literal["none", "crop_flip"]


def open_image(media: Media | str | os.PathLike[str]) -> Image.Image:
    """The decoded image in RGB, turned upright by its EXIF orientation.

    Transparent pixels are laid over white, as in transformers 5.23 (5.17 drops the alpha channel
    and shows whatever colour is stored under it). Of an animation, the first frame.

    Raises:
        DataError: the file is missing, empty, truncated, not an image, or has more pixels than
            ``PIL.Image.MAX_IMAGE_PIXELS``; names the path.
    """
    if not isinstance(media, Media):
        media = Media(kind="image", path=str(media))
    where = media.path or "<image bytes>"
    try:
        with Image.open(_source(media)) as image:
            _check_size(image, where)
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(where, "no such file", "fix the path or the media root") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, and others
        raise DataError(
            where,
            f"the image cannot be read: {type(error).__name__}: {error}",
            "replace the file or remove the row",
        ) from error


def _rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _source(media: Media) -> io.BytesIO | str:
    if media.data is not None:
        return io.BytesIO(media.data)
    if media.path is None:
        raise DataError("<image>", "the media has neither a path nor data", "give it one of them")
    return media.path


def _check_size(image: Image.Image, where: str) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise DataError(
            where,
            f"{image.width} x {image.height} pixels are more than the limit of {limit}",
            "scale the image down, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust the file",
        )


class ImageTransform:
    """Scales an image to a square, optionally augments it, and normalizes it.

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
        if mode not in ("resize", "pad"):
            raise ValueError(f"image mode is {mode!r}; allowed: resize, pad")
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
        self._mean = np.array(self.mean, dtype=np.float32)[:, None, None]
        self._std = np.array(self.std, dtype=np.float32)[:, None, None]

    def __call__(
        self, image: Image.Image, rng: np.random.Generator | None = None
    ) -> torch.FloatTensor:
        """The tower's input for ``image``.

        Args:
            image: an RGB image of any size.
            rng: source of the augmentation's draws; without it nothing is augmented.

        Returns:
            float32 (3, size, size).
        """
        if self.mode == "pad" and image.width != image.height:
            image = self._padded_to_square(image)
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), self.resample)
        values = np.asarray(image)
        if rng is not None and self.augment == "crop_flip":
            values = self._cropped_and_flipped(values, rng)
        pixels = values.transpose(2, 0, 1).astype(np.float32, order="C")
        pixels /= np.float32(255)
        pixels -= self._mean
        pixels /= self._std
        return torch.from_numpy(pixels)  # pyright: ignore[reportReturnType]

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


def _target(shift: int) -> slice:
    """Where an axis lands inside its own range when it is moved by ``shift``."""
    return slice(shift, None) if shift >= 0 else slice(None, shift)


def list_frames(folder: Path) -> list[Path]:
    """The image files of a folder of video frames, in the order of their names."""
    suffixes = Image.registered_extensions()
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)
