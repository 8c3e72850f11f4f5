"""Base of all readers, and shared functions: checks of fields, media of a row, turns.

A medium is a path, a struct of bytes, a ``data:`` URL or base64 text. In texts, ``<image>`` and
``<video>`` are the places of the row's media.
"""

import base64
import binascii
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coat_data.containers.media_files import image_suffixes
from coat_data.media.root import MediaRoot
from coat_data.readers.boxes import convert_tags
from coat_data.readers.fields import Row, check_unused, find_placeholder, is_missing
from coat_data.readers.preference import REJECTED, add_rejected, is_pair, split_pair, with_chosen
from coat_data.sample import KEY, DataError, Media, MediaKind, Part, Reading, Role, Sample, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of a row in its source, and the root of its media paths."""

    source: str
    """File name, for messages."""
    row: int
    """Row in the file, from 0."""
    root: MediaRoot
    columns: Mapping[str, str] = field(default_factory=dict)
    """The reader's field names -> field names of the file (LlamaFactory's columns and tags)."""
    ignore: frozenset[str] = frozenset()
    """Fields that the user allows to be left out."""
    notes: list[str] = field(default_factory=list)
    """Keys of :data:`~coat_data.sample.NOTES` that the reader of the row adds."""

    @property
    def where(self) -> str:
        """``file:row`` for messages."""
        return f"{self.source}:{self.row}"

    def sample(self, name: str, turns: Sequence[Turn], media: Sequence[Media] = ()) -> Sample:
        """Return the checked sample of the row, with ``name`` as its id."""
        turns = convert_tags(turns, self.where) if media else turns
        return Sample(
            id=name, turns=tuple(turns), media=tuple(media), source=self.source, row=self.row
        ).check()

    def error(self, problem: str, remedy: str) -> DataError:
        """Return the error of the row."""
        return DataError(self.where, problem, remedy)

    def as_object(
        self, value: object, name: str = "the row", remedy: str = "write one JSON object per row"
    ) -> Mapping[str, Any]:
        """Return the value; DataError if it is not an object."""
        if not isinstance(value, dict | Mapping):  # dict first: Mapping is checked in Python
            raise self.error(f"{name} is {kind_of(value)}, not an object", remedy)
        return value

    def as_string(self, value: object, name: str) -> str:
        """Return the value; DataError if it is not a string of valid characters."""
        if not isinstance(value, str):
            raise self.error(f"{name} is {kind_of(value)}, not a string", f"make {name} a string")
        if value.isascii():
            return value
        try:
            value.encode("utf-8")  # a lone surrogate parses as JSON but is not a character
        except UnicodeEncodeError as error:
            raise self.error(
                f"{name} has a broken character at {error.start}", "remove the \\ud... escape"
            ) from error
        return value

    def as_list(self, value: object, name: str) -> Sequence[Any]:
        """Return the value; DataError if it is not a list."""
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self.error(f"{name} is {kind_of(value)}, not a list", f"make {name} a list")
        return value

    def row_id(self, row: Mapping[str, Any]) -> str:
        """Return the row's id as text; the row number if there is none."""
        value = row.get("id")
        value = row.get("sample_id") if value is None else value
        if isinstance(value, float):  # pandas writes a column of numbers with gaps as such
            value = int(value) if value.is_integer() else str(value) if value == value else None
        if value is None:
            return str(self.row)
        if isinstance(value, int):
            return str(value)
        return self.as_string(value, "id")

    def refuse(self, row: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Raise DataError for unsupported fields; ``names`` maps them to remedies."""
        for name, remedy in names.items():
            if name in row and not is_missing(row[name]):
                raise self.error(f"the row has {name}", remedy)


@dataclass(frozen=True, slots=True)
class Reader:
    """One row format."""

    name: str
    """Name for ``--format`` and a recipe's ``format``."""
    summary: str
    """One line for ``--help``."""
    matches: Callable[[Any], bool]
    """Whether a raw row has this format, by its fields; accepts any value."""
    to_sample: Callable[[Any, Place], Sample]
    """Returns the checked sample of a row; raises only :class:`DataError`; decodes no media."""

    def recognizes(self, row: Any) -> bool:
        """Whether a raw row has this format, also with a pair of answers in place of the last."""
        return self.matches(with_chosen(row))

    def read(self, row: Any, place: Place) -> Sample:
        """Return the sample of a row with its :class:`~coat_data.sample.Reading`."""
        if type(row) is not dict:
            return self.to_sample(row, place)
        pair = split_pair(row, place.where, place.ignore) if is_pair(row) else None
        row = Row(row if pair is None else pair.row)
        sample = self.to_sample(row, place)
        used, unused = row.keys() & row.used, row.keys() - row.used
        if pair is not None:
            if REJECTED not in place.ignore:
                sample = add_rejected(sample, place.as_string(pair.rejected, REJECTED))
            used = used - {pair.added} | pair.fields
        if unused and not (place.columns and KEY in row):  # a field map of Energon is complete
            check_unused(row, unused, place.ignore, place.where, sample)
        noted = "placeholder_as_text" in place.notes  # by a reader that knows that it is text
        if not noted and find_placeholder(sample, place.ignore):
            place.notes.append("placeholder_as_text")
        inner = sample.reading
        notes = tuple(dict.fromkeys(place.notes))
        reading = Reading(inner.used.union(used), inner.ignored.union(unused), notes)
        # Nobody else has the new sample; a copy of it takes as long as reading its turns.
        object.__setattr__(sample, "reading", reading)
        return sample


def has_fields(*names: str) -> Callable[[Any], bool]:
    """Return a :attr:`Reader.matches` for rows that have all these fields."""
    return lambda row: isinstance(row, Mapping) and set(names) <= set(row)


def is_chat(turns: object) -> bool:
    """Whether a list has messages with ``role`` and ``content``."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and {"role", "content"} <= first.keys()


def kind_of(value: object) -> str:
    """Return the type of a JSON value, for messages."""
    return "null" if value is None else type(value).__name__


def continued(sample: Sample, row: Mapping[str, Any]) -> Sample:
    """Return the sample, marked as continued if it is a document with ``"continues": true``."""
    goes_on = "continues" in row and row["continues"] is True and sample.is_document
    return replace(sample, continues=True) if goes_on else sample


MEDIA_FIELDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image", "images"),
    "video": ("video", "videos", "video_path"),
}
"""Fields of a row with its media; one field per kind may be set."""

_DATA = re.compile(r"data:[^,;]*(?:;[^,;]*)*,")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_LONGEST_PATH = 4096
"""PATH_MAX of Linux: a longer text is not a path."""
_DEEPEST_STRUCT = 4
"""Levels of nesting: a part, its image_url, its url, and the text."""

PLACEHOLDERS: Mapping[str, MediaKind] = {"<image>": "image", "<video>": "video"}
"""Placeholders of media in a human turn -> kind of media."""

LOSS_FIELDS = ("weight", "loss", "train")
"""Fields of a turn that say whether it is supervised."""

Said = list[tuple[Role, str]]
"""Speakers and texts of a conversation."""
_KINDS: tuple[MediaKind, ...] = ("image", "video")


def to_media(item: object, kind: MediaKind, field: str, place: Place) -> Media:
    """Convert a path, ``{"path": ...}``, ``{"bytes": ..., "path": ...}`` or a URL to a medium.

    ``bytes`` may be bytes, as in Parquet, or base64 text, as in JSON. The keys ``url``, ``base64``,
    ``data`` and the kind itself are read in the same way, also nested (OpenAI's
    ``{"image_url": {"url": "data:..."}}``). A video's ``start`` and ``end`` are seconds.
    A list is a video as the paths of its frames (QwenLM/Qwen2.5-VL, qwen-vl-utils).
    """
    if isinstance(item, Mapping):
        return with_span(_from_struct(item, kind, field, place), item, field, place)
    if isinstance(item, list | tuple) and kind == "video":
        return _from_frames(item, field, place)
    if isinstance(item, bytes | bytearray | memoryview):
        return Media(kind=kind, path=_member(field, place), data=bytes(item))
    text = place.as_string(item, field)
    if _DATA.match(text[:200]):
        return Media(kind=kind, path=_member(field, place), data=_address_bytes(text, field, place))
    text = text.removeprefix("file://")
    if len(text) > _LONGEST_PATH and _BASE64.fullmatch(text):
        return Media(kind=kind, path=_member(field, place), data=_decode(text, field, place))
    return Media(kind=kind, path=media_path(text, field, place))


def _from_frames(items: Sequence[Any], field: str, place: Place) -> Media:
    """Return the video of a list of frames, which are paths or addresses of images."""
    if not items:
        raise place.error(f"{field} is an empty list", "list the frames of the video")
    frames = [to_media(one, "image", f"{field}[{n}]", place) for n, one in enumerate(items)]
    if any(frame.data is not None for frame in frames):
        raise place.error(
            f"{field} has embedded frames", "store them as files and give their paths"
        )
    paths = tuple(frame.path or "" for frame in frames)
    return Media(kind="video", path=paths[0], frames=paths)


def _is_frame_list(items: Sequence[Any]) -> bool:
    """Whether a list in a field of videos is one video: the paths of its frames."""
    return bool(items) and all(
        isinstance(item, str) and os.path.splitext(item)[1].lower() in image_suffixes()  # noqa: PTH122
        for item in items
    )


def _with_rate(media: Media, item: Mapping[str, Any], field: str, place: Place) -> Media:
    """Return the medium, for a list of frames with the frames per second of ``item`` if given."""
    rate = next((item[n] for n in ("sample_fps", "fps") if item.get(n) is not None), None)
    if not media.frames or rate is None:
        return media
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
        raise place.error(f"{field}: fps is {rate!r}", "give frames per second above 0")
    return replace(media, fps=float(rate))


def with_span(media: Media, item: Mapping[str, Any], field: str, place: Place) -> Media:
    """Return the medium, for a video with the seconds of ``item`` if given.

    They are ``start`` and ``end``, or ``video_start`` and ``video_end`` (QwenLM/Qwen2.5-VL,
    qwen-vl-utils); texts are read as numbers, as CSV files have no others.
    """
    if media.kind != "video":
        return media
    media = _with_rate(media, item, field, place)
    start, end = (_time(item, name, getattr(media, name), field, place) for name in _SPAN)
    if start is None and end is None:
        return media
    if start is not None and end is not None and end <= start:
        raise place.error(f"{field} ends at {end} s and starts at {start} s", "swap them")
    return replace(media, start=start, end=end)


_SPAN = ("start", "end")


def _time(
    item: Mapping[str, Any], name: str, own: float | None, field: str, place: Place
) -> float | None:
    """Return the time ``name`` of a clip in seconds; ``own`` is that of the medium itself."""
    given = {time for key in (name, f"video_{name}") if (time := item.get(key)) not in (None, "")}
    found: list[float] = [] if own is None else [own]
    for time in given:
        try:
            seconds = -1.0 if isinstance(time, bool) else float(time)
        except (TypeError, ValueError):
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise place.error(f"{field}: the time {time!r} is wrong", "give seconds, 0 or greater")
        found.append(seconds if isinstance(time, str) else time)
    if len(set(found)) > 1:
        raise place.error(f"{field} has two times: {name} {found}", "keep one of them")
    return found[0] if found else None


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
    raise place.error(f"{field} is nested too deep", 'write {"path": ...}')


def media_path(text: str, field: str, place: Place) -> str:
    """Return the absolute path or the URL of a medium."""
    if not text or "\0" in text or len(text) > _LONGEST_PATH:
        raise place.error(
            f"{field} {text[:80]!r} is not a path",
            f"name a file, or remove {field} from a row without media",
        )
    return place.root.file(text, place.where)


def _struct_bytes(item: Mapping[str, Any], field: str, place: Place) -> bytes | None:
    """Return the bytes in a struct; None if it has none."""
    for name in ("bytes", "base64", "data"):
        value = item.get(name)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, str):
            if _DATA.match(value[:200]):
                return _address_bytes(value, field, place)
            return _decode(value, f"{field}.{name}", place)
        if value is not None:
            raise place.error(f"{field}.{name} is {kind_of(value)}", "make it bytes or base64 text")
    return None


def _member(field: str, place: Place) -> str:
    return f"{place.where}.{field}"


def _address_bytes(text: str, field: str, place: Place) -> bytes:
    head, _, body = text.partition(",")
    if ";base64" not in head:
        raise place.error(f"{field} is a data: address without base64", "encode it as base64")
    return _decode(body, field, place)


def _decode(text: str, field: str, place: Place) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise place.error(f"{field} is not base64: {error}", "encode the file again") from error


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def media_fields(row: Mapping[str, Any], place: Place) -> dict[MediaKind, list[Media]]:
    """Return the row's images and videos; fields of the same kind must not differ."""
    media: dict[MediaKind, list[Media]] = {}
    for kind, names in MEDIA_FIELDS.items():
        own = place.columns.get(f"{kind}s")
        names = (own,) if own else names
        given = [field for field in names if field in row and not is_missing(row[field])]
        if not given:
            media[kind] = []
            continue
        items, *others = (_listed(row[field]) for field in given)
        if any(other != items for other in others):
            raise place.error(f"both {' and '.join(given)} are set", "keep one of them")
        items = [items] if kind == "video" and _is_frame_list(items) else items
        media[kind] = [to_media(item, kind, given[0], place) for item in items]
    videos = media["video"]
    if len(videos) == 1:
        media["video"] = [with_span(videos[0], row, "the row", place)]
    return media


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
    """Return the turns with labels on the supervised answers alone.

    Args:
        supervised: one for each answer of the file; the first may have been removed from the turns.
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

    Only placeholders in human turns are replaced; the text around them is kept. In a row with
    videos and without images, ``<image>`` may stand for a video. If a row has media but no
    placeholders, the media, each followed by a newline, precede the first human text. Placeholders
    without a file, and placeholders in answers, are plain text.
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
