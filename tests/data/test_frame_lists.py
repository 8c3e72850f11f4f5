"""Videos as lists of frames (qwen-vl-utils), sampled by number or, with a rate, by time."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import jsonl
from PIL import Image

from coat_data.load.dataset import SampleDataset
from coat_data.media.sampling import VideoSettings
from coat_data.media.video import Clip, VideoReader, read_frames
from coat_data.sample import DataError, Media
from coat_data.tools.export import export
from coat_data.tools.ingest import ingest

NAMES = [f"frame_{number}.png" for number in range(12)]


@pytest.fixture(autouse=True)
def frames(tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / name)


def qwen(video: Any, **keys: Any) -> dict[str, Any]:
    """A row after QwenLM/Qwen2.5-VL, qwen-vl-utils/README.md, "Local video frames"."""
    asked = [{"type": "video", "video": video, **keys}, {"type": "text", "text": "Describe it."}]
    return {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "A."}]
    }


def llava(**fields: Any) -> dict[str, Any]:
    said = [{"from": "human", "value": "<video>\nWhat?"}, {"from": "gpt", "value": "A."}]
    return {"conversations": said, **fields}


def read(media: Media, **settings: Any) -> Clip:
    reader = VideoReader(VideoSettings(**settings))
    clip = reader.read(media)
    count, times = reader.plan(media)
    assert (len(clip.frames), clip.times_s) == (count, times)
    return clip


def shown(clip: Clip) -> list[int]:
    return [int(np.asarray(frame)[0, 0, 0]) // 20 for frame in clip.frames]


def test_a_list_of_images_is_one_video(tmp_path: Path) -> None:
    rows = [
        qwen([f"file://{tmp_path}/{name}" for name in NAMES]),
        llava(video=NAMES),
        llava(videos=[NAMES]),  # LlamaFactory and ms-swift: a list of videos
        {"query": "<video>What?", "response": "A.", "videos": [NAMES]},
    ]
    for row in rows:
        (media,) = SampleDataset(jsonl(tmp_path / "rows.jsonl", row))[0].media
        assert media.frames == tuple(str(tmp_path / name) for name in NAMES)
        assert (media.kind, media.fps) == ("video", None)
        clip = read(media, num_frames=3)
        assert (shown(clip), clip.times_s) == ([2, 6, 10], None)
        assert shown(read(media, sampling="all", max_frames=20)) == list(range(12))


def test_frames_with_a_rate_are_sampled_by_time(tmp_path: Path) -> None:
    """Twelve frames at 2 per second: six seconds."""
    for row in (qwen(NAMES, sample_fps=2.0), qwen(NAMES, fps=2), llava(video=NAMES, fps=2)):
        media = SampleDataset(jsonl(tmp_path / "rows.jsonl", row))[0].media[0]
        assert media.fps == 2.0
        clip = read(media, sampling="fps", fps=1.0)
        assert (shown(clip), clip.times_s) == ([1, 3, 5, 7, 9, 11], [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
        assert shown(read(media, sampling="fps", fps=1.0, max_frames=2)) == [3, 9]
        assert shown(read(media, num_frames=3)) == [2, 6, 10]
        assert read(media, num_frames=30).times_s == [number / 2 for number in range(12)]


def test_a_part_of_frames_with_a_rate(tmp_path: Path) -> None:
    row = qwen(NAMES, sample_fps=2, start=1.5, end=4)
    media = SampleDataset(jsonl(tmp_path / "rows.jsonl", row))[0].media[0]
    assert shown(read(media, sampling="all", max_frames=20)) == [3, 4, 5, 6, 7]
    assert shown(read(media, sampling="fps", fps=1.0)) == [3, 5, 7]
    between = dataclasses.replace(media, start=1.6, end=1.9)
    assert shown(read(between, sampling="all", max_frames=20)) == [3]
    with pytest.raises(DataError, match="the list of frames has no times"):
        read(SampleDataset(jsonl(tmp_path / "rows.jsonl", qwen(NAMES, start=1.5)))[0].media[0])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*fps is 0"):
        SampleDataset(jsonl(tmp_path / "rows.jsonl", qwen(NAMES, sample_fps=0)))[0]


def test_frame_lists_are_ingested_and_exported(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "rows.jsonl", qwen(NAMES, sample_fps=2, start=1, end=3), qwen(NAMES[:1])
    )
    given = [SampleDataset(path)[row].media[0] for row in (0, 1)]
    wanted = [shown(read(media)) for media in given]
    ingest(path, tmp_path / "stored")
    stored = SampleDataset(tmp_path / "stored")
    assert [stored[row].media[0] for row in (0, 1)] == given
    for to in ("llava", "messages"):
        written = SampleDataset(export(tmp_path / "stored", tmp_path / to, to).path)
        assert [shown(read(written[row].media[0])) for row in (0, 1)] == wanted
        assert (written[0].media[0].fps, written[0].media[0].end) == (2.0, 3.0)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*is the first of 12 frames of a video"):
        ingest(path, tmp_path / "embedded", embed_media=True)


@pytest.mark.parametrize("name", ["a.gif", "a.png"])
def test_an_animation_as_a_video_is_no_list_of_one_frame(tmp_path: Path, name: str) -> None:
    images = [Image.new("RGB", (8, 8), (20 * number, 0, 0)) for number in range(8)]
    images[0].save(tmp_path / name, save_all=True, append_images=images[1:], duration=100)
    for row in (llava(video=name), llava(videos=[name]), qwen(name)):
        media = SampleDataset(jsonl(tmp_path / "rows.jsonl", row))[0].media[0]
        frames = read_frames(media, 8)
        assert [round(np.asarray(frame)[0, 0, 0] / 20) for frame in frames] == list(range(8))
