"""Images or videos with one caption each, in the columns of a CSV, JSONL or Parquet file.

The names of the columns are those that people use: ``image``, ``file_name`` (the image folder of
``datasets``), ``path``, ...; ``caption``, ``text``, ``title``, ... A column of another name can be
mapped (``columns``: ``image``, ``video``, ``caption``). WebVid's columns are known too
(m-bain/webvid, README): its file is ``page_dir/videoid.mp4``, or ``videoid.mp4``.
"""

import os
from collections.abc import Mapping
from typing import Any

from coat_data.containers.folder import VIDEO_SUFFIXES
from coat_data.readers.media import media_path, to_media
from coat_data.readers.reader import Place, as_object, as_string, is_missing, row_id
from coat_data.readers.turns import caption_turns
from coat_data.sample import DataError, Media, MediaKind, Sample

NAME = "captions"
SUMMARY = "one image or video and one caption per row (CSV, JSONL, Parquet; WebVid)"

_MEDIA_FIELDS: Mapping[str, MediaKind | None] = {
    "image": "image",
    "image_path": "image",
    "img": "image",
    "img_path": "image",
    "jpg": "image",
    "video": "video",
    "video_path": "video",
    "clip": "video",
    "file_name": None,
    "filename": None,
    "filepath": None,
    "file": None,
    "path": None,
}
"""Columns of media; of None, the ending of the file name says the kind."""

_CAPTION_FIELDS = ("caption", "text", "title", "description", "txt", "captions")
_WEBVID = {"videoid", "name", "page_dir"}


def matches(row: Any) -> bool:
    """Whether the row has a column of media and a column of text."""
    if not isinstance(row, Mapping):
        return False
    names = {str(name).lower() for name in row}
    return names >= _WEBVID or bool(
        names & set(_MEDIA_FIELDS) and names & set(_CAPTION_FIELDS) and "question" not in names
    )


def to_sample(row: Any, place: Place) -> Sample:
    """One caption pair. Does not decode the medium.

    Raises:
        DataError: a column is missing or empty.
    """
    row = {str(name).lower(): value for name, value in as_object(row, place.where).items()}
    if set(row) >= _WEBVID:
        media, name = _webvid(row, place), "name"
    else:
        media = _medium(row, place)
        name = _column(row, "caption", _CAPTION_FIELDS, place)
    value = row[name][0] if isinstance(row[name], list) and row[name] else row[name]
    caption = as_string(value, name, place.where)
    return Sample(
        id=row_id(row, place),
        turns=caption_turns([media], caption),
        media=(media,),
        source=place.source,
        row=place.row,
    ).check()


def _medium(row: Mapping[str, Any], place: Place) -> Media:
    for kind in ("image", "video"):
        if kind in place.columns:
            return to_media(row.get(place.columns[kind].lower()), kind, kind, place)
    name = _column(row, "image or video", tuple(_MEDIA_FIELDS), place)
    kind = _MEDIA_FIELDS[name]
    if kind is None:
        suffix = os.path.splitext(str(row[name]))[1].lower()  # noqa: PTH122 - no path yet
        kind = "video" if suffix in VIDEO_SUFFIXES else "image"
    return to_media(row[name], kind, name, place)


def _column(row: Mapping[str, Any], what: str, names: tuple[str, ...], place: Place) -> str:
    own = place.columns.get(what, "").lower()
    found = next((name for name in ((own,) if own else names) if not is_missing(row.get(name))), "")
    if not found:
        raise DataError(
            place.where,
            f"there is no {what} (columns: {', '.join(row)})",
            f"name the column one of {', '.join(names)}",
        )
    return found


def _webvid(row: Mapping[str, Any], place: Place) -> Media:
    names = [str(row[name]) for name in ("page_dir", "videoid")]
    candidates = ["/".join(names) + ".mp4", f"{names[1]}.mp4"]
    return Media(kind="video", path=first_file(candidates, "videoid", place))


def first_file(candidates: list[str], field: str, place: Place) -> str:
    """The absolute path of the first candidate that exists; the first one if none does."""
    paths = [media_path(name, field, place) for name in candidates]
    return next((path for path in paths if os.path.exists(path)), paths[0])  # noqa: PTH110
