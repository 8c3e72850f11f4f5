"""Times of the sampled frames of a video, the same for every decoder.

A clip (or the part of it between ``start`` and ``end``) is divided into N equal spans, and each
span gives the frame at its middle:

    time_i = start + duration * (i + 1/2) / N,    i = 0 .. N - 1

    uniform   N = num_frames
    fps       N = duration * fps, rounded, at least 1 and at most max_frames
    all       every frame; if there are more than max_frames, N = max_frames

If two spans give the same frame, it is used once: a short clip gives fewer frames.
"""

import math
from dataclasses import dataclass
from typing import Literal

VideoBackend = Literal["pyav", "decord"]
Sampling = Literal["uniform", "fps", "all"]

VIDEO_COUNTS = (
    "video_pyav", "video_decord", "video_folder", "video_decord_unsuited", "video_decord_timeout",
    "video_decord_crash", "video_decord_error", "video_short",
)  # fmt: skip
"""Counters of video reading: the reader that was used, why decord was not, and videos that end
before the duration in their header."""

_ROUNDING_S = 1e-6
"""Offset of the middles, so that rounding does not decide which of two frames is at a middle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSettings:
    """How videos are read."""

    backend: VideoBackend = "pyav"
    """``decord``: decord in a child process that is killed when it hangs, with PyAV for streams
    that decord does not read exactly (:mod:`coat_data.media.video`)."""
    sampling: Sampling = "uniform"
    """``uniform`` in time, so many frames per second (``fps``), or ``all`` frames."""
    num_frames: int = 8
    """Number of frames for ``uniform``."""
    fps: float | None = None
    """Frames per second for ``fps``."""
    max_frames: int = 64
    """Maximum number of frames for ``fps`` and ``all``."""
    max_frame_pixels: int = 1 << 25
    """Maximum pixels of a frame in the file; the default allows 8K (7,680 x 4,320)."""
    max_total_pixels: int = 1 << 29
    """Maximum pixels of all frames that are kept, in the size in which they are kept: training
    keeps squares of the tower's size."""
    time_tokens: bool = False
    """Insert the time of each frame before its tokens, as text: ``<1.5 seconds>``; with
    ``pool_frames`` the mean time of each group."""
    pool_frames: int = 1
    """Consecutive frames whose features are averaged into the tokens of one frame; 1 for none."""

    def num_spans(self, duration_s: float) -> int:
        """Return N for a clip of ``duration_s`` seconds; for ``all`` the maximum."""
        if self.sampling == "uniform":
            return self.num_frames
        if self.sampling == "fps" and self.fps is not None:
            return max(1, min(self.max_frames, math.floor(duration_s * self.fps + 0.5)))
        return self.max_frames


def middles(start_s: float, duration_s: float, num_spans: int) -> list[float]:
    """Return the middles of equal spans, in seconds."""
    step = duration_s / num_spans
    return [start_s + step * (i + 0.5) + _ROUNDING_S for i in range(num_spans)]
