"""Media by address: the same pixels as the files on disk, and one dead link is one bad row."""

import dataclasses
import io
import json
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, cast

import av
import fsspec
import numpy as np
import pytest
import torch
from av.video.stream import VideoStream
from PIL import Image

from coat_data.limits import Limits, Network
from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import EncodedSample, Encoder
from coat_data.load.lengths import measure_rows
from coat_data.load.loader import TrainLoader
from coat_data.media import remote_media
from coat_data.media.image import ImageTransform, image_size, open_image
from coat_data.media.sample_media import MediaLoader
from coat_data.media.sampling import VideoSettings
from coat_data.media.tiling import TiledTransform
from coat_data.mixture.sampler import Mixture, SamplerState
from coat_data.sample import DataError, Media, Sample, UnreachableError
from coat_data.text.chat import get_template
from coat_data.tools.export import export
from coat_data.tools.ingest import ingest
from coat_data.tools.lint import lint

IMAGES = ("large.jpg", "a b#1.png", "turned.jpg", "deep/small.webp")
HALF = (0.5, 0.5, 0.5)
LOCAL = Network(("127.0.0.1", "*"))


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
    noise(4, 1200, 600).save(folder / "chunks.png")  # its header may go on behind the pixels
    with av.open(str(folder / "clip.mp4"), "w") as container:  # the index stands at the end
        stream = cast(VideoStream, container.add_stream("libx264", rate=10))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(20):
            frame = av.VideoFrame.from_image(noise(number, 64, 48))
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return folder


def row(**media: Any) -> dict[str, Any]:
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    return {"id": str(next(iter(media.values()))), **media, "conversations": said}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(one) for one in rows))
    return path


def loaded(dataset: SampleDataset) -> list[tuple[Any, torch.Tensor]]:
    """What the header and what the pixels give, of each sample."""
    loader = MediaLoader(TiledTransform(32, HALF, HALF), VideoSettings(num_frames=4))
    found = []
    for sample in dataset.stream():
        assert isinstance(sample, Sample)
        plans = [loader.plan(medium) for medium in sample.media]
        opened = [loader.open(medium) for medium in sample.media]
        assert [plan.tiles for plan in plans] == [plan.tiles for plan, _ in opened]
        found.append((opened[0][0], loader.write(opened, None)))
    return found


@pytest.mark.parametrize("where", ["http root", "plain root", "memory root", "rows"])
def test_pixels_and_sizes_are_those_of_the_files(
    folder: Path, tmp_path: Path, serve: Any, where: str
) -> None:
    rows = [*(row(image=name) for name in IMAGES), row(video="clip.mp4")]
    wanted = loaded(SampleDataset(write(tmp_path / "a.jsonl", *rows), folder))
    root: str | Path = serve(folder, ranges=where != "plain root").url
    if where == "memory root":
        root = "memory://pictures/set"
        for path in (path for path in folder.rglob("*") if path.is_file()):
            name = f"/pictures/set/{path.relative_to(folder)}"
            fsspec.filesystem("memory").pipe_file(name, path.read_bytes())
    if where == "rows":
        names = [name.replace("#", "%23") for name in IMAGES]  # as an address has it
        rows = [*(row(image=f"{root}/{name}") for name in names), row(video=f"{root}/clip.mp4")]
        root = tmp_path
    dataset = SampleDataset(write(tmp_path / "b.jsonl", *rows), root, network=LOCAL)
    for (plan, pixels), (other, expected) in zip(loaded(dataset), wanted, strict=True):
        assert plan == other
        assert torch.equal(pixels, expected)


def test_a_header_is_a_range_and_a_file_one_request(folder: Path, serve: Any) -> None:
    server = serve(folder)
    media = Media(kind="image", path=f"{server.url}/large.jpg", network=LOCAL)
    assert (folder / "large.jpg").stat().st_size > 4 << 16
    assert image_size(media) == (900, 700)
    assert [span for _, span in server.asked] == ["bytes=0-0", "bytes=0-65535"]
    server.asked.clear()
    MediaLoader(TiledTransform(32, HALF, HALF), VideoSettings()).open(media)
    assert server.asked == [("/large.jpg", None)]
    server.asked.clear()
    chunks = dataclasses.replace(media, path=f"{server.url}/chunks.png")
    assert image_size(chunks) == (1200, 600)
    assert [span is None for _, span in server.asked] == [False] * 5 + [True]  # then as a whole


