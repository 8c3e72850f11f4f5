"""Which moments of a video are shown: a rule of times, the same for every decoder.

A clip (or the part of it between ``start`` and ``end``) is cut into N equal spans, and each span is
shown by the frame on screen at its middle:

    time_i = start + duration * (i + 1/2) / N,    i = 0 .. N - 1

    uniform   N = num_frames
    fps       N = duration * fps, rounded, at least 1 and at most max_frames
    all       every frame; if there are more than max_frames, N = max_frames

Two spans may be shown by the same frame, which is then given once: a short clip gives fewer frames.
"""

import math
from dataclasses import dataclass
from typing import Literal

VideoBackend = Literal["auto", "decord", "pyav"]
Sampling = Literal["uniform", "fps", "all"]

BACKENDS: tuple[VideoBackend, ...] = ("auto", "decord", "pyav")
SAMPLINGS: tuple[Sampling, ...] = ("uniform", "fps", "all")

VIDEO_COUNTS = (
    "video_pyav",
    "video_decord",
    "video_folder",
    "video_decord_unsuited",
    "video_decord_timeout",
    "video_decord_crash",
    "video_decord_error",
)
"""What is counted while videos are read: what read them, and why decord did not."""

_ROUNDING_S = 1e-6
"""A middle is moved by this much, so that rounding does not decide when a frame starts there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSettings:
    """How videos are read.

    Raises:
        ValueError: a setting is unknown, out of range, missing or without effect.
    """

    backend: VideoBackend = "auto"
    """``pyav``: PyAV; ``decord``: that library, in a child process that is killed when it hangs,
    and PyAV for what it does not read exactly (:mod:`coat_data.media.video`); ``auto``: what was
    measured to be the better, which is PyAV."""
    sampling: Sampling = "uniform"
    """``uniform`` in time, so many frames per second (``fps``), or ``all`` frames."""
    num_frames: int = 8
    """Frames under ``uniform``."""
    fps: float | None = None
    """Frames per second under ``fps``."""
    max_frames: int = 64
    """Most frames under ``fps`` and ``all``."""
    timeout_s: float = 30.0
    """Wall-clock limit of decord for one video, in seconds."""
    time_tokens: bool = False
    """Write before each frame when it is shown, as text: ``<1.5 seconds>``; with ``pool_frames``
    before each group, the mean of its frames' times."""
    pool_frames: int = 1
    """Consecutive frames whose features are averaged into the tokens of one; 1 for none."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"video backend is {self.backend!r}; allowed: {', '.join(BACKENDS)}")
        if self.sampling not in SAMPLINGS:
            allowed = ", ".join(SAMPLINGS)
            raise ValueError(f"video sampling is {self.sampling!r}; allowed: {allowed}")
        counts = (self.num_frames, self.max_frames, self.pool_frames)
        if min(counts) < 1 or self.timeout_s <= 0:
            raise ValueError(
                f"num_frames={self.num_frames}, max_frames={self.max_frames}, pool_frames="
                f"{self.pool_frames}, timeout_s={self.timeout_s}; ask for at least one frame, and "
                "a time above 0"
            )
        if (self.fps is not None) != (self.sampling == "fps") or (self.fps or 1) <= 0:
            raise ValueError(
                f"video fps={self.fps} with sampling {self.sampling!r}; sampling fps needs fps "
                "above 0, and the others take none"
            )

    def num_spans(self, duration_s: float) -> int:
        """N for a clip of ``duration_s`` seconds; for ``all`` its largest value."""
        if self.sampling == "uniform":
            return self.num_frames
        if self.sampling == "fps" and self.fps is not None:
            return max(1, min(self.max_frames, math.floor(duration_s * self.fps + 0.5)))
        return self.max_frames


def middles(start_s: float, duration_s: float, num_spans: int) -> list[float]:
    """The times, in seconds, in the middle of equal spans."""
    step = duration_s / num_spans
    return [start_s + step * (i + 0.5) + _ROUNDING_S for i in range(num_spans)]
