"""Reads the frames at given times of a video with PyAV (FFmpeg's libraries).

Damaged packets are skipped. Packets before a keyframe are dropped if the next requested time is at
or after that keyframe. Memory does not grow with the length of a video: frames are yielded one by
one, and packets are held up to the next keyframe at most.
"""

import contextlib
import gc
import io
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.error import ArgumentError, FFmpegError
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from coat_data.containers.media_files import check_regular_file
from coat_data.media.remote_media import fetch_media
from coat_data.sample import DataError, Media

_SEEK_SECONDS = 60.0
"""If a requested time is further ahead than this, the reader seeks to half this distance before it
(seeking is imprecise in some formats) and reads on from there."""

_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,flv,ogg,asf,"
    "gif,apng,ivf,nut,mxf,rm,dv,wtv,av1,obu,swf"
)
"""FFmpeg's names of the supported formats. FFmpeg detects the format by content, and the formats
left out (concat, hls, dash, image2, and others) are lists that open other files or URLs and
so bypass the check of the media root."""

_ONLY_VIDEO_FILES = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}

_EXACT_IN_DECORD = ("h264", "vp9", "mpeg4")

_MAX_READ_ERRORS = 100  # reading errors after which the rest of a file is skipped

_MAX_DECODED_FRAMES = 1 << 19
"""Maximum number of decoded frames, so that an endless file cannot block a loader; 4.8 hours at
30 fps."""

