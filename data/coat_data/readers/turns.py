"""Turns of a row: speakers, supervised answers, and media at their placeholders."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from coat_data.readers.fields import check_unused, given, is_missing
from coat_data.readers.reader import Place
from coat_data.readers.row_media import by_kind
from coat_data.sample import Media, MediaKind, Part, Role, Turn, errors_within
from coat_data.text.message_fields import read_fields

PLACEHOLDERS: Mapping[str, MediaKind] = {"<image>": "image", "<video>": "video"}
"""Placeholders of media in a human turn -> kind of media."""

LOSS_FIELDS = ("weight", "loss", "train")
"""Fields of a turn that say whether it is supervised."""

TurnTexts = list[tuple[Role, str]]
"""Speakers and texts of a conversation."""
_SHOWN: tuple[Role, ...] = ("user", "tool")
"""Roles of turns with placeholders."""


def is_chat(turns: object) -> bool:
    """Whether a list has messages with ``role`` and ``content``."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and first.get("role") is not None and "content" in first


class RawTurn(NamedTuple):
    """A turn of a file."""

    role: Role
    content: Any
    fields: dict[str, Any]
    """Fields of its :class:`~coat_data.sample.Turn` other than the content."""
    name: str
    """Name of the content, for messages."""


def read_turns(
    turns: Iterable[Any],
    name: str,
    speakers: Sequence[str],
    contents: Sequence[str],
    roles: Mapping[str, Role],
    place: Place,
) -> list[RawTurn]:
    """Read the turns ``name`` of a row, whose speaker and content have one of these names.

    Fields that are not read are noted as ignored, or refused. Speakers of LlamaFactory and ms-swift
    say calls as JSON, one or a list; these belong to the answer before them, if there is one.
    """
    read: list[RawTurn] = []
    usual = {*speakers, *contents}
    call_speakers = ("function_call", "tool_call", place.columns.get("function_tag"))
    for number, turn in enumerate(turns):
        field = f"{name}[{number}]"
        turn = place.as_object(turn, field, f"give it {speakers[0]} and {contents[0]}")
        speaker, content = given(turn, *speakers), given(turn, *contents)
        role = get_role(speaker, roles, f"{field}.{speakers[0]}", place)
        known = usual
        if role == "assistant" and not content and turn.get("refusal"):
            content, known = turn["refusal"], {*usual, "refusal"}
        is_call = speaker in call_speakers
        if is_call:
            turn, content = {**turn, "tool_calls": content or "[]"}, ""
        own = {} if turn.keys() <= known else _read_fields(turn, role, known, field, place)
        calls = own.get("tool_calls", ())
        if is_call and read and read[-1].role == "assistant":
            before = read[-1].fields
            before |= own | {"tool_calls": (*before.get("tool_calls", ()), *calls)}
            continue
        content = "" if content is None and calls else content
        read.append(RawTurn(role, content, own, f"{field}.{contents[0]}"))
    return read


def _read_fields(
    turn: Mapping[str, Any], role: Role, known: Collection[str], name: str, place: Place
) -> dict[str, Any]:
    names = turn.keys() - known - {*LOSS_FIELDS} - place.ignore
    others = {name: turn[name] for name in names}
    with errors_within(f"{place.where}: {name}"):
        fields, used = read_fields(others, role)
    if not is_supervised(turn, role, name, place) and role == "assistant":
        fields["supervised"] = False
    unused = {key for key in others.keys() - used if not is_missing(turn[key])}
    check_unused(turn, unused, place.ignore, f"{place.where}: {name}")
    for key in used | unused:
        place.turn_fields[f"{name.partition('[')[0]}[].{key}"] = key in used
    return fields


def with_system(turn_texts: TurnTexts, row: Mapping[str, Any], place: Place) -> TurnTexts:
    """Prepend the row's ``system`` field as a system turn, if the conversation has none."""
    field = place.columns.get("system", "system")
    system = row.get(field)
    if system is None or system == "" or (turn_texts and turn_texts[0][0] == "system"):
        return turn_texts
    return [("system", place.as_string(system, field)), *turn_texts]


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
    found = {key: turn[key] for key in LOSS_FIELDS if key in turn and key not in place.ignore}
    found = {key: value for key, value in found.items() if not is_missing(value)}
    if not found:
        return role == "assistant"
    key, value = next(iter(found.items()))
    known = all(isinstance(one, bool | int | float) and one in (0, 1) for one in found.values())
    if not known or len(set(found.values())) > 1:
        raise place.error(f"{name} has {found}", f"set {key} to 0 or 1")
    if value and role != "assistant":
        problem = f"{name}.{key} is {value!r} in a turn of {role}"
        raise place.error(problem, "only answers can be supervised: set it to 0 or remove it")
    return bool(value)


def with_fields(turns: Sequence[Turn], read: Sequence[RawTurn]) -> tuple[Turn, ...]:
    """Return the turns; the last ones get the fields of the turns that were ``read``."""
    first = len(turns) - len(read)
    pairs = zip(turns[first:], read, strict=True)
    return (*turns[:first], *(replace(t, **raw.fields) if raw.fields else t for t, raw in pairs))


def place_media(
    turn_texts: TurnTexts, files: Sequence[Media], place: Place
) -> tuple[tuple[Turn, ...], tuple[Media, ...]]:
    """Return the turns with media at the placeholders, and the media in their order.

    Only placeholders in human turns and tool results are replaced. In a row with videos and
    without images, ``<image>`` may mean a video. Without placeholders, the media, each
    followed by a newline, precede the first human text. Placeholders without a file are plain text.
    """
    tokens = _tokens(turn_texts, {kind: len(own) for kind, own in by_kind(files).items()}, place)
    if not tokens:
        if files:
            place.notes.append("media_first")
        return media_first(turn_texts, files, place), tuple(files)
    waiting = {kind: iter(own) for kind, own in by_kind(files).items()}
    pattern = re.compile(f"({'|'.join(tokens)})")
    media: list[Media] = []
    turns: list[Turn] = []
    for role, text in turn_texts:
        if role not in _SHOWN or "<" not in text:
            turns.append(Turn(role, (Part("text", text),) if text else ()))
            continue
        pieces = pattern.split(text)
        parts = [Part(tokens[one]) if one in tokens else Part("text", one) for one in pieces if one]
        turns.append(Turn(role, tuple(parts)))
        media += [next(waiting[part.kind]) for part in parts if part.kind != "text"]
    return tuple(turns), tuple(media)


def _tokens(
    turn_texts: TurnTexts, files: Mapping[MediaKind, int], place: Place
) -> dict[str, MediaKind]:
    """Return the kind of each placeholder; empty if the texts have none for the files."""
    tokens: dict[str, MediaKind] = {one: kind for one, kind in PLACEHOLDERS.items() if files[kind]}
    if not tokens:
        return {}
    asked = [text for role, text in turn_texts if role in _SHOWN and "<" in text]
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


def media_first(turn_texts: TurnTexts, media: Sequence[Media], place: Place) -> tuple[Turn, ...]:
    """Return the turns with all media, each followed by a newline, before the first human text."""
    turns = [Turn(role, (Part("text", text),) if text else ()) for role, text in turn_texts]
    first = next((number for number, (role, _) in enumerate(turn_texts) if role == "user"), None)
    if not media:
        return tuple(turns)
    if first is None:
        raise place.error("there is no human turn", "start with a human turn")
    shown = [part for item in media for part in (Part(item.kind), Part("text", "\n"))]
    shown[-1] = Part("text", f"\n{turns[first].text}")
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
