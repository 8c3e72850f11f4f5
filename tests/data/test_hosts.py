"""A host that does not answer is left alone; it is an outage, and other hosts are not meant."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from coat_data import remote_media
from coat_data.containers import hosts
from coat_data.containers.hosts import FAILURES, Hosts
from coat_data.remote_media import fetched
from coat_data.sample import DataError, Media, UnreachableError


class Server:
    """Answers with a status, and notes what it is asked."""

    def __init__(self) -> None:
        self.status = 200
        self.asked: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path, self.headers.get("User-Agent")))
                self.send_response(outer.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, format: str, *args: Any) -> None:
                """Not to the terminal."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def start() -> Iterator[Callable[[], Server]]:
    started: list[Server] = []

    def new() -> Server:
        started.append(Server())
        return started[-1]

    yield new
    for server in started:
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, for the pauses of hosts."""
    now = [1000.0]
    monkeypatch.setattr(remote_media, "WAITS_S", (0.0,))
    monkeypatch.setattr(remote_media, "_HOSTS", Hosts())
    monkeypatch.setattr(hosts.time, "monotonic", lambda: now[0])
    return now


def read(url: str) -> bytes | None:
    return fetched(Media(kind="image", path=url)).data


def test_a_host_that_fails_is_left_alone_for_a_while(
    start: Callable[[], Server], clock: list[float]
) -> None:
    server, other = start(), start()
    server.status = 503
    for number in range(FAILURES):
        with pytest.raises(UnreachableError, match="503"):
            read(f"{server.url}/{number}.jpg")
    assert len(server.asked) == 2 * FAILURES  # each is tried twice
    clock[0] += 59
    server.status = 200
    for name in ("a.jpg", "b.jpg"):
        with pytest.raises(
            UnreachableError,
            match=rf"/{name}: was not asked for: 3 links of {server.url} in a row failed, the last "
            r"one 59 s ago \(an outage .* it is asked again 60 s after a failure",
        ):
            read(f"{server.url}/{name}")
    assert len(server.asked) == 2 * FAILURES
    assert read(f"{other.url}/a.jpg") == b"ok"
    # After the pause one link is tried; if that fails, too, the pause begins anew.
    clock[0] += 2
    server.status = 503
    for count in (2, 2):
        with pytest.raises(UnreachableError):
            read(f"{server.url}/a.jpg")
        assert len(server.asked) == 2 * FAILURES + count
    clock[0] += 61
    server.status = 200
    assert read(f"{server.url}/a.jpg") == b"ok"
    server.status = 503
    with pytest.raises(UnreachableError, match="503"):  # it counts from one again
        read(f"{server.url}/a.jpg")
    server.status = 200
    assert read(f"{server.url}/a.jpg") == b"ok"


@pytest.mark.parametrize("status", [404, 403, 500])
def test_a_host_that_answers_is_up(start: Callable[[], Server], status: int) -> None:
    server = start()
    server.status = status
    for _ in range(2 * FAILURES):
        with pytest.raises(DataError, match=str(status)):
            read(f"{server.url}/a.jpg")
    server.status = 200
    assert read(f"{server.url}/a.jpg") == b"ok"


def test_a_host_that_is_gone_fails_at_once(start: Callable[[], Server]) -> None:
    server = start()
    server.http.shutdown()
    server.http.server_close()
    for _ in range(FAILURES):
        with pytest.raises(UnreachableError, match="refused"):
            read(f"{server.url}/a.jpg")
    with pytest.raises(UnreachableError, match="was not asked for"):
        read(f"{server.url}/a.jpg")


def test_requests_say_who_asks(start: Callable[[], Server]) -> None:
    from importlib.metadata import version

    server = start()
    read(f"{server.url}/a.jpg")
    assert server.asked == [("/a.jpg", f"coat-vlm/{version('coat-vlm')}")]
