"""Preference pairs: rows with a better and a worse answer to the same conversation.

A row has ``chosen`` and ``rejected`` in place of the last answer of its format; ``chosen`` is read
as that answer, by the reader of the format. Each may be a text, a message, or messages:

    {"prompt": "...", "chosen": "...", "rejected": "...", "images": ["a.jpg"]}        TRL
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}
    {"conversations": [{"from": "human", ...}], "chosen": {"from": "gpt", ...}, "rejected": {...}}
    {"image": "a.jpg", "question": "...", "chosen": "...", "rejected": "..."}
    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected_response": "..."}

Sources: huggingface/trl, docs/source/dataset_formats.md; hiyouga/LLaMA-Factory, data/README.md;
the dataset card of openbmb/RLAIF-V-Dataset; modelscope/ms-swift, Custom-dataset.md.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from coat_data.readers.boxes import convert_tags
from coat_data.readers.fields import ROLES, check_unused, given, is_missing
from coat_data.sample import DataError, Part, Sample, Turn

_PAIR = CHOSEN, REJECTED, RESPONSE = "chosen", "rejected", "rejected_response"
"""Fields of a pair; the last one (ms-swift) is added to an ordinary row with an answer."""

_TURNS = ("messages", "conversations", "conversation")
_ANSWERS = {
    "prompt": "completion",
    "question": "answer",
    "query": "response",
    "instruction": "output",
}
"""Field of a question -> field of its answer in an ordinary row."""
_SPEAKER = ("role", "from")
_REMEDY = "give both answers, or remove the row"


class Pair(NamedTuple):
    """The parts of a preference row."""

    row: dict[str, Any]
    """The row of the same format with only the chosen answer."""
    rejected: str
    fields: frozenset[str]
    added: str | None
    """The field of ``row`` that the file does not have."""


def is_pair(row: Any) -> bool:
    """Whether a raw row has a chosen or a rejected answer."""
    # An ingested record has fields of its own.
    return type(row) is dict and any(not is_missing(row.get(name)) for name in _PAIR)


def with_chosen(row: Any) -> Any:
    """Return an ordinary row of the same format: a preference row with only its chosen answer."""
    if not is_pair(row):
        return row
    rest = {key: row[key] for key in row if key not in _PAIR}
    return rest if is_missing(row.get(CHOSEN)) else rest | _answer(rest, row[CHOSEN])


def split_pair(row: Mapping[str, Any], where: str, ignore: Collection[str]) -> Pair:
    """Split a preference row; DataError if it is not a pair of answers to one conversation."""
    swift = is_missing(row.get(REJECTED)) and not is_missing(row.get(RESPONSE))
    worse = RESPONSE if swift else REJECTED
    if not swift and not is_missing(row.get(RESPONSE)):
        raise DataError(where, f"the row has {REJECTED} and {RESPONSE}", "keep one of them")
    rejected = _text(row.get(worse), worse, where)
    _check_message(row, worse, ignore, where)
    rest = {key: row[key] for key in row if key not in _PAIR}
    if swift and is_missing(row.get(CHOSEN)):
        if len(_turns(row[worse])) > 1:
            raise DataError(where, f"{worse} is a conversation", "give only its last answer")
        return Pair(rest, rejected, frozenset({worse}), None)
    chosen = _text(row.get(CHOSEN), CHOSEN, where)
    speaker = _check_conversations(row, worse, ignore, where)
    added = _answer(rest, row[CHOSEN])
    (name,) = added
    if name in _TURNS and not isinstance(added[name], list):
        others = [other for other, value in rest.items() if not is_missing(value)]
        raise DataError(
            where,
            "a preference row without a question; its fields in addition to chosen and rejected: "
            f"{', '.join(others) or 'none'}",
            f"add one of {', '.join(_ANSWERS)}, {', '.join(_TURNS)}, or map its field (columns)",
        )
    if name not in _TURNS:
        if not is_missing(rest.get(name)):
            raise DataError(
                where,
                f"the row has {name} in addition to chosen and rejected",
                "keep chosen and rejected for a stage named dpo, or the other answer for the rest",
            )
        if speaker and name == "completion":
            # The reader of messages checks the speaker and the fields.
            added = {name: _turns(row[CHOSEN])}
        else:
            _check_message(row, CHOSEN, ignore, where)
            added = {name: chosen}
    return Pair(rest | added, rejected, frozenset({CHOSEN, worse}), None if name in rest else name)


def add_rejected(sample: Sample, rejected: str, *, keep_boxes: bool) -> Sample:
    """Return the sample of ``Pair.row`` with its rejected answer; only the last is supervised."""
    answer = (Turn("assistant", (Part("text", rejected),)),)
    answer = convert_tags(answer, sample.where, has_media=bool(sample.media), keep=keep_boxes)
    part = answer[0].parts[0]
    last = sample.turns[-1]
    only_text = {part.kind for part in last.parts} <= {"text"} and not last.fields()
    if last.role != "assistant" or not only_text:
        problem = "the chosen answer is not text at the end of the conversation"
        remedy = "give both answers as texts, without calls and reasoning, or remove the row"
        raise DataError(sample.where, problem, remedy)
    if last.text == part.text:
        problem = "the chosen and the rejected answer are equal"
        raise DataError(sample.where, problem, "remove the row")
    sample = sample.only_last_supervised()
    return replace(sample, rejected=part.text, rejected_tagged=part.tagged)


def _check_conversations(
    row: Mapping[str, Any], worse: str, ignore: Collection[str], where: str
) -> Any:
    """Check the speakers of both answers and what is before them; return the chosen one's."""
    before = [_turns(row[name])[:-1] for name in (CHOSEN, worse)]
    if before[0] != before[1]:
        problem = "the conversations of chosen and rejected differ before their last answer"
        remedy = "let them differ only in the last answer, or remove the row"
        raise DataError(where, problem, remedy)
    speakers = {name: _speaker(row[name]) for name in (CHOSEN, worse)}
    if None not in speakers.values() and speakers[CHOSEN] != speakers[worse]:
        problem = f"the answers have different speakers: {speakers}"
        raise DataError(where, problem, "let the assistant give both, or remove the row")
    # UltraFeedback repeats the chosen conversation in messages.
    known = [[_role_and_text(turn) for turn in turns] for turns in (_turns(row[CHOSEN]), before[0])]
    for name in _TURNS if before[0] else ():
        turns = [_role_and_text(turn) for turn in _turns(row.get(name))]
        if name not in ignore and all(turns) and turns not in ([], *known):
            raise DataError(
                where,
                f"the row has another conversation in {name} than in chosen and {worse}",
                f"give only the answers in chosen and {worse}, or leave {name} out with "
                f"ignore_fields: [{name}]",
            )
    return speakers[CHOSEN]


