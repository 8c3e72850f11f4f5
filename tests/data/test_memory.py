"""Memory does not grow with rows, clips or the length of a clip, which has ended many runs.

In a process of its own (``memory_child.py``): 10,000 long rows of videos, and a clip of 200 frames,
which are 132 MiB in RGB.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from clips import write_clip

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
