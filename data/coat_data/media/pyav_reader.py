"""Shows what is on screen at given times of a video, with PyAV (FFmpeg's libraries).

Damaged packets are passed over, so that what is readable of a damaged file is used. Only what is
needed is decoded: a keyframe can be decoded without what came before it, so what came before is
dropped undecoded when the next wanted time lies at the keyframe or behind it.
"""

import contextlib
import io
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
from av.container import InputContainer
from av.error import ArgumentError, FFmpegError
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from coat_data.containers.remote_file import is_url
from coat_data.media.remote_media import header_of
from coat_data.sample import Media

_SEEK_SECONDS = 60.0
"""A wanted time further ahead than this is neared by seeking half the way back from it (seeking is
imprecise in some formats); from there, and to nearer times, the file is read on."""

_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,flv,ogg,asf,"
    "gif,apng,ivf,nut,mxf,rm,dv,wtv,av1,obu,swf"
)
"""FFmpeg's names of the formats read. It goes by content, not by ending, and the formats left out
(concat, hls, dash, image2, and others) are lists that make it open other files or addresses, past
the guard of the media root."""

_ONLY_VIDEO_FILES = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}

_EXACT_IN_DECORD = ("h264", "vp9", "mpeg4")

_MAX_READ_ERRORS = 100
"""Reading errors after which the rest of a file is given up."""

_MAX_DECODED_FRAMES = 50_000
"""Decoding stops here, so that one endless file cannot hold a loader; 28 minutes at 30 fps."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """When a video is on screen, by its own clock."""

    start_s: float
    """Time of the first frame in seconds; in frames if the file has no times."""
    duration_s: float
    """Likewise."""
    num_frames: int | None
    """Number of frames, where the file's header says it."""


class PyavVideo:
    """One open video; a context manager. FFmpeg's errors pass through."""

    def __init__(self, media: Media) -> None:
        self._media = media
        self._container = _open(media)

    def __enter__(self) -> "PyavVideo":
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def span(self) -> TimeSpan:
        """The video's own time span, from its header or else from its packets."""
        start, duration = _time_span(self._container)
        frames = _video_stream(self._container).frames or None
        if duration is None:
            times = self.packet_times()
            start, duration = times[0], times[-1] - times[0]
            if times == [float(number) for number in range(len(times))]:
                duration = float(len(times))  # counted, not timed
            frames = len(times)
        return TimeSpan(start, duration, frames)

    def packet_times(self) -> list[float]:
        """Start times of all frames, ascending, without decoding; their numbers if untimed.

        Raises:
            ValueError: there is no packet.
        """
        with _open(self._media) as container:
            found = [_time(packet) for packet in _packets(container, _video_stream(container))]
        known = [time for time in found if time is not None]
        if not found:
            raise ValueError("no frame could be decoded")
        return sorted(known) if known else [float(number) for number in range(len(found))]

    def suits_decord(self) -> bool:
        """Whether decord 0.6.0 shows the right frames of such a stream (found by comparison)."""
        stream = _video_stream(self._container)
        codec = stream.codec_context
        return (
            codec.codec.canonical_name in _EXACT_IN_DECORD
            and codec.pix_fmt in ("yuv420p", "yuvj420p")
            and self._container.format.name != "mpegts"
            and not stream.start_time
        )

    def shown_at(self, times: list[float]) -> list[tuple[float, Image.Image]]:
        """The distinct frames on screen at ``times`` (ascending), with their start times, upright.

        The frame at a time is the last one that starts by then, or the first of all.
        """
        frames = _shown_at(self._container, times)
        return [(time, _upright(frame)) for time, frame in frames]


def _open(media: Media) -> InputContainer:
    source: Any = media.path if media.data is None else io.BytesIO(media.data)
    if isinstance(source, str) and is_url(source):
        source = header_of(media)
    try:
        return av.open(source, metadata_errors="replace", options=_ONLY_VIDEO_FILES)  # pyright: ignore[reportReturnType]
    except ArgumentError as error:  # what FFmpeg answers to a format that is not in the list
        raise ValueError(f"its format is none of {_FORMATS}") from error


