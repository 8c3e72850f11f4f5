"""Remote media: the same pixels as the files on disk, and one dead link is one bad row."""

import dataclasses
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from clips import write_clip
from encoders import jsonl, talk
from PIL import Image

from coat_cli.main import main
from coat_data.containers import http_file
from coat_data.limits import Limits
from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import Encoder
from coat_data.load.lengths import measure_rows
from coat_data.media import remote_media
from coat_data.media.image import image_size
from coat_data.media.remote_media import fetch_media
from coat_data.media.sample_media import MediaLoader
from coat_data.media.sampling import VideoSettings
from coat_data.media.tiling import TiledTransform
from coat_data.sample import DataError, Media, Sample, UnreachableError
from coat_data.text.chat import get_template
from coat_data.tools.export import export
from coat_data.tools.ingest import ingest
from coat_data.tools.lint import lint

IMAGES = ("large.jpg", "a b#1.png", "turned.jpg", "deep/small.webp")
HALF = (0.5, 0.5, 0.5)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_media, "WAITS_S", (0.0,))


def noise(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "deep").mkdir()
    noise(0, 900, 700).save(folder / IMAGES[0], quality=95)
    noise(1, 90, 60).save(folder / IMAGES[1])
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(2, 80, 40).save(folder / IMAGES[2], exif=exif)
    noise(3, 33, 44).save(folder / IMAGES[3])
    write_clip(folder / "clip.mp4", (np.asarray(noise(n, 64, 48)) for n in range(20)))
    return folder


def loaded(dataset: SampleDataset) -> list[tuple[Any, torch.Tensor]]:
    """What the header and what the pixels give, of each sample."""
    loader = MediaLoader(TiledTransform(32, HALF, HALF), VideoSettings(num_frames=4))
    found = []
    for sample in dataset.stream():
        assert isinstance(sample, Sample)
        plans = [loader.plan(medium) for medium in sample.media]
        opened = [loader.open(medium) for medium in sample.media]
        assert [plan.tiles for plan in plans] == [plan.tiles for plan, _ in opened]
        found.append((opened[0][0], loader.write(opened)))
    return found


@pytest.mark.parametrize("where", ["http root", "memory root", "rows"])
def test_pixels_and_sizes_are_those_of_the_files(
    folder: Path, tmp_path: Path, serve: Any, where: str
) -> None:
    rows = [*(talk(image=name) for name in IMAGES), talk(video="clip.mp4")]
    wanted = loaded(SampleDataset(jsonl(tmp_path / "a.jsonl", *rows), folder))
    root: str | Path = serve(folder).url
    if where == "memory root":
        root = "memory://pictures/set"
        for path in (path for path in folder.rglob("*") if path.is_file()):
            name = f"/pictures/set/{path.relative_to(folder)}"
            fsspec.filesystem("memory").pipe_file(name, path.read_bytes())
    if where == "rows":
        names = [name.replace("#", "%23") for name in IMAGES]  # as an address has it
        rows = [*(talk(image=f"{root}/{name}") for name in names), talk(video=f"{root}/clip.mp4")]
        root = f"{root}/elsewhere"
    dataset = SampleDataset(jsonl(tmp_path / "b.jsonl", *rows), root)
    for (plan, pixels), (other, expected) in zip(loaded(dataset), wanted, strict=True):
        assert plan == other
        assert torch.equal(pixels, expected)


def test_a_row_of_an_unreachable_medium_is_bad_and_no_other(
    folder: Path, tmp_path: Path, serve: Any
) -> None:
    url = serve(folder).url
    dead = serve(folder)
    dead.close()
    (folder / "page.jpg").write_text("<html>moved</html>")
    names = [
        f"{url}/large.jpg", f"{url}/none.jpg", f"{dead.url}/large.jpg", f"{url}/page.jpg",
        f"https://{'x' * 70}.org/a.jpg", "http://x:port/a.jpg",
    ]  # fmt: skip
    path = jsonl(tmp_path / "a.jsonl", *(talk(image=name) for name in names))
    problems: list[DataError] = []
    summary = lint(path, problems.append, media_root=url)
    assert (summary.rows, summary.bad) == (6, 5)
    assert summary.unreachable == sum(isinstance(one, UnreachableError) for one in problems) >= 1
    assert [problem.where for problem in problems] == [
        f"{path}:{number + 1}: {name}" for number, name in enumerate(names) if number
    ]
    for problem, words in zip(
        problems, ("404", "refused", "cannot identify", "", "nonnumeric port"), strict=True
    ):
        assert words in problem.problem
    with pytest.raises(DataError, match=r"a\.jsonl:2: http.*none\.jpg: cannot be read: .*404"):
        ingest(path, tmp_path / "out", media_root=url)


