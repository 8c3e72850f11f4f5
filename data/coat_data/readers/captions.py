"""Images or videos with one caption each: in columns, in sets of video captions, in folders.

CSV, JSONL and Parquet files may have columns with the usual names: ``image``, ``file_name`` (the
image folder of ``datasets``), ``path``, ...; ``caption``, ``text``, ``title``, ... Several images
precede the caption, or stand at the ``<image>`` in it. WebVid's columns (m-bain/webvid, README)
name the file ``page_dir/videoid.mp4``, or ``videoid.mp4``.

ShareGPT4Video (ShareGPT4Omni/ShareGPT4Video, dataset card) has fields of its own; the caption with
``idx`` -1 is the summary::

    {"video_id": "a", "video_path": "a.mp4", "captions": [{"idx": "-1", "content": "..."}]}

For a file in a folder, the text file with its name is the caption; without one, the folder's name
is its class.
"""

import os
from collections.abc import Mapping
from typing import Any

from coat_data.containers.media_files import VIDEO_SUFFIXES
from coat_data.readers.fields import is_missing
from coat_data.readers.reader import Place, Reader, has_fields
from coat_data.readers.row_media import existing_path, media_path, to_media, with_span
from coat_data.readers.turns import (
    PLACEHOLDERS,
    TurnTexts,
    caption_turns,
    first_of,
    media_first,
    place_media,
)
from coat_data.sample import Media, MediaKind, Sample, Turn
from coat_data.text.chat import SHORT_ANSWER_SUFFIX

_MEDIA_FIELDS: Mapping[str, MediaKind | None] = {
    **dict.fromkeys(("image", "images", "image_path", "image_file", "image_name"), "image"),
    **dict.fromkeys(("image_url", "img", "img_path", "jpg"), "image"),
    **dict.fromkeys(("video", "videos", "video_path", "clip"), "video"),
    **dict.fromkeys(("file_name", "filename", "filepath", "file", "path"), None),
}
"""Columns of media; for None, the file name extension decides the kind."""

_NOT_ALONE = {"images", "videos", "image_url", "image_name", "image_file"}
"""Columns that are often null if a row is a document."""
_CAPTION_FIELDS = ("caption", "text", "title", "description", "txt", "captions")
_WEBVID = {"videoid", "name", "page_dir"}


def _kind_by_ending(name: str) -> MediaKind:
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - a string, no path yet
    return "video" if suffix in VIDEO_SUFFIXES else "image"


def _has_columns(row: Mapping[str, Any]) -> bool:
    names = {str(name).lower() for name in row}
    filled = {str(name).lower() for name, value in row.items() if not is_missing(value)}
    has_media = bool(names & (_MEDIA_FIELDS.keys() - _NOT_ALONE) or filled & _MEDIA_FIELDS.keys())
    has_caption = bool(names & set(_CAPTION_FIELDS)) and "question" not in names
    return names >= _WEBVID or (has_media and has_caption)


def _from_columns(row: Any, place: Place) -> Sample:
    names = {str(name).lower(): name for name in row}
    if names.keys() >= _WEBVID:
        page, video = str(row[names["page_dir"]]), str(row[names["videoid"]])
        path = existing_path([f"{page}/{video}.mp4", f"{video}.mp4"], "videoid", place)
        media = [Media(kind="video", path=path)]
        caption = place.as_string(row[names["name"]], "name")
    else:
        name = _column(row, names, "image or video", tuple(_MEDIA_FIELDS), place)
        media = _media(row, name, place)
        name = _column(row, names, "caption", _CAPTION_FIELDS, place)
        caption = place.as_string(first_of(row[name], place), name)
    if any(token in caption for token in PLACEHOLDERS):  # an interleaved document
        turns, shown = place_media([("user", caption)], media, place)
        turns = (Turn("user", ()), Turn("assistant", turns[0].parts))
        return place.sample(row, turns, shown)
    return place.sample(row, caption_turns(media, caption), media)


def _media(row: Mapping[str, Any], name: str, place: Place) -> list[Media]:
    items = row[name] if isinstance(row[name], list | tuple) else [row[name]]
    kind = _MEDIA_FIELDS[name.lower()] or _kind_by_ending(str(items[0]))
    media = [to_media(item, kind, name, place) for item in items]
    return [with_span(media[0], row, "the row", place)] if len(media) == 1 else media


def _column(
    row: Mapping[str, Any],
    by_lower: Mapping[str, str],
    what: str,
    names: tuple[str, ...],
    place: Place,
) -> str:
    for name in names:
        if name in by_lower and not is_missing(row.get(by_lower[name])):
            return by_lower[name]
    problem = f"there is no {what} (columns: {', '.join(map(str, row))})"
    raise place.error(problem, f"name the column one of {', '.join(names)}, or map it with columns")


def _is_video_set(row: Any) -> bool:
    return has_fields("captions", "video_path")(row) and isinstance(row["captions"], list)


def _from_video_set(row: Any, place: Place) -> Sample:
    captions = place.as_objects(row.get("captions"), "captions", "give it idx and content")
    if not captions:
        raise place.error("captions is empty", "remove the row")
    if len(captions) > 1:
        place.notes.append("later_captions")
    summary = next((entry for entry in captions if str(entry.get("idx")) == "-1"), captions[-1])
    caption = place.as_string(summary.get("content"), "the summary's content")
    media = to_media(row.get("video_path"), "video", "video_path", place)
    named = {**row, "id": row.get("video_id", row.get("id"))}
    return place.sample(named, caption_turns([media], caption), [media])


def _from_file(row: Any, place: Place) -> Sample:
    """Convert to a caption pair, or a question about the class, with spaces for ``_`` and ``-``."""
    name = place.as_string(row.get("path"), "path")
    kind = _kind_by_ending(name)
    media = Media(kind=kind, path=media_path(name, "path", place))
    if row.get("text") is not None:
        turns = caption_turns([media], place.as_string(row["text"], "the text").strip())
        return place.sample({"id": name}, turns, [media])
    folder = place.as_string(row.get("class"), "class")
    if not folder:
        raise place.error(
            f"{name} is not in a class folder and has no .txt file",
            "put it into a folder named after its class, or write its caption into a .txt file of "
            "the same name",
        )
    answer = folder.replace("_", " ").replace("-", " ")
    turn_texts: TurnTexts = [
        ("user", f"What is in the {kind}?{SHORT_ANSWER_SUFFIX}"),
        ("assistant", answer),
    ]
    return place.sample({"id": name}, media_first(turn_texts, [media], place), [media])


COLUMNS = Reader(
    "captions",
    "one image or video and one caption per row (CSV, JSONL, Parquet; WebVid)",
    _has_columns,
    _from_columns,
)
VIDEO_SETS = Reader("clips", "video captions: ShareGPT4Video JSONL", _is_video_set, _from_video_set)
FILES = Reader(
    "folder",
    "a folder of images or videos: one folder per class, or NAME.txt next to NAME.jpg",
    has_fields("path", "class"),
    _from_file,
)
