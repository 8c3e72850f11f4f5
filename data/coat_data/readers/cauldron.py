"""The Cauldron and FineVision: images, and question-answer pairs about them.

    {"images": [...], "texts": [{"user": "...", "assistant": "...", "source": "..."}]}

The images come before the first question, in order (HuggingFaceM4/the_cauldron and
HuggingFaceM4/FineVision, dataset cards). FineVision's ratings are not read.
"""

from collections.abc import Mapping
from typing import Any

from coat_data.readers.llava import media_fields, with_system
from coat_data.readers.reader import Place, as_list, as_object, as_string, kind_of, row_id
from coat_data.readers.turns import Said, media_first
from coat_data.sample import DataError, Sample

NAME = "cauldron"
SUMMARY = "The Cauldron and FineVision: images, and texts with user and assistant"


def matches(row: Any) -> bool:
    """Whether the row has ``texts`` and ``images``."""
    return isinstance(row, Mapping) and {"texts", "images"} <= set(row)


def to_sample(row: Any, place: Place) -> Sample:
    """One row as a checked sample. Does not decode the images.

    Raises:
        DataError: a field is missing or of the wrong type.
    """
    row = as_object(row, place.where)
    said: Said = []
    for number, pair in enumerate(as_list(row.get("texts"), "texts", place.where)):
        if not isinstance(pair, Mapping):
            raise DataError(
                place.where, f"texts[{number}] is {kind_of(pair)}", "give it user and assistant"
            )
        said.append(("user", as_string(pair.get("user"), f"texts[{number}].user", place.where)))
        answer = as_string(pair.get("assistant"), f"texts[{number}].assistant", place.where)
        said.append(("assistant", answer))
    said = with_system(said, row, place)
    files = media_fields(row, place)
    media = [*files["image"], *files["video"]]
    return Sample(
        id=row_id(row, place),
        turns=media_first(said, media, place),
        media=tuple(media),
        source=place.source,
        row=place.row,
    ).check()
