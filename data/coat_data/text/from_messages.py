"""Converts chat messages or a question in memory to a sample; for files: readers.messages.

    {"role": "user",
     "content": [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What is it?"}]}

``content`` may be a string. A picture is a path, a PIL image or encoded bytes; an image part
without one takes the next of the images that are passed beside the messages. Keys that are None
count as missing, as Arrow writes them.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from PIL import Image

from coat_data.sample import Media, MediaKind, Part, Sample, Turn

Picture: TypeAlias = str | os.PathLike[str] | bytes | Image.Image | Media
Message: TypeAlias = Mapping[str, Any]

_ROLES = ("system", "user", "assistant")
_PLACEHOLDER = "<image>"


def messages_to_sample(messages: Sequence[Message], images: Sequence[Picture] = ()) -> Sample:
    """Convert a conversation.

    Raises:
        ValueError: a role or part is unknown, or the image parts do not match ``images``.
    """
    remaining = iter(images)
    turns: list[Turn] = []
    media: list[Media] = []
    for message in messages:
        role = message.get("role")
        if role not in _ROLES:
            raise ValueError(f"a message has the role {role!r}; allowed: {', '.join(_ROLES)}")
        parts: list[Part] = []
        for part in _content(message):
            kind = part["type"]
            if kind == "text":
                parts.append(Part("text", part["text"]))
            else:
                parts.append(Part(kind))
                source = part.get(kind, part.get("path"))
                if source is None and kind == "image":
                    source = next(remaining, None)
                if source is None:
                    raise ValueError(
                        f"the messages have more {kind} parts than media ({len(images)} images are "
                        f'given); put the path under the key "{kind}" of the part'
                    )
                media.append(to_media(source, kind))
        turns.append(Turn(role, tuple(parts)))
    unused = len(list(remaining))
    if unused:
        raise ValueError(
            f"{len(images)} images are given, {unused} more than the messages have places for; "
            'add parts {"type": "image"} or give fewer images'
        )
    return Sample(id="messages", turns=tuple(turns), media=tuple(media), source="messages")


def question_to_sample(text: str, images: Sequence[Picture] = ()) -> Sample:
    """Convert one question: images at ``<image>``, or before the text without placeholders.

    Raises:
        ValueError: the number of ``<image>`` is neither zero nor that of the images.
    """
    if _PLACEHOLDER not in text:  # as in LLaVA's data: the image and a newline
        text = f"{_PLACEHOLDER}\n" * len(images) + text
    first, *others = text.split(_PLACEHOLDER)
    if len(others) != len(images):
        raise ValueError(
            f"the text has {len(others)} {_PLACEHOLDER} but {len(images)} images are given; "
            f"write {_PLACEHOLDER} once per image, or not at all to put the images first"
        )
    parts = [Part("text", first)]
    for words in others:
        parts += [Part("image"), Part("text", words)]
    turn = Turn("user", tuple(part for part in parts if part.kind == "image" or part.text))
    media = tuple(to_media(image, "image") for image in images)
    return Sample(id="question", turns=(turn,), media=media, source="question")


def to_media(picture: Picture, kind: MediaKind) -> Media:
    """Convert a path, encoded bytes, or a PIL image (encoded losslessly) to a medium."""
    if isinstance(picture, Media):
        return picture
    if isinstance(picture, bytes):
        return Media(kind=kind, path=f"<{kind} bytes>", data=picture)
    if isinstance(picture, Image.Image):
        buffer = io.BytesIO()
        # Modes with special rules in open_image are not converted here.
        if picture.mode not in ("L", "P", "RGBA", "LA", "I", "I;16", "F"):
            picture = picture.convert("RGB")
        if picture.mode in ("I", "F"):
            picture.save(buffer, "TIFF")
        else:
            picture.save(buffer, "PNG", compress_level=0)
        return Media(kind=kind, path="<PIL image>", data=buffer.getvalue())
    return Media(kind=kind, path=os.fspath(picture))


def _content(message: Message) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        part = {key: value for key, value in part.items() if value is not None}
        kind = part.get("type")
        if kind not in ("text", "image", "video") or (kind == "text" and "text" not in part):
            raise ValueError(
                f"a message has the part {part}; allowed types: text (with text), image, video"
            )
        yield part
