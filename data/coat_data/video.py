"""Reads frames that stand uniformly in a video's time, with PyAV.

The clip is cut into ``num_frames`` equal spans; each span is shown by the frame on screen at its
middle. Damaged packets are passed over, so that what is readable of a damaged file is used.

Only what is needed is decoded: a keyframe can be decoded without what came before it, so what came
before is dropped undecoded when the next wanted time lies at the keyframe or behind it.
"""

import contextlib
import io
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from coat_data.image import list_frames, open_image
from coat_data.sample import DataError, Media

_SEEK_SECONDS = 60.0
"""A wanted time further ahead than this is neared by seeking half the way back from it (seeking is
imprecise in some formats); from there, and to nearer times, the file is read on."""

_MAX_READ_ERRORS = 100
"""Reading errors after which the rest of a file is given up."""

_MAX_DECODED_FRAMES = 50_000
"""Decoding stops here, so that one endless file cannot hold a loader; 28 minutes at 30 fps."""


def read_frames(media: Media, num_frames: int) -> list[Image.Image]:
    """Up to ``num_frames`` frames in RGB, uniform in time, upright.

    A video with fewer frames gives each of them once. ``media.path`` may be a folder of frames,
    which are taken in the order of their names.

    Raises:
        DataError: the file is missing or not a video, or no frame of it can be decoded; names the
            path.
        ValueError: ``num_frames`` is not positive.
    """
    if num_frames <= 0:
        raise ValueError(f"num_frames={num_frames}; ask for at least one frame")
    where = media.path or "<video bytes>"
    if media.data is None and media.path is not None and Path(media.path).is_dir():
        return _read_folder(Path(media.path), num_frames)
    try:
        frames = _read_file(media, num_frames)
    except FileNotFoundError as error:
        raise DataError(where, "no such file", "fix the path or the media root") from error
    except Exception as error:  # FFmpeg's, IndexError, UnicodeDecodeError, and others
        raise _unreadable(where, f"{type(error).__name__}: {error}") from error
    if not frames:
        raise _unreadable(where, "no frame could be decoded")
    return frames


def _unreadable(where: str, problem: str) -> DataError:
    return DataError(
        where, f"the video cannot be read: {problem}", "replace the file or remove the row"
    )


def _read_folder(folder: Path, num_frames: int) -> list[Image.Image]:
    paths = list_frames(folder)
    if not paths:
        raise _unreadable(str(folder), "the folder has no image files")
    middles = {(2 * i + 1) * len(paths) // (2 * num_frames) for i in range(num_frames)}
    return [open_image(paths[index]) for index in sorted(middles)]


def _read_file(media: Media, num_frames: int) -> list[Image.Image]:
    with _open(media) as container:
        start, duration = _time_span(container)
        if duration is None:
            start, duration = _time_span_of_packets(media)
        # A microsecond later, so that rounding does not decide when a frame starts in the middle.
        middles = [start + duration * (i + 0.5) / num_frames + 1e-6 for i in range(num_frames)]
        return _shown_at(container, middles)


def _open(media: Media) -> InputContainer:
    source: Any = media.path if media.data is None else io.BytesIO(media.data)
    return av.open(source, metadata_errors="replace")  # pyright: ignore[reportReturnType]


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


def _time_span_of_packets(media: Media) -> tuple[float, float]:
    """Start and duration of a video whose file does not say; in frames if they have no times."""
    with _open(media) as container:
        times = [_time(packet) for packet in _packets(container, _video_stream(container))]
    known = [time for time in times if time is not None]
    return (min(known), max(known) - min(known)) if known else (0.0, float(len(times)))


def _shown_at(container: InputContainer, times: list[float]) -> list[Image.Image]:
    """The distinct frames on screen at ``times`` (ascending): the last that starts by then."""
    wanted = deque(times)
    chosen: list[VideoFrame] = []
    shown: VideoFrame | None = None
    for time, frame in _decoded(container, wanted):
        while wanted and time > wanted[0]:
            wanted.popleft()
            chosen.append(shown or frame)
        shown = frame
        if not wanted:
            break
    if wanted and shown is not None:  # the video ends before its duration says
        chosen.append(shown)
    distinct = {id(frame): frame for frame in chosen}
    return [_upright(frame) for frame in distinct.values()]


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
