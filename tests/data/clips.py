"""Writes small videos for tests."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
from av.video.stream import VideoStream


def write_clip(
    path: Path,
    frames: Iterable[np.ndarray],
    codec: str = "libx264",
    *,
    rate: int = 10,
    stamps: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> Path:
    """Encode RGB frames (height, width, 3) uint8; ``stamps`` are their times in 1 / ``rate`` s."""
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = cast(VideoStream, container.add_stream(codec, rate=rate, options=options or {}))
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, rate)
        for number, values in enumerate(frames):
            if not number:
                stream.height, stream.width = values.shape[:2]
            frame = av.VideoFrame.from_ndarray(values, format="rgb24")
            frame.pts, frame.time_base = stamps[number] if stamps else number, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def noise(size: int, seed: int = 0) -> np.ndarray:
    """Return a square frame of noise, which keeps its bytes when it is encoded."""
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
