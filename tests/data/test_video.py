"""Frames of tiny clips made here, against reading every frame of the clip in order."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clips import write_clip
from PIL import Image

from coat_data.media import pyav_reader
from coat_data.media.decord_reader import DecordReader
from coat_data.media.pyav_reader import PyavVideo
from coat_data.media.sampling import VideoSettings
from coat_data.media.video import FrameCount, VideoReader, read_frames
from coat_data.sample import DataError, Media


def picture(number: int, size: tuple[int, int] = (64, 48)) -> np.ndarray:
    """A gradient with a bar whose place tells the frame's number."""
    width, height = size
    values = np.zeros((height, width, 3), dtype=np.uint8)
    values[:, :, 0] = np.linspace(0, 255, width, dtype=np.uint8)
    values[:, :, 1] = 5 * number % 256
    values[:, (3 * number) % width :, 2] = 200
    return values


def make_clip(path: Path, num_frames: int, codec: str = "libx264", **options: Any) -> Path:
    return write_clip(path, map(picture, range(num_frames)), codec, **options)


def all_frames(path: Path) -> tuple[list[float], list[Image.Image]]:
    """Times and pictures of every frame, by plain sequential decoding."""
    with av.open(str(path)) as container:
        frames = list(container.decode(container.streams.video[0]))
    return [frame.time for frame in frames], [frame.to_image() for frame in frames]


def numbers_of(frames: list[Image.Image], every: list[Image.Image]) -> list[int]:
    """Which frames of the clip these are."""
    known = {image.tobytes(): number for number, image in enumerate(every)}
    assert len(known) == len(every)
    return [known[frame.tobytes()] for frame in frames]


def read(path: Path, num_frames: int) -> list[Image.Image]:
    return read_frames(Media(kind="video", path=str(path)), num_frames)


CLIPS = {
    "h264.mp4": ("libx264", {"g": "12", "bf": "2"}),
    "h264_long_groups.mp4": ("libx264", {"g": "250", "bf": "3"}),
    "open_gop.mp4": ("libx264", {"g": "10", "bf": "3", "x264-params": "open-gop=1:scenecut=0"}),
    "vp9.webm": ("libvpx-vp9", {"g": "15", "deadline": "realtime"}),
    "mpeg4.avi": ("mpeg4", {"g": "8", "qscale": "2"}),
    "h264.mkv": ("libx264", {"g": "20"}),
    "h264.ts": ("libx264", {"g": "10", "bf": "2"}),
}


def test_variable_frame_rate_is_uniform_in_time_not_in_frames(tmp_path: Path):
    stamps = [*range(20), *range(20, 120, 10)]  # 2 s at 10 fps, then 10 s at 1 fps
    path = make_clip(tmp_path / "vfr.mp4", 30, stamps=stamps, options={"bf": "0"})
    times, every = all_frames(path)
    chosen = [times[k] for k in numbers_of(read(path, 4), every)]
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.duration
        assert stream.time_base
        duration = float(stream.duration * stream.time_base)
    assert duration == pytest.approx(12, abs=1)
    for i, time in enumerate(chosen):
        assert time == max(t for t in times if t <= duration * (i + 0.5) / 4)


@pytest.mark.parametrize("name", ["h264.mp4", "h264_long_groups.mp4"])
def test_seeking_gives_the_same_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    codec, options = CLIPS[name]
    path = make_clip(tmp_path / name, 300, codec, options=options)
    expected = [frame.tobytes() for frame in read(path, 5)]
    seeks = []
    original = PyavVideo._seek
    monkeypatch.setattr(pyav_reader, "_SEEK_SECONDS", 4.0)
    monkeypatch.setattr(PyavVideo, "_seek", lambda *args: (seeks.append(args[1]), original(*args)))
    assert [frame.tobytes() for frame in read(path, 5)] == expected
    assert len(seeks) == (0 if "long_groups" in name else 4)  # keyframes 25 s apart: none to reach


@pytest.mark.parametrize(("a", "b", "c", "d"), [(0, -1, 1, 0), (-1, 0, 0, 1), (0, 1, 1, 0)])
def test_the_display_matrix_is_applied(tmp_path: Path, a: int, b: int, c: int, d: int):
    """Written by hand into the track header: turned, mirrored, and both.

    A pixel at (x, y) is shown at (a x + c y, b x + d y) (ISO/IEC 14496-12, 6.2.2).
    """
    path = make_clip(tmp_path / "a.mp4", 5)
    _, every = all_frames(path)
    data = bytearray(path.read_bytes())
    start = data.index(b"tkhd") + 44  # type, flags, five fields of 4 bytes, 16 bytes
    fields = [a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30]
    data[start : start + 36] = b"".join(field.to_bytes(4, "big", signed=True) for field in fields)
    path.write_bytes(data)
    stored = np.asarray(every[2])
    y, x = np.mgrid[: stored.shape[0], : stored.shape[1]]
    right, down = a * x + c * y, b * x + d * y
    expected = np.empty((np.ptp(down) + 1, np.ptp(right) + 1, 3), np.uint8)
    expected[down - down.min(), right - right.min()] = stored
    assert np.array_equal(np.asarray(read(path, 1)[0]), expected)