def _video_stream(container: InputContainer) -> VideoStream:
    stream = container.streams.best("video")
    if not isinstance(stream, VideoStream):
        raise ValueError("it has no video stream")
    if stream.codec_context is None:
        raise ValueError("no decoder knows its codec")
    stream.thread_type = "NONE"  # loader workers are processes; threads inside them only contend
    return stream


def _time_span(container: InputContainer) -> tuple[float, float | None]:
    """Start and duration of the video in seconds; the duration is None when the file has none."""
    stream = _video_stream(container)
    start = float((stream.start_time or 0) * (stream.time_base or 0))
    if stream.duration is not None and stream.time_base is not None:
        return start, float(stream.duration * stream.time_base)
    if container.duration is not None:
        return start, container.duration / av.time_base
    return start, None


def _shown_at(container: InputContainer, times: list[float]) -> list[tuple[float, VideoFrame]]:
    wanted = deque(times)
    chosen: list[tuple[float, VideoFrame]] = []
    shown: tuple[float, VideoFrame] | None = None
    for time, frame in _decoded(container, wanted):
        while wanted and time > wanted[0]:
            wanted.popleft()
            chosen.append(shown or (time, frame))
        shown = (time, frame)
        if not wanted:
            break
    if wanted and shown is not None:  # the video ends before its duration says
        chosen.append(shown)
    return list({id(frame): (time, frame) for time, frame in chosen}.values())


def _upright(frame: VideoFrame) -> Image.Image:
    image = frame.to_image()
    quarter_turns = round(frame.rotation / 90)
    return image.rotate(90 * quarter_turns, expand=True) if quarter_turns else image


def _decoded(container: InputContainer, wanted: deque[float]) -> Iterator[tuple[float, VideoFrame]]:
    """Times and frames in display order, at least what is on screen at the times in ``wanted``.

    The caller takes times out of ``wanted`` as it meets a later frame, and stops when it is empty.
    """
    stream = _video_stream(container)
    seconds = float(stream.time_base or 1)  # frame.time is missing after the last packet
    time = -1.0
    for number, frame in enumerate(_decoded_packets(container, stream, wanted)):
        time = time + 1.0 if frame.pts is None else frame.pts * seconds
        yield time, frame
        if number == _MAX_DECODED_FRAMES:
            return


def _decoded_packets(
    container: InputContainer, stream: VideoStream, wanted: deque[float]
) -> Iterator[VideoFrame]:
    for packet in _needed_packets(container, stream, wanted):
        if packet is None:
            stream.codec_context.flush_buffers()
            continue
        with contextlib.suppress(FFmpegError):  # a damaged packet: the next ones may be whole
            yield from packet.decode()  # pyright: ignore[reportReturnType]
    with contextlib.suppress(FFmpegError):
        yield from stream.decode(None)


def _needed_packets(
    container: InputContainer, stream: VideoStream, wanted: deque[float]
) -> Iterator[Packet | None]:
    """The packets to decode for the times in ``wanted``; None before a gap."""
    held: list[Packet] = []  # read, and not yet known to be needed
    fed = False
    sought = None
    for packet in _packets(container, stream):
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
                _seek(container, stream, sought - _SEEK_SECONDS / 2)
                continue
        held.append(packet)
    yield from held


def _seek(container: InputContainer, stream: VideoStream, seconds: float) -> None:
    """Go to about ``seconds``; without an index it fails, and reading on also gets there."""
    with contextlib.suppress(FFmpegError):
        container.seek(round(seconds / float(stream.time_base or 1)), stream=stream)


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[Packet]:
    """The packets of ``stream`` in file order; where reading fails, it is tried again behind."""
    for _ in range(_MAX_READ_ERRORS):
        try:
            yield from (packet for packet in container.demux(stream) if packet.size)
        except FFmpegError:
            continue
        return


def _time(packet: Packet) -> float | None:
    stamp = packet.dts if packet.pts is None else packet.pts
    return None if stamp is None or packet.time_base is None else float(stamp * packet.time_base)
