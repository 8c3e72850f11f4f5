"""Documents to train on as a whole: one text per row, or texts with images between them.

A document becomes the answer to an empty question: the template ``plain`` supervises the text and
its end token. C4, the Pile, FineWeb and plain files have one text per row. A row of mmc4 has
sentences, and images that each belong to one of the sentences::

    {"text_list": ["...", "..."],
     "image_info": [{"image_name": "a.jpg", "matched_text_index": 1, "matched_sim": 0.3}]}

An image precedes its sentence; VILA's copies have ``image_base64`` instead of a name
(allenai/mmc4, README; NVlabs/VILA, llava/data/dataset.py, ``LazyMMC4Dataset``).

OBELICS has web pages as two lists of equal length, in which images and texts take turns. At each
place one of the two is null (HuggingFaceM4/OBELICS, dataset card). Images may be links, paths or
embedded files::

    {"images": ["https://.../a.jpg", null], "texts": [null, "A paragraph."], "metadata": "[...]"}
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from coat_data.readers.fields import is_missing
from coat_data.readers.reader import Place, Reader, has_fields
from coat_data.readers.row_media import to_media
from coat_data.readers.turns import caption_turns
from coat_data.sample import Media, Part, Sample, Turn

_FIELDS = ("text", "content")
_BETWEEN_TEXTS = "\n\n"
"""Between texts without an image between them, as between the paragraphs of a text."""


def _from_text(row: Any, place: Place) -> Sample:
    name = next((name for name in _FIELDS if row.get(name) is not None), None)
    if name is None:
        problem = f"there is no text (fields: {', '.join(map(str, row)) or 'none'})"
        remedy = f"name the field one of {', '.join(_FIELDS)}, or map it: columns: {{text: FIELD}}"
        raise place.error(problem, remedy)
    text = place.as_string(row[name], name)
    if not text.strip():
        raise place.error(f"{name} is empty", "fill it or remove the row")
    return place.sample(row, caption_turns([], text))


def _interleaved(row: Any, place: Place) -> Sample:
    """Convert a document: sentences joined by spaces, images of one sentence in their order."""
    sentences = place.as_strings(row.get("text_list"), "text_list")
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
    return place.sample(row, turns, media)


def _images(row: Mapping[str, Any], num_sentences: int, place: Place) -> dict[int, list[Media]]:
    images: dict[int, list[Media]] = defaultdict(list)
    infos = place.as_objects(row.get("image_info") or [], "image_info", "give it image_name")
    for number, info in enumerate(infos):
        name = f"image_info[{number}]"
        index = info.get("matched_text_index")
        if not isinstance(index, int) or not 0 <= index < num_sentences:
            problem = f"{name}.matched_text_index is {index!r}"
            raise place.error(problem, f"give the number of one of the {num_sentences} sentences")
        file, data = info.get("image_name"), info.get("image_base64")
        if file is None and data is None:
            remedy = "download the images (raw_url is their URL) and name the files"
            raise place.error(f"{name} has neither image_name nor image_base64", remedy)
        field, item = ("image_name", file) if data is None else ("image_base64", {"base64": data})
        images[index].append(to_media(item, "image", f"{name}.{field}", place))
    return images


def _is_page(row: Mapping[str, Any]) -> bool:
    images, texts = row.get("images"), row.get("texts")
    if not isinstance(images, list) or not isinstance(texts, list):
        return False
    return all(text is None or isinstance(text, str) for text in texts)


def _from_page(row: Any, place: Place) -> Sample:
    images = place.as_list(row.get("images"), "images")
    texts = place.as_list(row.get("texts"), "texts")
    parts: list[Part] = []
    media: list[Media] = []
    for number, (image, text) in enumerate(zip_longest(images, texts)):
        text = None if text == "" and not is_missing(image) else text
        if is_missing(image) == (text is None):
            both = "both null or missing" if text is None else "both set"
            remedy = "give lists of equal length, in which one of the two is null at each place"
            raise place.error(f"images[{number}] and texts[{number}] are {both}", remedy)
        if text is None:
            media.append(to_media(image, "image", f"images[{number}]", place))
            parts.append(Part("image"))
            continue
        between = _BETWEEN_TEXTS if parts and parts[-1].kind == "text" else ""
        parts.append(Part("text", between + place.as_string(text, f"texts[{number}]")))
    turns = (Turn("user", ()), Turn("assistant", tuple(parts)))
    return place.sample(row, turns, media)


TEXTS = Reader(
    "documents",
    "a text per row (text or content), or plain .txt files: documents to train on as a whole",
    lambda row: any(isinstance(row.get(f), str) for f in _FIELDS),
    _from_text,
)
INTERLEAVED = Reader(
    "mmc4",
    "interleaved documents (mmc4): text_list and image_info",
    has_fields("text_list"),
    _interleaved,
)
OBELICS = Reader(
    "obelics", "interleaved documents (OBELICS): images and texts with nulls", _is_page, _from_page
)