def test_an_outage_stops_measuring_and_a_missing_file_does_not(
    folder: Path, tmp_path: Path, serve: Any, make_tokenizer: Any
) -> None:
    """What is measured is kept for the run, so an outage must not look like a bad row."""
    tokenizer = make_tokenizer("qwen2")
    encoder = Encoder(
        tokenizer, get_template("chatml", tokenizer), TiledTransform(32, HALF, HALF),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tokens_per_image=4,
    )  # fmt: skip
    url = serve(folder).url
    names = ["large.jpg", "none.jpg"]
    rows = [talk(image=f"{url}/{name}") for name in names] + [talk(image="http://x:port/a.jpg")]
    source = SampleDataset(jsonl(tmp_path / "a.jsonl", *rows), url)
    options: dict[str, Any] = {"num_workers": 1, "skip_bad": True}
    (sizes,) = measure_rows(source, encoder.measure, range(3), **options)
    assert [bool(tokens) for tokens, *_ in sizes] == [True, False, False]
    dead = serve(folder)
    dead.close()
    path = jsonl(tmp_path / "b.jsonl", *rows, talk(image=f"{dead.url}/large.jpg"))
    with pytest.raises(UnreachableError, match=r"b\.jsonl:4: http.*refused.*start again"):
        list(measure_rows(SampleDataset(path, dead.url), encoder.measure, range(4), **options))


class Talk:
    """A server that sends ``head`` and then ``number`` times ``piece``, until it is hung up."""

    def __init__(self, head: bytes, piece: bytes = b"", number: int = 0, pause_s: float = 0.0):
        self.sent = 0
        self.asked: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/a.jpg"
        self._message = head, piece, number, pause_s
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        head, piece, number, pause_s = self._message
        while True:
            with suppress(OSError), self._socket.accept()[0] as connection:
                self.asked.append(connection.recv(1 << 16))
                connection.sendall(head)
                for _ in range(number):
                    connection.sendall(piece)
                    self.sent += len(piece)
                    time.sleep(pause_s)


def remote(url: str, **limits: Any) -> Media:
    """An image at an address of this machine, which the user named as media root."""
    return Media(kind="image", path=url, root=url, limits=Limits(**limits))


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


