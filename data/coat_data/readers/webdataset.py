"""Samples of WebDataset tars: an object of field to bytes (:mod:`coat_data.containers.tar`).

- Fields that end in an image or video extension, or in ``img`` (Eagle), are media, in natural order
  of their names: ``img2.jpg`` before ``img10.jpg``.
- ``json`` with ``conversations``, ``messages``, ``texts`` or query fields is a row of that format,
  and the media of the tar are the row's media: those that the row names, in its order and with its
  ``start`` and ``end`` (``{"path": "0001.mp4", "start": 1.5}``), or all if it names none.
- Otherwise the sample is a caption pair: ``txt``, ``caption`` or ``text``, or the caption in
  ``json`` (img2dataset).
"""

import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from coat_data.containers.media_files import VIDEO_SUFFIXES, image_suffixes, natural_key
from coat_data.readers import llava, messages, pairs
from coat_data.readers.fields import given, is_missing
from coat_data.readers.reader import Place, Reader
from coat_data.readers.row_media import MEDIA_FIELDS
from coat_data.readers.turns import caption_turns, first_of
from coat_data.sample import KEY, DataError, Media, MediaKind, Sample

_CAPTION_FIELDS = ("txt", "caption", "text", "cap")
_CAPTION_KEYS = ("caption", "text", "title", "captions")
_MAX_NAME = 4096  # A longer text is the file, not its name
_ROW_READERS = (llava.READER, messages.READER, pairs.CAULDRON, pairs.QUERY)
_NUMBERED = re.compile(r"<image-(\d+)>")


def _matches(row: Mapping[str, Any]) -> bool:
    values = (value for name, value in row.items() if name != KEY)
    return KEY in row and all(isinstance(value, bytes | DataError) for value in values)


def _to_sample(row: Any, place: Place) -> Sample:
    if not _matches(row):
        raise place.error("the row is not a sample of a tar", "give a .tar file")
    key = str(row[KEY])
    for value in row.values():
        if isinstance(value, DataError):
            raise value if value.where == place.where else value.within(place.where)
    media = [
        Media(kind=kind, path=_path(row, field, place), data=row[field])
        for field, kind in _media_members(row).items()
    ]
    field = next((name for name in row if name == "json" or name.endswith(".json")), None)
    value = None if field is None else _parsed(row, field, place)
    if isinstance(value, Mapping):
        reader = next((one for one in _ROW_READERS if one.recognizes(value)), None)
        if reader is not None:
            return reader.read(_with_media(value, row, place), place)
    caption = _caption(row, value, place)
    if not media:
        problem = f"{key} has no image or video (fields: {_fields(row)})"
        raise place.error(problem, "remove the sample")
    return place.sample({"id": key}, caption_turns(media, caption), media)


def _fields(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(name for name in row if name != KEY))


def _kind(field: str) -> MediaKind | None:
    last = f".{field.rpartition('.')[2]}"
    if last in VIDEO_SUFFIXES:
        return "video"
    return "image" if last in image_suffixes() or last == ".img" else None


def _media_members(row: Mapping[str, Any]) -> dict[str, MediaKind]:
    names = sorted((name for name in row if name != KEY), key=natural_key)
    return {name: kind for name in names if (kind := _kind(name))}


def _path(row: Mapping[str, Any], field: str, place: Place) -> str:
    return f"{place.source}/{row[KEY]}.{field}"


def _parsed(row: Mapping[str, Any], field: str, place: Place) -> Any:
    try:
        return json.loads(row[field])
    except (ValueError, RecursionError) as error:
        raise place.error(f"{row[KEY]}.{field} is not JSON: {error}", "write it again") from error


def _with_media(value: Mapping[str, Any], row: Mapping[str, Any], place: Place) -> dict[str, Any]:
    changed = {"id": str(row[KEY]), **value}
    members = _media_members(row)
    for kind, names in MEDIA_FIELDS.items() if members else ():
        values = [changed.pop(name, None) for name in names]
        entries = next((value for value in values if not is_missing(value)), [])
        entries = list(entries) if isinstance(entries, list | tuple) else [entries]
        own = [member for member in members if members[member] == kind]
        if own:
            changed[f"{kind}s"] = [
                {"bytes": row[member], "path": _path(row, member, place), **_span(entry)}
                for member, entry in _match_members(entries, own, row, place)
            ]
    if isinstance(changed.get("conversations"), list):
        changed["conversations"] = [_remove_numbers(turn) for turn in changed["conversations"]]
    return changed


def _match_members(
    entries: list[Any], own: list[str], row: Mapping[str, Any], place: Place
) -> list[tuple[str, Any]]:
    """Return the members that the JSON names, in its order; all members if it names none."""
    base = PurePosixPath(str(row[KEY])).name.lower()
    by_name = {**{member: member for member in own}, **{f"{base}.{one}": one for one in own}}
    found = [by_name.get(PurePosixPath(_name(entry)).name.lower()) for entry in entries]
    named = [(one, entry) for one, entry in zip(found, entries, strict=True) if one is not None]
    if named and len(named) < len(entries):
        missing = next(entry for one, entry in zip(found, entries, strict=True) if one is None)
        raise place.error(
            f"{row[KEY]}.json names {_name(missing)!r}, which is not in the sample (members: "
            f"{', '.join(own)})",
            "add the file to the tar, or remove its name",
        )
    if named:
        return named
    if len(entries) == len(own):
        return list(zip(own, entries, strict=True))
    if any(map(_span, entries)):
        raise place.error(
            f"{row[KEY]}.json has start and end for {len(entries)} media, of which none is in the "
            f"sample by name (members: {', '.join(own)})",
            "name the members",
        )
    return [(member, None) for member in own]


def _name(entry: Any) -> str:
    if isinstance(entry, Mapping):
        entry = given(entry, "path", "image", "video", "url")
    return entry if isinstance(entry, str) and len(entry) <= _MAX_NAME else ""


def _span(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        return {}
    return {time: entry[time] for time in ("start", "end") if entry.get(time) is not None}


def _remove_numbers(turn: Any) -> Any:
    if isinstance(turn, Mapping) and isinstance(turn.get("value"), str):
        return {**turn, "value": _NUMBERED.sub("<image>", turn["value"])}
    return turn


def _caption(row: Mapping[str, Any], value: Any, place: Place) -> str:
    for field in _CAPTION_FIELDS:
        if field not in row:
            continue
        try:
            return row[field].decode("utf-8").strip()
        except UnicodeDecodeError as error:
            problem = f"{row[KEY]}.{field} is not UTF-8"
            raise place.error(problem, "save it as UTF-8") from error
    if isinstance(value, Mapping):
        for name in _CAPTION_KEYS:
            text = first_of(value.get(name), place)
            if isinstance(text, str):
                return place.as_string(text, name).strip()
    problem = f"{row[KEY]} has no text (fields: {_fields(row)})"
    raise place.error(problem, "add .txt with a caption, or .json with conversations or messages")


READER = Reader(
    "webdataset",
    "WebDataset tars: caption pairs, conversations in .json, img2dataset",
    _matches,
    _to_sample,
)
