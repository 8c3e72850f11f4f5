r"""LLaVA's conversations and their variants (InternVL, LLaVA-NeXT, LLaVA-Video, ShareGPT).

A row looks like this (haotian-liu/LLaVA, docs/Finetune_Custom_Data.md)::

    {"id": "17", "image": "a.jpg", "conversations": [
        {"from": "human", "value": "<image>\nWhat colour is the bus?"},
        {"from": "gpt", "value": "Red."}]}

Files of other projects differ in many ways; :func:`to_sample` lists the rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coat_data.readers.fields import ROLES, check_unused
from coat_data.readers.reader import Place, Reader, has_fields, kind_of
from coat_data.readers.row_media import media_fields
from coat_data.readers.turns import (
    LOSS_FIELDS,
    Said,
    continued,
    get_role,
    is_chat,
    is_supervised,
    place_media,
    with_loss,
    with_system,
    without_first_answer,
)
from coat_data.sample import Role, Sample

_TAGS: Mapping[str, Role] = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}


def to_sample(row: Any, place: Place) -> Sample:
    """Convert a row to a checked sample. Does not decode the media.

    Rules for variants of the format:

    - ``id`` may be a string, an int, absent or repeated; if absent, it is the row number.
    - ``image``, ``images``, ``video`` or ``videos``: any value that
      :func:`~coat_data.readers.row_media.to_media` accepts, or a list of such values.
    - ``system`` of the row becomes a system turn if the conversation has none.
    - An answer before the first question is dropped, as in LLaVA (llava/train/train.py,
      ``preprocess_v1``).
    - ``"continues": true``, which :mod:`coat_data.tools.export` writes, means that a document
      continues in the next row.
    - An answer with ``"weight": 0`` or ``"loss": false`` is shown and not supervised.
    """
    row = place.as_object(row)
    said, supervised = _said(row, place)
    turns, media = place_media(said, media_fields(row, place), place)
    turns = with_loss(turns, supervised)
    return continued(place.sample(place.row_id(row), turns, media), row)


def _said(row: Mapping[str, Any], place: Place) -> tuple[Said, list[bool]]:
    columns = place.columns
    name = columns.get("messages", "conversations")
    tags: dict[str, Role] = {columns[tag]: role for tag, role in _TAGS.items() if tag in columns}
    roles: Mapping[str, Role] = {**ROLES, **tags} if tags else ROLES
    speaker_field = columns.get("role_tag", "from")
    text_field = columns.get("content_tag", "value")
    said: Said = []
    supervised: list[bool] = []
    turns = row.get(name)
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        problem = (
            f"{name} is {kind_of(turns)}, not a list"
            if name in row
            else f"there is no field {name} (fields: {', '.join(map(str, row)) or 'none'})"
        )
        raise place.error(problem, f'add "{name}": [{{"from": "human", "value": ...}}, ...]')
    known = {speaker_field, text_field, *LOSS_FIELDS}
    for number, turn in enumerate(turns):
        field = f"{name}[{number}]"
        turn = place.as_object(turn, field, "give it from and value")
        role = get_role(turn.get(speaker_field), roles, f"{field}.{speaker_field}", place)
        said.append((role, place.as_string(turn.get(text_field), f"{field}.{text_field}")))
        answered = role == "assistant"
        if len(turn) > 2:
            answered = is_supervised(turn, role, field, place)
            if unused := turn.keys() - known:
                check_unused(turn, unused, place.ignore, f"{place.where}: {field}")
        if role == "assistant":
            supervised.append(answered)
    return without_first_answer(with_system(said, row, place)), supervised


READER = Reader(
    "llava",
    "LLaVA JSON, JSONL or Parquet: conversations with from and value, image, video",
    lambda row: has_fields("conversations")(row) and not is_chat(row["conversations"]),
    to_sample,
)
