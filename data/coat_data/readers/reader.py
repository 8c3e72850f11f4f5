"""The base of all readers, and what they share: checks of fields, media of a row, turns.

A medium is a path, a struct of bytes, a ``data:`` address or base64 text. In a text, ``<image>``
and ``<video>`` stand where the media of the row belong.
"""

import base64
import binascii
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coat_data.media.root import MediaRoot
from coat_data.sample import DataError, Media, MediaKind, Part, Role, Sample, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a row stands, and where its media paths start."""

    source: str
    """The file, for messages."""
    row: int
    """The row in it, from 0."""
    root: MediaRoot
    columns: Mapping[str, str] = field(default_factory=dict)
    """The user's names of fields, by the reader's (LlamaFactory's ``columns`` and ``tags``)."""

    @property
    def where(self) -> str:
        """``file:row`` for messages."""
        return f"{self.source}:{self.row}"

    def sample(self, name: str, turns: Sequence[Turn], media: Sequence[Media] = ()) -> Sample:
        """The checked sample of the row, with ``name`` as its id."""
        return Sample(
            id=name, turns=tuple(turns), media=tuple(media), source=self.source, row=self.row
        ).check()


@dataclass(frozen=True, slots=True)
class Reader:
    """One kind of row."""

    name: str
    """What ``--format`` and a recipe's ``format`` call it."""
    summary: str
    """One line for ``--help``."""
    matches: Callable[[Any], bool]
    """Whether a raw row is of this kind, by its fields; takes any value."""
    to_sample: Callable[[Any, Place], Sample]
    """The checked sample of a row, or a :class:`DataError` and nothing else; decodes no media."""


def has_fields(*names: str) -> Callable[[Any], bool]:
    """A :attr:`Reader.matches` for rows that have all these fields."""
    return lambda row: isinstance(row, Mapping) and set(names) <= set(row)


def kind_of(value: object) -> str:
    """The type of a JSON value, for messages."""
    return "null" if value is None else type(value).__name__


def as_object(
    value: object,
    where: str,
    name: str = "the row",
    remedy: str = "write one JSON object per row",
) -> Mapping[str, Any]:
    """The value, or a DataError if it is not an object."""
    if not isinstance(value, Mapping):
        raise DataError(where, f"{name} is {kind_of(value)}, not an object", remedy)
    return value


def as_string(value: object, name: str, where: str) -> str:
    """The value, or a DataError if it is not a string of characters."""
    if not isinstance(value, str):
        raise DataError(where, f"{name} is {kind_of(value)}, not a string", f"make {name} a string")
    try:
        value.encode("utf-8")  # half a surrogate pair parses as JSON but is not a character
    except UnicodeEncodeError as error:
        raise DataError(
            where, f"{name} has a broken character at {error.start}", "remove the \\ud... escape"
        ) from error
    return value


def as_list(value: object, name: str, where: str) -> Sequence[Any]:
    """The value, or a DataError if it is not a list."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(where, f"{name} is {kind_of(value)}, not a list", f"make {name} a list")
    return value


def is_missing(value: object) -> bool:
    """Whether a field counts as absent: null, an empty list, or Arrow's object of nulls."""
    if isinstance(value, Mapping):
        return all(item is None for item in value.values())
    return value is None or (isinstance(value, list | tuple) and not value)


def row_id(row: Mapping[str, Any], place: Place) -> str:
    """The row's id as text; the row number where it has none."""
    value = next((row[name] for name in ("id", "sample_id") if row.get(name) is not None), None)
    if value is None:
        return str(place.row)
    if isinstance(value, int):
        return str(value)
    return as_string(value, "id", place.where)


def continued(sample: Sample, row: Mapping[str, Any]) -> Sample:
    """The sample; a document of whose row ``continues`` is true goes on in the next row."""
    goes_on = row.get("continues") is True and sample.is_document
    return replace(sample, continues=True) if goes_on else sample


def refuse_fields(row: Mapping[str, Any], names: Mapping[str, str], where: str) -> None:
    """Raise for a field that would have to be trained differently: what it asks for, by name."""
    for name, remedy in names.items():
        if not is_missing(row.get(name)):
            raise DataError(where, f"the row has {name}", remedy)


NOT_SFT = {
    "audio": "remove the rows with audio: only images and videos are read",
    "audios": "remove the rows with audio: only images and videos are read",
    "chosen": "this is preference data; make conversations with the chosen answer of it",
    "rejected": "this is preference data; make conversations with the chosen answer of it",
    "rejected_response": "this is preference data; make conversations with the better answer of it",
}
"""Fields that a conversation cannot stand for, and what to do about them."""

MEDIA_FIELDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image", "images"),
    "video": ("video", "videos", "video_path"),
}
"""Fields of a row that hold its media; one of each kind may be set."""

