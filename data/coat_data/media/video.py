"""Reads the sampled frames of a video, with decord or PyAV (the default).

decord is optional. Its last release can hang while it holds the interpreter's lock, or abort
(dmlc/decord issues 269, 363, 375), so it runs in a child process with a time limit. It also returns
wrong frames of H.265 with keyframes between other frames, of MPEG transport streams and of videos
whose clock does not start at zero, and other colors for 10-bit video; so it is used only for
streams for which it was found to be exact. PyAV reads all others, and those that decord fails to
read. The sampled times are the same for both.
"""

import importlib.util
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coat_data.containers.media_files import image_suffixes, natural_key
from coat_data.containers.remote_file import is_url
from coat_data.media.decord_reader import DecordError, DecordReader
from coat_data.media.image import is_animated, open_image
from coat_data.media.pyav_reader import PyavVideo, TimeSpan
from coat_data.media.remote_media import fetch_media
from coat_data.media.sampling import VideoSettings, middles
from coat_data.sample import DataError, Media

Frame = Image.Image | NDArray[np.uint8]
"""A frame, or its values (height, width, 3) in RGB."""

Convert = Callable[[Image.Image], Frame]


@dataclass(frozen=True, slots=True)
class Clip:
    """Sampled frames of a video, in order."""

    frames: list[Any]
    """Images in RGB, upright; or what they were converted to."""
    times_s: list[float] | None
    """Start time of each frame, in seconds from the video's first frame; None for a folder of
    frames and a file without times.
    """
    duration_s: float | None = None
    """Duration in seconds of the sampled part; None for a folder of frames."""


@dataclass(frozen=True, slots=True)
class FrameCount:
    """The frames of a video, or of its part between ``start`` and ``end``."""

    number: int
    """At least 1."""
    fps: float | None
    """Mean frames per second; None for frames and files without times."""
    first: int = 0
    """Number of the part's first frame in the video."""


