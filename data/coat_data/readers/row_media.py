"""Media of a row: a path, a struct of bytes, a ``data:`` URL or base64 text becomes a ``Media``."""

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coat_data.containers.media_files import image_suffixes
from coat_data.readers.fields import given, is_missing
from coat_data.readers.reader import Place, kind_of
from coat_data.sample import Media, MediaKind

MEDIA_FIELDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image", "images"),
    "video": ("video", "videos", "video_path"),
}
"""Fields of a row with its media; one field per kind may be set."""

_DATA = re.compile(r"data:[^,;]*(?:;[^,;]*)*,")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_MAX_PATH = 4096  # PATH_MAX of Linux: a longer text is not a path


def to_media(item: object, kind: MediaKind, field: str, place: Place) -> Media:
    """Convert a path, ``{"path": ...}``, ``{"bytes": ..., "path": ...}`` or a URL to ``Media``.

    ``bytes`` may be bytes or base64 text. The keys ``url``, ``base64``, ``data`` and the kind
    itself are read in the same way, also nested (OpenAI's ``{"image_url": {"url": "data:..."}}``).
    A list is a video as the paths of its frames (QwenLM/Qwen2.5-VL, qwen-vl-utils).
    """
    if isinstance(item, Mapping):
        return with_span(_from_struct(item, kind, field, place), item, field, place)
    if isinstance(item, list | tuple) and kind == "video":
        return _from_frames(item, field, place)
    data = _embedded(item, field, place)
    if data is None:
        text = place.as_string(item, field).removeprefix("file://")
        if len(text) <= _MAX_PATH or not _BASE64.fullmatch(text):
            return Media(kind=kind, path=media_path(text, field, place))
        data = _decode(text, field, place)
    return Media(kind=kind, path=f"{place.where}.{field}", data=data)


def _from_frames(items: Sequence[Any], field: str, place: Place) -> Media:
    if not items:
        raise place.error(f"{field} is an empty list", "list the frames of the video")
    frames = [to_media(one, "image", f"{field}[{n}]", place) for n, one in enumerate(items)]
    if any(frame.data is not None for frame in frames):
        problem = f"{field} has embedded frames"
        raise place.error(problem, "store them as files and give their paths")
    paths = tuple(frame.path or "" for frame in frames)
    return Media(kind="video", path=paths[0], frames=paths)


def _is_frame_list(items: Sequence[Any]) -> bool:
    """Whether a list in a field of videos is one video: the paths of its frames."""
    return len(items) > 1 and all(
        isinstance(item, str) and os.path.splitext(item)[1].lower() in image_suffixes()  # noqa: PTH122
        for item in items
    )


def with_span(media: Media, item: Mapping[str, Any], field: str, place: Place) -> Media:
    """Return ``media``, for a video with the seconds ``start`` and ``end`` of ``item`` if given.

    Or ``video_start`` and ``video_end`` (QwenLM/Qwen2.5-VL, qwen-vl-utils); texts are numbers.
    Frames may have a rate (``fps``).
    """
    if media.kind != "video":
        return media
    rate = given(item, "sample_fps", "fps") if media.frames else None
    if rate is not None:
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not number or not 0 < rate < float("inf"):
            raise place.error(f"{field}: fps is {rate!r}", "give frames per second above 0")
        media = replace(media, fps=float(rate))
    start = _time(item, "start", media.start, field, place)
    end = _time(item, "end", media.end, field, place)
    if start is None and end is None:
        return media
    if start is not None and end is not None and end <= start:
        raise place.error(f"{field} ends at {end} s and starts at {start} s", "swap them")
    return replace(media, start=start, end=end)


def _time(
    item: Mapping[str, Any], name: str, own: float | None, field: str, place: Place
) -> float | None:
    """Return the time ``name`` of a clip in seconds; ``own`` is the file's."""
    found: list[float] = [] if own is None else [own]
    for time in (item[key] for key in (name, f"video_{name}") if not is_missing(item.get(key))):
        try:
            seconds = -1.0 if isinstance(time, bool) else float(time)
        except (TypeError, ValueError):
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise place.error(f"{field}: the time {time!r} is wrong", "give seconds, 0 or greater")
        found.append(seconds if isinstance(time, str) else time)
    if len(set(found)) > 1:
        raise place.error(f"{field} has two times: {name} {found}", "keep one of them")
    return found[0] if found else None


def _from_struct(item: Mapping[str, Any], kind: MediaKind, field: str, place: Place) -> Media:
    value: Any = item
    while isinstance(value, Mapping):  # a part, its image_url, its url
        data = _struct_bytes(value, field, place)
        if data is not None:
            path = value.get("path")  # for messages: nothing is read from there
            path = path if path and isinstance(path, str) else f"{place.where}.{field}"
            return Media(kind=kind, path=path, data=data)
        value = given(value, kind, f"{kind}_url", "url", "path")
    return to_media(value, kind, field, place)


def media_path(text: str, field: str, place: Place) -> str:
    """Return the absolute path or the URL of an image or video."""
    if not text or "\0" in text or len(text) > _MAX_PATH:
        problem = f"{field} {text[:80]!r} is not a path"
        raise place.error(problem, f"name a file, or remove {field} from a row without media")
    return place.root.file(text, place.where)


def existing_path(names: Sequence[str], field: str, place: Place) -> str:
    """Return the path of the first of several possible names that exists, else of the first."""
    paths = [media_path(place.as_string(name, field), field, place) for name in names]
    return next((path for path in paths if os.path.exists(path)), paths[0])  # noqa: PTH110


def _struct_bytes(item: Mapping[str, Any], field: str, place: Place) -> bytes | None:
    for name in ("bytes", "base64", "data"):
        value = item.get(name)
        data = _embedded(value, field, place)
        if data is None and isinstance(value, str):
            data = _decode(value, f"{field}.{name}", place)
        if data is not None:
            return data
        if value is not None:
            raise place.error(f"{field}.{name} is {kind_of(value)}", "make it bytes or base64 text")
    return None


def _embedded(value: object, field: str, place: Place) -> bytes | None:
    """Return the content of bytes or of a ``data:`` URL; None for any other value."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str) or not _DATA.match(value[:200]):
        return None
    head, _, body = value.partition(",")
    if ";base64" not in head:
        raise place.error(f"{field} is a data: URL without base64", "encode it as base64")
    return _decode(body, field, place)


def _decode(text: str, field: str, place: Place) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise place.error(f"{field} is not base64: {error}", "encode the file again") from error


def by_kind(media: Sequence[Media]) -> dict[MediaKind, list[Media]]:
    """Return the images and the videos."""
    return {kind: [one for one in media if one.kind == kind] for kind in MEDIA_FIELDS}


def media_fields(row: Mapping[str, Any], place: Place) -> list[Media]:
    """Return the row's images, then its videos; fields of the same kind must not differ."""
    media: list[Media] = []
    for kind, names in MEDIA_FIELDS.items():
        own = place.columns.get(f"{kind}s")
        names = (own,) if own else names
        used = [field for field in names if field in row and not is_missing(row[field])]
        if not used:
            continue
        values = (row[field] for field in used)
        items, *others = (list(v) if isinstance(v, list | tuple) else [v] for v in values)
        if any(other != items for other in others):
            raise place.error(f"both {' and '.join(used)} are set", "keep one of them")
        items = [items] if kind == "video" and _is_frame_list(items) else items
        found = [to_media(item, kind, used[0], place) for item in items]
        media += [with_span(found[0], row, "the row", place)] if len(found) == 1 else found
    return media
