"""What is tried again where a network or server fails, and what is told when that does not help."""

import http
import http.client
import socket
import time
import urllib.error
from collections.abc import Callable, Sequence
from typing import TypeVar

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