class VideoReader:
    """Reads clips; can be pickled for a worker process, which starts its own child for decord.

    ``decord`` replaces the child process in tests. ValueError without the package.
    """

    def __init__(self, settings: VideoSettings, decord: DecordReader | None = None) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()  # by VIDEO_COUNTS
        self._decord = None
        if settings.backend == "decord":
            if decord is None and importlib.util.find_spec("decord") is None:
                raise ValueError(
                    "the video backend is decord, which is not installed; install it (pip install "
                    "'.[decord]'), or set model.video.backend to pyav"
                )
            self._decord = decord or DecordReader()

    def read(self, media: Media, convert: Convert | None = None) -> Clip:
        """Read the sampled frames; a video with fewer frames gives each of them once.

        ``convert`` is applied to each frame when it is decoded, so that only its result is held.
        Frames of a folder (in the order of ``natural_key``) or a list are sampled by time like
        a video if there is ``media.fps``, otherwise evenly by number: ``num_frames`` of them, or,
        unless the sampling is uniform, up to ``max_frames``.

        DataError, with the path, if no frame can be decoded, ``start`` and ``end`` do not fit the
        video, or a frame or all have more pixels than allowed.
        """
        if (paths := _frames_of(media)) is not None:
            self.counts["video_folder"] += 1
            indices, times = self._frame_indices(media, len(paths))
            stamps = [0.0] * len(indices) if times is None else times
            opened = ((time, open_image(paths[i])) for time, i in zip(stamps, indices, strict=True))
            return Clip([image for _, image in self._kept(opened, media, convert)], times)
        media = fetch_media(media)
        with self._opened(media) as video:
            span = video.span()
            start, duration = _time_range(media, span)
            times = self._times(video, span, start, duration)
            frames = self._kept(self._frames(video, media, times), media, convert)
        if not frames:
            raise _unreadable(media, "no frame could be decoded")
        if not span.timed:
            return Clip([image for _, image in frames], None)
        starts = [time - span.start_s for time, _ in frames]
        gaps = [after - before for before, after in pairwise(starts)]
        # A time after the last frame does not show it: the frame may stay on screen.
        if gaps and start + duration - frames[-1][0] > 2 * max(gaps) + duration / len(times):
            self.counts["video_short"] += 1
        return Clip([image for _, image in frames], starts, duration)

    def read_numbers(
        self,
        media: Media,
        choose: Callable[[FrameCount], Sequence[int]],
        convert: Convert | None = None,
    ) -> list[Any]:
        """Read the frames with the ascending numbers that ``choose`` returns, also repeatedly.

        In a file, frame n is the one on screen at (n + 1/2) / fps: at a constant rate the n-th, and
        otherwise one whose time is the one of its number. DataError as :meth:`read`.
        """
        if (paths := _frames_of(media)) is not None:
            self.counts["video_folder"] += 1
            opened = ((0.0, open_image(paths[number])) for number in choose(self.count(media)))
            return [frame for _, frame in self._kept(opened, media, convert)]
        media = fetch_media(media)
        with self._opened(media) as video:
            span = _count_span(video)
            step = span.duration_s / (span.num_frames or 1)
            numbers = choose(_count_part(media, span))
            times = [span.start_s + (number + 0.5) * step for number in numbers]
            frames = self._kept(self._frames(video, media, times), media, convert)
        if not frames:
            raise _unreadable(media, "no frame could be decoded")
        starts = [time for time, _ in frames]
        if times[-1] - starts[-1] > 2 * max(step, *(b - a for a, b in pairwise(starts)), 0.0):
            self.counts["video_short"] += 1
        return [frames[max(0, bisect_right(starts, time) - 1)][1] for time in times]

    def count(self, media: Media) -> FrameCount:
        """Count the frames from the header, or from the packets if it does not have the number."""
        if (paths := _frames_of(media)) is not None:
            seconds = len(paths) / (media.fps or 1.0)
            span = TimeSpan(0.0, seconds, len(paths), timed=media.fps is not None)
            return _count_part(media, span)
        media = fetch_media(media)
        with self._opened(media) as video:
            return _count_part(media, _count_span(video))

    def plan(self, media: Media) -> tuple[int, list[float] | None]:
        """Return the number and times of the frames of :meth:`read`, from the header.

        The number is exact for an intact file with at least as many frames as are sampled, else
        the maximum. The times are seconds from the first frame; None for a folder.
        """
        if (paths := _frames_of(media)) is not None:
            indices, times = self._frame_indices(media, len(paths))
            return len(indices), times
        with self._opened(media) as video:
            span = video.span()
            start, duration = _time_range(media, span)
            count = self._num_spans(duration if span.timed else None)
            frames = span.num_frames
            if frames is None and self.settings.sampling == "all":
                frames = len(video.packet_times())
            count = count if frames is None else min(count, frames)
            return count, middles(start - span.start_s, duration, count) if span.timed else None

    def _num_spans(self, duration: float | None) -> int:
        """Return the number of spans; the duration is None without times."""
        settings = self.settings
        if duration is not None:
            return settings.num_spans(duration)
        return settings.num_frames if settings.sampling == "uniform" else settings.max_frames

    def _times(
        self, video: PyavVideo, span: TimeSpan, start: float, duration: float
    ) -> list[float]:
        if self.settings.sampling == "all":
            end = start + duration
            times = [time for time in video.packet_times() if start - 1e-6 <= time < end + 1e-6]
            if len(times) <= self.settings.max_frames:
                return [time + 1e-6 for time in times]
        count = self._num_spans(duration if span.timed else None)
        return middles(start, duration, count)

    def _frames(
        self, video: PyavVideo, media: Media, times: list[float]
    ) -> Iterable[tuple[float, Image.Image]]:
        fits = video.frame_pixels * len(times) <= self.settings.max_total_pixels  # held at once
        if self._decord is not None and not (fits and video.suits_decord()):
            self.counts["video_decord_unsuited"] += 1
        elif self._decord is not None:
            try:
                frames = self._decord.read_at(media, times)
            except DecordError as error:
                self.counts[f"video_decord_{error.kind}"] += 1
            else:
                self.counts["video_decord"] += 1
                return frames
        self.counts["video_pyav"] += 1
        return video.read_at(times)

    def _frame_indices(self, media: Media, num_files: int) -> tuple[list[int], list[float] | None]:
        settings, rate = self.settings, media.fps
        if rate is None:
            spans = self._num_spans(None)
            return sorted({(2 * i + 1) * num_files // (2 * spans) for i in range(spans)}), None
        start, duration = _time_range(media, TimeSpan(0.0, num_files / rate, num_files))
        first, last = math.ceil(start * rate - 1e-6), math.ceil((start + duration) * rate - 1e-6)
        indices = list(range(first, last))
        if settings.sampling != "all" or not 0 < len(indices) <= settings.max_frames:
            times = middles(start, duration, settings.num_spans(duration))
            indices = sorted({min(int(time * rate), num_files - 1) for time in times})
        return indices, [index / rate for index in indices]

    def _kept(
        self, frames: Iterable[tuple[float, Image.Image]], media: Media, convert: Convert | None
    ) -> list[tuple[float, Frame]]:
        kept: list[tuple[float, Frame]] = []
        left = self.settings.max_total_pixels
        for time, frame in frames:
            image = frame if convert is None else convert(frame)
            size = image.size if isinstance(image, Image.Image) else image.shape[1::-1]
            left -= size[0] * size[1]
            if left < 0:
                raise DataError(
                    media.name,
                    f"{len(kept) + 1} frames of {size[0]} x {size[1]} pixels exceed "
                    f"the limit of {self.settings.max_total_pixels} pixels",
                    "ask for fewer frames, scale the video down, or raise "
                    "model.video.max_total_pixels",
                )
            kept.append((time, image))
        return kept

    @contextmanager
    def _opened(self, media: Media) -> Iterator[PyavVideo]:
        try:
            with PyavVideo(media, self.settings.max_frame_pixels) as video:
                yield video
        except DataError:
            raise
        except FileNotFoundError as error:
            remedy = "fix the path or the media root"
            raise DataError(media.name, "no such file", remedy) from error
        except Exception as error:  # FFmpeg's errors, IndexError, UnicodeDecodeError and others
            raise _unreadable(media, f"{type(error).__name__}: {error}") from error


def check_header(media: Media) -> None:
    """Raise DataError if PyAV finds no video in a file; frames of any size are allowed."""
    with VideoReader(VideoSettings(max_frame_pixels=(1 << 31) - 1))._opened(media):
        pass


def read_frames(media: Media, num_frames: int) -> list[Image.Image]:
    """Read up to ``num_frames`` frames with PyAV, uniform in time, as :class:`VideoReader`."""
    return VideoReader(VideoSettings(num_frames=num_frames)).read(media).frames


def _unreadable(media: Media, problem: str) -> DataError:
    remedy = "replace the file or remove the row"
    return DataError(media.name, f"the video cannot be read: {problem}", remedy)


def _frames_of(media: Media) -> Sequence[Media] | None:
    """Return the images of a list of frames or of a folder, in order; None for a video."""
    if media.frames:
        if media.fps is None and (media.start is not None or media.end is not None):
            problem = "start and end are given in seconds, and the list of frames has no times"
            remedy = "give its frames per second (fps), or list only the wanted frames"
            raise DataError(media.name, problem, remedy)
        return media.frame_images()
    if media.data is not None or media.path is None or is_url(media.path):
        return None
    folder = Path(media.path)
    if folder.suffix.lower() in image_suffixes() and folder.is_file() and not is_animated(media):
        return replace(media, frames=(media.path,)).frame_images()
    if not folder.is_dir():
        return None
    if media.start is not None or media.end is not None:
        problem = "start and end are given in seconds, and a folder of frames has no times"
        remedy = "remove start and end, or put only the wanted frames into a folder"
        raise DataError(str(folder), problem, remedy)
    suffixes = image_suffixes()
    found = (path for path in folder.iterdir() if path.suffix.lower() in suffixes)
    paths = sorted(found, key=lambda path: (natural_key(path.stem), path.name))
    if not paths:
        raise _unreadable(media, "the folder has no image files")
    return replace(media, frames=tuple(map(str, paths))).frame_images()


def _count_span(video: PyavVideo) -> TimeSpan:
    """Return the span of a file, with its number of frames and a duration above 0."""
    span = video.span()
    if span.num_frames is not None:
        return span
    times = video.packet_times()
    step = (times[-1] - times[0]) / max(1, len(times) - 1)
    duration = step * len(times) or span.duration_s or 1.0
    return replace(span, num_frames=len(times), duration_s=duration)


def _count_part(media: Media, span: TimeSpan) -> FrameCount:
    whole, (start, duration) = span.num_frames or 1, _time_range(media, span)
    rate, begin = whole / span.duration_s, start - span.start_s
    first, end = (math.ceil(time * rate - 1e-6) for time in (begin, begin + duration))
    first = min(first, whole - 1)
    number = max(1, min(end, whole) - first)
    return FrameCount(number, rate if span.timed else None, first)


def _time_range(media: Media, span: TimeSpan) -> tuple[float, float]:
    start = 0.0 if media.start is None else media.start
    end = span.duration_s if media.end is None else min(media.end, span.duration_s)
    if media.start is None and media.end is None:
        return span.start_s, span.duration_s
    if not span.timed:
        problem = "start and end are given in seconds, and the file has no times"
        raise DataError(media.name, problem, "put the video into a container, such as MP4")
    if not 0 <= start < end:
        raise DataError(
            media.name,
            f"start={media.start}, end={media.end} select nothing of a video of "
            f"{span.duration_s:.3f} seconds",
            "give seconds from the video's beginning, start before end and before the video's end",
        )
    return span.start_s + start, end - start
