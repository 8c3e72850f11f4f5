"""Reads the pictures of media for people: images, and a few frames of videos."""

from collections.abc import Sequence

from PIL import Image

from coat_data.media.image import open_image
from coat_data.sample import DataError, Media


def read_pictures(media: Sequence[Media], number: int) -> tuple[list[Image.Image], list[str]]:
    """Read up to ``number`` images and video frames in RGB; also returns what could not be read."""
    pictures: list[Image.Image] = []
    problems: list[str] = []
    for medium in media:
        try:
            if medium.kind == "image":
                pictures.append(open_image(medium))
            else:
                from coat_data.media.video import read_frames  # only videos need a decoder

                pictures += read_frames(medium, number)
        except (DataError, OSError) as error:
            problems.append(str(error))
    hidden = len(pictures) - number
    if hidden > 0:
        problems.append(f"{hidden} more images are not shown")
    return pictures[:number], problems
