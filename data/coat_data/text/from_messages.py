"""Converts chat messages in memory to a sample; for files: readers.messages.

    {"role": "user",
     "content": [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What is it?"}]}

``content`` may be a string. A picture is a path, a PIL image or encoded bytes; an image part
without one takes the next of the images that are passed with the messages. Keys that are None
count as missing, as Arrow writes them. Calls and reasoning: :mod:`coat_data.text.message_fields`.
"""

import base64
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from coat_data.sample import Media, MediaKind, Part, Sample, Turn
from coat_data.text.message_fields import read_fields

Picture: TypeAlias = str | os.PathLike[str] | bytes | Image.Image | Media
Message: TypeAlias = Mapping[str, Any]

_ROLES = ("system", "user", "assistant", "tool")


def messages_to_sample(
    messages: Sequence[Message], images: Sequence[Picture] = (), **fields: Any
) -> Sample:
    """Convert a conversation; ``fields`` are set in the sample: ``tools``, ``continues``."""
    turns, sources = parse_messages(messages)
    remaining = iter(images)
    media: list[Media] = []
    for kind, given in sources:
        source = next(remaining, None) if given is None and kind == "image" else given
        if source is None:
            raise ValueError(
                f"the messages have more {kind} parts than media ({len(images)} images are "
                f'given); put the path under the key "{kind}" of the part'
            )
        media.append(to_media(source, kind))
    if unused := len(list(remaining)):
        raise ValueError(
            f"{len(images)} images are given, {unused} more than the messages have places for; "
            'add parts {"type": "image"} or give fewer images'
        )
    return Sample(id="messages", turns=turns, media=tuple(media), source="messages", **fields)


def parse_messages(
    messages: Sequence[Message],
) -> tuple[tuple[Turn, ...], list[tuple[MediaKind, Any]]]:
    """Return the turns of a conversation, and kind and source (or None) of its media."""
    turns: list[Turn] = []
    sources: list[tuple[MediaKind, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(
                f"a message is {message!r}; required: a dictionary with role and content"
            )
        role = message.get("role")
        if role not in _ROLES:
            raise ValueError(f"a message has the role {role!r}; allowed: {', '.join(_ROLES)}")
        parts: list[Part] = []
        for part in _content(message):
            kind = part["type"]
            parts.append(Part(kind, part["text"] if kind == "text" else ""))
            if kind != "text":
                found = (part[key] for key in (kind, "url", "path", "base64") if key in part)
                sources.append((kind, next(found, None)))
        turns.append(Turn(role, tuple(parts), **read_fields(message, role)[0]))
    return tuple(turns), sources


def to_media(picture: Picture | Any, kind: MediaKind) -> Media:
    """Convert an image or video in memory or its address; ValueError if it is neither.

    A path, address, ``data:`` address or encoded bytes; an image also as PIL image or array of
    8-bit values (H, W, 3) or (3, H, W); a video also as frames: a sequence of such images or an
    array (T, H, W, 3) or (T, 3, H, W).
    """
    if isinstance(picture, Media):
        return picture
    if isinstance(picture, str) and picture.startswith("data:"):
        picture = base64.b64decode(picture.partition(",")[2])
    if isinstance(picture, bytes):
        return Media(kind=kind, path=f"<{kind} bytes>", data=picture)
    if isinstance(picture, str | os.PathLike):
        return Media(kind=kind, path=os.fspath(picture))
    if kind == "image":
        return Media(kind=kind, path="<PIL image>", data=_encode_image(picture))
    if isinstance(picture, Sequence) or hasattr(picture, "__array__"):
        each: Any = picture
        frames = [to_media(frame, "image") for frame in each]
        paths = tuple(str(frame.path) for frame in frames if frame.data is None)
        data = tuple(frame.data for frame in frames if frame.data is not None)
        if paths and not data:
            return Media(kind=kind, path=paths[0], frames=paths)
        if data and not paths:
            names = tuple(f"<frame {number}>" for number in range(len(data)))
            return Media(kind=kind, path="<video frames>", frames=names, frames_data=data)
    raise ValueError(
        f"a video is {type(picture).__name__}; give a path, encoded bytes, an array "
        "(T, H, W, 3) of 8-bit values, or a list of frames, all paths or all images"
    )


def _encode_image(picture: Any) -> bytes:
    if not isinstance(picture, Image.Image):
        array = np.asarray(picture)
        if array.ndim == 3 and array.shape[-1] not in (3, 4) and array.shape[0] in (3, 4):
            array = array.transpose(1, 2, 0)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] not in (3, 4):
            raise ValueError(
                f"an image is {type(picture).__name__} of shape {array.shape} and dtype "
                f"{array.dtype}; give a path, encoded bytes, a PIL image, or an array (H, W, 3) or "
                "(3, H, W) of 8-bit values"
            )
        picture = Image.fromarray(np.ascontiguousarray(array))
    # Modes with special rules in open_image are not converted here.
    if picture.mode not in ("L", "P", "RGBA", "LA", "I", "I;16", "F"):
        picture = picture.convert("RGB")
    buffer = io.BytesIO()
    if picture.mode in ("I", "F"):
        picture.save(buffer, "TIFF")
    else:
        picture.save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def _content(message: Message) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(parts, Sequence) or not all(isinstance(part, Mapping) for part in parts):
        raise ValueError(
            f"a message has the content {content!r}; allowed: a string, or a list of parts such as "
            '{"type": "text", "text": "..."}'
        )
    for part in parts:
        part = {key: value for key, value in part.items() if value is not None}
        kind = part.get("type")
        if kind == "image_url" and "image_url" in part:  # OpenAI's
            address = part["image_url"]
            url = address.get("url") if isinstance(address, Mapping) else address
            part, kind = {"type": "image", "url": url}, "image"
        if "base64" in part:
            part["base64"] = base64.b64decode(part["base64"])
        if kind not in ("text", "image", "video") or (
            kind == "text" and not isinstance(part.get("text"), str)
        ):
            raise ValueError(
                f"a message has the part {part}; allowed types: text (with text), image, video"
            )
        yield part
