r"""LLaVA's conversations, and what grew out of them (InternVL, LLaVA-NeXT, LLaVA-Video, ShareGPT).

A row looks like this (haotian-liu/LLaVA, docs/Finetune_Custom_Data.md)::

    {"id": "17", "image": "a.jpg", "conversations": [
        {"from": "human", "value": "<image>\nWhat colour is the bus?"},
        {"from": "gpt", "value": "Red."}]}

Files on users' disks differ from it in many ways; the rules for each are in :func:`to_sample`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coat_data.readers.reader import (
    NOT_SFT,
    Place,
    Reader,
    Said,
    as_object,
    as_string,
    continued,
    has_fields,
    kind_of,
    media_fields,
    place_media,
    refuse_fields,
    row_id,
    with_system,
    without_first_answer,
)
from coat_data.sample import DataError, Role, Sample

ROLES: Mapping[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""Names of the speakers in a file, and the role each one has in a sample."""

_TAGS: Mapping[str, Role] = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}


def to_sample(row: Any, place: Place) -> Sample:
    """One row as a checked sample. Does not decode the media.

    Rules for what the format leaves open:

    - ``id`` may be a string, an int, absent or repeated; absent, it is the row number.
    - ``image``, ``images``, ``video`` or ``videos``: anything that
      :func:`~coat_data.readers.reader.to_media` takes, or a list of it; null and an empty list mean
      none.
    - Placeholders are read as :func:`~coat_data.readers.reader.place_media` says.
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
    return continued(place.sample(row_id(row, place), turns, media), row)


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
        turn = as_object(turn, where, field, "give it from and value")
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


READER = Reader(
    "llava",
    "LLaVA JSON, JSONL or Parquet: conversations with from and value, image, video",
    has_fields("conversations"),
    to_sample,
)
