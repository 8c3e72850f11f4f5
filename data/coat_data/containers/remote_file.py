"""Files by URL: copied into the cache folder once, then read as local files.

``http:`` and ``https:`` are read with :mod:`coat_data.containers.http_file`, all other schemes
(``hf:``, ``s3:``, ``memory:``, ...) with fsspec, which finds its own credentials.
"""

import errno
import http
import http.client
import re
import socket
import time
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar

from tqdm import tqdm

from coat_data.containers.cache import cache_folder, cached_file
from coat_data.containers.http_file import is_http, open_http
from coat_data.sample import DataError, UnreachableError

WAITS_S = (0.5, 2.0, 8.0)
"""Seconds between attempts, for transient failures."""

_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, http.client.InvalidURL)
_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError,
    NameError, NotImplementedError, TypeError, ValueError,
)  # fmt: skip
"""Data errors and programming errors, which are raised without a retry."""

T = TypeVar("T")

_GROUP = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DOWNLOADS = 8  # files that are downloaded at the same time


def is_url(path: str | Path) -> TypeGuard[str]:
    """Whether the path is a URL such as ``hf://``, ``s3://`` or ``https://``."""
    return isinstance(path, str) and _URL.match(path) is not None


def expand_braces(pattern: str) -> list[str]:
    """Expand a brace pattern to names; ``{08..10}`` gives 08, 09, 10."""
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


def local_copies(pattern: str) -> dict[Path, str]:
    """Copy the files of a URL, or of a pattern with braces or ``*`` (not http), to the cache.

    Returns copy -> URL. A file that changes by its ETag, date or size is downloaded again.
    DataError if a file is missing or cannot be read, or nothing matches; OSError for the cache.
    """
    urls: list[str] = []
    for url in expand_braces(pattern):
        if is_http(url) or not set("*?[") & set(url):
            urls.append(url)
            continue
        system, path = filesystem(url)
        names = retry(url, lambda path=path, system=system: sorted(map(str, system.glob(path))))
        if not names:
            raise DataError(url, "matches no file", "check the URL and the credentials")
        urls += map(system.unstrip_protocol, names)
    with (
        tqdm(desc="downloading", unit="B", unit_scale=True, delay=1.0) as bar,
        ThreadPoolExecutor(_DOWNLOADS) as pool,
    ):
        return dict(zip(pool.map(lambda url: _local_copy(url, bar), urls), urls, strict=True))


def _local_copy(url: str, bar: "tqdm[Any]") -> Path:
    version, size = retry(url, lambda: _state(url))
    name = url.partition("::")[0].partition("?")[0].rpartition("/")[2] or "file"

    def write(out: BinaryIO) -> None:
        retry(url, lambda: _download(url, size, out, bar))

    return cached_file("files", f"{url} {version} {size}", name, write)


def _state(url: str) -> tuple[str, int | None]:
    """Return what changes with a file's content, as far as the server says, and its size."""
    if is_http(url):
        with open_http(url) as answer:
            named = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            return str(named), answer.length
    system, path = filesystem(url)
    found = system.info(path)
    if found.get("type") == "directory":
        raise DataError(url, "is a folder", "give files, such as FOLDER/*.tar")
    return str(system.ukey(path)), found.get("size")


def _download(url: str, size: int | None, out: BinaryIO, bar: "tqdm[Any]") -> None:
    out.seek(0)
    out.truncate()  # what an earlier attempt wrote
    if is_http(url):
        stream: Any = open_http(url)
    else:
        system, path = filesystem(url)
        stream = system.open(path, "rb")
    with stream:
        while data := stream.read(1 << 20):
            out.write(data)
            bar.update(len(data))
    if size is not None and out.tell() != size:
        raise ConnectionError(f"ended at byte {out.tell()} of {size}")


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path there; DataError without one."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        problem = f"no installed file system reads such URLs: {error}"
        raise DataError(url, problem, "install what it names") from error


def retry(
    url: str,
    attempt: Callable[[], T],
    waits_s: Sequence[float] | None = None,
    *,
    timeouts: bool = True,
) -> T:
    """Call ``attempt``, and again after transient failures and pauses of ``waits_s`` seconds.

    ``timeouts``: whether a host that sent nothing is asked again. DataError if the URL cannot
    be read; UnreachableError if the failure is transient.
    """
    for wait_s in (*(WAITS_S if waits_s is None else waits_s), None):
        try:
            return attempt()
        except DataError:
            raise
        except Exception as error:  # of urllib, and of any file system
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                remedy = "set COAT_VLM_CACHE to a folder on a larger disk"
                raise DataError(str(cache_folder()), "the disk is full", remedy) from error
            transient = not isinstance(error, _MISTAKES) and not _is_permanent(error)
            timed_out = isinstance(getattr(error, "reason", error), TimeoutError)
            if transient and wait_s is not None and (timeouts or not timed_out):
                time.sleep(wait_s)
                continue
            kind = UnreachableError if transient else DataError
            problem = f"cannot be read: {type(error).__name__}: {error}"
            raise kind(url, problem, "check the URL, the network, the credentials") from error
    raise AssertionError("the last attempt returns or raises")


def _is_permanent(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR and error.code not in (408, 429)
    reason = getattr(error, "reason", None)  # of a URLError
    hostless = reason == "no host given" or getattr(reason, "errno", 0) == socket.EAI_NONAME
    unknown = isinstance(reason, str) and reason.startswith("unknown url type")
    return hostless or unknown or isinstance(error, _FINAL)
