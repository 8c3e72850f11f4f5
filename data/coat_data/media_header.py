"""Whether a video is there, without opening it."""

import os
from pathlib import Path

from coat_data.containers.remote_file import is_url
from coat_data.remote_media import size_of
from coat_data.sample import DataError, Media


def check_video(media: Media) -> None:
    """Check that the file, or the folder of frames, is there and not empty.

    Raises:
        DataError: it is not; names the path.
    """
    where = media.path or "<video bytes>"
    if media.data is not None:
        empty = not media.data
    elif is_url(where):
        empty = size_of(where) == 0
    elif not os.path.exists(where):  # noqa: PTH110 - a million paths
        raise DataError(where, "no such file", "fix the path or the media root")
    else:
        path = Path(where)
        empty = not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
    if empty:
        raise DataError(where, "the video is empty", "replace the file or remove the row")