_DATA = re.compile(r"data:[^,;]*(?:;[^,;]*)*,")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_LONGEST_PATH = 4096
"""PATH_MAX of Linux: a longer text is no path."""
_DEEPEST_STRUCT = 4
"""A part, its image_url, its url, and the text."""

PLACEHOLDERS: Mapping[str, MediaKind] = {"<image>": "image", "<video>": "video"}
"""What stands for media in a human turn, and the kind of media."""

Said = list[tuple[Role, str]]
"""Speakers and texts of a conversation."""
_KINDS: tuple[MediaKind, ...] = ("image", "video")


def media_list(value: object, kind: MediaKind, field: str, place: Place) -> list[Media]:
    """The media of a field that holds one medium, a list of them, or nothing.

    Raises:
        DataError: an entry is no medium; names ``field``.
    """
    if is_missing(value):
        return []
    items = value if isinstance(value, list | tuple) else [value]
    return [to_media(item, kind, field, place) for item in items]


def to_media(item: object, kind: MediaKind, field: str, place: Place) -> Media:
    """One medium from a path, ``{"path": ...}``, ``{"bytes": ..., "path": ...}`` or an address.

    ``bytes`` may be bytes, as in Parquet, or base64 text, as in JSON. The same goes for the keys
    ``url``, ``base64``, ``data`` and the kind itself, alone or nested (OpenAI's
    ``{"image_url": {"url": "data:..."}}``). A video's ``start`` and ``end`` are seconds.

    Raises:
        DataError: it is none of these, or a path that leaves the media root.
    """
    if isinstance(item, Mapping):
        return with_span(_from_struct(item, kind, field, place), item, field, place)
    if isinstance(item, bytes | bytearray | memoryview):
        return Media(kind=kind, path=_member(field, place), data=bytes(item))
    text = as_string(item, field, place.where)
    if _DATA.match(text[:200]):
        return Media(kind=kind, path=_member(field, place), data=_address_bytes(text, field, place))
    text = text.removeprefix("file://")
    if len(text) > _LONGEST_PATH and _BASE64.fullmatch(text):
        return Media(kind=kind, path=_member(field, place), data=_decode(text, field, place))
    return Media(kind=kind, path=media_path(text, field, place))


def with_span(media: Media, item: Mapping[str, Any], field: str, place: Place) -> Media:
    """The medium, of which a video shows from ``start`` to ``end`` seconds if ``item`` says so.

    Raises:
        DataError: a time is no number of seconds, or the end comes first.
    """
    start, end = item.get("start"), item.get("end")
    if media.kind != "video" or (start is None and end is None):
        return media
    for time in (start, end):
        known = isinstance(time, int | float) and not isinstance(time, bool)
        if time is not None and not (known and 0 <= time < float("inf")):
            raise DataError(
                place.where, f"{field}: the time {time!r} is wrong", "give seconds, 0 or greater"
            )
    if start is not None and end is not None and end <= start:
        raise DataError(
            place.where, f"{field} ends at {end} s and starts at {start} s", "swap them"
        )
    return replace(media, start=start, end=end)


