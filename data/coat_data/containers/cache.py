"""The cache folder: downloaded and unpacked files, shared by the processes of a host."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from coat_data.folder_lock import hold_lock
from coat_data.saved_files import replace_file, write_text


def cache_folder() -> Path:
    """Return the cache folder: ``COAT_VLM_CACHE``, by default ``~/.cache/coat-vlm``."""
    folder = os.environ.get("COAT_VLM_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "coat-vlm"


def cached_file(folder: str, key: str, name: str, write: Callable[[BinaryIO], None]) -> Path:
    """Return the file ``name`` of a key in ``folder`` of the cache; ``write`` writes it if needed.

    One process of a host calls ``write``, the others wait. ``key`` changes with the content. A file
    whose size differs from the written one, such as a truncated copy, is written again.
    """
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = cache_folder() / folder / digest / name
    size = path.with_name(f".{name}.size")

    def is_whole() -> bool:
        try:
            return str(path.stat().st_size) == size.read_text(encoding="ascii")
        except FileNotFoundError:
            return False

    if is_whole():
        return path
    with hold_lock(path.with_name(".lock"), f"data (which writes {path})", wait=True):
        if not is_whole():
            for left in path.parent.glob(".*.tmp"):  # by a process that was killed
                left.unlink()
            with replace_file(path) as file:
                write(file)
            write_text(size, str(path.stat().st_size))
    return path
