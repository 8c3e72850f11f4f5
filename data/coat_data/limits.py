"""Limits on what the rows of a data set may take, and the hosts that they may name.

Data files come from third parties: a row may name any address, and a small file may stand for a
large one. Every limit is a recipe key (``limits.NAME``, ``network``) and an option of the data
commands (``--limit NAME=NUMBER``, ``--network``).
"""

import ipaddress
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from os import PathLike

_PUBLIC = "*"
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of compressed archives and of media by address."""

    archive_bytes: int | None = None
    """Bytes that a compressed file may be unpacked to; default 250 times its size, and at least
    1 GiB."""
    archive_members: int = 10_000_000
    """Members of a compressed tar."""
    archive_sample_bytes: int = 1 << 30
    """Bytes of one sample of a compressed tar, which is held in memory."""
    archive_wait_s: float = 60.0
    """Seconds until a compressed tar gives its next sample."""
    remote_bytes: int = 2 << 30
    """Bytes of an image or video over http, which is held in memory."""
    remote_s: float = 300.0
    """Seconds for an image or video over http."""
    remote_wait_s: float = 5.0
    """Seconds that a host of an image or video may take to connect, or send nothing."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"limits.{field.name}={value}; give a number above 0")

    @classmethod
    def parse(cls, settings: Sequence[str]) -> "Limits":
        """Return the limits of a command line's ``NAME=NUMBER`` settings.

        Raises:
            ValueError: a name is unknown, or a value is no number.
        """
        kinds = {field.name: float if field.name.endswith("_s") else int for field in fields(cls)}
        values = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in kinds:
                raise ValueError(f"--limits {setting}: choose NAME=NUMBER from {', '.join(kinds)}")
            try:
                values[name] = kinds[name](value)
            except ValueError:
                kind = "a number" if kinds[name] is float else "a whole number"
                raise ValueError(f"--limits {setting}: {value!r} is not {kind}") from None
        return cls(**values)

    def unpacked_bytes(self, packed_bytes: int) -> int:
        """Return the limit of the unpacked size of a file with ``packed_bytes`` bytes."""
        return self.archive_bytes or max(1 << 30, 250 * packed_bytes)


@dataclass(frozen=True, slots=True)
class Network:
    """The hosts that may be asked for files."""

    hosts: tuple[str, ...] = (_PUBLIC,)
    """Names or IP addresses, also private ones; ``*.example.org`` stands for all hosts below it,
    and ``*`` for every public host. For other schemes than http: ``s3://BUCKET``. Empty for
    none."""

    @classmethod
    def parse(cls, text: str) -> "Network":
        """Return the hosts of ``allow`` (every public one), ``deny`` (none) or ``HOST,HOST``."""
        named: dict[str, tuple[str, ...]] = {"allow": (_PUBLIC,), "deny": ()}
        return cls(named[text] if text in named else tuple(filter(None, text.split(","))))

    def with_hosts_of(self, *named: str | PathLike[str] | None) -> "Network":
        """Return these hosts and those of the addresses that the user named; none stay none."""
        hosts = {host_of(one): None for one in named if isinstance(one, str) and "://" in one}
        return Network((*self.hosts, *hosts)) if self.hosts and hosts else self

    def lists(self, host: str) -> bool:
        """Whether a host is listed by its name or IP address."""
        host = host.lower().rstrip(".")
        return any(
            host == entry or (entry.startswith("*.") and host.endswith(entry[1:]))
            for entry in map(str.lower, self.hosts)
        )

    def problem(self, host: str) -> str:
        """Return why a host may not be asked, by its name alone; empty if it may."""
        if not self.hosts:
            return "addresses are not read (network: deny)"
        if self.lists(host) or _PUBLIC in self.hosts:
            return ""
        return f"the host {host} is none of network.hosts: {', '.join(self.hosts)}"


def is_public(address: str) -> bool:
    """Whether an IP address is one of the Internet: not private, link-local, loopback, multicast.

    An IPv6 address that stands for an IPv4 address is judged by it.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is None and found not in _GLOBAL_UNICAST:
            return False
        found = inner or found
    return found.is_global and not found.is_multicast


def host_of(url: str) -> str:
    """Return the host of an http address, ``scheme://bucket`` of another one, in lower case.

    An address without a valid host gives an empty text; opening it reports this.
    """
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # such as a bracket without its end
        return ""
    if parts.scheme.lower() in ("http", "https"):
        return (parts.hostname or "").rstrip(".")
    return f"{parts.scheme}://{parts.netloc}".lower()
