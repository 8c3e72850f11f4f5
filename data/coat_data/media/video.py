"""Reads the frames of a video that a sampling rule asks for, with decord or PyAV.

PyAV is the default. It decodes what is needed only and was measured to be as fast as decord on few
frames of a long clip (data/README.md).

decord is for those who want it. Its last release can hang while it holds the interpreter's lock, or
abort (dmlc/decord issues 269, 363, 375), so it runs in a child process with a time limit
(:mod:`coat_data.media.decord_reader`). It also shows wrong frames of H.265 with keyframes between
others, of MPEG transport streams and of videos whose clock does not start at zero, and other
colours than today's FFmpeg of 10-bit video; so it is asked only for streams in which it was found
exact. What it is not asked for, or cannot read, PyAV reads. Which frames are shown is decided here,
from times that PyAV finds in the file's header, and is the same for both.
"""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from coat_data.containers.remote_file import is_url
from coat_data.media.decord_reader import DecordError, DecordReader
from coat_data.media.image import list_frames, open_image
from coat_data.media.pyav_reader import PyavVideo, TimeSpan
from coat_data.media.remote_media import fetched
from coat_data.media.sampling import VideoSettings, middles
from coat_data.sample import DataError, Media


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames of a video in order."""

    frames: list[Image.Image]
    """In RGB, upright."""
    times_s: list[float] | None
    """When each frame comes on screen, in seconds from the video's first frame; None for a folder
    of frames, which has no times."""
    duration_s: float | None = None
    """Seconds of the part that the frames are taken from; None for a folder of frames."""


class VideoReader:
    """Reads clips; can be sent to a worker process, where it starts its own child for decord.

    Attributes:
        settings: what is read, and how.
        counts: videos read by ``video_pyav``, ``video_decord`` and ``video_folder``; and those that
            PyAV read in decord's place, by why: ``video_decord_unsuited`` (a stream that decord is
            not asked for), ``video_decord_timeout``, ``video_decord_crash``,
            ``video_decord_error``.
    """

    def __init__(self, settings: VideoSettings, decord: DecordReader | None = None) -> None:
        """Choose the backend.

        Args:
            settings: what is read, and how.
            decord: takes the place of the usual child process; for tests of what happens when it
                hangs.

        Raises:
            ValueError: decord is asked for and not installed.
        """
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._decord = None
        if settings.backend == "decord":
            if decord is None and importlib.util.find_spec("decord") is None:
                raise ValueError(
                    "the video backend is decord, which is not installed; install it (pip install "
                    "'coat-vlm[decord]'), or set model.video.backend to auto or pyav"
                )
            self._decord = decord or DecordReader(settings.timeout_s)

    def read(self, media: Media) -> Clip:
        """The frames that the settings ask for; fewer where the video is short.

        ``media.path`` may be a folder of frames, which are taken in the order of their names,
        evenly by number: ``num_frames`` of them, or under other sampling than uniform up to
        ``max_frames``.

        Raises:
            DataError: the file is missing or not a video, no frame of it can be decoded, or
                ``start`` and ``end`` do not fit it; names the path.
        """
        if (folder := _folder_of(media)) is not None:
            self.counts["video_folder"] += 1
            paths = _frames_of(folder, media)
            return Clip([open_image(paths[i]) for i in self._chosen(len(paths))], None)
        media = fetched(media)
        with _opened(media) as video:
            span = video.span()
            start, duration = _window(media, span)
            times = self._times(video, start, duration)
            frames = self._frames(video, media, times)
        if not frames:
            raise _unreadable(media, "no frame could be decoded")
        shown = [time - span.start_s for time, _ in frames]
        return Clip([image for _, image in frames], shown, duration)

    def plan(self, media: Media) -> tuple[int, list[float] | None]:
        """The largest number of frames that :meth:`read` gives, from the header alone.

        It is the number itself for a whole file with at least as many frames as are asked for.

        Returns:
            That number, and the middles of as many spans in seconds from the video's first frame
            (None for a folder), which are the frames' times to within a frame.

        Raises:
            DataError: as for :meth:`read`, as far as the header shows it.
        """
        if (folder := _folder_of(media)) is not None:
            return len(self._chosen(len(_frames_of(folder, media)))), None
        with _opened(media) as video:
            span = video.span()
            start, duration = _window(media, span)
            count = self.settings.num_spans(duration)
            frames = span.num_frames
            if frames is None and self.settings.sampling == "all":
                frames = len(video.packet_times())
            count = count if frames is None else min(count, frames)
            return count, middles(start - span.start_s, duration, count)

    def close(self) -> None:
        """End decord's child process; the next video would start another."""
        if self._decord is not None:
            self._decord.close()

    def _times(self, video: PyavVideo, start: float, duration: float) -> list[float]:
        if self.settings.sampling == "all":
            end = start + duration
            times = [time for time in video.packet_times() if start - 1e-6 <= time < end + 1e-6]
            if len(times) <= self.settings.max_frames:
                return [time + 1e-6 for time in times]
        return middles(start, duration, self.settings.num_spans(duration))

    def _frames(
        self, video: PyavVideo, media: Media, times: list[float]
    ) -> list[tuple[float, Image.Image]]:
        if self._decord is not None and not video.suits_decord():
            self.counts["video_decord_unsuited"] += 1
        elif self._decord is not None:
            try:
                frames = self._decord.shown_at(media, times)
            except DecordError as error:
                self.counts[f"video_decord_{error.kind}"] += 1
            else:
                self.counts["video_decord"] += 1
                return frames
        self.counts["video_pyav"] += 1
        return video.shown_at(times)

    def _chosen(self, num_files: int) -> list[int]:
        """Indices of the frames of a folder; without times, they are evenly spaced by number."""
        settings = self.settings
        spans = settings.num_frames if settings.sampling == "uniform" else settings.max_frames
        return sorted({(2 * i + 1) * num_files // (2 * spans) for i in range(spans)})


def read_frames(media: Media, num_frames: int) -> list[Image.Image]:
    """Up to ``num_frames`` frames in RGB, uniform in time, upright, read with PyAV.

    A video with fewer frames gives each of them once. ``media.path`` may be a folder of frames,
    which are taken in the order of their names.

    Raises:
        DataError: as :meth:`VideoReader.read`.
        ValueError: ``num_frames`` is not positive.
    """
    return VideoReader(VideoSettings(backend="pyav", num_frames=num_frames)).read(media).frames


@contextmanager
def _opened(media: Media) -> Iterator[PyavVideo]:
    """The open video; errors name the file."""
    try:
        with PyavVideo(media) as video:
            yield video
    except DataError:
        raise
    except Exception as error:
        raise _named(media, error) from error


def _named(media: Media, error: Exception) -> DataError:
    """FFmpeg's errors, IndexError, UnicodeDecodeError and others, with the file's name."""
    if isinstance(error, FileNotFoundError):
        return DataError(_name(media), "no such file", "fix the path or the media root")
    return _unreadable(media, f"{type(error).__name__}: {error}")


def _unreadable(media: Media, problem: str) -> DataError:
    remedy = "replace the file or remove the row"
    return DataError(_name(media), f"the video cannot be read: {problem}", remedy)


def _name(media: Media) -> str:
    return media.path or "<video bytes>"


def _folder_of(media: Media) -> Path | None:
    if media.data is not None or media.path is None or is_url(media.path):
        return None
    folder = Path(media.path)
    return folder if folder.is_dir() else None


def _frames_of(folder: Path, media: Media) -> list[Path]:
    if media.start is not None or media.end is not None:
        raise DataError(
            str(folder),
            "start and end are given in seconds, and a folder of frames has no times",
            "remove start and end, or put only the wanted frames into a folder",
        )
    if not (paths := list_frames(folder)):
        raise _unreadable(media, "the folder has no image files")
    return paths


def _window(media: Media, span: TimeSpan) -> tuple[float, float]:
    """Start and duration of what is to be shown, by the video's own clock."""
    start = 0.0 if media.start is None else media.start
    end = span.duration_s if media.end is None else min(media.end, span.duration_s)
    if media.start is None and media.end is None:
        return span.start_s, span.duration_s
    if not 0 <= start < end:
        raise DataError(
            _name(media),
            f"start={media.start}, end={media.end} show nothing of a video of "
            f"{span.duration_s:.3f} seconds",
            "give seconds from the video's beginning, start before end and before the video's end",
        )
    return span.start_s + start, end - start
