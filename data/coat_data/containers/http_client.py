"""Requests over http and https, to hosts that are allowed, with limits of time and size.

Every hop of a redirect is checked by its scheme, by its host, and by the IP addresses that the host
has when it is connected to: a name of a row may stand for a private address. The connection goes to
the checked addresses, so a name that changes between check and connection gains nothing. A proxy of
the environment (``https_proxy``) is the user's own and is not checked; the host behind it is.
"""

import functools
import http.client
import io
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from coat_data.limits import Network, host_of, is_public
from coat_data.sample import DataError

_REMEDY = (
    "download the file, or list the host if you trust the row: network: {hosts: [NAME]}, "
    "or --network NAME (* for all public hosts)"
)


def is_http(url: str) -> bool:
    """Whether the standard library reads this address."""
    return url.startswith(("http://", "https://"))


def check_host(url: str, network: Network) -> None:
    """Check the host of an address by its name.

    Raises:
        DataError: the address may not be read.
    """
    if problem := network.problem(host_of(url)):
        raise DataError(url, problem, _REMEDY)


def request(
    url: str,
    span: tuple[int, int] | None,
    timeout_s: float,
    network: Network,
    max_s: float = math.inf,
) -> Any:
    """Request a byte range (start, stop), or the whole file.

    Args:
        url: the address.
        span: first byte, and the byte after the last one.
        timeout_s: seconds to connect, and seconds without data.
        network: hosts that may be asked.
        max_s: seconds for headers, redirects and the body, which the caller reads.

    Raises:
        OSError: the request failed; TimeoutError after ``max_s``, also while the body is read.
        DataError: a host is not allowed, or a redirect leads to another scheme.
    """
    headers = {"Accept-Encoding": "identity", "User-Agent": _user_agent()}
    if span is not None:
        headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
    try:
        opener = _opener(network, max_s)
        return opener.open(urllib.request.Request(url, headers=headers), None, timeout_s)
    except DataError as error:
        raise error if error.where == url else error.within(f"{url} (redirected)") from error


def read_body(answer: Any, url: str, max_bytes: int) -> bytes:
    """Read the body of an answer.

    Raises:
        DataError: it is larger than ``max_bytes``.
        TimeoutError: it takes longer than :func:`request` was told.
        ConnectionError: it breaks off.
    """
    data = io.BytesIO()
    while chunk := answer.read1(1 << 20):
        data.write(chunk)
        if data.tell() > max_bytes:
            problem = f"is larger than {max_bytes} bytes"
            raise DataError(url, problem, "download it first, or raise limits.remote_bytes")
    if answer.length:  # read1 raises no error for a truncated response
        raise ConnectionError(f"broke off {answer.length} bytes before the end")
    return data.getvalue()


@functools.cache
def _user_agent() -> str:
    """Return the User-Agent header: some hosts refuse Python's default."""
    try:
        return f"coat-vlm/{version('coat-vlm')}"
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "coat-vlm"


def _opener(network: Network, max_s: float) -> urllib.request.OpenerDirector:
    """Return an opener without urllib's handlers of ftp, file and data."""
    opener = urllib.request.OpenerDirector()
    until = time.monotonic() + max_s
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        _Connections(network, until, max_s),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        if not is_http(newurl.lower()):
            raise DataError(newurl, "is no address of http or https", "remove the row")
        fp.close()  # the base class would read a body of any size
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens http and https addresses with :func:`_checked` connections."""

    def __init__(self, network: Network, until: float, max_s: float) -> None:
        super().__init__()
        self._limits = network, until, max_s

    def http_open(self, req: urllib.request.Request) -> Any:
        return self._open(http.client.HTTPConnection, req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self._open(http.client.HTTPSConnection, req)

    def _open(self, kind: type[http.client.HTTPConnection], req: urllib.request.Request) -> Any:
        make = _checked(kind, req, *self._limits)
        return self.do_open(make, req)  # pyright: ignore[reportArgumentType]


def _checked(
    kind: type[http.client.HTTPConnection],
    req: urllib.request.Request,
    network: Network,
    until: float,
    max_s: float,
) -> Callable[..., http.client.HTTPConnection]:
    """Return a constructor of connections that check the addresses of their host."""
    url = req.full_url
    check_host(url, network)
    tunnel = getattr(req, "_tunnel_host", None)
    proxied = req.has_proxy() or tunnel is not None

    def connect(address: tuple[str, int], timeout: float, *_: Any) -> socket.socket:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        if proxied:
            _check_behind_proxy(url, network)
        else:
            _check_addresses(url, address[0], found, network)
        return _connect(found, timeout)

    def make(host: str, **options: Any) -> http.client.HTTPConnection:
        connection = kind(host, **options)
        connection._create_connection = connect  # pyright: ignore[reportAttributeAccessIssue]
        connection.response_class = answer  # pyright: ignore[reportAttributeAccessIssue]
        return connection

    def answer(sock: Any, **options: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, **options)
        timed = _TimedSocket(response.fp.detach(), sock, until, max_s)
        response.fp = io.BufferedReader(timed)
        return response

    return make


class _TimedSocket(io.RawIOBase):
    """The bytes of a socket, read until a time of the clock ``time.monotonic``."""

    def __init__(
        self, stream: io.RawIOBase, sock: socket.socket, until: float, max_s: float
    ) -> None:
        self._stream, self._socket, self._until, self._max_s = stream, sock, until, max_s
        self._timeout_s = sock.gettimeout() or 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        left = self._until - time.monotonic()
        self._socket.settimeout(max(min(self._timeout_s, left), 1e-3))
        try:
            if left > 0:
                return self._stream.readinto(buffer)
        except TimeoutError:
            if left > self._timeout_s:
                raise
        raise TimeoutError(f"not read within {self._max_s:g} s, limits.remote_s")

    def close(self) -> None:
        self._stream.close()
        super().close()


def _check_behind_proxy(url: str, network: Network) -> None:
    """Check the host behind a proxy, if this machine can resolve it."""
    try:
        found = socket.getaddrinfo(host_of(url), None, type=socket.SOCK_STREAM)
    except OSError:
        return  # only the proxy knows the name
    _check_addresses(url, host_of(url), found, network)


def _check_addresses(url: str, host: str, found: list[Any], network: Network) -> None:
    """Raise DataError if a host that is not listed has an address that is not public."""
    if network.lists(host):
        return
    if problem := network.problem(host):
        raise DataError(url, problem, _REMEDY)
    for *_, place in found:
        if not is_public(place[0]):
            raise DataError(
                url, f"the host {host} has the address {place[0]}, which is not public", _REMEDY
            )


def _connect(found: list[Any], timeout_s: float) -> socket.socket:
    """Connect to one of the addresses within ``timeout_s`` seconds in all.

    Each address gets an equal part of the time that is left: the first may be one of IPv6, which
    this machine cannot reach.
    """
    until = time.monotonic() + timeout_s
    failure = OSError("the host has no address")
    for number, (family, kind, protocol, _, place) in enumerate(found):
        connection = socket.socket(family, kind, protocol)
        try:
            part_s = (until - time.monotonic()) / (len(found) - number)
            connection.settimeout(max(part_s, 0.01))
            connection.connect(place)
        except OSError as error:
            connection.close()
            failure = error
        else:
            connection.settimeout(timeout_s)
            return connection
    raise failure
