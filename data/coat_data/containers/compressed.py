"""Compressed files (gzip, bzip2, xz, zstd), which are unpacked into the cache folder once."""

import bz2
import gzip
import lzma
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from coat_data.containers.cache import cached_file
from coat_data.limits import Limits
from coat_data.sample import DataError

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def unpack(path: Path, limits: Limits) -> Path:
    """Return a file, or the unpacked copy of a compressed one; a changed file has another copy.

    DataError if it is damaged, or unpacks to more than ``limits.archive_bytes``.
    """
    with path.open("rb") as stream:
        head = stream.read(6)
    kind = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    if kind is None:
        return path
    state = path.stat()
    max_bytes = limits.archive_bytes or max(1 << 30, 250 * state.st_size)

    def write(out: BinaryIO) -> None:
        with _open(path, kind) as stream:
            while data := _read(stream, path):
                out.write(data)
                if out.tell() > max_bytes:
                    problem = f"its {state.st_size} bytes unpack to more than {max_bytes}"
                    remedy = "raise limits.archive_bytes (--limits archive_bytes=NUMBER)"
                    raise DataError(str(path), problem, remedy)

    name = f"{path.stem}.tar" if path.suffix == ".tgz" else path.stem
    key = f"{path} {state.st_size} {state.st_mtime_ns}"
    return cached_file("unpacked", key, name, write)


def _open(path: Path, kind: str) -> Any:
    if kind == "zstd":  # the standard library has it from Python 3.14 on
        import pyarrow

        return pyarrow.input_stream(str(path), compression="zstd")
    return {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}[kind](path, "rb")


def _read(stream: Any, path: Path) -> bytes:
    try:
        return stream.read(1 << 20)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        problem = f"is damaged: {type(error).__name__}: {error}"
        raise DataError(str(path), problem, "copy it again") from error
