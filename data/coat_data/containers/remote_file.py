"""Files by address: the one place where a URL is opened, as ranges of bytes or in order.

The standard library reads ``http:`` and ``https:``; fsspec, which finds its credentials itself, all
else (``hf:``, ``s3:``, ``gs:``, ``memory:``, ``file:``). fsspec's own reading over http is not
used: here one function makes every request (:func:`_request`), so that hosts, redirects, sizes and
times can be checked, each answer is compared with the version of the file that was opened, and what
fails is tried again by one rule (:func:`retried`). Connections belong to the process that opened
them: a :class:`RemoteFile` is cheap to send to workers.
"""

import functools
import http
import http.client
import io
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar

from coat_data.sample import DataError, UnreachableError

WAITS_S = (0.5, 2.0, 8.0)
"""Between attempts, in seconds: a network may fail for a moment."""
OUTAGES = (OSError, http.client.HTTPException)
"""What networks and servers raise."""
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, http.client.InvalidURL)
_MISTAKES = (
    DataError, TypeError, AttributeError, NameError, LookupError, ValueError, ImportError,
    AssertionError, NotImplementedError, MemoryError,
)  # fmt: skip
"""Not of the network: these pass as they are."""

T = TypeVar("T")

_GROUP = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_TIMEOUT_S = 60.0
_BLOCK_BYTES = 1 << 20
_BLOCKS_KEPT = 8
_SMALL_BYTES = 1 << 17  # shorter ranges are cut from a block, which neighbours share


def is_http(url: str) -> bool:
    """Whether the standard library reads the address."""
    return url.startswith(("http://", "https://"))


def _request(url: str, span: tuple[int, int] | None, timeout_s: float) -> Any:
    """The answer to a request of some bytes (start, stop), or of all; OSError where it fails."""
    headers = {"Accept-Encoding": "identity", "User-Agent": _user_agent()}
    if span is not None:
        headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=timeout_s)


def _version(answer: Any) -> str:
    """What changes with the file, as far as an answer tells: ETag or time of change, and size."""
    named = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return f"{named} {total or answer.headers.get('Content-Length')}"


@functools.cache
def _user_agent() -> str:
    """What requests say they are from: some hosts refuse Python's own name."""
    try:
        return f"coat-vlm/{version('coat-vlm')}"
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "coat-vlm"


def retried(attempt: Callable[[], T], waits_s: Sequence[float] | None = None) -> T:
    """What ``attempt`` returns, tried again where the network or the server fails.

    Args:
        attempt: is called again after one of :data:`OUTAGES` that may pass.
        waits_s: pauses between attempts, in seconds; :data:`WAITS_S` by default.
    """
    for wait_s in WAITS_S if waits_s is None else waits_s:
        try:
            return attempt()
        except OUTAGES as error:
            if _is_final(error):
                raise
            time.sleep(wait_s)
    return attempt()


def told(call: Callable[[], T]) -> T:
    """What fsspec returns; what its file systems raise of a network, as a ConnectionError.

    Those of ``hf:`` raise errors of httpx, which are no OSError.
    """
    try:
        return call()
    except (*_MISTAKES, *OUTAGES):
        raise
    except Exception as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def _is_final(error: Exception) -> bool:
    """Whether trying again is in vain: missing, forbidden, no address, or no such host."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR and error.code not in (408, 429)
    reason = getattr(error, "reason", None)  # of a URLError
    hostless = reason == "no host given" or getattr(reason, "errno", 0) == socket.EAI_NONAME
    return hostless or isinstance(error, _FINAL)


def unreachable(url: str, error: Exception) -> DataError:
    """What to tell the user about an address that failed; a missing file is a plain DataError."""
    problem = f"cannot be read: {type(error).__name__}: {error}"
    outage = isinstance(error, OUTAGES) and not _is_final(error)
    kind = UnreachableError if outage else DataError
    return kind(url, problem, "check the address, the network and the credentials")


def expand_braces(pattern: str) -> list[str]:
    """The names that a pattern stands for; itself if it has no braces.

    A range keeps the width of its start: ``{08..10}`` is 08, 09, 10.
    """
    pieces: list[list[str]] = []
    end = 0
    for match in _GROUP.finditer(pattern):
        start, stop, names = match.groups()
        if names is not None:
            values = names.split(",")
        else:
            numbers = range(int(start), int(stop) + 1)
            values = [str(number).zfill(len(start)) for number in numbers]
        pieces += [[pattern[end : match.start()]], values]
        end = match.end()
    return ["".join(choice) for choice in product(*pieces, [pattern[end:]])]


def is_url(path: str | Path) -> TypeGuard[str]:
    """Whether the path is an address such as ``hf://``, ``s3://`` or ``https://``."""
    return isinstance(path, str) and _URL.match(path) is not None