def test_gif_frames_that_paint_over_the_one_before(tmp_path: Path):
    images = []
    canvas = Image.new("RGB", (32, 32), "white")
    for number in range(8):
        canvas = canvas.copy()
        canvas.paste(
            ("red", "green", "blue", "black")[number % 4], (4 * number, 0, 4 * number + 4, 9)
        )
        images.append(canvas)
    path = tmp_path / "a.gif"
    images[0].save(path, save_all=True, append_images=images[1:], duration=100, loop=0)
    for frame, number in zip(read(path, 4), (1, 3, 5, 7), strict=True):
        assert np.abs(np.asarray(frame).astype(int) - np.asarray(images[number])).max() <= 2


@pytest.mark.parametrize("name", CLIPS)
def test_frames_by_number(tmp_path: Path, name: str):
    codec, options = CLIPS[name]
    path = make_clip(tmp_path / name, 40, codec, options=options)
    _, every = all_frames(path)
    reader = VideoReader(VideoSettings())
    counts = []

    def choose(count: FrameCount) -> list[int]:
        counts.append(count)
        return [count.first + number for number in (0, 1, 7, 7, count.number - 1)]

    whole = Media(kind="video", path=str(path))
    assert numbers_of(reader.read_numbers(whole, choose), every) == [0, 1, 7, 7, 39]
    assert (counts[0].number, counts[0].first) == (40, 0)
    assert counts[0].fps == pytest.approx(10, rel=1e-3)
    part = replace(whole, start=1.0, end=2.5)
    assert numbers_of(reader.read_numbers(part, choose), every) == [10, 11, 17, 17, 24]
    assert (counts[1].number, counts[1].first) == (15, 10)
    assert reader.count(part) == counts[1]
    assert not reader.counts["video_short"]


def test_the_time_of_a_number_is_right_at_a_variable_rate(tmp_path: Path):
    stamps = [*range(20), *range(20, 120, 10)]  # 2 s at 10 fps, then 10 s at 1 fps
    path = make_clip(tmp_path / "vfr.mp4", 30, stamps=stamps, options={"bf": "0"})
    times, every = all_frames(path)
    media, reader = Media(kind="video", path=str(path)), VideoReader(VideoSettings())
    count = reader.count(media)
    assert count.fps is not None
    assert count.number / count.fps == pytest.approx(12, abs=1)
    chosen = numbers_of(reader.read_numbers(media, lambda _: range(30)), every)
    for number, shown in enumerate(chosen):
        assert times[shown] == max(t for t in times if t <= (number + 0.5) / count.fps)


def test_numbers_of_frames_without_times(tmp_path: Path):
    reader = VideoReader(VideoSettings())
    raw = Media(kind="video", path=str(make_clip(tmp_path / "raw.h264", 20)))
    _, every = all_frames(Path(raw.path or ""))
    assert reader.count(raw) == FrameCount(20, None)
    assert numbers_of(reader.read_numbers(raw, lambda _: [0, 9, 19]), every) == [0, 9, 19]
    for number in range(4):
        Image.fromarray(picture(number)).save(tmp_path / f"{number}.png")
    folder = Media(kind="video", path=str(tmp_path))
    assert reader.count(folder) == FrameCount(4, None)
    frames = reader.read_numbers(folder, lambda _: [1, 3])
    assert [np.asarray(frame).tolist() for frame in frames] == [
        picture(1).tolist(), picture(3).tolist(),
    ]  # fmt: skip


