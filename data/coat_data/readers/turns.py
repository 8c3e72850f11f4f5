"""Turns whose text has ``<image>`` and ``<video>`` where the media of the row stand."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from coat_data.readers.reader import Place
from coat_data.sample import DataError, Media, MediaKind, Part, Role, Turn

PLACEHOLDERS: Mapping[str, MediaKind] = {"<image>": "image", "<video>": "video"}
"""What stands for media in a human turn, and the kind of media."""

Said = list[tuple[Role, str]]
"""Speakers and texts of a conversation."""


def place_media(
    said: Said, files: Mapping[MediaKind, Sequence[Media]], place: Place
) -> tuple[tuple[Turn, ...], tuple[Media, ...]]:
    """The turns with their media in place, and the media in the order in which they stand.

    Placeholders count in human turns only and keep their order and the text around them. In a row
    with videos and no images ``<image>`` may stand for a video too. A row with media but no
    placeholder shows the media, each followed by a newline, before the first human text. A
    placeholder that no file of the row calls for is text, and so is any in an answer.

    Args:
        said: the conversation.
        files: the row's images and videos.
        place: for messages.

    Raises:
        DataError: the placeholders do not match the files.
    """
    said, tokens = _tokens(said, {kind: len(files.get(kind, ())) for kind in _KINDS}, place.where)
    waiting = {kind: iter(files.get(kind, ())) for kind in _KINDS}
    media: list[Media] = []
    turns: list[Turn] = []
    for role, text in said:
        parts = split_text(text, tokens if role == "user" else {})
        turns.append(Turn(role, parts))
        media += [next(waiting[part.kind]) for part in parts if part.kind != "text"]
    return tuple(turns), tuple(media)


def split_text(text: str, tokens: Mapping[str, MediaKind]) -> tuple[Part, ...]:
    """The parts of a turn: text, cut at the placeholders."""
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return tuple(
        Part(tokens[piece]) if piece in tokens else Part("text", piece) for piece in pieces if piece
    )


_KINDS: tuple[MediaKind, ...] = ("image", "video")


def _tokens(
    said: Said, files: Mapping[MediaKind, int], where: str
) -> tuple[Said, dict[str, MediaKind]]:
    """The turns with a placeholder for every file, and what the placeholders stand for."""
    tokens: dict[str, MediaKind] = {
        token: kind for token, kind in PLACEHOLDERS.items() if files[kind]
    }
    human = [number for number, (role, _) in enumerate(said) if role == "user"]
    if not tokens:
        return said, tokens
    if not human:
        raise DataError(where, "there is no human turn", "start with a human turn")
    pattern = "|".join(PLACEHOLDERS)
    found = Counter(token for number in human for token in re.findall(pattern, said[number][1]))
    if all(found[token] == files[kind] for token, kind in tokens.items()):
        return said, tokens
    if not files["image"] and found.total() == files["video"]:
        return said, dict.fromkeys(PLACEHOLDERS, "video")
    if found["<image>"] or (files["video"] and found["<video>"]):
        raise DataError(
            where,
            f"{found['<image>']} <image> and {found['<video>']} <video> placeholders in the human "
            f"turns, but {files['image']} image and {files['video']} video files",
            "write one placeholder per file, or none to show the files first",
        )
    first = "".join(f"{token}\n" * files[kind] for token, kind in tokens.items())
    said = list(said)
    said[human[0]] = ("user", first + said[human[0]][1])
    return said, tokens


def media_first(said: Said, media: Sequence[Media], place: Place) -> tuple[Turn, ...]:
    """The turns with all media, each followed by a newline, before the first human text.

    Raises:
        DataError: there are media but no human turn.
    """
    turns = [Turn(role, (Part("text", text),) if text else ()) for role, text in said]
    first = next((number for number, (role, _) in enumerate(said) if role == "user"), None)
    if not media:
        return tuple(turns)
    if first is None:
        raise DataError(place.where, "there is no human turn", "start with a human turn")
    shown = [part for item in media for part in (Part(item.kind), Part("text", "\n"))]
    text = turns[first].text
    shown[-1] = Part("text", f"\n{text}")
    turns[first] = Turn("user", tuple(shown))
    return tuple(turns)


def caption_turns(media: Sequence[Media], caption: str) -> tuple[Turn, ...]:
    """A caption pair: the media, and the caption as the answer (what the template plain trains)."""
    return (
        Turn("user", tuple(Part(item.kind) for item in media)),
        Turn("assistant", (Part("text", caption),)),
    )
