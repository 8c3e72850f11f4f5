"""Limits of compressed files, images and videos that are far larger than their files."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from clips import write_clip
from encoders import Tar
from PIL import Image

from coat_data.limits import Limits
from coat_data.load.dataset import SampleDataset
from coat_data.media import image as image_module
from coat_data.media.image import ImageTransform, image_size, open_image
from coat_data.media.sampling import VideoSettings
from coat_data.media.video import VideoReader
from coat_data.sample import DataError, Media

MIB = 1 << 20


def sparse_tar(path: Path, size: int) -> Path:
    """A gzipped tar with one sparse member (GNU's old form) that has no data at all."""
    info = tarfile.TarInfo("a.jpg")
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:410] = b"%011o\0" % size + b"%011o\0" % 0
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(gzip.compress(bytes(header) + bytes(1024)))
    return path


def test_archive_bombs_end_with_the_file_and_the_limit(tmp_path: Path, tar: Tar) -> None:
    small = tar(tmp_path / "small.tar.gz", {"a.jpg": bytes(9000), "a.txt": b"a"})
    sparse = sparse_tar(tmp_path / "sparse.tar.gz", 3 << 30)
    for path, limits, words in (
        (small, Limits(archive_bytes=9000), "bytes unpack to more than 9000"),
        (sparse, Limits(), "is a sparse file of 3221225472 bytes"),
    ):
        assert path.stat().st_size < 6 * MIB
        with pytest.raises(DataError, match=words) as caught:
            SampleDataset(path, limits=limits)
        assert caught.value.where == str(path)


TOLD = {"from": "gpt", "value": "a"}
ROWS = [
    {"id": f"{n}", "conversations": [{"from": "human", "value": "q \xe9"}, TOLD]}
    for n in range(2000)
]  # fmt: skip


def packed(kind: str, data: bytes) -> bytes:
    if kind == "zst":
        return pyarrow.compress(data, "zstd", asbytes=True)
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[kind](data)


@pytest.mark.parametrize(
    ("kind", "form"), [("gz", "json"), ("zst", "jsonl"), ("bz2", "jsonl"), ("xz", "json")]
)
def test_compressed_json_is_read_by_number(tmp_path: Path, kind: str, form: str) -> None:
    text = json.dumps(ROWS) if form == "json" else "\n".join(map(json.dumps, ROWS))
    path = tmp_path / f"a.{form}.{kind}"
    path.write_bytes(packed(kind, text.encode()))
    dataset = SampleDataset(path)
    assert [dataset[n].id for n in (0, 1999, 7)] == ["0", "1999", "7"]
    assert dataset[5].where == f"{path}:6"
    assert dataset.media_root == tmp_path
    assert dataset.paths == (path,)
    path.write_bytes(packed(kind, text.replace('"7"', '"x"').encode()))
    assert SampleDataset(path)[7].id == "x"
    path.write_bytes(packed(kind, text.encode())[:-200])
    with pytest.raises(DataError, match=r"is damaged: .* -> copy it again"):
        SampleDataset(path)
    path.write_bytes(packed(kind, text.encode()))
    with pytest.raises(DataError, match=r"unpack to more than 1000 -> raise limits\.archive_bytes"):
        SampleDataset(path, limits=Limits(archive_bytes=1000))
    assert not list(tmp_path.glob("cache/unpacked/*/*.tmp"))


def test_a_copy_that_broke_off_is_made_again(tmp_path: Path) -> None:
    """Half of the rows were read, without a word."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed("gz", "\n".join(map(json.dumps, ROWS)).encode()))
    assert len(SampleDataset(path)) == len(ROWS)
    (copy,) = tmp_path.glob("cache/unpacked/*/a.jsonl")
    copy.write_bytes(b"".join(copy.read_bytes().splitlines(keepends=True)[:1000]))
    assert len(SampleDataset(path)) == len(ROWS)


def test_a_compressed_file_is_read_as_the_file_in_it(tmp_path: Path, tar: Tar) -> None:
    members = {f"{n}.{field}": f"{n}".encode() for n in range(3) for field in ("txt", "jpg")}
    plain = tar(tmp_path / "a.tar", members)
    (tmp_path / "b.tar.zst").write_bytes(packed("zst", plain.read_bytes()))
    (tmp_path / "b.tgz").write_bytes(packed("gz", plain.read_bytes()))
    for name in ("b.tar.zst", "b.tgz"):
        dataset = SampleDataset(tmp_path / name)
        assert dataset[2].media[0].data == b"2"
        assert dataset[2].where == f"{tmp_path / name}:3"


def video(path: Path, width: int, height: int, num_frames: int, codec: str = "libx264") -> Path:
    """A clip of nearly black frames: a few kilobytes."""
    frames = []
    for number in range(num_frames):
        frames.append(np.zeros((height, width, 3), np.uint8))
        frames[-1][:64, :64] = 16 * number
    options = {"preset": "ultrafast"} if codec == "libx264" else {}
    return write_clip(path, frames, codec, options=options)


def test_pixels_of_videos_have_limits(tmp_path: Path) -> None:
    large = Media(kind="video", path=str(video(tmp_path / "a.mp4", 6400, 5600, 1, "mpeg4")))
    words = r"a\.mp4: a frame has 6400 x 5600 pixels, and the limit is 33554432 .*max_frame_pixels"
    for read in (VideoReader(VideoSettings()).read, VideoReader(VideoSettings()).plan):
        with pytest.raises(DataError, match=words):
            read(large)
    small = Media(kind="video", path=str(video(tmp_path / "b.mp4", 64, 48, 8)))
    settings = VideoSettings(num_frames=8, max_total_pixels=7 * 64 * 48)
    with pytest.raises(
        DataError, match=r"8 frames of 64 x 48 .*raise model\.video\.max_total_pixels"
    ):
        VideoReader(settings).read(small)
    shrunk = VideoReader(settings).read(small, lambda frame: frame.resize((32, 24)))
    whole = VideoReader(VideoSettings(num_frames=8)).read(small)
    for found, frame in zip(shrunk.frames, whole.frames, strict=True):
        assert found.tobytes() == frame.resize((32, 24)).tobytes()


def test_a_side_has_a_limit(tmp_path: Path) -> None:
    Image.new("1", (1, 70_000)).save(tmp_path / "a.png")
    for read in (open_image, image_size):
        with pytest.raises(DataError, match=r"1 x 70000 pixels; a side has at most 65535"):
            read(Media(kind="image", path=str(tmp_path / "a.png")))


@pytest.mark.parametrize("size", [(37, 90), (33, 3000), (2500, 40)])
def test_padding_in_strips_is_padding_at_once(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    resample = Image.Resampling.BICUBIC
    monkeypatch.setattr(image_module, "_STRIP_PIXELS", 700)
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(noise[..., :3])
    transform = ImageTransform(16, (0.48, 0.46, 0.41), (0.5,) * 3, "pad", resample)
    side = max(size)
    color = (int(255 * 0.48), int(255 * 0.46), int(255 * 0.41))
    padded = Image.new("RGB", (side, side), color)
    padded.paste(image, ((side - size[0]) // 2, (side - size[1]) // 2))
    expected = padded.resize((16, 16), resample)
    assert transform.square(image).tobytes() == expected.tobytes()

    data = io.BytesIO()
    Image.fromarray(noise).save(data, "PNG")
    white = Image.new("RGBA", size, "white")
    composite = Image.alpha_composite(white, Image.fromarray(noise)).convert("RGB")
    opened = open_image(Media(kind="image", data=data.getvalue()))
    assert opened.tobytes() == composite.tobytes()
