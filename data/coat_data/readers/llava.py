r"""LLaVA's conversations and their variants (InternVL, LLaVA-NeXT, LLaVA-Video, ShareGPT).

A row looks like this (haotian-liu/LLaVA, docs/Finetune_Custom_Data.md)::

    {"id": "17", "image": "a.jpg", "conversations": [
        {"from": "human", "value": "<image>\nWhat colour is the bus?"},
        {"from": "gpt", "value": "Red."}]}

Files of other projects differ in many ways; :func:`to_sample` lists the rules.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from coat_data.readers.fields import ROLES
from coat_data.readers.reader import Place, Reader, has_fields, kind_of
from coat_data.readers.row_media import media_fields
from coat_data.readers.turns import (
    TurnTexts,
    is_chat,
    place_media,
    read_turns,
    with_fields,
    with_system,
)
from coat_data.sample import Role, Sample

_TAGS: Mapping[str, Role] = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "assistant",
}
_RESPONSE = re.compile(r"\A\s*<tool_response>\n?(.*?)\n?</tool_response>\s*\Z", re.DOTALL)
"""A result as Hermes' sets have it; templates write such tags themselves."""


def to_sample(row: Any, place: Place) -> Sample:
    """Convert a row to a checked sample. Does not decode the media.

    Rules for variants of the format:

    - ``id`` may be a string, an int, absent or repeated; if absent, it is the row number.
    - ``image``, ``images``, ``video`` or ``videos``: any value that
      :func:`~coat_data.readers.row_media.to_media` accepts, or a list of such values.
    - ``system`` of the row becomes a system turn if the conversation has none.
    - Tool calls and results as in LlamaFactory (data/README.md): ``function_call``, whose text
      is JSON, and ``observation``; the fields of a turn in :mod:`coat_data.text.message_fields`.
    - ``"continues": true``, which :mod:`coat_data.tools.export` writes, means that a document
      continues in the next row.
    - An answer with ``"weight": 0`` or ``"loss": false`` is shown and not supervised.
    """
    columns = place.columns
    name = columns.get("messages", "conversations")
    tags: dict[str, Role] = {columns[tag]: role for tag, role in _TAGS.items() if tag in columns}
    roles: Mapping[str, Role] = {**ROLES, **tags} if tags else ROLES
    speaker_field = columns.get("role_tag", "from")
    text_field = columns.get("content_tag", "value")
    turns = row.get(name)
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        problem = (
            f"{name} is {kind_of(turns)}, not a list"
            if name in row
            else f"there is no field {name} (fields: {', '.join(map(str, row)) or 'none'})"
        )
        raise place.error(problem, f'add "{name}": [{{"from": "human", "value": ...}}, ...]')
    read = read_turns(turns, name, (speaker_field,), (text_field,), roles, place)
    turn_texts: TurnTexts = [(turn.role, place.as_string(turn.content, turn.name)) for turn in read]
    turn_texts = [
        (role, _RESPONSE.sub(r"\1", t) if role == "tool" else t) for role, t in turn_texts
    ]
    turn_texts = with_system(turn_texts, row, place)
    shown, media = place_media(turn_texts, media_fields(row, place), place)
    return place.sample(row, with_fields(shown, read), media)


READER = Reader(
    "llava",
    "LLaVA JSON, JSONL or Parquet: conversations with from and value, image, video",
    lambda row: has_fields("conversations")(row) and not is_chat(row["conversations"]),
    to_sample,
)
