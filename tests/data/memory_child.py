"""Resident memory while large sources are read, as JSON: test_memory.py runs it by itself."""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coat_data.load.dataset import SampleDataset
from coat_data.media.image import ImageTransform
from coat_data.media.sample_media import MediaLoader
from coat_data.media.sampling import VideoSettings
from coat_data.sample import Media


def resident_mib(name: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (the most so far) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def grown(work: Callable[[], Any], peak: bool = False) -> float:
    """MiB that are held after ``work``, or at its peak, more than before."""
    gc.collect()
    before = resident_mib("VmRSS")
    if peak:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    work()
    gc.collect()
    return resident_mib("VmHWM" if peak else "VmRSS") - before


def main(folder: Path) -> None:
    """Measure and print."""
    found = {}

    def rows(name: str) -> SampleDataset:
        dataset = SampleDataset(folder / name)
        for _ in dataset.stream():
            pass
        return dataset

    rows("few.jsonl")
    for name in ("videos.jsonl", "videos.json"):
        kept: list[SampleDataset] = []
        found[name] = grown(lambda name=name, kept=kept: kept.append(rows(name)))

    def clip(name: str) -> None:
        settings = VideoSettings(num_frames=4)
        loader = MediaLoader(ImageTransform(32, (0.5,) * 3, (0.5,) * 3), settings)
        opened = [loader.open(Media(kind="video", path=str(folder / name)))]
        assert len(loader.write(opened)) == 4

    clip("short.mp4")
    found["short clip"] = grown(lambda: clip("short.mp4"), peak=True)
    found["long clip"] = grown(lambda: clip("long.mp4"), peak=True)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