def test_a_row_of_an_unreachable_medium_is_bad_and_no_other(
    folder: Path, tmp_path: Path, serve: Any
) -> None:
    url = serve(folder).url
    dead = serve(folder)
    dead.close()
    (folder / "page.jpg").write_text("<html>moved</html>")
    names = [
        f"{url}/large.jpg", f"{url}/none.jpg", f"{dead.url}/large.jpg", f"{url}/page.jpg",
        f"https://{'x' * 70}.org/a.jpg", "http://x:port/a.jpg", "hf://nothing",
    ]  # fmt: skip
    path = write(tmp_path / "a.jsonl", *(row(image=name) for name in names))
    problems: list[DataError] = []
    summary = lint(path, problems.append, network=LOCAL)
    assert (summary.rows, summary.bad) == (7, 6)
    assert summary.unreachable == sum(isinstance(one, UnreachableError) for one in problems) >= 1
    assert [problem.where for problem in problems] == [
        f"{path}:{number}: {name}" for number, name in enumerate(names) if number
    ]
    for problem, words in zip(
        problems, ("404", "refused", "cannot identify", "", "nonnumeric port", ""), strict=True
    ):
        assert words in problem.problem
    with pytest.raises(DataError, match=r"a\.jsonl:1: http.*none\.jpg: cannot be read: .*404"):
        ingest(path, tmp_path / "out", network=LOCAL)
    videos = write(tmp_path / "v.jsonl", row(video=f"{url}/clip.mp4"), row(video=f"{url}/no.mp4"))
    for check in ("header", "decode"):
        problems.clear()
        lint(videos, problems.append, check_media=check, network=LOCAL)
        assert [problem.where for problem in problems] == [f"{videos}:1: {url}/no.mp4"]


class Squares:
    """Encodes the media of a sample."""

    def __call__(self, sample: Sample, rng: np.random.Generator | None) -> EncodedSample:
        loader = MediaLoader(ImageTransform(8, HALF, HALF), VideoSettings())
        pixels = loader.write([loader.open(medium) for medium in sample.media], rng)
        ids = torch.full((2,), 1 + sample.row)
        return EncodedSample(input_ids=ids, labels=ids, pixel_values=pixels)


def test_training_replaces_and_counts_them(folder: Path, tmp_path: Path, serve: Any) -> None:
    url = serve(folder).url
    rows = [row(image=f"{url}/{name}") for name in ("none.jpg", *("large.jpg", "turned.jpg") * 3)]
    source = SampleDataset(write(tmp_path / "a.jsonl", *rows), network=LOCAL)
    options: dict[str, Any] = {
        "batch_size": 7, "micro_batch_size": 7, "rank": 0, "world_size": 1, "seed": 1,
        "replace_bad": True, "pad_token_id": 0,
    }  # fmt: skip
    batches = []
    for workers in (0, 1):
        loader = TrainLoader(
            [source], Mixture([7], [None], [None], seed=1), cast(Any, Squares()),
            num_workers=workers, **options,
        )  # fmt: skip
        ((step,),) = islice(loader.steps(SamplerState(0)), 1)
        assert [(bad.source, bad.row) for bad in step.bad] == [(0, 0)]
        batches.append(step.batch)
    for name, values in batches[0].items():
        assert torch.equal(values, batches[1][name])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_outage_stops_measuring_and_a_missing_file_does_not(
    folder: Path, tmp_path: Path, serve: Any, make_tokenizer: Any, workers: int
) -> None:
    """What is measured is kept for the run, so an outage must not look like a bad row."""
    tokenizer = make_tokenizer("qwen2")
    encoder = Encoder(
        tokenizer, get_template("chatml", tokenizer), TiledTransform(32, HALF, HALF),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tokens_per_image=4,
    )  # fmt: skip
    url = serve(folder).url
    names = ["large.jpg", "none.jpg"]
    rows = [row(image=f"{url}/{name}") for name in names] + [row(image="http://x:port/a.jpg")]
    source = SampleDataset(write(tmp_path / "a.jsonl", *rows), network=LOCAL)
    options: dict[str, Any] = {"num_workers": workers, "skip_bad": True}
    (sizes,) = measure_rows(source, encoder.measure, range(3), **options)
    assert [bool(tokens) for tokens, _ in sizes] == [True, False, False]
    dead = serve(folder)
    dead.close()
    path = write(tmp_path / "b.jsonl", *rows, row(image=f"{dead.url}/large.jpg"))
    with pytest.raises(UnreachableError, match=r"b\.jsonl:3: http.*refused.*start again"):
        list(measure_rows(SampleDataset(path, network=LOCAL), encoder.measure, range(4), **options))


