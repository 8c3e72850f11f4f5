"""Writes an output folder completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coat_data.sample import DataError


@contextmanager
def new_folder(out_dir: str | Path) -> Iterator[Path]:
    """A temporary folder beside ``out_dir`` that takes its name when the block ends well.

    After an error or Ctrl-C in the block, the temporary folder is removed and ``out_dir`` is as
    before.

    Args:
        out_dir: folder to make; it must not exist, or be empty.

    Yields:
        The folder to write into.

    Raises:
        DataError: ``out_dir`` has files in it or is a file.
    """
    target = Path(out_dir).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(
            str(target), "already exists and is not empty", "choose another folder or delete it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
