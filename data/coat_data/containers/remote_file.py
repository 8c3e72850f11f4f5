"""Files by URL, read whole or as byte ranges.

``http:`` and ``https:`` use the standard library; all other schemes (``hf:``, ``s3:``, ``gs:``,
``memory:``, ``file:``) use fsspec, which finds its own credentials. fsspec's http file system is
not used: here one function makes every request (:mod:`coat_data.containers.http_client`), so that
hosts, redirects, sizes and timeouts are checked, each response is compared with the version of the
opened file, and all failures are retried by one rule (:func:`retry`). Connections belong to the
process that opened them; a :class:`RemoteFile` is cheap to pickle.
"""

import http
import http.client
import io
import math
import os
import re
import socket
import time
import urllib.error
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from coat_data.containers.http_client import check_host, is_http, read_body, request
from coat_data.limits import Limits, Network
from coat_data.sample import DataError, UnreachableError

WAITS_S = (0.5, 2.0, 8.0)
"""Seconds between attempts, for transient failures."""
IO_ERRORS = (OSError, http.client.HTTPException)
"""Exceptions of networks and servers."""
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, http.client.InvalidURL)
_MISTAKES = (
    DataError, TypeError, AttributeError, NameError, LookupError, ValueError, ImportError,
    AssertionError, NotImplementedError, MemoryError,
)  # fmt: skip
"""Programming and data errors, which are raised without a retry."""

T = TypeVar("T")

_GROUP = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_TIMEOUT_S = 60.0
_BLOCK_BYTES = 1 << 20
_CACHED_BLOCKS = 8
_SMALL_BYTES = 1 << 17  # shorter ranges are read from a cached block


def _version(answer: Any) -> str:
    """Return what changes with the file, if the server sends it: ETag or date, and size."""
    named = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return f"{named} {total or answer.headers.get('Content-Length')}"


def retry(
    attempt: Callable[[], T],
    waits_s: Sequence[float] | None = None,
    *,
    timeouts: bool = True,
) -> T:
    """Call ``attempt``, and call it again after transient failures of the network or server.

    Args:
        attempt: the function to call.
        waits_s: pauses between attempts, in seconds; :data:`WAITS_S` by default.
        timeouts: whether a host that sent nothing is asked again.

    Raises:
        ConnectionError: fsspec raised an exception that is no OSError, such as the httpx errors of
            ``hf:``, in every attempt.
    """
    for wait_s in (*(WAITS_S if waits_s is None else waits_s), None):
        try:
            return attempt()
        except IO_ERRORS as error:
            timed_out = isinstance(getattr(error, "reason", error), TimeoutError)
            if wait_s is None or _is_permanent(error) or (timed_out and not timeouts):
                raise
        except _MISTAKES:
            raise
        except Exception as error:
            if wait_s is None:
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _is_permanent(error: Exception) -> bool:
    """Whether an error is not retryable: missing, forbidden, no address, or unknown host."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR and error.code not in (408, 429)
    reason = getattr(error, "reason", None)  # of a URLError
    hostless = reason == "no host given" or getattr(reason, "errno", 0) == socket.EAI_NONAME
    return hostless or isinstance(error, _FINAL)


def unreachable(url: str, error: Exception) -> DataError:
    """Return the DataError of an address; an UnreachableError if its cause is transient."""
    problem = f"cannot be read: {type(error).__name__}: {error}"
    transient = isinstance(error, IO_ERRORS) and not _is_permanent(error)
    kind = UnreachableError if transient else DataError
    return kind(url, problem, "check the address, the network and the credentials")


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a brace pattern stands for.

    A range keeps the width of its start: ``{08..10}`` gives 08, 09, 10.
    """
    parts: list[list[str]] = []
    end = 0
    for match in _GROUP.finditer(pattern):
        start, stop, names = match.groups()
        if names is not None:
            values = names.split(",")
        else:
            numbers = range(int(start), int(stop) + 1)
            values = [str(number).zfill(len(start)) for number in numbers]
        parts += [[pattern[end : match.start()]], values]
        end = match.end()
    return ["".join(choice) for choice in product(*parts, [pattern[end:]])]


def is_url(path: str | Path) -> TypeGuard[str]:
    """Whether the path is a URL such as ``hf://``, ``s3://`` or ``https://``."""
    return isinstance(path, str) and _URL.match(path) is not None


def expand_urls(pattern: str) -> list[str]:
    """Return the addresses that match a pattern with braces, or ``*`` (not over http).

    Raises:
        DataError: a pattern with ``*`` matches nothing, or its server cannot be reached.
    """
    found: list[str] = []
    for url in expand_braces(pattern):
        if is_http(url) or not set("*?[") & set(url):
            found.append(url)
            continue
        try:
            names = retry(lambda url=url: _glob(url))
        except IO_ERRORS as error:
            raise unreachable(url, error) from error
        if not names:
            raise DataError(url, "matches no file", "check the address and the credentials")
        found += names
    return found


def _glob(url: str) -> list[str]:
    system, path = filesystem(url)
    return [system.unstrip_protocol(name) for name in sorted(map(str, system.glob(path)))]


class Blocks:
    """Cache of the last few blocks of all files that share it, per process."""

    def __init__(self) -> None:
        self._cache: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def get(self, file: "RemoteFile", number: int) -> bytes:
        """Return a block of a file."""
        block = self._cache.pop((file.url, number), None)
        if block is None:
            block = file.range(number * _BLOCK_BYTES, _BLOCK_BYTES)
        self._cache[file.url, number] = block
        while len(self._cache) > _CACHED_BLOCKS:
            self._cache.popitem(last=False)
        return block

    def __getstate__(self) -> dict[str, Any]:
        return {"_cache": OrderedDict()}