# A forked worker must not free what its parent decoded: FFmpeg would wait for threads that only the
# parent has. Frames with side data are in cycles, which a worker's garbage collection would find.
os.register_at_fork(after_in_child=gc.freeze)


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Start and duration of a video, by its own clock."""

    start_s: float
    """Time of the first frame in seconds; a frame number if the file has no times."""
    duration_s: float
    """Duration in seconds; the number of frames if the file has no times."""
    num_frames: int | None
    """Number of frames in the header, if any."""
    timed: bool = True
    """Whether the file has times."""


class PyavVideo:
    """An open video, as a context manager; DataError for frames above ``max_pixels``."""

    def __init__(self, media: Media, max_pixels: int = 1 << 25) -> None:
        self._media = media
        self._max_pixels = max_pixels
        self._container = _open(media, max_pixels)
        self._stream = _video_stream(self._container)
        if not self.frame_pixels:  # for some codecs the limit hides the size
            self._container.close()
            self._container = _open(media, None)
            self._stream = _video_stream(self._container)
        codec = self._stream.codec_context
        if self.frame_pixels > max_pixels:
            self._container.close()
            raise DataError(
                media.name,
                f"a frame has {codec.width} x {codec.height} pixels, and the limit is {max_pixels}",
                "scale the video down, or raise model.video.max_frame_pixels if you trust the file",
            )
        codec.options = {"max_pixels": str(max_pixels)}  # the size may change in the stream

    @property
    def frame_pixels(self) -> int:
        """Pixels of a frame, by the header."""
        return self._stream.codec_context.width * self._stream.codec_context.height

    def __enter__(self) -> "PyavVideo":
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def span(self) -> TimeSpan:
        """Return the time span of the video from its header, or else from its packets."""
        stream, duration = self._stream, self._container.duration
        start = float((stream.start_time or 0) * (stream.time_base or 0))
        frames = stream.frames or None
        if stream.duration and stream.time_base is not None:  # zero is unknown
            return TimeSpan(start, float(stream.duration * stream.time_base), frames)
        if duration:
            return TimeSpan(start, duration / av.time_base, frames)
        times = self.packet_times()
        untimed = times == [float(number) for number in range(len(times))]
        # The last frame is on screen for as long as the others, on average.
        length = (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)
        return TimeSpan(times[0], length, len(times), not untimed)

    def packet_times(self) -> list[float]:
        """Return the start times of all frames, ascending, without decoding; or frame numbers."""
        with PyavVideo(self._media, self._max_pixels) as video:
            found = [_time(packet) for packet in video._packets()]
        known = [time for time in found if time is not None]
        if not found:
            raise ValueError("no frame could be decoded")
        return sorted(known) if known else [float(number) for number in range(len(found))]

    def suits_decord(self) -> bool:
        """Whether decord 0.6.0 returns the right frames of such streams (found by comparison)."""
        codec = self._stream.codec_context
        return (
            codec.codec.canonical_name in _EXACT_IN_DECORD
            and codec.pix_fmt in ("yuv420p", "yuvj420p")
            and self._container.format.name != "mpegts"
            and not self._stream.start_time
        )

    def read_at(self, times: list[float]) -> Iterator[tuple[float, Image.Image]]:
        """Yield the distinct frames at ``times`` (ascending), upright, with their start times.

        The frame at a time is the last one that starts by then, or the first one.
        """
        last = None
        for time, frame in self._chosen(deque(times)):
            if frame is not last:
                yield time, _upright(frame)
            last = frame

    def _chosen(self, wanted: deque[float]) -> Iterator[tuple[float, VideoFrame]]:
        current: tuple[float, VideoFrame] | None = None
        for time, frame in self._decode(wanted):
            while wanted and time > wanted[0]:
                wanted.popleft()
                yield current or (time, frame)
            current = (time, frame)
            if not wanted:
                break
        if wanted and current is not None:  # the video is shorter than its duration says
            yield current

    def _decode(self, wanted: deque[float]) -> Iterator[tuple[float, VideoFrame]]:
        """Yield times and frames in display order, at least the frames at the times in ``wanted``.

        The caller removes times from ``wanted`` when it gets a later frame.
        """
        seconds = float(self._stream.time_base or 1)  # frame.time is missing after the last packet
        time = -1.0
        for number, frame in enumerate(self._decode_packets(wanted)):
            if number == _MAX_DECODED_FRAMES:
                raise ValueError(
                    f"more than {_MAX_DECODED_FRAMES} frames have to be decoded; cut the video"
                )
            time = time + 1.0 if frame.pts is None else frame.pts * seconds
            yield time, frame

    def _decode_packets(self, wanted: deque[float]) -> Iterator[VideoFrame]:
        for packet in self._needed_packets(wanted):
            if packet is None:
                self._stream.codec_context.flush_buffers()
                continue
            with contextlib.suppress(FFmpegError):  # skip a damaged packet
                yield from packet.decode()  # pyright: ignore[reportReturnType]
        with contextlib.suppress(FFmpegError):
            yield from self._stream.decode(None)

    def _needed_packets(self, wanted: deque[float]) -> Iterator[Packet | None]:
        """Yield the packets to decode for the times in ``wanted``; None before a gap."""
        held: list[Packet] = []  # not yet known to be needed
        fed = False
        sought = None
        for packet in self._packets():
            time = _time(packet)
            if time is None or time > wanted[0]:
                yield from (*held, packet)
                held.clear()
                fed = True
                continue
            if packet.is_keyframe:
                held.clear()
                if fed:
                    yield None
                    fed = False
                if wanted[0] - time > _SEEK_SECONDS and sought != wanted[0]:
                    sought = wanted[0]
                    self._seek(sought - _SEEK_SECONDS / 2)
                    continue
            held.append(packet)
        yield from held

    def _seek(self, seconds: float) -> None:
        offset = round(seconds / float(self._stream.time_base or 1))
        with contextlib.suppress(FFmpegError):  # reading on reaches it as well
            self._container.seek(offset, stream=self._stream)

    def _packets(self) -> Iterator[Packet]:
        for _ in range(_MAX_READ_ERRORS):
            try:
                packets = self._container.demux(self._stream)
                yield from (packet for packet in packets if packet.size)
            except FFmpegError:
                continue
            return


def _open(media: Media, max_pixels: int | None) -> InputContainer:
    media = fetch_media(media)
    source: Any = media.path if media.data is None else io.BytesIO(media.data)
    if isinstance(source, str):
        check_regular_file(source)
    # FFmpeg decodes the first frames when it opens a file.
    options = dict(_ONLY_VIDEO_FILES)
    if max_pixels is not None:
        options["max_pixels"] = str(max_pixels)
    try:
        return av.open(source, metadata_errors="replace", options=options)  # pyright: ignore[reportReturnType]
    except ArgumentError as error:  # raised by FFmpeg for a format that is not in the list
        raise ValueError(f"its format is not one of {_FORMATS}") from error


def _video_stream(container: InputContainer) -> VideoStream:
    stream = container.streams.best("video")
    if not isinstance(stream, VideoStream):
        raise ValueError("it has no video stream")
    if stream.codec_context is None:
        raise ValueError("no decoder knows its codec")
    stream.thread_type = "NONE"  # workers are processes; more threads would only compete
    return stream


def _upright(frame: VideoFrame) -> Image.Image:
    """Apply the display matrix: a pixel at (x, y) is shown at (a x + c y, b x + d y)."""
    image = frame.to_image()
    side_data: Any = frame.side_data  # a sequence, annotated as a mapping
    matrix = next((one for one in side_data if one.type.name == "DISPLAYMATRIX"), None)
    if matrix is None:
        return image
    a, b, _, c, d = np.frombuffer(matrix, np.int32, 5).tolist()
    if abs(b) > abs(a):  # turned by a quarter
        image, a, d = image.transpose(Image.Transpose.TRANSPOSE), c, b
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if a < 0 else image
    return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if d < 0 else image


def _time(packet: Packet) -> float | None:
    stamp = packet.dts if packet.pts is None else packet.pts
    return None if stamp is None or packet.time_base is None else float(stamp * packet.time_base)
