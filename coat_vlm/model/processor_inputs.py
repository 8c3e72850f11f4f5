"""The arguments of the processor's calls: options, media of each row, truncation."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from PIL import Image

from coat_data.load.encode import EncodedSample
from coat_data.sample import MediaKind
from coat_data.text.from_messages import Picture, to_media
from coat_vlm.model.configuration import IMAGE_TOKEN

PLACEHOLDERS = {"image": IMAGE_TOKEN, "video": "<video>"}
MARKS = re.compile("|".join(map(re.escape, PLACEHOLDERS.values())))


def flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's options and those nested in it; ValueError for options of media."""
    flat = dict(options)
    for name in ("images_kwargs", "videos_kwargs", "audio_kwargs", "audio"):
        if flat.pop(name, None):
            raise ValueError(
                f"{name} are given, and images and videos are read as in training; change the "
                "processor's settings (image_size, image_mode, video) instead"
            )
    for name in ("text_kwargs", "common_kwargs"):
        flat |= flat.pop(name, None) or {}
    return flat


def flatten(given: Any, kind: MediaKind) -> list[Any]:
    """Return one or nested lists of images or videos as a flat list of :class:`Media`."""
    if given is None:
        return []
    is_list = isinstance(given, list | tuple)
    frames = kind == "video" and is_list and all(isinstance(one, Image.Image) for one in given)
    if is_list and not (frames and given):
        return [medium for one in given for medium in flatten(one, kind)]
    return [to_media(given, kind)]


def check_rows(texts: list[str], images: Any) -> None:
    """Raise ValueError if images are lists per row, and a row has other placeholders."""
    if not isinstance(images, list | tuple) or len(images) != len(texts):
        return
    if not any(own is None or isinstance(own, list | tuple) for own in images):
        return
    for row, (text, own) in enumerate(zip(texts, images, strict=True)):
        count, given = text.count(IMAGE_TOKEN), len(flatten(own, "image"))
        if count != given:
            raise ValueError(
                f"row {row} of the text has {count} {IMAGE_TOKEN} but {given} images are given for "
                f"it; write {IMAGE_TOKEN} once for each"
            )


def place_media(texts: list[str], images: list[Any], videos: list[Any]) -> list[Any]:
    """Return the media in the order of their placeholders; ValueError if numbers differ."""
    for kind, mark, given in (("images", IMAGE_TOKEN, images), ("videos", "<video>", videos)):
        count = sum(text.count(mark) for text in texts)
        if count != len(given):
            raise ValueError(
                f"the text has {count} {mark} but {len(given)} {kind} are given; write {mark} once "
                "for each, as apply_chat_template does, or pass a question or messages instead"
            )
    sources = {IMAGE_TOKEN: iter(images), "<video>": iter(videos)}
    return [next(sources[mark]) for text in texts for mark in MARKS.findall(text)]


def split_rows(images: Any, num_rows: int, *, one: bool) -> list[list[Picture]]:
    """Return the images of each row; ``one``: the images belong to a single row."""
    per_row = [images] if one else [None] * num_rows if images is None else images
    if len(per_row) != num_rows:
        raise ValueError(
            f"{num_rows} prompts but {len(per_row)} entries of images; give one entry per prompt, "
            "an image or a list of images"
        )
    return [_as_list(own) for own in per_row]


def _as_list(images: Any) -> list[Picture]:
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def truncate(sample: EncodedSample, length: int, image_id: int) -> EncodedSample:
    """Return a conversation's first ``length`` tokens; ValueError if image tokens are cut."""
    kept = sample.input_ids[:length]
    check_image_tokens(int((kept == image_id).sum()), int((sample.input_ids == image_id).sum()))
    return dataclasses.replace(sample, input_ids=kept, labels=sample.labels[:length])


def check_image_tokens(left: int, needed: int) -> None:
    """Raise ValueError if truncation left only a part of the image tokens."""
    if left != needed:
        raise ValueError(
            f"truncation leaves {left} of {needed} image tokens, but an image needs all of its "
            "tokens; raise max_length, or give fewer images"
        )


def find_padded_length(longest: int, padding: bool | str, max_length: int | None) -> int:
    """Return the tokens to which rows are padded, ``longest`` of them in a row."""
    if padding != "max_length":
        return longest
    if max_length is None:
        raise ValueError(
            "padding='max_length' needs max_length, the number of tokens of a sequence"
        )
    return max(longest, max_length)