def test_truncated_clip_gives_its_readable_part(tmp_path: Path):
    path = make_clip(tmp_path / "a.mp4", 60, container_options={"movflags": "faststart"})
    _, every = all_frames(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    numbers = numbers_of(read(path, 6)[:-1], every)
    assert numbers == [5, 15, 25][: len(numbers)]
    assert numbers


def test_clip_without_times(tmp_path: Path):
    """A raw stream has neither a duration nor time stamps; it is uniform in frames."""
    path = make_clip(tmp_path / "a.h264", 20, options={"bf": "2"})
    with av.open(str(path)) as container:
        every = [frame.to_image() for frame in container.decode(video=0)]
    assert numbers_of(read(path, 4), every) == [2, 7, 12, 17]
    assert numbers_of(read(path, 64), every) == list(range(20))
    media = Media(kind="video", path=str(path))
    reader = VideoReader(VideoSettings(sampling="fps", fps=0.5, max_frames=4))
    clip = reader.read(media)
    assert numbers_of(clip.frames, every) == [2, 7, 12, 17]
    assert (clip.times_s, clip.duration_s) == (None, None)
    assert reader.plan(media) == (4, None)
    with pytest.raises(DataError, match="the file has no times"):
        reader.read(Media(kind="video", path=str(path), start=1.0))


def test_durations_of_zero_in_the_header_are_unknown(tmp_path: Path):
    path = make_clip(tmp_path / "a.mp4", 40, options={"bf": "0"})
    _, every = all_frames(path)
    data = bytearray(path.read_bytes())
    for box, offset in ((b"mvhd", 20), (b"tkhd", 24), (b"mdhd", 20)):
        place = data.index(box) + offset
        data[place : place + 4] = bytes(4)
    path.write_bytes(data)
    assert numbers_of(read(path, 4), every) == [5, 15, 25, 35]


@pytest.mark.parametrize("damage", ["missing", "text", "header", "audio"])
def test_unreadable_videos_name_the_path(tmp_path: Path, damage: str):
    path = tmp_path / "bad.mp4"
    if damage == "audio":
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=16000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 16000
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    elif damage == "header":
        path.write_bytes(make_clip(tmp_path / "good.mp4", 5).read_bytes()[:60])
    elif damage != "missing":
        path.write_bytes(b"<html>no</html>")
    with pytest.raises(DataError, match=r"bad\.mp4") as raised:
        read(path, 4)
    assert raised.value.where == str(path)


def test_a_list_of_other_files_is_no_video_whatever_its_name(tmp_path: Path):
    make_clip(tmp_path / "other.mp4", 10)
    listing = tmp_path / "v.mp4"
    listing.write_text("ffconcat version 1.0\nfile other.mp4\n")
    with av.open(str(listing)) as opened:
        assert len(list(opened.decode(video=0))) == 10  # FFmpeg alone goes to the other file
    decord = DecordReader(5.0, ("false",))
    for backend in ("pyav", "decord"):
        reader = VideoReader(VideoSettings(backend=backend, num_frames=2), decord)
        with pytest.raises(DataError, match=r"v\.mp4: .*its format is not one of"):
            reader.read(Media(kind="video", path=str(listing)))
        with pytest.raises(DataError, match="its format is not one of"):
            reader.read(Media(kind="video", data=listing.read_bytes()))
        assert not reader.counts  # decord was not asked
    assert len(read_frames(Media(kind="video", path=str(tmp_path / "other.mp4")), 2)) == 2


@pytest.mark.parametrize("name", CLIPS)
def test_skipped_frames_change_no_other_frame(tmp_path: Path, name: str):
    codec, options = CLIPS[name]
    path = make_clip(tmp_path / name, 120, codec, options=options)
    times, every = all_frames(path)
    rng = np.random.default_rng(0)
    for count in (1, 3, 20, 60):
        wanted = sorted(rng.uniform(times[0] - 0.1, times[-1] + 0.5, count).tolist())
        with PyavVideo(Media(kind="video", path=str(path))) as video:
            found = list(video.read_at(wanted))
        shown = {max((k for k, t in enumerate(times) if t <= w), default=0) for w in wanted}
        assert numbers_of([frame for _, frame in found], every) == sorted(shown)
        assert [time for time, _ in found] == pytest.approx([times[k] for k in sorted(shown)])


def test_more_decoded_frames_than_allowed_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = make_clip(tmp_path / "a.mp4", 40, options={"g": "250", "bf": "0", "sc_threshold": "0"})
    monkeypatch.setattr(pyav_reader, "_MAX_DECODED_FRAMES", 25)
    assert len(read(path, 1)) == 1  # frame 20, which ends where frame 21 starts
    with pytest.raises(DataError, match="more than 25 frames have to be decoded; cut the video"):
        read(path, 4)


def test_a_stream_that_ends_before_its_header_says(tmp_path: Path):
    path = make_clip(tmp_path / "a.mkv", 40, options={"bf": "0"})
    data = bytearray(path.read_bytes())
    place = data.index(b"\x44\x89\x88") + 3  # the element Duration, in milliseconds
    assert struct.unpack(">d", data[place : place + 8]) == (4000.0,)
    data[place : place + 8] = struct.pack(">d", 10_000.0)
    reader = VideoReader(VideoSettings(num_frames=10, backend="pyav"))
    _, every = all_frames(path)
    clip = reader.read(Media(kind="video", data=bytes(data)))
    assert clip.duration_s == pytest.approx(10)
    # A frame per second at 0.5 s, 1.5 s, ...; the last one is there at 4.5 s and later.
    assert numbers_of(clip.frames, every) == [5, 15, 25, 35, 39]
    assert reader.counts == {"video_pyav": 1, "video_short": 1}