def expand_urls(pattern: str) -> list[str]:
    """The addresses that a pattern stands for: braces everywhere, ``*`` but for http.

    Raises:
        DataError: a pattern with ``*`` matches nothing, or its server cannot be asked.
    """
    found: list[str] = []
    for url in expand_braces(pattern):
        if is_http(url) or not set("*?[") & set(url):
            found.append(url)
            continue
        try:
            names = retried(lambda url=url: _matching(url))
        except OUTAGES as error:
            raise unreachable(url, error) from error
        if not names:
            raise DataError(url, "matches no file", "check the address and the credentials")
        found += names
    return found


def _matching(url: str) -> list[str]:
    system, path = _filesystem(url)
    names = told(lambda: system.glob(path))
    return [system.unstrip_protocol(name) for name in sorted(str(name) for name in names)]


class Blocks:
    """The last few blocks read by one process, of all files that share them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def get(self, file: "RemoteFile", number: int) -> bytes:
        """A block of a file, read if it is not kept."""
        kept = self._kept.pop((file.url, number), None)
        if kept is None:
            kept = file.range(number * _BLOCK_BYTES, _BLOCK_BYTES)
        self._kept[file.url, number] = kept
        while len(self._kept) > _BLOCKS_KEPT:
            self._kept.popitem(last=False)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": OrderedDict()}


class RemoteFile:
    """One file by its address.

    Attributes:
        url: the address.
        size: bytes; None if the server does not say.
        version: changes with the content, as far as the server tells (ETag, time of change, size).
        seekable: whether ranges can be read; else only the whole file in order.

    Args:
        url: see above.
        blocks: shared by the files of a source, so that many shards take no more memory than one.
        timeout_s: how long an http server may be silent; 60 seconds by default.
        waits_s: pauses before it is tried again; 0.5, 2 and 8 seconds by default.

    Raises:
        DataError: there is no such file, no access, or nothing that opens such addresses.
    """

    def __init__(
        self,
        url: str,
        blocks: Blocks,
        *,
        timeout_s: float | None = None,
        waits_s: Sequence[float] | None = None,
    ) -> None:
        self.url = url
        self._blocks = blocks
        self._timeout_s = _TIMEOUT_S if timeout_s is None else timeout_s
        self._waits_s = waits_s
        self._http = is_http(url)
        try:
            asked = self._ask_server if self._http else self._ask_system
            self.size, self.version, self.seekable = retried(asked, waits_s)
        except OUTAGES as error:
            raise unreachable(url, error) from error

    def read(self, start: int, size: int) -> bytes:
        """``size`` bytes from ``start`` on; fewer at the end of the file.

        Raises:
            DataError: the file is another one now.
            OSError: the network fails, also when tried again.
        """
        if size > _SMALL_BYTES:
            return self.range(start, size)
        data, stop = b"", start + size
        while start < stop:
            number, offset = divmod(start, _BLOCK_BYTES)
            block = self._blocks.get(self, number)
            piece = block[offset : offset + stop - start]
            if not piece:
                break
            data += piece
            start += len(piece)
        return data

    def stream(self) -> BinaryIO:
        """The whole file in order; close it after use.

        If the connection breaks and ranges can be read, reading goes on from the byte reached.

        Raises:
            OSError: the network fails, also when tried again.
        """
        return _InOrder(self)  # pyright: ignore[reportReturnType]

    def open_at(self, start: int) -> BinaryIO:
        """One connection that gives the file from ``start`` on; more than 0 needs ranges.

        Raises:
            DataError: the file is another one now.
            OSError: the network fails.
        """
        if self._http and start:
            return self._part(start, self.size or 0)
        if self._http:
            return _request(self.url, None, self._timeout_s)
        system, path = _filesystem(self.url)
        stream = told(lambda: system.open(path, "rb", cache_type="readahead"))
        if start:
            stream.seek(start)
        return stream

    def range(self, start: int, size: int) -> bytes:
        """As :meth:`read`, of these bytes alone, past the blocks."""
        stop = start + size if self.size is None else min(start + size, self.size)
        if stop <= start:
            return b""
        if not self._http:
            system, path = retried(lambda: _filesystem(self.url), self._waits_s)
            return retried(
                lambda: told(lambda: system.cat_file(path, start=start, end=stop)), self._waits_s
            )

        def read() -> bytes:
            with self._part(start, stop) as answer:
                return answer.read()

        return retried(read, self._waits_s)

    def _part(self, start: int, stop: int) -> Any:
        """The answer with these bytes."""
        answer = _request(self.url, (start, stop), self._timeout_s)
        partial = answer.status == http.HTTPStatus.PARTIAL_CONTENT
        if partial and _version(answer) == self.version:
            return answer
        answer.close()
        if not partial:
            raise OSError(f"{self.url}: the server has stopped answering ranges")
        raise DataError(self.url, "has changed since it was opened", "start again")

    def _ask_server(self) -> tuple[int | None, str, bool]:
        """Size, version, and whether it answers ranges, from a request of one byte."""
        try:
            with _request(self.url, (0, 1), self._timeout_s) as answer:
                partial = answer.status == http.HTTPStatus.PARTIAL_CONTENT
                whole = answer.headers.get("Content-Length")
                if partial:
                    whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
                size = int(whole) if whole and whole.isdigit() else None
                return size, _version(answer), partial
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return 0, _version(error), True  # the file is empty
            raise

    def _ask_system(self) -> tuple[int | None, str, bool]:
        system, path = _filesystem(self.url)
        found = told(lambda: system.info(path))
        if found.get("type") == "directory":
            raise DataError(self.url, "is a folder", "give files, such as FOLDER/*.tar")
        return found.get("size"), str(told(lambda: system.ukey(path))), True


class _InOrder:
    """A file in order over as many connections as it takes; see :meth:`RemoteFile.stream`."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._position = 0
        self._stream: BinaryIO | None = retried(lambda: file.open_at(0))

    def read(self, size: int = -1) -> bytes:
        data = retried(lambda: self._piece(size)) if self._file.seekable else self._piece(size)
        self._position += len(data)
        return data

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> "_InOrder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _piece(self, size: int) -> bytes:
        end = self._file.size or 0
        if self._stream is None:
            self._stream = self._file.open_at(self._position)
        stream = self._stream
        try:
            data = told(lambda: stream.read(size))
            if not data and size and self._position < end:
                raise ConnectionError(
                    f"{self._file.url}: broke off at byte {self._position} of {end}"
                )
        except OUTAGES:
            if self._file.seekable:
                stream.close()
                self._stream = None
            raise
        return data