def _from_struct(item: Mapping[str, Any], kind: MediaKind, field: str, place: Place) -> Media:
    value: Any = item
    for _ in range(_DEEPEST_STRUCT):
        if not isinstance(value, Mapping):
            return to_media(value, kind, field, place)
        given = _struct_bytes(value, field, place)
        if given is not None:
            path = value.get("path")  # for messages: nothing is read from there
            named = isinstance(path, str) and bool(path)
            return Media(kind=kind, path=path if named else _member(field, place), data=given)
        inner = (value.get(name) for name in (kind, f"{kind}_url", "url", "path"))
        value = next((one for one in inner if one is not None), None)
    raise DataError(place.where, f"{field} is nested too deep", 'write {"path": ...}')


def media_path(text: str, field: str, place: Place) -> str:
    """The absolute path or the address of a medium.

    Raises:
        DataError: the text is no path, or leaves the media root.
    """
    if not text or "\0" in text or len(text) > _LONGEST_PATH:
        raise DataError(
            place.where,
            f"{field} {text[:80]!r} is not a path",
            f"name a file, or remove {field} from a row without media",
        )
    return place.root.file(text, place.where)


def _struct_bytes(item: Mapping[str, Any], field: str, place: Place) -> bytes | None:
    """The bytes that a struct holds; None if it holds none."""
    for name in ("bytes", "base64", "data"):
        value = item.get(name)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, str):
            if _DATA.match(value[:200]):
                return _address_bytes(value, field, place)
            return _decode(value, f"{field}.{name}", place)
        if value is not None:
            raise DataError(
                place.where, f"{field}.{name} is {kind_of(value)}", "make it bytes or base64 text"
            )
    return None


def _member(field: str, place: Place) -> str:
    return f"{place.where}.{field}"


def _address_bytes(text: str, field: str, place: Place) -> bytes:
    head, _, body = text.partition(",")
    if ";base64" not in head:
        raise DataError(
            place.where, f"{field} is a data: address without base64", "encode it as base64"
        )
    return _decode(body, field, place)


def _decode(text: str, field: str, place: Place) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            place.where, f"{field} is not base64: {error}", "encode the file again"
        ) from error


def media_fields(row: Mapping[str, Any], place: Place) -> dict[MediaKind, list[Media]]:
    """The row's images and videos, of which each kind may stand in one field only."""
    media: dict[MediaKind, list[Media]] = {}
    for kind, names in MEDIA_FIELDS.items():
        own = place.columns.get(f"{kind}s")
        given = [field for field in ([own] if own else names) if not is_missing(row.get(field))]
        if len(given) > 1:
            raise DataError(place.where, f"both {' and '.join(given)} are set", "keep one of them")
        media[kind] = media_list(row[given[0]], kind, given[0], place) if given else []
    return media


def with_system(said: Said, row: Mapping[str, Any], place: Place) -> Said:
    """The conversation with the row's ``system`` field before it, if it has no system turn."""
    field = place.columns.get("system", "system")
    system = row.get(field)
    if system is None or system == "" or (said and said[0][0] == "system"):
        return said
    return [("system", as_string(system, field, place.where)), *said]


def without_first_answer(said: Said) -> Said:
    """The conversation without an answer that stands before the first question."""
    first = 1 if said and said[0][0] == "system" else 0
    if len(said) > first + 1 and said[first][0] == "assistant":
        return [*said[:first], *said[first + 1 :]]
    return said


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
        shown = tokens if role == "user" else {}
        pieces = re.split(f"({'|'.join(shown)})", text) if shown else [text]
        parts = [Part(shown[one]) if one in shown else Part("text", one) for one in pieces if one]
        turns.append(Turn(role, tuple(parts)))
        media += [next(waiting[part.kind]) for part in parts if part.kind != "text"]
    return tuple(turns), tuple(media)


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
