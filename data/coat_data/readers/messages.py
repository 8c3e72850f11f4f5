"""Chat messages: OpenAI's and TRL's content parts, and ms-swift's texts with placeholders.

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "..."}]}],
     "images": ["a.jpg"]}

``content`` may be a string, with ``<image>`` and ``<video>`` at the places of the media of the
columns. The list may be called ``conversations`` or ``conversation`` (MiniCPM-V, Mantis), and
``prompt`` and ``completion`` (texts or messages) may replace it. Keys that are null count as
missing, as Arrow writes them. Tools, calls and reasoning: :mod:`coat_data.text.message_fields`.
Sources: huggingface/trl, docs/source/dataset_formats.md;
modelscope/ms-swift, docs/source_en/Customization/Custom-dataset.md.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coat_data.containers.remote_file import is_url
from coat_data.media.image import image_size
from coat_data.readers.boxes import EDGES, tag_box
from coat_data.readers.fields import ROLES, check_unused, has_placeholder, is_missing
from coat_data.readers.reader import Place, Reader
from coat_data.readers.row_media import by_kind, media_fields, to_media, with_span
from coat_data.readers.turns import (
    TurnTexts,
    is_chat,
    place_media,
    read_turns,
    with_fields,
    with_system,
)
from coat_data.sample import Media, MediaKind, Part, Role, Sample, Turn, errors_within

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
_MEDIA_TYPES: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
}
_OTHER_NAMES = ("conversations", "conversation")
_OBJECT_TOKEN = re.compile("<ref-object>|<bbox>")


def matches(row: Mapping[str, Any]) -> bool:
    """Whether the row has ``messages``, or ``prompt`` and ``completion``."""
    named = "messages" in row or {"prompt", "completion"} <= set(row)
    return named or any(is_chat(row.get(name)) for name in _OTHER_NAMES)


def to_sample(row: Any, place: Place) -> Sample:
    """Convert a row to a checked sample. Does not decode the media.

    - If any message has an image or video part, the parts are the places of the media, and strings
      are not parsed: a part without a source takes the next medium of ``images`` or ``videos``.
    - Otherwise the placeholders in the texts are the places, as in LLaVA's rows.
    - A single answer without a question is a text to train on as a whole (ms-swift's pre-training):
      it gets an empty question, and may contain media.
    - ``objects`` fills ms-swift's ``<ref-object>`` and ``<bbox>`` in order: the name, and the box
      (:mod:`coat_data.readers.boxes`).
    - ``continues``, ``weight`` and ``loss`` as in LLaVA's rows.
    """
    if "label" in row and isinstance(row["label"], int):  # also a boolean; a text is a property
        place.refuse(row, {"label": "use rows with answers, not labels"})
    raw = _messages(row, place)
    read = read_turns(raw, "messages", ("role", "from"), ("content", "value"), ROLES, place)
    messages: list[_Message] = [
        (turn.role, list(_pieces(turn.content, turn.name, place))) for turn in read
    ]
    files = media_fields(row, place)
    _fill_objects(messages, row, files, place)
    by_parts = any(piece.kind != "text" for _, pieces in messages for piece in pieces)
    is_document = len(read) == 1 and read[0].role == "assistant" and not read[0].fields
    if by_parts:
        turns, media = _by_parts(messages, files, place)
    else:
        texts: TurnTexts = [
            (role, "".join(one.text for one in pieces)) for role, pieces in messages
        ]
        texts = [("user", texts[0][1])] if is_document else with_system(texts, row, place)
        turns, media = place_media(texts, files, place)
    if is_document:  # the answer may have media; the question is empty
        turns = (Turn("user", ()), Turn("assistant", turns[0].parts))
    return place.sample(row, with_fields(turns, read), media)


@dataclass(slots=True)
class _Piece:
    kind: Literal["text", "image", "video"]
    text: str = ""
    source: Mapping[str, Any] = field(default_factory=dict)
    """The content part, which may have the image or video; otherwise the columns have it."""


_Message = tuple[Role, list[_Piece]]


def _pieces(content: Any, name: str, place: Place) -> Iterator[_Piece]:
    if isinstance(content, str):
        yield _Piece("text", place.as_string(content, name))
        return
    for number, part in enumerate(place.as_list(content, name)):
        own = f"{name}[{number}]"
        if isinstance(part, str):
            yield _Piece("text", place.as_string(part, own))
            continue
        part = place.as_object(part, own, "give it a type")
        part = {key: v for key, v in part.items() if not is_missing(v) or (key, v) == ("text", "")}
        kind = part.get("type") or next(
            (one for one in ("text", *_MEDIA_TYPES) if one in part), None
        )
        if kind in _TEXT_TYPES:
            key = "refusal" if kind == "refusal" else "text"
            text = place.as_string(part.get(key), f"{own}.{key}")
            if has_placeholder(text):  # media are parts of their own
                place.notes.append("placeholder_as_text")
            yield _Piece("text", text)
            unused = part.keys() - {"type", key}
        elif isinstance(kind, str) and kind in _MEDIA_TYPES:
            yield _Piece(_MEDIA_TYPES[kind], source=part)
            other = "video" if _MEDIA_TYPES[kind] == "image" else "image"
            unused = {other, f"{other}_url"} & part.keys()
            if part.get("text"):
                raise place.error(f"{own} has both media and text", "make two parts of it")
        else:
            raise place.error(f"{own} has the type {kind!r}", "use text, image or video")
        if unused:
            check_unused(part, unused, place.ignore, f"{place.where}: {own}")


_SOURCES = ("image", "video", "image_url", "video_url", "url", "path", "bytes", "base64", "data")


def _messages(row: Mapping[str, Any], place: Place) -> Iterator[Any]:
    name = place.columns.get("messages", "messages")
    filled = {key for key, value in row.items() if value is not None}
    if name not in filled and not {"prompt", "completion"} <= filled:
        name = next((other for other in _OTHER_NAMES if other in filled), name)
    if name in filled or "prompt" not in filled:
        yield from place.as_list(row.get(name), name)
        return
    for field_name, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(field_name)
        raw = [{"role": role, "content": value}] if isinstance(value, str) else value
        yield from place.as_list(raw, field_name)


def _by_parts(
    messages: Sequence[_Message], files: Sequence[Media], place: Place
) -> tuple[tuple[Turn, ...], tuple[Media, ...]]:
    waiting = by_kind(files)
    media: list[Media] = []
    turns: list[Turn] = []
    for number, (role, pieces) in enumerate(messages):
        parts: list[Part] = []
        for piece in pieces:
            if piece.kind == "text":
                parts += [Part("text", piece.text)] if piece.text else []
                continue
            kind = piece.kind
            parts.append(Part(kind))
            name = f"messages[{number}].{kind}"
            if any(key in piece.source for key in _SOURCES):
                media.append(to_media(piece.source, kind, name, place))
            elif waiting[kind]:
                media.append(with_span(waiting[kind].pop(0), piece.source, name, place))
            else:
                raise place.error(
                    f"the messages show more {kind}s than the row's {len(by_kind(files)[kind])}",
                    f'list the file in "{kind}s", or put it into the part',
                )
        turns.append(Turn(role, tuple(parts)))
    left = sum(len(items) for items in waiting.values())
    if left:
        problem = f"{left} files of the row are shown in no message"
        raise place.error(problem, 'add parts {"type": "image"} or remove the files')
    return tuple(turns), tuple(media)


def _fill_objects(
    messages: Sequence[_Message], row: Mapping[str, Any], files: Sequence[Media], place: Place
) -> None:
    objects = row.get("objects")
    if is_missing(objects):
        return
    objects, images = place.as_object(objects), by_kind(files)["image"]
    names = iter(place.as_list(objects.get("ref") or [], "objects.ref"))
    boxes = iter(enumerate(place.as_list(objects.get("bbox") or [], "objects.bbox")))

    def fill(match: re.Match[str]) -> str:
        if match[0] == "<bbox>":
            number, box = next(boxes, (0, None))
            box = place.as_list(box, "the box of a <bbox>")
            edges, image = _edges(objects, number, images, place)
            return tag_box(box, edges, place.where, image)
        name = place.as_string(next(names, None), "the name of a <ref-object>")
        return f"<ref-object>{name}</ref-object>"

    for _, pieces in messages:
        for piece in pieces:
            piece.text = _OBJECT_TOKEN.sub(fill, piece.text)
    for left, token in ((list(names), "<ref-object>"), (list(boxes), "<bbox>")):
        if left:
            problem = f"objects has {len(left)} more entries than the texts have {token}"
            raise place.error(problem, f"write {token} where each of them belongs, or remove them")


def _edges(
    objects: Mapping[str, Any], number: int, images: Sequence[Media], place: Place
) -> tuple[tuple[float, float], int]:
    """Return the edges of the image of box ``number``, in the unit of the boxes, and its number."""
    unit = objects.get("bbox_type") or "real"
    of_boxes = objects.get("image_id") or []
    index = of_boxes[number] if isinstance(of_boxes, list) and number < len(of_boxes) else 0
    if isinstance(unit, str) and unit in EDGES:
        return EDGES[unit], index if index in range(len(images)) else 0
    if unit != "real" or not isinstance(index, int) or not 0 <= index < len(images):
        raise place.error(
            f"objects.bbox_type is {unit!r}, and box {number} is in image {index!r} of the row's "
            f"{len(images)} images",
            f"use real (pixels of an image of the row), {' or '.join(EDGES)}",
        )
    if is_url(images[index].path or "") and images[index].data is None:
        raise place.error(
            f"the box {number} is in pixels of an image at a URL, whose size is not known",
            f"download the images, or give the boxes as {' or '.join(EDGES)}",
        )
    with errors_within(place.where):
        return image_size(images[index]), index


READER = Reader(
    "messages",
    "messages with role and content (OpenAI, TRL, ms-swift), or prompt and completion",
    matches,
    to_sample,
)
