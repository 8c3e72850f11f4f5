"""What servers are told of who asks, and which addresses are asked at all."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coat_cli.main import main
from coat_data.limits import Limits, Network, is_public
from coat_data.load.dataset import SampleDataset
from coat_data.media.image import image_size
from coat_data.media.remote_media import fetch_media
from coat_data.sample import DataError, Media, Sample, UnreachableError
from coat_data.tools.lint import lint

HOST = "127.0.0.1"


def test_requests_say_who_asks() -> None:
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("User-Agent"))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *args: object) -> None:
            """Not to the terminal."""

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://{HOST}:{server.server_address[1]}/a.jpg"
        assert fetch_media(Media(kind="image", path=url, network=Network((HOST,)))).data == b"ok"
        server.shutdown()
    assert asked == [f"coat-vlm/{version('coat-vlm')}"]


@pytest.fixture
def redirecting() -> Iterator[Any]:
    """A function that starts a server which redirects to an address; returns its own."""
    started: list[ThreadingHTTPServer] = []

    def start(target: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(302)
                self.send_header("Location", target)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Not to the terminal."""

        started.append(ThreadingHTTPServer((HOST, 0), Handler))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"http://{HOST}:{started[-1].server_address[1]}/a.jpg"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def rows(path: Path, *addresses: str) -> Path:
    said = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}]
    lines = (json.dumps({"image": address, "conversations": said}) for address in addresses)
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "127.0.0.1", "localhost", "2130706433", "0x7f.1", "10.0.0.1", "[::1]",
     "0.0.0.0", "[::ffff:10.0.0.1]", "[64:ff9b::a9fe:a9fe]", "%31%32%37.0.0.1"],
)  # fmt: skip
def test_rows_reach_no_address_that_is_not_public(tmp_path: Path, host: str) -> None:
    problems: list[DataError] = []
    lint(rows(tmp_path / "a.jsonl", f"http://{host}/latest/meta-data"), problems.append)
    (problem,) = problems
    assert problem.where.startswith(f"{tmp_path}/a.jsonl:0: http://")
    assert "which is not public" in problem.problem
    assert "network: {hosts: [NAME]}" in problem.remedy


