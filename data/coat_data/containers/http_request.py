"""Requests to http servers, and what their answers say."""

import functools
import io
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from coat_data.sample import DataError


def is_http(url: str) -> bool:
    """Whether the standard library reads the address."""
    return url.startswith(("http://", "https://"))


def http_answer(url: str, span: tuple[int, int] | None, timeout_s: float) -> Any:
    """The answer to a request of some bytes (start, stop), or of all; OSError where it fails."""
    headers = {"Accept-Encoding": "identity", "User-Agent": user_agent()}
    if span is not None:
        headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=timeout_s)


def http_version(answer: Any) -> str:
    """What changes with the file, as far as an answer tells: ETag or time of change, and size."""
    named = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return f"{named} {total or answer.headers.get('Content-Length')}"


def http_body(url: str, timeout_s: float, limit_s: float, limit_bytes: int) -> bytes:
    """A whole file.

    Args:
        url: its address.
        timeout_s: how long the server may be silent.
        limit_s: how long all of it may take, in seconds.
        limit_bytes: the most that it may be.

    Raises:
        DataError: it is larger.
        OSError, http.client.HTTPException: the network fails, or it takes longer.
    """
    until = time.monotonic() + limit_s
    data = io.BytesIO()
    with http_answer(url, None, timeout_s) as answer:
        while piece := answer.read1(1 << 20):
            data.write(piece)
            if data.tell() > limit_bytes:
                raise DataError(url, f"is larger than {limit_bytes} bytes", "download it first")
            if time.monotonic() > until:
                raise TimeoutError(f"not read within {limit_s:g} s ({data.tell()} bytes came)")
        if answer.length:  # read1 is silent about what is missing
            raise ConnectionError(f"broke off {answer.length} bytes before the end")
    return data.getvalue()


@functools.cache
def user_agent() -> str:
    """What requests say they are from: some hosts refuse Python's own name."""
    try:
        return f"coat-vlm/{version('coat-vlm')}"
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "coat-vlm"
