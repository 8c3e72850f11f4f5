"""Compressed files (gzip, bzip2, xz, zstd): as a bounded stream, or unpacked once into the cache.

A few bytes may stand for gigabytes, so the unpacked size and the time are limited
(:class:`coat_data.limits.Limits`).
"""

import bz2
import gzip
import hashlib
import io
import lzma
import time
import zlib
from pathlib import Path
from typing import Any

from coat_data.containers.json_file import JsonRows, row_spans
from coat_data.containers.remote_file import cache_folder
from coat_data.folder_lock import hold_lock
from coat_data.limits import Limits
from coat_data.sample import DataError

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def compression(path: Path) -> str | None:
    """Return the compression of a file, by its first bytes; None for an uncompressed one."""
    with path.open("rb") as stream:
        head = stream.read(6)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


class UnpackedStream(io.RawIOBase):
    """The unpacked bytes of a file.

    Args:
        path: a compressed file.
        limits: limits of its unpacked size, and of the time between two calls of :meth:`progress`.

    Raises:
        DataError: a limit is exceeded; names the file and the limit.
        OSError: the file is damaged.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path = path
        self._packed_bytes = path.stat().st_size
        self._limits = limits
        self._most = limits.unpacked_bytes(self._packed_bytes)
        self._bytes = 0
        self._stream = _open(path)
        self.progress()

    def readable(self) -> bool:
        """True."""
        return True

    def progress(self) -> None:
        """Start the time anew: a row was found."""
        self._until = time.monotonic() + self._limits.archive_wait_s

    def readinto(self, buffer: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fill the buffer, or less of it; 0 at the end."""
        try:
            data = self._stream.read(len(buffer))
        except (zlib.error, lzma.LZMAError, ValueError) as error:  # OSError and EOFError stay
            raise OSError(f"{type(error).__name__}: {error}") from error
        buffer[: len(data)] = data
        self._bytes += len(data)
        if self._bytes > self._most:
            raise DataError(
                str(self._path),
                f"its {self._packed_bytes} bytes unpack to more than {self._most}",
                "raise limits.archive_bytes (--limits archive_bytes=NUMBER) for a trusted file",
            )
        if time.monotonic() > self._until:
            raise DataError(
                str(self._path),
                f"no row came within {self._limits.archive_wait_s:g} s "
                f"({self._bytes} bytes were unpacked)",
                "raise limits.archive_wait_s (--limits archive_wait_s=NUMBER) for a trusted file",
            )
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        super().close()


def _open(path: Path) -> Any:
    kind = compression(path)
    if kind == "zstd":  # the standard library has it from Python 3.14 on
        import pyarrow

        return pyarrow.input_stream(str(path), compression="zstd")
    return {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}[kind or "gzip"](path, "rb")


class PackedJsonRows(JsonRows):
    """The rows of a compressed JSON or JSONL file, which is unpacked into the cache once.

    Attributes:
        media_root: folder of the compressed file.

    Raises:
        DataError: the file is damaged, or unpacks to more than the limit.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path = path
        super().__init__([_unpack(path, limits)])
        self.media_root = path.parent

    def spans(self, path: Path) -> Any:
        """Yield the rows; errors name the compressed file."""
        with path.open("rb") as stream:
            yield from row_spans(stream, str(self._path))

    def place(self, index: int) -> tuple[str, int]:
        """Return the compressed file and ``index``."""
        return str(self._path), index


def _unpack(path: Path, limits: Limits) -> Path:
    """Return the unpacked copy in the cache; another file, or a changed one, has another copy."""
    state = path.stat()
    key = hashlib.sha256(f"{path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:32]
    target = cache_folder() / "unpacked" / f"{key}-{path.stem}"
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f"{key}.lock")
    with hold_lock(lock, f"data (which unpacks {path})", wait=True):
        if not target.is_file():
            partial = target.with_name(f"{key}.new")
            try:
                with UnpackedStream(path, limits) as stream, partial.open("wb") as out:
                    while data := stream.read(1 << 20):
                        stream.progress()  # the size alone is limited
                        out.write(data)
                partial.replace(target)
            except (EOFError, OSError) as error:
                if getattr(error, "errno", None) is not None:
                    raise  # such as a full disk, which is not the file's fault
                raise DataError(str(path), f"is damaged: {error}", "copy it again") from error
            finally:
                partial.unlink(missing_ok=True)
    return target