def test_a_server_has_so_much_time(folder: Path, serve: Any) -> None:
    def media(name: str, limits: Limits, **options: Any) -> Media:
        url = serve(folder, **options).url
        return Media(kind="image", path=f"{url}/{name}", network=LOCAL, limits=limits)

    silent = media("turned.jpg", Limits(remote_wait_s=0.2), pause_s=2.0)
    for read in (image_size, open_image):
        with pytest.raises(DataError, match=r"turned\.jpg: cannot be read: .*timed out"):
            read(silent)
    slow = media("turned.jpg", Limits(remote_s=0.3), piece=8, pause_s=0.05)
    for read in (image_size, open_image):
        with pytest.raises(DataError, match=r"not read within 0\.3 s, limits\.remote_s"):
            read(slow)
    with pytest.raises(DataError, match=r"larger than 1000 bytes -> .* raise limits\.remote_bytes"):
        open_image(media("large.jpg", Limits(remote_bytes=1000)))


@pytest.mark.parametrize("root", ["memory://pictures/set", "https://host.org/set", "."])
@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "deep/../../secret.png",
        "/etc/secret.png",
        "file:///etc/secret.png",
        "FILE:///etc/secret.png",
        "local:///etc/secret.png",
        "ftp://host.org/a.png",
        "memory://pictures/secret.png",
        "memory://pictures/set/../secret.png",
        "s3://bucket/a::file:///etc/secret.png",
        "simplecache::file:///etc/secret.png",
        "zip://a.png::file:///etc/secret.zip",
    ],
)
def test_no_medium_leaves_its_root(tmp_path: Path, root: str, name: str) -> None:
    path = write(tmp_path / "a.jsonl", row(image=name))
    (sample,) = SampleDataset(path, tmp_path if root == "." else root).stream()
    if root == "." and name.startswith("simplecache"):  # a file of this name below the folder
        assert isinstance(sample, Sample)
        assert sample.media[0].path == str(tmp_path / "simplecache::file:/etc/secret.png")
        return
    assert isinstance(sample, DataError)
    assert "leaves the media root" in sample.problem or "address" in sample.problem


def test_addresses_are_kept_or_copied(folder: Path, tmp_path: Path, serve: Any) -> None:
    root = serve(folder).url
    path = write(tmp_path / "a.jsonl", row(image="large.jpg"), row(image=f"{root}/turned.jpg"))
    files = [(folder / name).read_bytes() for name in ("large.jpg", "turned.jpg")]
    addresses = [f"{root}/large.jpg", f"{root}/turned.jpg"]
    listed = tmp_path / "list.yaml"
    listed.write_text(json.dumps({"sources": [{"path": "a.jsonl", "media_root": root}]}))
    for source, options in ((path, {"media_root": root}), (listed, {})):
        ingest(source, tmp_path / f"kept-{source.stem}", network=LOCAL, **options)
        kept = SampleDataset(tmp_path / f"kept-{source.stem}", network=LOCAL)
        assert [kept[number].media[0].path for number in range(2)] == addresses
    ingest(path, tmp_path / "own", media_root=root, embed_media=True, network=LOCAL)
    assert [SampleDataset(tmp_path / "own")[n].media[0].data for n in range(2)] == files
    summary = export(path, tmp_path / "copied", to="llava", media_root=root, network=LOCAL)
    assert (summary.rows, summary.left_out) == (2, 0)
    media = [sample.media[0] for sample in SampleDataset(summary.path).stream()]  # pyright: ignore
    assert [Path(medium.path or "").read_bytes() for medium in media] == files
    assert Image.open(io.BytesIO(files[1])).size == (80, 40)