class RemoteFile:
    """A remote file.

    Attributes:
        url: the address.
        size: bytes; None if the server does not send a size.
        version: changes with the content, as far as the server says (ETag, date, size).
        seekable: whether byte ranges can be read.

    Args:
        url: the address.
        blocks: cache shared by the files of a source, so that it does not grow with their number.
        network: hosts that may be asked; by default the public ones and that of ``url``.
        limits: for a medium of a row, which has less time than a shard: limits of http requests,
            which are not repeated after a timeout.
        waits_s: pauses between attempts; 0.5, 2 and 8 seconds by default.

    Raises:
        DataError: the file does not exist, access is denied, the host is not allowed, or the scheme
            is not supported.
    """

    def __init__(
        self,
        url: str,
        blocks: Blocks,
        *,
        network: Network | None = None,
        limits: Limits | None = None,
        waits_s: Sequence[float] | None = None,
    ) -> None:
        self.url = url
        self.network = Network().with_hosts_of(url) if network is None else network
        check_host(url, self.network)
        self._blocks = blocks
        self._limits = limits
        self._timeout_s = _TIMEOUT_S if limits is None else limits.remote_wait_s
        self._waits_s = waits_s
        self._http = is_http(url)
        try:
            probe = self._probe_http if self._http else self._probe_filesystem
            self.size, self.version, self.seekable = self._retry(probe)
        except IO_ERRORS as error:
            raise unreachable(url, error) from error

    def read(self, start: int, size: int) -> bytes:
        """Read ``size`` bytes from ``start`` on; fewer at the end of the file.

        Raises:
            DataError: the file has changed since it was opened.
            OSError: the network still fails after all attempts.
        """
        if size > _SMALL_BYTES:
            return self.range(start, size)
        data, stop = b"", start + size
        while start < stop:
            number, offset = divmod(start, _BLOCK_BYTES)
            block = self._blocks.get(self, number)
            part = block[offset : offset + stop - start]
            if not part:
                break
            data += part
            start += len(part)
        return data

    def range(self, start: int, size: int) -> bytes:
        """Read like :meth:`read`, but exactly these bytes and without the cache."""
        stop = start + size if self.size is None else min(start + size, self.size)
        if stop <= start:
            return b""

        def read() -> bytes:
            if not self._http:
                system, path = filesystem(self.url)
                return system.cat_file(path, start=start, end=stop)
            with self._request(start, stop) as answer:
                if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                    raise OSError(f"{self.url}: the server has stopped answering ranges")
                if _version(answer) != self.version:
                    raise DataError(self.url, "has changed since it was opened", "start again")
                if self._limits is None:
                    return answer.read()
                return read_body(answer, self.url, stop - start)

        return self._retry(read)

    def _retry(self, attempt: Callable[[], T]) -> T:
        return retry(attempt, self._waits_s, timeouts=self._limits is None)

    def _request(self, start: int, stop: int) -> Any:
        max_s = math.inf if self._limits is None else self._limits.remote_s
        return request(self.url, (start, stop), self._timeout_s, self.network, max_s)

    def _probe_http(self) -> tuple[int | None, str, bool]:
        """Request one byte; return size, version, and whether ranges are supported."""
        try:
            with self._request(0, 1) as answer:
                partial = answer.status == http.HTTPStatus.PARTIAL_CONTENT
                whole = answer.headers.get("Content-Length")
                if partial:
                    whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
                size = int(whole) if whole and whole.isdigit() else None
                return size, _version(answer), partial and size is not None
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return 0, _version(error), True  # the file is empty
            raise

    def _probe_filesystem(self) -> tuple[int | None, str, bool]:
        system, path = filesystem(self.url)
        found = system.info(path)
        if found.get("type") == "directory":
            raise DataError(self.url, "is a folder", "give files, such as FOLDER/*.tar")
        size = found.get("size")
        return size, str(system.ukey(path)), size is not None


class RangeFile(io.RawIOBase):
    """A seekable file object over a function that reads byte ranges.

    Attributes:
        failure: the exception of the last failed read; it does not mean that the file is damaged.

    Args:
        size: bytes of the file.
        read_at: returns bytes from a start up to a stop at most, at least one.
    """

    def __init__(self, size: int, read_at: Callable[[int, int], bytes]) -> None:
        self.failure: Exception | None = None
        self._size = size
        self._read_at = read_at
        self._place = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte of the file; behind its end there is nothing to read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fill the buffer; it stays shorter only at the end of the file."""
        view = memoryview(buffer).cast("B")
        stop = min(self._place + len(view), self._size)
        done = 0
        try:
            while self._place < stop and (data := self._read_at(self._place, stop)):
                view[done : done + len(data)] = data
                done += len(data)
                self._place += len(data)
        except Exception as error:
            self.failure = error
            raise
        return done


def filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of an address; fsspec caches one per process."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(
            url, f"nothing here opens such addresses: {error}", "install what it names"
        ) from error


def cache_folder() -> Path:
    """Return the cache folder: ``COAT_VLM_CACHE``, by default ``~/.cache/coat-vlm``."""
    own = os.environ.get("COAT_VLM_CACHE")
    return Path(own).expanduser() if own else Path.home() / ".cache" / "coat-vlm"
