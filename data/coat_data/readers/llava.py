r"""LLaVA's conversations, and what grew out of them (InternVL, LLaVA-NeXT, LLaVA-Video, ShareGPT).

A row looks like this (haotian-liu/LLaVA, docs/Finetune_Custom_Data.md)::

    {"id": "17", "image": "a.jpg", "conversations": [
        {"from": "human", "value": "<image>\nWhat colour is the bus?"},
        {"from": "gpt", "value": "Red."}]}

Files on users' disks differ from it in many ways; the rules for each are in :func:`to_sample`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coat_data.readers.media import media_list
from coat_data.readers.reader import (
    NOT_SFT,
    Place,
    as_object,
    as_string,
    continued,
    is_missing,
    kind_of,
    refuse_fields,
    row_id,
)
from coat_data.readers.turns import Said, place_media
from coat_data.sample import DataError, Media, MediaKind, Role, Sample

NAME = "llava"
SUMMARY = "LLaVA JSON, JSONL or Parquet: conversations with from and value, image, video"

ROLES: Mapping[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""Names of the speakers in a file, and the role each one has in a sample."""

_FIELDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image", "images"),
    "video": ("video", "videos", "video_path"),
}
_TAGS: Mapping[str, Role] = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}


def matches(row: Any) -> bool:
    """Whether the row has ``conversations``."""
    return isinstance(row, Mapping) and "conversations" in row


def to_sample(row: Any, place: Place) -> Sample:
    """One row as a checked sample. Does not decode the media.

    Rules for what the format leaves open:

    - ``id`` may be a string, an int, absent or repeated; absent, it is the row number.
    - ``image``, ``images``, ``video`` or ``videos``: anything that
      :func:`~coat_data.readers.media.to_media` takes, or a list of it; null and an empty list mean
      none.
    - Placeholders are read as :func:`~coat_data.readers.turns.place_media` says.
    - ``system`` of the row becomes a system turn where there is none.
    - An answer before the first question is dropped, as LLaVA does (llava/train/train.py,
      ``preprocess_v1``).
    - ``"continues": true``, which :mod:`coat_data.tools.export` writes, says that a document goes
      on in the next row.
    - The names of fields and speakers may be mapped (``place.columns``).

    Args:
        row: a parsed row.
        place: where it stands.

    Raises:
        DataError: a field is missing or of the wrong type, the placeholders do not match the
            files, or :meth:`~coat_data.Sample.check` fails.
    """
    where = place.where
    row = as_object(row, where)
    refuse_fields(row, NOT_SFT, where)
    turns, media = place_media(_said(row, place), media_fields(row, place), place)
    sample = Sample(
        id=row_id(row, place), turns=turns, media=media, source=place.source, row=place.row
    )
    return continued(sample.check(), row)


def media_fields(row: Mapping[str, Any], place: Place) -> dict[MediaKind, list[Media]]:
    """The row's images and videos, of which each kind may stand in one field only."""
    media: dict[MediaKind, list[Media]] = {}
    for kind, names in _FIELDS.items():
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


def _said(row: Mapping[str, Any], place: Place) -> Said:
    where, columns = place.where, place.columns
    name = columns.get("messages", "conversations")
    roles: dict[str, Role] = {
        **ROLES,
        **{columns[tag]: role for tag, role in _TAGS.items() if tag in columns},
    }
    speaker_field = columns.get("role_tag", "from")
    text_field = columns.get("content_tag", "value")
    said: Said = []
    for number, turn in enumerate(_turns(row, name, where)):
        field = f"{name}[{number}]"
        if not isinstance(turn, Mapping):
            raise DataError(
                where, f"{field} is {kind_of(turn)}, not an object", "give it from and value"
            )
        speaker = as_string(turn.get(speaker_field), f"{field}.{speaker_field}", where)
        if speaker not in roles:
            raise DataError(
                where,
                f"{field}.{speaker_field} is {speaker!r}",
                f"use one of {', '.join(sorted(roles))}",
            )
        text = as_string(turn.get(text_field), f"{field}.{text_field}", where)
        said.append((roles[speaker], text))
    return without_first_answer(with_system(said, row, place))


def without_first_answer(said: Said) -> Said:
    """The conversation without an answer that stands before the first question."""
    first = 1 if said and said[0][0] == "system" else 0
    if len(said) > first + 1 and said[first][0] == "assistant":
        return [*said[:first], *said[first + 1 :]]
    return said


def _turns(row: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    turns = row.get(name)
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        problem = (
            f"{name} is {kind_of(turns)}, not a list"
            if name in row
            else f"there is no field {name} (fields: {', '.join(map(str, row)) or 'none'})"
        )
        raise DataError(where, problem, f'add "{name}": [{{"from": "human", "value": ...}}, ...]')
    return turns
