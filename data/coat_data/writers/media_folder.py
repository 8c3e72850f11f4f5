"""Copies the media of exported samples into a folder, or names them where they are."""

import io
import os
import shutil
from pathlib import Path

from PIL import Image

from coat_data.containers.folder import VIDEO_SUFFIXES
from coat_data.containers.remote_file import is_url
from coat_data.image_formats import IMAGE_FORMATS, image_suffixes
from coat_data.remote_media import fetched
from coat_data.sample import DataError, Media

FOLDER = "media"
"""Name of the folder beside the exported rows."""

_FILES_PER_FOLDER = 1000


class MediaFolder:
    """Where the media of an export go.

    Args:
        out_dir: the export's folder.
        keep_root: name the files where they are, relative to this media root, or by their
            addresses; None copies them.
    """

    def __init__(self, out_dir: Path, keep_root: Path | str | None) -> None:
        self._out_dir = out_dir
        self._keep_root = keep_root
        self._count = 0

    def add(self, media: Media) -> str:
        """The path of a medium relative to the export's media root.

        Raises:
            DataError: it cannot be read, or has no file to keep.
        """
        where = media.path or f"<{media.kind} bytes>"
        if self._keep_root is not None:
            if media.data is not None:
                raise DataError(where, "has no file of its own", "export without --keep-paths")
            if is_url(where):
                return where
            return os.path.relpath(where, self._keep_root)
        folder = f"{FOLDER}/{self._count // _FILES_PER_FOLDER:05d}"
        name = f"{folder}/{self._count % _FILES_PER_FOLDER:03d}{media_suffix(media)}"
        self._count += 1
        (self._out_dir / folder).mkdir(parents=True, exist_ok=True)
        target = self._out_dir / name
        try:
            media = fetched(media)
            if media.data is not None:
                target.write_bytes(media.data)
            elif Path(where).is_dir():
                shutil.copytree(where, target)
            else:
                shutil.copyfile(where, target)
        except FileNotFoundError as error:
            raise DataError(where, "no such file", "fix the path or the media root") from error
        return name


def media_suffix(media: Media) -> str:
    """The ending of a medium's file name: its own if it fits the kind, else by its content."""
    own = Path(media.path or "").suffix.lower()
    if media.kind == "video":
        is_folder = media.data is None and Path(media.path or "").is_dir()
        return "" if is_folder else own if own in VIDEO_SUFFIXES else ".mp4"
    if own in image_suffixes():
        return own
    try:
        with Image.open(io.BytesIO(media_bytes(media)), formats=IMAGE_FORMATS) as image:
            return f".{(image.format or 'img').lower()}"
    except Exception:  # whatever Pillow raises: an image that nobody can read is copied as it is
        return ".img"


def media_bytes(media: Media) -> bytes:
    """The encoded file.

    Raises:
        DataError: it is missing or a folder, or its address cannot be read; names the path.
    """
    media = fetched(media)
    if media.data is not None:
        return media.data
    try:
        return Path(media.path or "").read_bytes()
    except OSError as error:
        raise DataError(
            str(media.path), f"unreadable: {error.strerror}", "check path and media_root"
        ) from error
