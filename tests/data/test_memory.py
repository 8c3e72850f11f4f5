"""Memory does not grow with rows, clips or the length of a clip, which has ended many runs.

In a process of its own (``memory_child.py``): 10,000 long rows of videos, a clip of 200 frames,
which are 132 MiB in RGB, and large images.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from clips import write_clip
from PIL import Image

ROWS = 10_000


def make_clip(path: Path, num_frames: int) -> None:
    def frame(number: int) -> np.ndarray:
        values = np.zeros((360, 640, 3), dtype=np.uint8)
        values[:, : number % 640] = 255
        return values

    write_clip(path, map(frame, range(num_frames)), "mpeg4", rate=30, options={"g": "30"})


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """MiB by what was done."""
    folder = tmp_path_factory.mktemp("memory")
    said = [{"from": "human", "value": "<video>\n" + "what? " * 300}, {"from": "gpt", "value": "a"}]
    lines = [
        json.dumps({"id": number, "video": f"{number % 997}/clip.mp4", "conversations": said})
        for number in range(ROWS)
    ]
    (folder / "videos.jsonl").write_text("\n".join(lines))
    (folder / "videos.json").write_text(f"[{','.join(lines)}]")
    (folder / "few.jsonl").write_text("\n".join(lines[:100]))
    make_clip(folder / "short.mp4", 15)
    make_clip(folder / "long.mp4", 200)
    write_clip(folder / "large.mp4", [np.zeros((1080, 1920, 3), np.uint8)] * 32)
    Image.new("RGBA", (3000, 3000), (10, 20, 30, 128)).save(folder / "rgba.png", compress_level=1)
    Image.new("RGB", (30_000, 200), "red").save(folder / "wide.png", compress_level=1)
    Image.new("RGBA", (8, 8)).save(folder / "tiny.png")
    child = Path(__file__).with_name("memory_child.py")
    done = subprocess.run(
        [sys.executable, str(child), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["videos.jsonl", "videos.json"])
def test_rows_stay_on_disk(grown: dict[str, float], name: str) -> None:
    """As text they are 19 MiB, as objects of Python far more; their places are 16 bytes each."""
    assert grown[name] < 8


def test_a_long_clip_takes_no_more_memory_than_a_short_one(grown: dict[str, float]) -> None:
    assert grown["long clip"] < grown["short clip"] + 30


def test_frames_are_held_in_the_size_of_the_tower(grown: dict[str, float]) -> None:
    """The decoder has up to 17 reference frames of 3 MB, and one image is 8 MB; as images, the
    32 frames of 1920 x 1080 would take 265 MB more.
    """
    assert grown["large frames"] < 17 * 3 + 8 + 60


@pytest.mark.parametrize(
    # Pillow takes four bytes per pixel, for the image and for its RGB copy. The padded square of
    # the second one would have 2.7 GB.
    ("name", "mb"),
    [("rgba.png", 2 * 36), ("wide.png", 2 * 24)],
)
def test_large_images_take_little_more_than_their_pixels(
    grown: dict[str, float], name: str, mb: float
) -> None:
    assert grown[name] < mb + 40
