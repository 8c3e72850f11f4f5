"""Chat messages: OpenAI's and TRL's content parts, and ms-swift's texts with placeholders.

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "..."}]}],
     "images": ["a.jpg"]}

``content`` may be a string, with ``<image>`` and ``<video>`` where the media of the columns stand.
``prompt`` and ``completion`` (texts or messages) may stand for ``messages``. Keys that are null
count as missing, as Arrow writes them. Sources: huggingface/trl, docs/source/dataset_formats.md;
modelscope/ms-swift, docs/source_en/Customization/Custom-dataset.md.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coat_data.readers.reader import (
    NOT_SFT,
    Place,
    Reader,
    Said,
    as_list,
    as_object,
    as_string,
    continued,
    is_missing,
    media_fields,
    place_media,
    refuse_fields,
    row_id,
    to_media,
    with_span,
    with_system,
    without_first_answer,
)
from coat_data.sample import DataError, Media, MediaKind, Part, Role, Sample, Turn

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
"""Names of the roles in a file, and the role each one has in a sample."""

_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA_TYPES: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
}
_OBJECT_TOKEN = re.compile("<ref-object>|<bbox>")


def matches(row: Any) -> bool:
    """Whether the row has ``messages``, or ``prompt`` and ``completion``."""
    return isinstance(row, Mapping) and ("messages" in row or {"prompt", "completion"} <= set(row))


def to_sample(row: Any, place: Place) -> Sample:
    """One row as a checked sample. Does not decode the media.

    - If any message has an image or video part, strings are text and the parts say where the media
      stand: a part without a source takes the next medium of the columns ``images`` or ``videos``.
    - Else the placeholders of the texts do, as in LLaVA's rows.
    - A single answer without a question is a text to learn as a whole (ms-swift's pre-training):
      it gets an empty question, and may hold media itself.
    - ``objects`` fills ms-swift's ``<ref-object>`` and ``<bbox>`` in order: the name, and
      ``[x1, y1, x2, y2]`` as the file has the numbers.
    - ``"continues": true``, which :mod:`coat_data.tools.export` writes, says that a document goes
      on in the next row.
    - A message with ``"loss": false`` is refused: a sample is trained on all of its answers.

    Raises:
        DataError: the row is wrong; names the field.
    """
    where = place.where
    row = as_object(row, where)
    refuse_fields(row, {**NOT_SFT, "label": "use rows with answers, not labels"}, where)
    messages = [_Message.read(message, number, place) for number, message in _messages(row, place)]
    _fill_objects(messages, row, place)
    files = media_fields(row, place)
    if len(messages) == 1 and messages[0].role == "assistant":
        turns, media = _document(messages[0], files, place)
    elif any(piece.kind != "text" for message in messages for piece in message.pieces):
        turns, media = _by_parts(messages, files, place)
    else:
        said: Said = [(message.role, message.text) for message in messages]
        said = without_first_answer(with_system(said, row, place))
        turns, media = place_media(said, files, place)
    return continued(place.sample(row_id(row, place), turns, media), row)


@dataclass(slots=True)
class _Piece:
    kind: str
    text: str = ""
    source: Mapping[str, Any] = field(default_factory=dict)
    """The part: where the medium comes from; without a source it is the next one of the columns."""


@dataclass(slots=True)
class _Message:
    role: Role
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @classmethod
    def read(cls, message: Any, number: int, place: Place) -> "_Message":
        where, name = place.where, f"messages[{number}]"
        message = as_object(message, where, name, "give it role and content")
        role = as_string(message.get("role", message.get("from")), f"{name}.role", where)
        if role not in ROLES:
            raise DataError(
                where, f"{name}.role is {role!r}", f"use one of {', '.join(sorted(ROLES))}"
            )
        loss = message.get("loss")
        if loss is not None and bool(loss) != (ROLES[role] == "assistant"):
            raise DataError(
                where,
                f"{name}.loss is {loss!r} in a turn of {role}",
                "all answers of a row are trained, and nothing else: split the row",
            )
        content = message.get("content", message.get("value"))
        return cls(ROLES[role], list(_pieces(content, f"{name}.content", where)))


def _pieces(content: Any, name: str, where: str) -> Iterator[_Piece]:
    if isinstance(content, str):
        yield _Piece("text", as_string(content, name, where))
        return
    for number, part in enumerate(as_list(content, name, where)):
        own = f"{name}[{number}]"
        if isinstance(part, str):
            yield _Piece("text", as_string(part, own, where))
            continue
        part = as_object(part, where, own, "give it a type")
        part = {key: value for key, value in part.items() if not is_missing(value)}
        kind = part.get("type") or next(
            (name for name in ("text", *_MEDIA_TYPES) if name in part), None
        )
        if kind in _TEXT_TYPES:
            yield _Piece("text", as_string(part.get("text"), f"{own}.text", where))
        elif isinstance(kind, str) and kind in _MEDIA_TYPES:
            yield _Piece(_MEDIA_TYPES[kind], source=part)
        else:
            raise DataError(where, f"{own} has the type {kind!r}", "use text, image or video")


_SOURCES = ("image", "video", "image_url", "video_url", "url", "path", "bytes", "base64", "data")


def _messages(row: Mapping[str, Any], place: Place) -> Iterator[tuple[int, Any]]:
    name = place.columns.get("messages", "messages")
    if name in row or "prompt" not in row:
        yield from enumerate(as_list(row.get(name), name, place.where))
        return
    number = 0
    for field_name, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(field_name)
        said = [{"role": role, "content": value}] if isinstance(value, str) else value
        for message in as_list(said, field_name, place.where):
            yield number, message
            number += 1


def _document(
    message: _Message, files: Mapping[MediaKind, Sequence[Media]], place: Place
) -> tuple[tuple[Turn, ...], tuple[Media, ...]]:
    """One answer with media of its own, after an empty question."""
    if any(piece.kind != "text" for piece in message.pieces):
        turns, media = _by_parts([message], files, place)
    else:
        turns, media = place_media([("user", message.text)], files, place)
    return (Turn("user", ()), Turn("assistant", turns[0].parts)), media


def _by_parts(
    messages: Sequence[_Message], files: Mapping[MediaKind, Sequence[Media]], place: Place
) -> tuple[tuple[Turn, ...], tuple[Media, ...]]:
    waiting = {kind: list(items) for kind, items in files.items()}
    media: list[Media] = []
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        parts: list[Part] = []
        for piece in message.pieces:
            if piece.kind == "text":
                parts += [Part("text", piece.text)] if piece.text else []
                continue
            kind: MediaKind = "image" if piece.kind == "image" else "video"
            parts.append(Part(kind))
            name = f"messages[{number}].{kind}"
            if any(key in piece.source for key in _SOURCES):
                media.append(to_media(piece.source, kind, name, place))
            elif waiting.get(kind):
                media.append(with_span(waiting[kind].pop(0), piece.source, name, place))
            else:
                raise DataError(
                    place.where,
                    f"the messages show more {kind}s than the row's {len(files.get(kind, ()))}",
                    f'list the file in "{kind}s", or put it into the part',
                )
        turns.append(Turn(message.role, tuple(parts)))
    left = sum(len(items) for items in waiting.values())
    if left:
        raise DataError(
            place.where,
            f"{left} files of the row are shown in no message",
            'add parts {"type": "image"} or remove the files',
        )
    return tuple(turns), tuple(media)


def _fill_objects(messages: Sequence[_Message], row: Mapping[str, Any], place: Place) -> None:
    """Write the names and boxes of ms-swift's ``objects`` into the texts."""
    objects = row.get("objects")
    if is_missing(objects):
        return
    objects = as_object(objects, place.where)
    names = iter(as_list(objects.get("ref") or [], "objects.ref", place.where))
    boxes = iter(as_list(objects.get("bbox") or [], "objects.bbox", place.where))

    def fill(match: re.Match[str]) -> str:
        if match[0] == "<bbox>":
            box = as_list(next(boxes, None), "the box of a <bbox>", place.where)
            return f"[{', '.join(map(str, box))}]"
        return as_string(next(names, None), "the name of a <ref-object>", place.where)

    for message in messages:
        for piece in message.pieces:
            piece.text = _OBJECT_TOKEN.sub(fill, piece.text)


READER = Reader(
    "messages",
    "messages with role and content (OpenAI, TRL, ms-swift), or prompt and completion",
    matches,
    to_sample,
)
