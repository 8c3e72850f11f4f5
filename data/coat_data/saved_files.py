"""Small files that a program rewrites: replaced atomically, with the version of their format."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

FORMAT_VERSION = "format_version"
"""The key of the version in a saved file."""


class FormatVersionError(ValueError):
    """A saved file has a format that this version of the program does not read."""


@contextmanager
def replace_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file next to ``path``; sync it and rename it to ``path`` at the end.

    ``path`` has its earlier content or all of the new one, also after a crash of the machine unless
    ``durable`` is False. After an exception it is unchanged. Its folder is created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):  # it never was there, if the folder is read-only
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file by ``text`` in UTF-8; see :func:`replace_file`."""
    with replace_file(path, durable=durable) as file:
        file.write(text.encode("utf-8"))


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | str | None]) -> None:
    """Raise ValueError before a command replaces a file that it reads, or writes one file twice.

    All files below a folder of ``inputs`` are read. No output of a command is binary, so an
    existing binary file (an image, a table, weights) is refused as well.
    """
    read = [Path(path).resolve() for path in inputs if path is not None]
    written = [path for path in outputs if path is not None]
    for path in written:
        own, old, problem = path.resolve(), path.exists(), ""
        if [one.resolve() for one in written].count(own) > 1:
            problem = "is named for two outputs"
        elif own in read or (
            old and any(one in own.parents or own.samefile(one) for one in read if one.exists())
        ):
            problem = "is an input of this command"
        elif path.is_file():
            with path.open("rb") as file:
                problem = "holds binary data" if b"\0" in file.read(4096) else ""
        if problem:
            raise ValueError(f"{path} {problem} and is not overwritten; name another file to write")


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


def check_version(found: object, expected: int, where: str) -> None:
    """Raise FormatVersionError unless ``found`` in the file ``where`` is the expected version."""
    if found != expected or isinstance(found, bool):
        raise FormatVersionError(
            f"{where} has format version {found}, and this version of coat-vlm reads version "
            f"{expected}: use the version of coat-vlm that wrote it, or start a new run"
        )
