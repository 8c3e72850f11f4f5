"""Media fields of a row: paths, structs of bytes, ``data:`` addresses and base64 text."""

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from coat_data.readers.reader import Place, as_string, is_missing, kind_of
from coat_data.sample import DataError, Media, MediaKind

_DATA = re.compile(r"data:[^,;]*(?:;[^,;]*)*,")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_LONGEST_PATH = 4096
"""PATH_MAX of Linux: a longer text is no path."""
_DEEPEST_STRUCT = 4
"""A part, its image_url, its url, and the text."""


def media_list(value: object, kind: MediaKind, field: str, place: Place) -> list[Media]:
    """The media of a field that holds one medium, a list of them, or nothing.

    Raises:
        DataError: an entry is no medium; names ``field``.
    """
    if is_missing(value):
        return []
    items = value if isinstance(value, list | tuple) else [value]
    return [to_media(item, kind, field, place) for item in items]


def to_media(item: object, kind: MediaKind, field: str, place: Place) -> Media:
    """One medium from a path, ``{"path": ...}``, ``{"bytes": ..., "path": ...}`` or an address.

    ``bytes`` may be bytes, as in Parquet, or base64 text, as in JSON. The same goes for the keys
    ``url``, ``base64``, ``data`` and the kind itself, alone or nested (OpenAI's
    ``{"image_url": {"url": "data:..."}}``). A video's ``start`` and ``end`` are seconds.

    Raises:
        DataError: it is none of these, or a path that leaves the media root.
    """
    if isinstance(item, Mapping):
        return with_span(_from_struct(item, kind, field, place), item, field, place)
    if isinstance(item, bytes | bytearray | memoryview):
        return Media(kind=kind, path=_member(field, place), data=bytes(item))
    text = as_string(item, field, place.where)
    if _DATA.match(text[:200]):
        return Media(kind=kind, path=_member(field, place), data=_address_bytes(text, field, place))
    text = text.removeprefix("file://")
    if len(text) > _LONGEST_PATH and _BASE64.fullmatch(text):
        return Media(kind=kind, path=_member(field, place), data=_decode(text, field, place))
    return Media(kind=kind, path=media_path(text, field, place))


def with_span(media: Media, item: Mapping[str, Any], field: str, place: Place) -> Media:
    """The medium, of which a video shows from ``start`` to ``end`` seconds if ``item`` says so.

    Raises:
        DataError: a time is no number of seconds, or the end comes first.
    """
    start, end = item.get("start"), item.get("end")
    if media.kind != "video" or (start is None and end is None):
        return media
    for time in (start, end):
        known = isinstance(time, int | float) and not isinstance(time, bool)
        if time is not None and not (known and 0 <= time < float("inf")):
            raise DataError(
                place.where, f"{field}: the time {time!r} is wrong", "give seconds, 0 or greater"
            )
    if start is not None and end is not None and end <= start:
        raise DataError(
            place.where, f"{field} ends at {end} s and starts at {start} s", "swap them"
        )
    return dataclasses.replace(media, start=start, end=end)


def _from_struct(item: Mapping[str, Any], kind: MediaKind, field: str, place: Place) -> Media:
    value: Any = item
    for _ in range(_DEEPEST_STRUCT):
        if not isinstance(value, Mapping):
            return to_media(value, kind, field, place)
        given = _struct_bytes(value, field, place)
        if given is not None:
            return Media(kind=kind, path=_name(value, field, place), data=given)
        value = _inner(value, kind)
    raise DataError(place.where, f"{field} is nested too deep", 'write {"path": ...}')


def media_path(text: str, field: str, place: Place) -> str:
    """The absolute path or the address of a medium.

    Raises:
        DataError: the text is no path, or leaves the media root.
    """
    if not text or "\0" in text or len(text) > _LONGEST_PATH:
        raise DataError(
            place.where,
            f"{field} {text[:80]!r} is not a path",
            f"name a file, or remove {field} from a row without media",
        )
    return place.root.file(text, place.where)


def _inner(item: Mapping[str, Any], kind: MediaKind) -> Any:
    names = (kind, f"{kind}_url", "url", "path")
    return next((item[name] for name in names if item.get(name) is not None), None)


def _struct_bytes(item: Mapping[str, Any], field: str, place: Place) -> bytes | None:
    """The bytes that a struct holds; None if it holds none."""
    for name in ("bytes", "base64", "data"):
        value = item.get(name)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, str):
            if _DATA.match(value[:200]):
                return _address_bytes(value, field, place)
            return _decode(value, f"{field}.{name}", place)
        if value is not None:
            raise DataError(
                place.where, f"{field}.{name} is {kind_of(value)}", "make it bytes or base64 text"
            )
    return None


def _name(item: Mapping[str, Any], field: str, place: Place) -> str:
    """Where bytes came from, for messages: nothing is read from there."""
    name = item.get("path")
    return name if isinstance(name, str) and name else _member(field, place)


def _member(field: str, place: Place) -> str:
    return f"{place.where}.{field}"


def _address_bytes(text: str, field: str, place: Place) -> bytes:
    head, _, body = text.partition(",")
    if ";base64" not in head:
        raise DataError(
            place.where, f"{field} is a data: address without base64", "encode it as base64"
        )
    return _decode(body, field, place)


def _decode(text: str, field: str, place: Place) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            place.where, f"{field} is not base64: {error}", "encode the file again"
        ) from error
