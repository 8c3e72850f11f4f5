"""What a medium's first bytes say, without decoding it."""

import io
import os
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from coat_data.sample import DataError, Media


def image_size(media: Media) -> tuple[int, int]:
    """Width and height in pixels as stored (before any EXIF rotation), from the image's header.

    Raises:
        DataError: the file is missing, or its beginning is not an image; names the path.
    """
    where = media.path or "<image bytes>"
    try:
        with _stream(media) as stream, Image.open(stream) as image:
            return image.size
    except FileNotFoundError as error:
        raise DataError(where, "no such file", "fix the path or the media root") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, and others
        raise DataError(
            where,
            f"the image cannot be read: {type(error).__name__}: {error}",
            "replace the file or remove the row",
        ) from error


def check_video(media: Media) -> None:
    """Check that the file, or the folder of frames, is there and not empty.

    Raises:
        DataError: it is not; names the path.
    """
    where = media.path or "<video bytes>"
    if media.data is not None:
        empty = not media.data
    elif not os.path.exists(where):  # noqa: PTH110 - a million paths
        raise DataError(where, "no such file", "fix the path or the media root")
    else:
        path = Path(where)
        empty = not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
    if empty:
        raise DataError(where, "the video is empty", "replace the file or remove the row")


def _stream(media: Media) -> BinaryIO:
    return io.BytesIO(media.data) if media.data is not None else Path(media.path or "").open("rb")
