"""Media files in a folder: the text beside a file is its caption, else its folder is its class."""

import os
from collections.abc import Mapping
from typing import Any

from coat_data.containers.folder import VIDEO_SUFFIXES
from coat_data.readers.media import media_path
from coat_data.readers.reader import Place, as_object, as_string
from coat_data.readers.turns import caption_turns
from coat_data.sample import DataError, Media, MediaKind, Part, Sample, Turn
from coat_data.text.chat import SHORT_ANSWER_SUFFIX

NAME = "folder"
SUMMARY = "a folder of images or videos: one folder per class, or NAME.txt beside NAME.jpg"

QUESTION: Mapping[MediaKind, str] = {
    "image": f"\nWhat is in the image?{SHORT_ANSWER_SUFFIX}",
    "video": f"\nWhat is in the video?{SHORT_ANSWER_SUFFIX}",
}
"""Asked about a file whose class is known."""


def matches(row: Any) -> bool:
    """Whether the row is one of :class:`~coat_data.containers.folder.FolderRows`."""
    return isinstance(row, Mapping) and {"path", "class"} <= set(row)


def to_sample(row: Any, place: Place) -> Sample:
    """A caption pair, or a question for the class (``_`` and ``-`` in its name are spaces).

    Raises:
        DataError: the file has neither a text beside it nor a folder that could be its class.
    """
    row = as_object(row, place.where)
    name = as_string(row.get("path"), "path", place.where)
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - a string, no path yet
    kind: MediaKind = "video" if suffix in VIDEO_SUFFIXES else "image"
    media = Media(kind=kind, path=media_path(name, "path", place))
    if row.get("text") is not None:
        turns = caption_turns([media], as_string(row["text"], "the text", place.where).strip())
    else:
        turns = _class_turns(kind, as_string(row.get("class"), "class", place.where), name, place)
    return Sample(id=name, turns=turns, media=(media,), source=place.source, row=place.row).check()


def _class_turns(kind: MediaKind, folder: str, name: str, place: Place) -> tuple[Turn, ...]:
    if not folder:
        raise DataError(
            place.where,
            f"{name} lies in no class folder and has no text beside it",
            "put it into a folder named after its class, or write its caption into a .txt file of "
            "the same name",
        )
    answer = folder.replace("_", " ").replace("-", " ")
    return (
        Turn("user", (Part(kind), Part("text", QUESTION[kind]))),
        Turn("assistant", (Part("text", answer),)),
    )