def test_a_name_is_judged_by_its_addresses(
    monkeypatch: pytest.MonkeyPatch, serve: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")
    port = int(serve(tmp_path).url.rpartition(":")[2])
    resolve = socket.getaddrinfo

    def resolved(host: str, *args: Any, **options: Any) -> Any:
        return resolve(HOST if host == "images.example.org" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    url = f"http://images.example.org:{port}/a.jpg"
    with pytest.raises(
        DataError, match=r"images\.example\.org has the address 127\.0\.0\.1, which"
    ):
        fetch_media(Media(kind="image", path=url))
    for hosts in ("images.example.org", "*.example.org"):
        assert fetch_media(Media(kind="image", path=url, network=Network((hosts,)))).data == b"data"
    with pytest.raises(DataError, match=r"is none of network\.hosts: 127"):
        fetch_media(Media(kind="image", path=url, network=Network((HOST,))))


def test_each_hop_of_a_redirect_is_checked(redirecting: Any, serve: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")
    good = f"{serve(tmp_path).url}/a.jpg"
    listed = Network((HOST, "*"))
    media = [
        Media(kind="image", path=redirecting(target), network=listed)
        for target in (good, good.replace(HOST, "127.0.0.2"), "ftp://127.0.0.1/a", "file:///etc/passwd")
    ]  # fmt: skip
    assert fetch_media(media[0]).data == b"data"
    for medium, words in zip(
        media[1:],
        ("127.0.0.2, which is not public", "no address of http", "not allowed"),
        strict=True,
    ):
        with pytest.raises(DataError, match=words) as caught:
            fetch_media(medium)
        assert str(medium.path) in str(caught.value)


def test_the_network_can_be_closed_or_opened_for_hosts(tmp_path: Path, serve: Any) -> None:
    (tmp_path / "shard.jsonl").write_text(rows(tmp_path / "x.jsonl", "a.png").read_text())
    url = serve(tmp_path).url
    path = rows(tmp_path / "a.jsonl", "https://example.org/a.png", "s3://bucket/a.png", f"{url}/a")
    for setting, expected in (
        ("deny", ("deny", "deny", "deny")),
        ("127.0.0.1,s3://bucket", ("none of network.hosts", "", "")),
        ("allow", ("", "", "")),
    ):
        dataset = SampleDataset(path, network=Network.parse(setting))
        for row, words in enumerate(expected):
            if words:
                with pytest.raises(DataError, match=rf"a\.jsonl:{row}: .*{words}"):
                    dataset[row]
            else:
                assert dataset[row].media[0].network == Network.parse(setting)
    assert Network.parse("allow") == Network()
    (named,) = SampleDataset(f"{url}/shard.jsonl", url).stream()  # the user named the host
    assert isinstance(named, Sample)
    assert named.media[0].network == Network(("*", HOST))
    rows(tmp_path / "own.jsonl", f"{url}/x.jsonl", "http://127.0.0.2/x.jsonl")
    own, other = (SampleDataset(f"{url}/own.jsonl")[row].media[0] for row in range(2))
    assert fetch_media(own).data == (tmp_path / "x.jsonl").read_bytes()
    with pytest.raises(DataError, match="which is not public"):
        fetch_media(other)
    with pytest.raises(DataError, match="network: deny"):
        SampleDataset(f"{url}/shard.jsonl", network=Network.parse("deny"))
    assert all(map(is_public, ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")))
    private = (
        "224.0.0.1",
        "100.64.0.1",
        "fec0::1",
        "::7f00:1",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
    )
    assert not any(map(is_public, private))


def test_a_silent_host_is_asked_once(tmp_path: Path) -> None:
    accepted: list[socket.socket] = []
    with socket.create_server((HOST, 0)) as silent:

        def accept() -> None:
            while True:
                try:
                    accepted.append(silent.accept()[0])
                except OSError:
                    return  # closed

        threading.Thread(target=accept, daemon=True).start()
        url = f"http://{HOST}:{silent.getsockname()[1]}/a.jpg"
        media = Media(
            kind="image", path=url, network=Network((HOST,)), limits=Limits(remote_wait_s=0.3)
        )
        for number, read in enumerate((image_size, fetch_media), 1):
            with pytest.raises(UnreachableError, match="timed out"):
                read(media)
            assert len(accepted) == number
    for connection in accepted:
        connection.close()


def test_the_command_line_opens_hosts_and_raises_limits(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    path = rows(tmp_path / "a.jsonl", f"{serve(tmp_path).url}/a.png")
    assert main(["data", "lint", str(path)]) == 1
    assert "--network NAME" in capsys.readouterr().out
    assert main(["data", "lint", str(path), "--network", HOST]) == 0
    assert main(["data", "lint", str(path), "--network", "deny"]) == 1
    decode = ["data", "lint", str(path), "--network", HOST, "--check-media", "decode"]
    assert main([*decode, "--limits", "remote_bytes=50"]) == 1
    assert "larger than 50 bytes" in capsys.readouterr().out
    assert main([*decode, "--limits", "no_such=50"]) == 2
    assert "choose NAME=NUMBER from archive_bytes" in capsys.readouterr().err


@pytest.fixture
def talking() -> Iterator[Any]:
    """A function that starts a server which sends a head and then pieces, until it is hung up."""
    with ExitStack() as stack:

        def start(head: bytes, piece: bytes, number: int, pause_s: float) -> tuple[str, list[int]]:
            sent: list[int] = []
            server = stack.enter_context(socket.create_server((HOST, 0)))

            def talk() -> None:
                with suppress(OSError):  # closed by the test, or by the client
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(head)
                        for _ in range(number):
                            connection.sendall(piece)
                            sent.append(len(piece))
                            time.sleep(pause_s)

            thread = threading.Thread(target=talk, daemon=True)
            thread.start()
            stack.callback(thread.join)
            return f"http://{HOST}:{server.getsockname()[1]}/a.jpg", sent

        yield start


def test_slow_headers_end_with_the_time_of_a_medium(talking: Any) -> None:
    url, _ = talking(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", 95, 0.05)
    limits = Limits(remote_s=0.5)
    medium = Media(kind="image", path=url, network=Network((HOST,)), limits=limits)
    with pytest.raises(UnreachableError, match=r"not read within 0\.5 s, limits\.remote_s"):
        fetch_media(medium)


def test_the_body_of_a_redirect_is_not_read(talking: Any, serve: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")
    head = f"HTTP/1.1 302 Found\r\nLocation: {serve(tmp_path).url}/a.jpg\r\n\r\n".encode()
    url, sent = talking(head, bytes(1 << 20), 256, 0.0)
    assert fetch_media(Media(kind="image", path=url, network=Network((HOST,)))).data == b"data"
    assert sum(sent) < 64 << 20  # buffers of the two sockets


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch, serve: Any, tmp_path: Path
) -> None:
    """As with a host that has an address of IPv6 that this machine cannot reach."""
    (tmp_path / "a.jpg").write_bytes(b"data")
    port = int(serve(tmp_path).url.rpartition(":")[2])
    with socket.create_server((HOST, 0)) as closed:
        unused = closed.getsockname()[1]
    waits: list[float] = []

    class Recorded(socket.socket):
        def settimeout(self, value: float | None) -> None:
            waits.append(value or 0.0)
            super().settimeout(value)

    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (HOST, place)) for place in (unused, port)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", Recorded)
    medium = Media(kind="image", path=f"http://{HOST}:{port}/a.jpg", network=Network((HOST,)))
    assert fetch_media(medium).data == b"data"
    assert waits[0] == pytest.approx(Limits().remote_wait_s / 2, abs=0.1)


def test_a_proxy_may_be_private_and_the_host_behind_it_not(
    monkeypatch: pytest.MonkeyPatch, serve: Any, tmp_path: Path
) -> None:
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"data")

        def do_CONNECT(self) -> None:
            asked.append(self.path)
            self.send_error(502)

        def log_message(self, format: str, *args: object) -> None:
            """Not to the terminal."""

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer((HOST, 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://{HOST}:{server.server_port}")
        assert fetch_media(Media(kind="image", path="http://8.8.8.8/a.jpg")).data == b"data"
        with pytest.raises(DataError, match="Tunnel connection failed: 502"):
            fetch_media(Media(kind="image", path="https://8.8.8.8/a.jpg"))
        assert set(asked) == {"http://8.8.8.8/a.jpg", "8.8.8.8:443"}
        asked.clear()
        for scheme in ("http", "https"):
            with pytest.raises(DataError, match=r"169\.254\.169\.254, which is not public"):
                fetch_media(Media(kind="image", path=f"{scheme}://169.254.169.254/a"))
        assert not asked
        server.shutdown()
