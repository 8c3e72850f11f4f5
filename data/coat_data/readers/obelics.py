"""OBELICS: web pages as two lists of equal length, in which images and texts take turns.

    {"images": ["https://.../a.jpg", null], "texts": [null, "A paragraph."], "metadata": "[...]"}

At each place one of the two is null (HuggingFaceM4/OBELICS, dataset card). Images may be links,
paths or embedded files. The page becomes the answer to an empty question.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from coat_data.readers.fields import is_missing
from coat_data.readers.reader import (
    Place,
    Reader,
    as_list,
    as_object,
    as_string,
    row_id,
    to_media,
)
from coat_data.sample import DataError, Media, Part, Sample, Turn

_BETWEEN_TEXTS = "\n\n"
"""Between texts without an image between them, as between the paragraphs of a text."""


def _matches(row: Any) -> bool:
    if not isinstance(row, Mapping) or not isinstance(row.get("images"), list):
        return False
    texts = row.get("texts")
    return isinstance(texts, list) and all(text is None or isinstance(text, str) for text in texts)


def _to_sample(row: Any, place: Place) -> Sample:
    """Convert a page.

    Raises:
        DataError: the lists differ in length, or a place has both or neither.
    """
    row = as_object(row, place.where)
    images = as_list(row.get("images"), "images", place.where)
    texts = as_list(row.get("texts"), "texts", place.where)
    parts: list[Part] = []
    media: list[Media] = []
    for number, (image, text) in enumerate(zip_longest(images, texts)):
        if is_missing(image) == (text is None):
            both = "both null or missing" if text is None else "both set"
            raise DataError(
                place.where,
                f"images[{number}] and texts[{number}] are {both}",
                "give lists of equal length, in which one of the two is null at each place",
            )
        if text is None:
            media.append(to_media(image, "image", f"images[{number}]", place))
            parts.append(Part("image"))
            continue
        between = _BETWEEN_TEXTS if parts and parts[-1].kind == "text" else ""
        parts.append(Part("text", between + as_string(text, f"texts[{number}]", place.where)))
    turns = (Turn("user", ()), Turn("assistant", tuple(parts)))
    return place.sample(row_id(row, place), turns, media)


READER = Reader(
    "obelics", "interleaved documents (OBELICS): images and texts with nulls", _matches, _to_sample
)
