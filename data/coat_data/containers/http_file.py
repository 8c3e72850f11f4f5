"""Files over http and https, read with the standard library.

fsspec's own http file system needs aiohttp, which no other part of this program brings, and has no
hook for the check of addresses that rows name.
"""

import contextlib
import http.client
import ipaddress
import socket
import threading
import time
import urllib.parse
import urllib.request
from typing import Any

from coat_data.limits import Limits
from coat_data.sample import DataError

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SILENT_S = 60.0
_SILENT_ROW_S = 5.0
"""Seconds that a host which a row names may take to connect, or may send nothing."""


def is_http(url: str) -> bool:
    """Whether the address is one of http or https."""
    return url.startswith(("http://", "https://"))


def open_http(url: str) -> Any:
    """Open the file at an address that the user named; raises OSError."""
    return _open(url, _SILENT_S, _Connections(None))


def read_row_address(url: str, limits: Limits, trusted: str) -> bytes:
    """Read the file at an address that a row of a data set names.

    Each host of a chain of redirects must have public IP addresses only, except for the host of
    ``trusted``, which the user named. The proxy of the environment (``https_proxy``) is not
    checked; the host behind it is, if this machine can resolve it.

    DataError for another scheme, a private address or a file above the limit; OSError if the
    request failed; TimeoutError after ``limits.remote_s``.
    """
    if not is_http(url):
        raise DataError(url, "is not an address of http or https", "download the file")
    until = time.monotonic() + limits.remote_s
    connections = _Connections(urllib.parse.urlsplit(trusted).hostname or "")
    timer = threading.Timer(limits.remote_s, connections.abort)  # for headers that never end
    timer.start()
    data, missing = bytearray(), None
    try:
        with _open(url, _SILENT_ROW_S, connections) as answer:
            while time.monotonic() < until and (chunk := answer.read1(1 << 20)):
                data += chunk
                if len(data) > limits.remote_bytes:
                    problem = f"is larger than {limits.remote_bytes} bytes"
                    raise DataError(url, problem, "download it first, or raise limits.remote_bytes")
            missing = answer.length  # read1 raises no error if the body ends early
    except (OSError, http.client.HTTPException):
        if time.monotonic() < until:
            raise
    finally:
        timer.cancel()
    if time.monotonic() >= until:
        raise TimeoutError(f"not read within {limits.remote_s:g} s, limits.remote_s")
    if missing:
        raise ConnectionError(f"ended {missing} bytes early")
    return bytes(data)


def _open(url: str, timeout_s: float, connections: "_Connections") -> Any:
    headers = {"Accept-Encoding": "identity", "User-Agent": "coat-vlm"}
    opener = urllib.request.OpenerDirector()  # build_opener would add ftp, file and data
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        connections,
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener.open(urllib.request.Request(url, headers=headers), None, timeout_s)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        fp.close()  # urllib would read its body, of any size
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Connects to public addresses only, except for the host ``trusted``; to any if it is None."""

    def __init__(self, trusted: str | None) -> None:
        super().__init__()
        self._trusted = trusted
        self._current: http.client.HTTPConnection | None = None

    def http_open(self, req: urllib.request.Request) -> Any:
        return self._request(http.client.HTTPConnection, req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self._request(http.client.HTTPSConnection, req)

    def abort(self) -> None:
        """Shut the socket down, from another thread."""
        if self._current is not None and (sock := self._current.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _request(self, kind: type[http.client.HTTPConnection], req: urllib.request.Request) -> Any:
        url, host = req.full_url, urllib.parse.urlsplit(req.full_url).hostname or ""
        proxied = req.has_proxy() or getattr(req, "_tunnel_host", None) is not None

        def connect(address: tuple[str, int], *options: Any) -> socket.socket:
            ips = [address[0]]
            if self._trusted is not None and host != self._trusted:
                if proxied:
                    with contextlib.suppress(socket.gaierror):  # only the proxy knows the name
                        _public_addresses(url, host)
                else:
                    ips = _public_addresses(url, address[0])
            for ip in ips[:-1]:
                with contextlib.suppress(OSError):  # such as IPv6, which this machine cannot reach
                    return socket.create_connection((ip, address[1]), *options)
            return socket.create_connection((ips[-1], address[1]), *options)

        def make(name: str, **options: Any) -> http.client.HTTPConnection:
            self._current = kind(name, **options)
            self._current._create_connection = connect  # pyright: ignore[reportAttributeAccessIssue]
            return self._current

        return self.do_open(make, req)  # pyright: ignore[reportArgumentType]


def _public_addresses(url: str, host: str) -> list[str]:
    """Return the IP addresses of a host; DataError if one of them is not public."""
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    for address in found:
        if not is_public(address):
            problem = f"the host {host} has the address {address}, which is not public"
            remedy = "download the file, or make its host the media root if you trust the rows"
            raise DataError(url, problem, remedy)
    return found


def is_public(address: str) -> bool:
    """Whether an IP address, or the IPv4 address in an IPv6 one, is public and no multicast."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is None and found not in _GLOBAL_UNICAST:
            return False
        found = inner or found
    return found.is_global and not found.is_multicast