def fetch(
    url: str, *, timeout_s: float, waits_s: Sequence[float], limit_s: float, limit_bytes: int
) -> bytes:
    """A whole file, in one request.

    Args:
        url: its address.
        timeout_s: how long an http server may be silent.
        waits_s: pauses before it is tried again.
        limit_s: how long an http server may take for all of it.
        limit_bytes: the most that an http server may send.

    Raises:
        DataError: nothing here opens such addresses, or the file is larger.
        OSError, http.client.HTTPException: the network fails, also when tried again.
    """

    def read() -> bytes:
        if not is_http(url):
            system, path = _filesystem(url)
            return told(lambda: system.cat_file(path))
        until = time.monotonic() + limit_s
        data = io.BytesIO()
        with _request(url, None, timeout_s) as answer:
            while piece := answer.read1(1 << 20):
                data.write(piece)
                if data.tell() > limit_bytes:
                    raise DataError(url, f"is larger than {limit_bytes} bytes", "download it first")
                if time.monotonic() > until:
                    raise TimeoutError(f"not read within {limit_s:g} s ({data.tell()} bytes came)")
            if answer.length:  # read1 is silent about what is missing
                raise ConnectionError(f"broke off {answer.length} bytes before the end")
        return data.getvalue()

    return retried(read, waits_s)


class RangeFile(io.RawIOBase):
    """A file for libraries that read it in places.

    Attributes:
        failure: why bytes could not be read, if so; not the fault of what is in the file.

    Args:
        size: bytes of the file.
        read_at: bytes from a start up to a stop or before, at least one.
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
        """Fill the buffer; it is left shorter at the end of the file only."""
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


def read_whole(stream: BinaryIO, size: int) -> bytes:
    """``size`` bytes of a stream that may give fewer at a time; fewer only at its end."""
    data = io.BytesIO()
    while data.tell() < size and (piece := stream.read(size - data.tell())):
        data.write(piece)
    return data.getvalue()


def _filesystem(url: str) -> tuple[Any, str]:
    """The file system for an address; fsspec keeps one per process."""
    import fsspec

    try:
        return told(lambda: fsspec.core.url_to_fs(url))
    except (ImportError, ValueError) as error:
        raise DataError(
            url, f"nothing here opens such addresses: {error}", "install what it names"
        ) from error


def cache_folder() -> Path:
    """Where indices are kept: ``COAT_VLM_CACHE``, by default ``~/.cache/coat-vlm``."""
    own = os.environ.get("COAT_VLM_CACHE")
    return Path(own).expanduser() if own else Path.home() / ".cache" / "coat-vlm"
