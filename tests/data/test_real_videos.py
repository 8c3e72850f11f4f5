"""Real clips of other people's cameras and encoders: the frames shown are the right ones.

``COAT_VIDEO_DATA`` names a folder with the six clips of torchcodec's test resources
(pytorch/torchcodec, commit c66da14): H.264, H.265 with 8 and 10 bits, AV1, full-range colours, a
file with two videos, B-frames and sound. Each frame that the reader gives is compared with a plain
decoding of the whole stream, and its number with the list of all packets' time stamps.
"""

import os
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from coat_data.media.sampling import VideoSettings
from coat_data.media.video import VideoReader
from coat_data.sample import Media

FOLDER = Path(os.environ.get("COAT_VIDEO_DATA", "COAT_VIDEO_DATA is not set"))
CLIPS = {  # codec, frames (as many as packets), width and height, from the files' headers
    "av1_video.mkv": ("av1", 125, (640, 360)),
    "bt709_full_range.mp4": ("h264", 30, (1280, 720)),
    "h264_10bits.mp4": ("h264", 30, (200, 200)),
    "h265_10bits.mp4": ("hevc", 30, (200, 200)),
    "h265_video.mp4": ("hevc", 10, (128, 128)),
    "nasa_13013.mp4": ("h264", 390, (480, 270)),
}
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(),
    reason="set COAT_VIDEO_DATA to a folder with torchcodec's test clips (see this file's head)",
)


def all_frames(path: Path) -> tuple[list[float], list[bytes], tuple[int, int]]:
    """Times of all packets in order; all frames, decoded one after another; their size."""
    with av.open(str(path)) as container:
        stream: Any = container.streams.best("video")
        packets = [packet for packet in container.demux(stream) if packet.size]
        times = sorted(float(packet.pts * stream.time_base) for packet in packets)
    with av.open(str(path)) as container:
        stream = container.streams.best("video")
        frames = [frame.to_image() for frame in container.decode(stream)]
    return times, [frame.tobytes() for frame in frames], frames[0].size


@pytest.mark.parametrize("name", CLIPS)
def test_every_clip_shows_the_frames_of_its_time_stamps(name: str):
    _, count, size = CLIPS[name]
    times, every, decoded_size = all_frames(FOLDER / name)
    assert len(times) == len(every) == count
    assert decoded_size == size
    step = float(np.median(np.diff(times)))
    asked = [
        {"num_frames": 8},
        {"num_frames": 3},
        {"sampling": "fps", "fps": 2.0},
        {"sampling": "all", "max_frames": 400},
    ]
    for settings in asked:
        reader = VideoReader(VideoSettings(**settings))
        media = Media(kind="video", path=str(FOLDER / name))
        clip = reader.read(media)
        assert clip.times_s is not None
        assert len(clip.frames) == reader.plan(media)[0]
        numbers = [int(np.argmin(np.abs(np.subtract(times, t)))) for t in clip.times_s]
        assert [frame.tobytes() for frame in clip.frames] == [every[k] for k in numbers]
        duration = times[-1] + step - times[0]
        if settings.get("sampling") == "all":
            assert numbers == list(range(count))
        else:
            spans = settings.get("num_frames") or round(2 * duration)
            middles = [times[0] + duration * (i + 0.5) / spans for i in range(spans)]
            for number, middle in zip(numbers, middles, strict=True):
                assert times[number] <= middle + 2e-3
                assert number + 1 == count or times[number + 1] > middle - 2e-3
