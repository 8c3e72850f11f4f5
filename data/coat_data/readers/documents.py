"""Documents to learn as a whole: a text per row, or sentences with images between them.

A document is an answer to nothing: the template ``plain`` trains all of it and its end. C4, the
Pile, FineWeb and plain files have a text per row. Those of mmc4 are sentences, and images that
belong to one of them each::

    {"text_list": ["...", "..."],
     "image_info": [{"image_name": "a.jpg", "matched_text_index": 1, "matched_sim": 0.3}]}

An image stands before its sentence; VILA's copies hold ``image_base64`` in place of a name
(allenai/mmc4, README; NVlabs/VILA, llava/data/dataset.py, ``LazyMMC4Dataset``).
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from coat_data.readers.reader import (
    Place,
    Reader,
    as_list,
    as_object,
    as_string,
    caption_turns,
    continued,
    has_fields,
    row_id,
    to_media,
)
from coat_data.sample import DataError, Media, Part, Sample, Turn

_FIELDS = ("text", "content")


def _has_text(row: Any) -> bool:
    """Whether the row has a text and nothing that a special kind of row has."""
    return isinstance(row, Mapping) and any(isinstance(row.get(name), str) for name in _FIELDS)


def _from_text(row: Any, place: Place) -> Sample:
    """One document.

    Raises:
        DataError: there is no text, or it is empty.
    """
    row = as_object(row, place.where)
    own = place.columns.get("text")
    names = _FIELDS if own is None else (own,)
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise DataError(
            place.where,
            f"there is no text (fields: {', '.join(map(str, row)) or 'none'})",
            f"name the field one of {', '.join(names)}",
        )
    text = as_string(row[name], name, place.where)
    if not text.strip():
        raise DataError(place.where, f"{name} is empty", "fill it or remove the row")
    return continued(place.sample(row_id(row, place), caption_turns([], text)), row)


def _interleaved(row: Any, place: Place) -> Sample:
    """One document. Sentences are joined by a space; images of the same sentence keep their order.

    Raises:
        DataError: a field is missing or of the wrong type, or an image names no sentence.
    """
    row = as_object(row, place.where)
    sentences = [
        as_string(text, f"text_list[{number}]", place.where)
        for number, text in enumerate(as_list(row.get("text_list"), "text_list", place.where))
    ]
    shown = _images(row, len(sentences), place)
    parts: list[Part] = []
    media: list[Media] = []
    for number, sentence in enumerate(sentences):
        parts += [Part("image")] * len(shown[number])
        media += shown[number]
        last = number == len(sentences) - 1
        parts.append(Part("text", sentence if last else f"{sentence} "))
    seen = tuple(part for part in parts if part.kind != "text" or part.text)
    turns = (Turn("user", ()), Turn("assistant", seen))
    return place.sample(row_id(row, place), turns, media)


def _images(row: Mapping[str, Any], num_sentences: int, place: Place) -> dict[int, list[Media]]:
    """The images of each sentence."""
    images: dict[int, list[Media]] = defaultdict(list)
    for number, info in enumerate(as_list(row.get("image_info") or [], "image_info", place.where)):
        name = f"image_info[{number}]"
        info = as_object(info, place.where, name, "give it image_name")
        index = info.get("matched_text_index")
        if not isinstance(index, int) or not 0 <= index < num_sentences:
            raise DataError(
                place.where,
                f"{name}.matched_text_index is {index!r}",
                f"give the number of one of the {num_sentences} sentences",
            )
        images[index].append(_image(info, name, place))
    return images


def _image(info: Mapping[str, Any], name: str, place: Place) -> Media:
    if info.get("image_base64") is not None:
        return to_media({"base64": info["image_base64"]}, "image", f"{name}.image_base64", place)
    if info.get("image_name") is None:
        raise DataError(
            place.where,
            f"{name} has neither image_name nor image_base64",
            "download the images (raw_url is their address) and name the files",
        )
    return to_media(info["image_name"], "image", f"{name}.image_name", place)


TEXTS = Reader(
    "documents",
    "a text per row (text or content), or plain .txt files: documents to learn as a whole",
    _has_text,
    _from_text,
)
INTERLEAVED = Reader(
    "mmc4",
    "interleaved documents (mmc4): text_list and image_info",
    has_fields("text_list"),
    _interleaved,
)
