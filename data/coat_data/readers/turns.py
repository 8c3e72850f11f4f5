"""Turns of a row: speakers, supervised answers, and media at their placeholders."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coat_data.readers.reader import Place
from coat_data.sample import Media, MediaKind, Part, Role, Sample, Turn

PLACEHOLDERS: Mapping[str, MediaKind] = {"<image>": "image", "<video>": "video"}
"""Placeholders of media in a human turn -> kind of media."""

LOSS_FIELDS = ("weight", "loss", "train")
"""Fields of a turn that say whether it is supervised."""

Said = list[tuple[Role, str]]
"""Speakers and texts of a conversation."""
_KINDS: tuple[MediaKind, ...] = ("image", "video")


def is_chat(turns: object) -> bool:
    """Whether a list has messages with ``role`` and ``content``."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and {"role", "content"} <= first.keys()


def continued(sample: Sample, row: Mapping[str, Any]) -> Sample:
    """Return the sample, marked as continued if it is a document with ``"continues": true``."""
    goes_on = "continues" in row and row["continues"] is True and sample.is_document
    return replace(sample, continues=True) if goes_on else sample


def with_system(said: Said, row: Mapping[str, Any], place: Place) -> Said:
    """Prepend the row's ``system`` field as a system turn, if the conversation has none."""
    field = place.columns.get("system", "system")
    system = row.get(field)
    if system is None or system == "" or (said and said[0][0] == "system"):
        return said
    return [("system", place.as_string(system, field)), *said]


def get_role(name: object, roles: Mapping[str, Role], field: str, place: Place) -> Role:
    """Return the role of a speaker, by its name in lower case if it is not in ``roles``."""
    text = place.as_string(name, field)
    role = roles.get(text) or roles.get(text.lower())
    if role is None:
        known = ", ".join(sorted(roles))
        raise place.error(f"{field} is {text!r}", f"use one of {known}")
    return role


def is_supervised(turn: Mapping[str, Any], role: Role, name: str, place: Place) -> bool:
    """Return whether a turn is supervised, by ``weight``, ``loss`` or ``train``: 0, 1 or a boolean.

    Sources: OpenAI, fine-tuning API (``weight``); modelscope/ms-swift, Custom-dataset.md
    (``loss``); axolotl, docs/dataset-formats/conversation.qmd (``train``).
    """
    given = {
        key: turn[key]
        for key in LOSS_FIELDS
        if turn.get(key) is not None and key not in place.ignore
    }
    if not given:
        return role == "assistant"
    key, value = next(iter(given.items()))
    known = all(isinstance(one, bool | int | float) and one in (0, 1) for one in given.values())
    if not known or len({bool(one) for one in given.values()}) > 1:
        raise place.error(f"{name} has {given}", f"set {key} to 0 or 1")
    if value and role != "assistant":
        raise place.error(
            f"{name}.{key} is {value!r} in a turn of {role}",
            "only answers can be supervised: set it to 0 or remove it",
        )
    return bool(value)


def with_loss(turns: Sequence[Turn], supervised: Sequence[bool]) -> tuple[Turn, ...]:
    """Return the turns with labels only on the answers that are ``supervised``.

    The first of the file's answers may have been removed from the turns.
    """
    if all(supervised):
        return tuple(turns)
    flags = list(supervised)
    marked = [
        replace(turn, supervised=flags.pop()) if turn.role == "assistant" else turn
        for turn in reversed(turns)
    ]
    return tuple(reversed(marked))


def without_first_answer(said: Said) -> Said:
    """Remove an answer before the first question."""
    first = 1 if said and said[0][0] == "system" else 0
    if len(said) > first + 1 and said[first][0] == "assistant":
        return [*said[:first], *said[first + 1 :]]
    return said


def place_media(
    said: Said, files: Mapping[MediaKind, Sequence[Media]], place: Place
) -> tuple[tuple[Turn, ...], tuple[Media, ...]]:
    """Return the turns with media at the placeholders, and the media in their order.

    Only placeholders in human turns are replaced. In a row with videos and without images,
    ``<image>`` may stand for a video. Without placeholders, the media, each followed by a newline,
    precede the first human text. Placeholders without a file are plain text.
    """
    tokens = _tokens(said, {kind: len(files.get(kind, ())) for kind in _KINDS}, place)
    if not tokens:
        media = [one for kind in _KINDS for one in files.get(kind, ())]
        if media:
            place.notes.append("media_first")
        return media_first(said, media, place), tuple(media)
    waiting = {kind: iter(files.get(kind, ())) for kind in _KINDS}
    pattern = re.compile(f"({'|'.join(tokens)})")
    media: list[Media] = []
    turns: list[Turn] = []
    for role, text in said:
        if role != "user" or "<" not in text:
            turns.append(Turn(role, (Part("text", text),) if text else ()))
            continue
        pieces = pattern.split(text)
        parts = [Part(tokens[one]) if one in tokens else Part("text", one) for one in pieces if one]
        turns.append(Turn(role, tuple(parts)))
        media += [next(waiting[part.kind]) for part in parts if part.kind != "text"]
    return tuple(turns), tuple(media)


def _tokens(said: Said, files: Mapping[MediaKind, int], place: Place) -> dict[str, MediaKind]:
    """Return the kind of each placeholder; empty if the texts have none for the files."""
    tokens: dict[str, MediaKind] = {
        token: kind for token, kind in PLACEHOLDERS.items() if files[kind]
    }
    if not any(files.values()):
        return {}
    asked = [text for role, text in said if role == "user" and "<" in text]
    found = {token: sum(text.count(token) for text in asked) for token in PLACEHOLDERS}
    if all(found[token] == files[kind] for token, kind in tokens.items()):
        return tokens
    if not files["image"] and sum(found.values()) == files["video"]:
        return dict.fromkeys(PLACEHOLDERS, "video")
    if found["<image>"] or (files["video"] and found["<video>"]):
        raise place.error(
            f"{found['<image>']} <image> and {found['<video>']} <video> placeholders in the human "
            f"turns, but {files['image']} image and {files['video']} video files",
            "write one placeholder per file, or none to show the files first",
        )
    return {}


def media_first(said: Said, media: Sequence[Media], place: Place) -> tuple[Turn, ...]:
    """Return the turns with all media, each followed by a newline, before the first human text."""
    turns = [Turn(role, (Part("text", text),) if text else ()) for role, text in said]
    first = next((number for number, (role, _) in enumerate(said) if role == "user"), None)
    if not media:
        return tuple(turns)
    if first is None:
        raise place.error("there is no human turn", "start with a human turn")
    shown = [part for item in media for part in (Part(item.kind), Part("text", "\n"))]
    text = turns[first].text
    shown[-1] = Part("text", f"\n{text}")
    turns[first] = Turn("user", tuple(shown))
    return tuple(turns)


def first_of(value: Any, place: Place) -> Any:
    """Return the value, or the first one of a list; the others are noted."""
    if not isinstance(value, list) or not value:
        return value
    if len(value) > 1:
        place.notes.append("later_captions")
    return value[0]


def caption_turns(media: Sequence[Media], caption: str) -> tuple[Turn, ...]:
    """Return the turns of a caption pair: the media as the question, the caption as the answer."""
    return (
        Turn("user", tuple(Part(item.kind) for item in media)),
        Turn("assistant", (Part("text", caption),)),
    )
