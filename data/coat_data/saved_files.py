"""Small files that a program rewrites: replaced atomically, with the version of their format."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

FORMAT_VERSION = "format_version"
"""The key of the version in a saved file. Files of commit 6626d5c have none: version 1."""


class NewerVersionError(ValueError):
    """A saved file was written by a newer version of the program."""


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path``; sync it and rename it to ``path`` at the end.

    ``path`` has its earlier content or all of the new one, also after a crash of the machine. After
    an exception it is unchanged. Its folder is created.

    Raises:
        OSError: the file could not be written; the error names ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file by ``text`` in UTF-8; see :func:`replace_file`."""
    with replace_file(path) as file:
        file.write(text.encode("utf-8"))


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_version(found: object, newest: int, where: str) -> int:
    """Return the format version of a saved file.

    Args:
        found: the value in the file; None if it has none, which is version 1.
        newest: the newest version that this program reads.
        where: the file, for the error message.

    Raises:
        NewerVersionError: the file is of a newer version.
        ValueError: the value is not a version.
    """
    version = 1 if found is None else found
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f"{where} has format version {found!r}; allowed: a number from 1 to {newest}"
        )
    if version > newest:
        raise NewerVersionError(
            f"{where} has format version {version}, and this version of coat-vlm reads versions up "
            f"to {newest}: install the version of coat-vlm that wrote it, or a newer one"
        )
    return version
