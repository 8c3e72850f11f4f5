"""Which frames are shown, between which seconds, and how many beforehand; times by hand."""

from pathlib import Path

import numpy as np
import pytest
from clips import write_clip
from PIL import Image

from coat_data.media.sampling import VideoSettings
from coat_data.media.video import Clip, VideoReader
from coat_data.sample import DataError, Media


def make_clip(path: Path, stamps: list[int]) -> Path:
    """A grey clip whose frame at ``stamps[i]`` tenths of a second has the brightness 8 i."""
    frames = (np.full((16, 32, 3), 8 * i % 256, dtype=np.uint8) for i in range(len(stamps)))
    return write_clip(path, frames, stamps=stamps, options={"qp": "0"})


def read(path: Path, start: float | None = None, end: float | None = None, **settings) -> Clip:
    media = Media(kind="video", path=str(path), start=start, end=end)
    reader = VideoReader(VideoSettings(**settings))
    clip = reader.read(media)
    assert len(clip.frames) <= reader.plan(media)[0]
    return clip


def shown(clip: Clip) -> list[float]:
    """The frames' times; each frame is the one that was written for its time."""
    assert clip.times_s is not None
    for time, frame in zip(clip.times_s, clip.frames, strict=True):
        assert abs(np.asarray(frame).mean() - 80 * time) <= 3
    return [round(time, 3) for time in clip.times_s]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seconds at 10 frames per second."""
    return make_clip(tmp_path_factory.mktemp("clips") / "a.mp4", list(range(30)))


def test_uniform_fps_and_all(clip: Path):
    assert shown(read(clip, num_frames=3)) == [0.5, 1.5, 2.5]
    assert shown(read(clip, sampling="fps", fps=1.0)) == [0.5, 1.5, 2.5]
    assert shown(read(clip, sampling="fps", fps=2.0)) == [0.2, 0.7, 1.2, 1.7, 2.2, 2.7]
    assert shown(read(clip, sampling="fps", fps=2.0, max_frames=3)) == [0.5, 1.5, 2.5]
    assert shown(read(clip, sampling="fps", fps=0.1)) == [1.5]  # at least one
    assert shown(read(clip, sampling="fps", fps=50.0)) == [i / 10 for i in range(30)]
    assert shown(read(clip, sampling="all")) == [i / 10 for i in range(30)]
    assert shown(read(clip, sampling="all", max_frames=3)) == [0.5, 1.5, 2.5]


def test_between_start_and_end(clip: Path):
    """A part of a clip has the spans of the part; times count from the whole clip's beginning."""
    assert shown(read(clip, 1.0, 2.0, num_frames=2)) == [1.2, 1.7]
    assert shown(read(clip, 2.0, None, num_frames=1)) == [2.5]
    assert shown(read(clip, None, 0.4, num_frames=2)) == [0.1, 0.3]
    assert shown(read(clip, 2.0, 99.0, num_frames=1)) == [2.5]  # the clip ends before
    assert shown(read(clip, 1.0, 1.35, sampling="all")) == [1.0, 1.1, 1.2, 1.3]
    assert shown(read(clip, 1.0, 2.0, sampling="fps", fps=3.0)) == [1.1, 1.5, 1.8]


@pytest.mark.parametrize(("start", "end"), [(3.5, None), (2.0, 1.0), (-1.0, 2.0)])
def test_a_part_that_shows_nothing_is_a_data_error(clip: Path, start: float, end: float | None):
    media = Media(kind="video", path=str(clip), start=start, end=end)
    for act in (VideoReader(VideoSettings()).read, VideoReader(VideoSettings()).plan):
        with pytest.raises(DataError, match=r"a\.mp4: start="):
            act(media)


def test_folders_of_frames(tmp_path: Path):
    for number in range(6):
        Image.new("L", (8, 8), 8 * number).save(tmp_path / f"{number}.png")
    media = Media(kind="video", path=str(tmp_path))
    for settings, expected in [
        ({"num_frames": 3}, [1, 3, 5]),
        ({"sampling": "all"}, [0, 1, 2, 3, 4, 5]),
        ({"sampling": "all", "max_frames": 2}, [1, 4]),
        ({"sampling": "fps", "fps": 1.0, "max_frames": 2}, [1, 4]),  # it has no seconds
    ]:
        reader = VideoReader(VideoSettings(**settings))
        read_clip = reader.read(media)
        assert [np.asarray(frame)[0, 0, 0] // 8 for frame in read_clip.frames] == expected
        assert read_clip.times_s is None
        assert reader.plan(media)[0] == len(expected)
        assert dict(reader.counts) == {"video_folder": 1}
    with pytest.raises(DataError, match="a folder of frames has no times"):
        reader.read(Media(kind="video", path=str(tmp_path), start=1.0))
