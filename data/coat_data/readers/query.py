"""Questions and answers in fields: alpaca, ms-swift's query and response, and lists of pairs.

    {"instruction": "...", "input": "...", "output": "...", "history": [["q", "a"]]}
    {"query": "<image>...", "response": "...", "history": [["q", "a"]], "images": ["a.jpg"]}
    {"system": "...", "conversation": [{"human": "...", "assistant": "..."}]}
    {"video": "a.mp4", "QA": [{"q": "...", "a": "..."}]}

Sources: hiyouga/LLaMA-Factory, data/README.md (the columns prompt, query, response, system and
history may be mapped); modelscope/ms-swift, docs/source_en/Customization/Custom-dataset.md;
NVlabs/VILA, llava/data/dataset_impl/lita.py (VideoQA).
"""

from collections.abc import Mapping
from typing import Any

from coat_data.readers.llava import media_fields, with_system
from coat_data.readers.reader import (
    NOT_SFT,
    Place,
    as_list,
    as_object,
    as_string,
    refuse_fields,
    row_id,
)
from coat_data.readers.turns import Said, place_media
from coat_data.sample import DataError, Sample

NAME = "query"
SUMMARY = "alpaca (instruction, input, output), query and response, human/assistant or q/a pairs"


def matches(row: Any) -> bool:
    """Whether the row has the fields of one of the four kinds."""
    if not isinstance(row, Mapping):
        return False
    pairs = row.get("conversation", row.get("QA"))
    return (
        {"instruction", "output"} <= set(row)
        or {"query", "response"} <= set(row)
        or (isinstance(pairs, list) and bool(pairs) and isinstance(pairs[0], Mapping))
    )


def to_sample(row: Any, place: Place) -> Sample:
    """One row as a checked sample. Does not decode the media.

    ``input`` follows ``instruction`` on a line of its own; ``history`` comes first.

    Raises:
        DataError: a field is missing or of the wrong type, or the placeholders do not match.
    """
    row = as_object(row, place.where)
    refuse_fields(row, NOT_SFT, place.where)
    said = with_system(_said(row, place), row, place)
    turns, media = place_media(said, media_fields(row, place), place)
    return Sample(
        id=row_id(row, place), turns=turns, media=media, source=place.source, row=place.row
    ).check()


def _said(row: Mapping[str, Any], place: Place) -> Said:
    where, columns = place.where, place.columns
    if "conversation" in row and "prompt" not in columns:
        return _pairs(row["conversation"], "conversation", ("human", "assistant"), where)
    if "QA" in row and not columns:
        return _pairs(row["QA"], "QA", ("q", "a"), where)
    swift = "query" in row and "response" in row and not columns
    question = columns.get("prompt", "query" if swift else "instruction")
    answer = columns.get("response", "response" if swift else "output")
    said = _pairs(row.get(columns.get("history", "history")) or [], "history", (0, 1), where)
    text = as_string(row.get(question), question, where)
    extra = columns.get("query", "input")
    if not swift and row.get(extra):
        text = f"{text}\n{as_string(row[extra], extra, where)}"
    return [*said, ("user", text), ("assistant", as_string(row.get(answer), answer, where))]


def _pairs(value: Any, name: str, keys: tuple[Any, Any], where: str) -> Said:
    said: Said = []
    for number, pair in enumerate(as_list(value, name, where)):
        try:
            question, answer = pair[keys[0]], pair[keys[1]]
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(
                where,
                f"{name}[{number}] is no question and answer",
                f"give it {keys[0]}, {keys[1]}",
            ) from error
        said.append(("user", as_string(question, f"{name}[{number}] (question)", where)))
        said.append(("assistant", as_string(answer, f"{name}[{number}] (answer)", where)))
    return said
