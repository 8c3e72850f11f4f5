"""Functions shared by the tools: opening media, writing a folder atomically."""

import glob
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coat_data.containers.media_files import check_regular_file
from coat_data.folder_lock import hold_lock
from coat_data.media.image import open_image
from coat_data.media.remote_media import check_video, fetch_media
from coat_data.media.video import read_frames
from coat_data.sample import DataError, Media


def decode(media: Media, max_pixels: int | None = None) -> None:
    """Decode an image, or one frame of a video."""
    if media.kind == "image":
        open_image(media, max_pixels)
    else:
        if media.frames:
            check_video(media)
        read_frames(media, 1)


def media_bytes(media: Media) -> bytes:
    """Read the encoded file of an image or video."""
    if media.frames:
        raise DataError(
            str(media.path),
            f"is the first of {len(media.frames)} frames of a video, which has no file of its own",
            "encode the frames as a video, or keep them as files next to the data",
        )
    media = fetch_media(media)
    if media.data is not None:
        return media.data
    check_regular_file(media.path or "")
    try:
        return Path(media.path or "").read_bytes()
    except OSError as error:
        problem = f"unreadable: {error.strerror}"
        raise DataError(str(media.path), problem, "check path and media_root") from error


def list_bad(path: Path, errors: Iterable[DataError]) -> None:
    """Append the errors of rows that were left out to a JSONL file."""
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(error.row()) + "\n" for error in errors)


@contextmanager
def new_folder(out_dir: str | Path) -> Iterator[Path]:
    """Create a temporary folder next to ``out_dir``, and rename it when the block succeeds.

    It is removed after an error or Ctrl-C, or, after a kill, by the next call for ``out_dir``.
    DataError if ``out_dir`` has files in it or is a file; LockError if another process writes it.
    """
    target = Path(out_dir).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        problem = "already exists and is not empty"
        raise DataError(str(target), problem, "choose another folder or delete it")
    with hold_lock(target.with_name(f".{target.name}.lock"), f"data (which writes {target})"):
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.new"):  # of a killed one
            shutil.rmtree(leftover, ignore_errors=True)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")
        partial.mkdir()
        try:
            yield partial
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