def test_time_and_size_are_limited(
    folder: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "not read within 0.3 s, limits.remote_s"
    for server in (
        Talk(OK, b"x", 1000, 0.05),  # a slow body
        Talk(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", 95, 0.05),  # headers without an end
    ):
        with pytest.raises(UnreachableError, match=slow):
            fetch_media(remote(server.url, remote_s=0.3))
    with pytest.raises(DataError, match=r"larger than 1000 bytes -> .* raise limits\.remote_bytes"):
        image_size(remote(f"{serve(folder).url}/large.jpg", remote_bytes=1000))
    with pytest.raises(UnreachableError, match="ended 999995 bytes early"):
        fetch_media(remote(Talk(OK, b"x", 5).url))
    monkeypatch.setattr(http_file, "_SILENT_ROW_S", 0.2)
    with pytest.raises(UnreachableError, match="timed out"):
        fetch_media(remote(Talk(b"", b"", 1, 2.0).url))


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "localhost", "2130706433", "[::ffff:10.0.0.1]", "%31%32%37.0.0.1"],
)
def test_rows_reach_no_address_that_is_not_public(tmp_path: Path, host: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", talk(image=f"http://{host}/latest/meta-data"))
    problems: list[DataError] = []
    lint(path, problems.append)
    (problem,) = problems
    assert problem.where.startswith(f"{path}:1: http://")
    assert "which is not public" in problem.problem


def test_public_addresses() -> None:
    public = ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")
    assert all(map(http_file.is_public, public))
    private = ("224.0.0.1", "100.64.0.1", "fec0::1", "64:ff9b:1::7f00:1", "2002:7f00:1::")
    assert not any(map(http_file.is_public, private))


def test_a_name_is_judged_by_its_addresses(
    monkeypatch: pytest.MonkeyPatch, serve: Any, folder: Path
) -> None:
    port = serve(folder).url.rpartition(":")[2]
    resolve = socket.getaddrinfo

    def resolved(host: str, *args: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host == "images.example.org" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    media = Media(kind="image", path=f"http://images.example.org:{port}/turned.jpg")
    with pytest.raises(
        DataError, match=r"images\.example\.org has the address 127\.0\.0\.1, which"
    ):
        fetch_media(media)
    named = dataclasses.replace(media, root=f"http://images.example.org:{port}")
    assert fetch_media(named).data == (folder / "turned.jpg").read_bytes()
    # The connection goes to the addresses that were checked, however the name resolves later.
    answers = iter(["127.0.0.1"])
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *args, **options: resolve(
            next(answers, "10.0.0.1") if host == "images.example.org" else host, *args, **options
        ),
    )
    monkeypatch.setattr(http_file, "is_public", lambda _: True)
    assert fetch_media(media).data == (folder / "turned.jpg").read_bytes()


def test_each_hop_of_a_redirect_is_checked(serve: Any, folder: Path) -> None:
    good = f"{serve(folder).url}/turned.jpg"

    def redirect(target: str) -> Talk:
        head = f"HTTP/1.1 302 Found\r\nLocation: {target}\r\n\r\n"
        return Talk(head.encode(), bytes(1 << 20), 256)

    server = redirect(good)
    assert fetch_media(remote(server.url)).data == (folder / "turned.jpg").read_bytes()
    assert server.sent < 64 << 20  # buffers of the sockets: the body of a redirect is not read
    for target, words in (
        (good.replace("127.0.0.1", "127.0.0.2"), "127.0.0.2, which is not public"),
        ("ftp://127.0.0.1/a", "unknown url type: ftp"),
        ("file:///etc/passwd", "not allowed"),
    ):
        with pytest.raises(DataError, match=words):
            fetch_media(remote(redirect(target).url))


def test_a_proxy_may_be_private_and_the_host_behind_it_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    proxy = Talk(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndata")
    refusing = Talk(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("https_proxy", refusing.url)
    assert fetch_media(Media(kind="image", path="http://8.8.8.8/a.jpg")).data == b"data"
    with pytest.raises(DataError, match="Tunnel connection failed: 502"):
        fetch_media(Media(kind="image", path="https://8.8.8.8/a.jpg"))
    asked = [*proxy.asked, *refusing.asked]
    assert [request.split()[1] for request in asked[:2]] == [
        b"http://8.8.8.8/a.jpg",
        b"8.8.8.8:443",
    ]
    for scheme in ("http", "https"):
        with pytest.raises(DataError, match=r"169\.254\.169\.254, which is not public"):
            fetch_media(Media(kind="image", path=f"{scheme}://169.254.169.254/a"))
    assert [*proxy.asked, *refusing.asked] == asked


def test_the_network_can_be_denied(
    tmp_path: Path, serve: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(folder).url
    path = str(jsonl(tmp_path / "a.jsonl", talk(image="turned.jpg")))
    command = ["data", "lint", path, "--media-root", url, "--check-media", "decode"]
    assert main(command) == 0
    assert main([*command, "--network", "deny"]) == 1
    assert f"{path}:1: {url}/turned.jpg: URLs are not read" in capsys.readouterr().out
    assert main([*command, "--limits", "remote_bytes=50"]) == 1
    assert main([*command, "--limits", "no_such=50"]) == 2
    assert "choose NAME=NUMBER from archive_bytes" in capsys.readouterr().err


def test_addresses_are_kept_or_copied(folder: Path, tmp_path: Path, serve: Any) -> None:
    root = serve(folder).url
    path = jsonl(tmp_path / "a.jsonl", talk(image="large.jpg"), talk(image=f"{root}/turned.jpg"))
    files = [(folder / name).read_bytes() for name in ("large.jpg", "turned.jpg")]
    addresses = [f"{root}/large.jpg", f"{root}/turned.jpg"]
    ingest(path, tmp_path / "kept", media_root=root)
    kept = SampleDataset(tmp_path / "kept")
    assert [kept[number].media[0].path for number in range(2)] == addresses
    ingest(path, tmp_path / "own", media_root=root, embed_media=True)
    assert [SampleDataset(tmp_path / "own")[n].media[0].data for n in range(2)] == files
    summary = export(path, tmp_path / "copied", to="llava", media_root=root)
    assert (summary.rows, summary.left_out) == (2, 0)
    media = [sample.media[0] for sample in SampleDataset(summary.path).stream()]  # pyright: ignore
    assert [Path(medium.path or "").read_bytes() for medium in media] == files
