"""Hosts that do not answer: after some failures in a row they are not asked for a while.

A data set may have thousands of links to a host that is down. Each would be tried several times,
for seconds; so its links fail at once until the pause is over. Then one is tried again.
"""

import time
import urllib.error

from coat_data.containers.http_request import is_http
from coat_data.sample import DataError, UnreachableError

FAILURES = 3
"""Links of one host that fail in a row, each tried several times, before it is left alone."""
PAUSE_S = 60.0
"""How long it is left alone, in seconds; again after each further failure."""

_OVERLOADED = (429, 502, 503, 504)
"""HTTP statuses that are about the host; with another one it has answered."""


class Hosts:
    """The http hosts that one process has asked, and how they failed."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float]] = {}

    def check(self, url: str) -> None:
        """Raise if the host of ``url`` is left alone now.

        Raises:
            UnreachableError: it is; says since when.
        """
        failures, last_s = self._failures.get(_host(url), (0, 0.0))
        passed_s = time.monotonic() - last_s
        if failures >= FAILURES and passed_s < PAUSE_S:
            raise UnreachableError(
                url,
                f"was not asked for: {failures} links of {_host(url)} in a row failed, the last "
                f"one {passed_s:.0f} s ago (an outage of the host, not of this file alone)",
                f"see whether the host is up; it is asked again {PAUSE_S:.0f} s after a failure",
            )

    def note(
        self, url: str, problem: DataError | None = None, cause: BaseException | None = None
    ) -> None:
        """What came of asking for ``url``.

        Args:
            url: an address; only those of http count, as others have no one host.
            problem: what was told of it; None for an answer.
            cause: the error behind it.
        """
        host = _host(url)
        answered = isinstance(cause, urllib.error.HTTPError) and cause.code not in _OVERLOADED
        if not isinstance(problem, UnreachableError) or answered:
            self._failures.pop(host, None)
        elif is_http(url):
            failures, _ = self._failures.get(host, (0, 0.0))
            self._failures[host] = (failures + 1, time.monotonic())


def _host(url: str) -> str:
    """Scheme, name and port."""
    return "/".join(url.split("/", 3)[:3])
