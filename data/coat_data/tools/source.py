"""What the tools share: walking over a source, opening media, writing a folder at once."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from coat_data.load.dataset import SampleDataset
from coat_data.media.image import open_image
from coat_data.media.remote_media import fetched
from coat_data.media.video import read_frames
from coat_data.sample import DataError, Media, Sample


def walk(
    dataset: SampleDataset, job: str, *, progress: bool = True
) -> Iterator[Sample | DataError]:
    """All samples in order, errors in the place of bad ones, with a progress bar."""
    total = len(dataset) if dataset.random_access else None
    return iter(tqdm(dataset.stream(), f"{job} {dataset.name}", total, disable=not progress))


def decode(media: Media) -> None:
    """Decode an image, or one frame of a video.

    Raises:
        DataError: it cannot be decoded; names the path.
    """
    if media.kind == "image":
        open_image(media)
    else:
        read_frames(media, 1)


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


def list_bad(path: Path, errors: Iterable[DataError]) -> None:
    """Append what is wrong with the rows that were left out to a JSONL file."""
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(error.row()) + "\n" for error in errors)


@contextmanager
def new_folder(out_dir: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``out_dir`` that takes its name when the block ends well.

    After an error or Ctrl-C in the block, the temporary folder is removed and ``out_dir`` is as
    before.

    Args:
        out_dir: folder to make; it must not exist, or be empty.
        replace: it may exist and hold files, which are removed in the end.

    Yields:
        The folder to write into.

    Raises:
        DataError: ``out_dir`` has files in it or is a file.
    """
    target = Path(out_dir).absolute()
    fresh = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not fresh and not replace:
        raise DataError(
            str(target), "already exists and is not empty", "choose another folder or delete it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (target.parent / f".{target.name}.{os.getpid()}.{end}" for end in ("new", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=fresh)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