def _answer(rest: Mapping[str, Any], chosen: Any) -> dict[str, Any]:
    """Return the field, with its value, that holds the chosen answer in an ordinary row."""
    answers = _turns(chosen)
    if len(answers) > 1:  # the whole conversation, with or without a prompt
        return {"messages": answers}
    for name in _TURNS:
        turns = rest.get(name)
        if isinstance(turns, list | tuple):
            chat = any(isinstance(turn, Mapping) and "role" in turn for turn in turns)
            speaker = ("role", "assistant", "content") if chat else ("from", "gpt", "value")
            if isinstance(chosen, str):
                answers = [{speaker[0]: speaker[1], speaker[2]: chosen}]
            return {name: [*turns, *answers]}
    for question, answer in _ANSWERS.items():
        if question in rest:
            return {answer: chosen}
    return {"messages": chosen}


def _turns(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * isinstance(value, Mapping)


def _speaker(answer: Any) -> Any:
    for message in _turns(answer)[-1:]:
        if isinstance(message, Mapping):
            return given(message, *_SPEAKER)
    return None


def _check_message(row: Mapping[str, Any], name: str, ignore: Collection[str], where: str) -> None:
    """Refuse an answer's message of another speaker, or with a field that must not be left out."""
    for message in _turns(row[name])[-1:]:
        if isinstance(message, Mapping):
            unused = message.keys() - {*_SPEAKER, "content", "value"}
            check_unused(message, unused, ignore, f"{where}: {name}")
    speaker = _speaker(row[name])
    if ROLES.get(str(speaker).lower(), "assistant") != "assistant":
        raise DataError(where, f"the {name} answer is spoken by {speaker}", _REMEDY)


def _role_and_text(turn: Any) -> tuple[Any, Any] | None:
    if not isinstance(turn, Mapping) or _speaker(turn) is None:
        return None
    speaker = str(_speaker(turn)).lower()
    return ROLES.get(speaker, speaker), given(turn, "content", "value")


def _text(value: Any, name: str, where: str) -> str:
    if isinstance(value, list | tuple) and len(value) > 1 and isinstance(value[-1], str):
        raise DataError(where, f"{name} has {len(value)} answers", "give one, or write more rows")
    message = value[-1] if isinstance(value, list | tuple) and value else value
    if isinstance(message, Mapping) and not is_missing(message):
        message = given(message, "content", "value")
    if isinstance(message, list | tuple):
        texts: list[Any] = [p.get("text") if isinstance(p, Mapping) else p for p in message]
        message = "".join(texts) if all(isinstance(text, str) for text in texts) else texts
    if is_missing(message):
        raise DataError(where, f"a preference row without the {name} answer", _REMEDY)
    if not isinstance(message, str):
        raise DataError(
            where, f"the {name} answer is {type(message).__name__}, not a text", _REMEDY
        )
    if not message.strip():
        raise DataError(where, f"the {name} answer is empty", _REMEDY)
    return message
