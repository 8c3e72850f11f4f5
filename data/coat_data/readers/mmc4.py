"""Interleaved documents of mmc4: sentences, and images that belong to one of them each.

    {"text_list": ["...", "..."],
     "image_info": [{"image_name": "a.jpg", "matched_text_index": 1, "matched_sim": 0.3}]}

An image stands before its sentence; VILA's copies hold ``image_base64`` in place of a name
(allenai/mmc4, README; NVlabs/VILA, llava/data/dataset.py, ``LazyMMC4Dataset``). The document is one
answer to an empty question, so that the template ``plain`` trains on all of its text.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from coat_data.readers.media import to_media
from coat_data.readers.reader import Place, as_list, as_object, as_string, kind_of, row_id
from coat_data.sample import DataError, Media, Part, Sample, Turn

NAME = "mmc4"
SUMMARY = "interleaved documents (mmc4): text_list and image_info"


def matches(row: Any) -> bool:
    """Whether the row has ``text_list``."""
    return isinstance(row, Mapping) and "text_list" in row


def to_sample(row: Any, place: Place) -> Sample:
    """One document as a checked sample. Does not decode the images.

    Sentences are joined by a space. Images of the same sentence keep their order.

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
    return Sample(
        id=row_id(row, place),
        turns=(
            Turn("user", ()),
            Turn("assistant", tuple(part for part in parts if _is_seen(part))),
        ),
        media=tuple(media),
        source=place.source,
        row=place.row,
    ).check()


def _is_seen(part: Part) -> bool:
    return part.kind != "text" or bool(part.text)


def _images(row: Mapping[str, Any], num_sentences: int, place: Place) -> dict[int, list[Media]]:
    """The images of each sentence."""
    images: dict[int, list[Media]] = defaultdict(list)
    for number, info in enumerate(as_list(row.get("image_info") or [], "image_info", place.where)):
        name = f"image_info[{number}]"
        if not isinstance(info, Mapping):
            raise DataError(place.where, f"{name} is {kind_of(info)}", "give it image_name")
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
