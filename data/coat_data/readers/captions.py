"""Images or videos with one caption each: in columns, in sets of video captions, in folders.

The names of the columns of a CSV, JSONL or Parquet file are those that people use: ``image``,
``file_name`` (the image folder of ``datasets``), ``path``, ...; ``caption``, ``text``, ``title``,
... A column of another name can be mapped (``columns``: ``image``, ``video``, ``caption``).
WebVid's columns are known too (m-bain/webvid, README): its file is ``page_dir/videoid.mp4``, or
``videoid.mp4``.

Two sets have fields of their own. ShareGPT4Video (ShareGPT4Omni/ShareGPT4Video, dataset card): the
caption with ``idx`` -1 is the summary::

    {"video_id": "a", "video_path": "a.mp4", "captions": [{"idx": "-1", "content": "..."}]}

Panda-70M (snap-research/Panda-70M, README): a CSV of ``videoID, url, timestamp, caption`` where a
record lists several clips; each one is a row here (:mod:`coat_data.containers.csv_file`).

Of a file in a folder, the text beside it is the caption, else its folder is its class.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from coat_data.containers.csv_file import CLIP
from coat_data.containers.folder import VIDEO_SUFFIXES
from coat_data.readers.reader import (
    Place,
    Reader,
    as_list,
    as_object,
    as_string,
    caption_turns,
    has_fields,
    is_missing,
    media_path,
    row_id,
    to_media,
)
from coat_data.sample import DataError, Media, MediaKind, Part, Sample, Turn
from coat_data.text.chat import SHORT_ANSWER_SUFFIX

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
_TIME = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")


def _kind_by_ending(name: str) -> MediaKind:
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - a string, no path yet
    return "video" if suffix in VIDEO_SUFFIXES else "image"


def _has_columns(row: Any) -> bool:
    """Whether the row has a column of media and a column of text."""
    if not isinstance(row, Mapping):
        return False
    names = {str(name).lower() for name in row}
    return names >= _WEBVID or bool(
        names & set(_MEDIA_FIELDS) and names & set(_CAPTION_FIELDS) and "question" not in names
    )


def _from_columns(row: Any, place: Place) -> Sample:
    """One caption pair.

    Raises:
        DataError: a column is missing or empty.
    """
    row = {str(name).lower(): value for name, value in as_object(row, place.where).items()}
    if set(row) >= _WEBVID:
        names = [str(row[name]) for name in ("page_dir", "videoid")]
        candidates = ["/".join(names) + ".mp4", f"{names[1]}.mp4"]
        media = Media(kind="video", path=_first_file(candidates, "videoid", place))
        name = "name"
    else:
        media = _medium(row, place)
        name = _column(row, "caption", _CAPTION_FIELDS, place)
    value = row[name][0] if isinstance(row[name], list) and row[name] else row[name]
    turns = caption_turns([media], as_string(value, name, place.where))
    return place.sample(row_id(row, place), turns, [media])


def _medium(row: Mapping[str, Any], place: Place) -> Media:
    for kind in ("image", "video"):
        if kind in place.columns:
            return to_media(row.get(place.columns[kind].lower()), kind, kind, place)
    name = _column(row, "image or video", tuple(_MEDIA_FIELDS), place)
    kind = _MEDIA_FIELDS[name] or _kind_by_ending(str(row[name]))
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


def _first_file(candidates: list[str], field: str, place: Place) -> str:
    """The absolute path of the first candidate that exists; the first one if none does."""
    paths = [media_path(name, field, place) for name in candidates]
    return next((path for path in paths if os.path.exists(path)), paths[0])  # noqa: PTH110


def _is_video_set(row: Any) -> bool:
    """Whether the row has the fields of ShareGPT4Video or Panda-70M."""
    return isinstance(row, Mapping) and (
        isinstance(row.get(CLIP), tuple)
        or ({"captions", "video_path"} <= set(row) and isinstance(row["captions"], list))
    )


def _from_video_set(row: Any, place: Place) -> Sample:
    """One caption pair.

    Raises:
        DataError: a field is missing or of the wrong type.
    """
    row = as_object(row, place.where)
    is_panda = isinstance(row.get(CLIP), tuple)
    media, caption = _panda(row, place) if is_panda else _share_gpt(row, place)
    name = row_id({**row, "id": row.get("video_id", row.get("id"))}, place)
    return place.sample(name, caption_turns([media], caption), [media])


def _share_gpt(row: Mapping[str, Any], place: Place) -> tuple[Media, str]:
    captions = [
        as_object(entry, place.where, f"captions[{number}]", "give it idx and content")
        for number, entry in enumerate(as_list(row.get("captions"), "captions", place.where))
    ]
    if not captions:
        raise DataError(place.where, "captions is empty", "remove the row")
    summary = next((entry for entry in captions if str(entry.get("idx")) == "-1"), captions[-1])
    caption = as_string(summary.get("content"), "the summary's content", place.where)
    return to_media(row.get("video_path"), "video", "video_path", place), caption


def _panda(row: Mapping[str, Any], place: Place) -> tuple[Media, str]:
    number, times, caption = row[CLIP]
    name = as_string(row.get("videoID"), "videoID", place.where)
    cut = [f"{name}_{number}.mp4", f"{name}/{number}.mp4", f"{name}_{number:05d}.mp4"]
    path = _first_file([f"{name}.mp4", *cut], "videoID", place)
    is_cut = not path.endswith(f"{name}.mp4")
    start, end = (None, None) if is_cut else (_seconds(time, place) for time in times)
    media = Media(kind="video", path=path, start=start, end=end)
    return media, as_string(caption, "caption", place.where)


def _seconds(time: str, place: Place) -> float:
    found = _TIME.fullmatch(time)
    if found is None:
        raise DataError(
            place.where, f"the timestamp {time!r} is no time", "write hours:minutes:seconds"
        )
    return 3600 * int(found[1]) + 60 * int(found[2]) + float(found[3])


def _from_file(row: Any, place: Place) -> Sample:
    """A caption pair, or a question for the class (``_`` and ``-`` in its name are spaces).

    Raises:
        DataError: the file has neither a text beside it nor a folder that could be its class.
    """
    row = as_object(row, place.where)
    name = as_string(row.get("path"), "path", place.where)
    kind = _kind_by_ending(name)
    media = Media(kind=kind, path=media_path(name, "path", place))
    if row.get("text") is not None:
        turns = caption_turns([media], as_string(row["text"], "the text", place.where).strip())
        return place.sample(name, turns, [media])
    folder = as_string(row.get("class"), "class", place.where)
    if not folder:
        raise DataError(
            place.where,
            f"{name} lies in no class folder and has no text beside it",
            "put it into a folder named after its class, or write its caption into a .txt file of "
            "the same name",
        )
    question = f"\nWhat is in the {kind}?{SHORT_ANSWER_SUFFIX}"
    answer = folder.replace("_", " ").replace("-", " ")
    turns = (
        Turn("user", (Part(kind), Part("text", question))),
        Turn("assistant", (Part("text", answer),)),
    )
    return place.sample(name, turns, [media])


COLUMNS = Reader(
    "captions",
    "one image or video and one caption per row (CSV, JSONL, Parquet; WebVid)",
    _has_columns,
    _from_columns,
)
VIDEO_SETS = Reader(
    "clips", "video captions: ShareGPT4Video JSONL, Panda-70M CSV", _is_video_set, _from_video_set
)
FILES = Reader(
    "folder",
    "a folder of images or videos: one folder per class, or NAME.txt beside NAME.jpg",
    has_fields("path", "class"),
    _from_file,
)
