"""Questions and answers in fields: alpaca, ms-swift's query and response, and lists of pairs.

    {"instruction": "...", "input": "...", "output": "...", "history": [["q", "a"]]}
    {"query": "<image>...", "response": "...", "history": [["q", "a"]], "images": ["a.jpg"]}
    {"system": "...", "conversation": [{"human": "...", "assistant": "..."}]}
    {"video": "a.mp4", "QA": [{"q": "...", "a": "..."}]}
    {"images": [...], "texts": [{"user": "...", "assistant": "...", "source": "..."}]}
    {"image": "a.jpg", "question": "...", "answer": "..."}

Sources: hiyouga/LLaMA-Factory, data/README.md (the columns prompt, query, response, system and
history may be mapped); modelscope/ms-swift, docs/source_en/Customization/Custom-dataset.md;
NVlabs/VILA, llava/data/dataset_impl/lita.py (VideoQA). The last format comes from The Cauldron and
FineVision (HuggingFaceM4/the_cauldron and HuggingFaceM4/FineVision, dataset cards): the images come
before the first question, in order; FineVision's ratings are ignored.
"""

from collections.abc import Mapping
from typing import Any

from coat_data.readers.fields import given, is_missing
from coat_data.readers.reader import Place, Reader, has_fields
from coat_data.readers.row_media import MEDIA_FIELDS, media_fields
from coat_data.readers.turns import PLACEHOLDERS, TurnTexts, media_first, place_media, with_system
from coat_data.sample import Sample


def _is_query(row: Mapping[str, Any]) -> bool:
    pairs = given(row, "conversation", "QA")
    return (
        {"instruction", "output"} <= set(row)
        or {"query", "response"} <= set(row)
        or (isinstance(pairs, list) and bool(pairs) and isinstance(pairs[0], Mapping))
    )


def _query(row: Any, place: Place) -> Sample:
    """Convert a row; ``input`` follows ``instruction`` on a new line, ``history`` comes first."""
    turn_texts = with_system(_read_texts(row, place), row, place)
    return place.sample(row, *place_media(turn_texts, media_fields(row, place), place))


def _read_texts(row: Mapping[str, Any], place: Place) -> TurnTexts:
    columns = place.columns
    if row.get("conversation") is not None and "prompt" not in columns:
        return _pairs(row["conversation"], "conversation", ("human", "assistant"), place)
    if row.get("QA") is not None and not columns:
        return _pairs(row["QA"], "QA", ("q", "a"), place)
    filled = {name for name, value in row.items() if value is not None}
    swift = {"query", "response"} <= filled and not columns
    question = columns.get("prompt", "query" if swift else "instruction")
    answer = columns.get("response", "response" if swift else "output")
    turn_texts = _pairs(row.get(columns.get("history", "history")) or [], "history", (0, 1), place)
    text = place.as_string(row.get(question), question)
    extra = columns.get("query", "input")
    if not swift and row.get(extra):
        text = f"{text}\n{place.as_string(row[extra], extra)}"
    return [*turn_texts, ("user", text), ("assistant", place.as_string(row.get(answer), answer))]


def _cauldron(row: Any, place: Place) -> Sample:
    turn_texts = with_system(
        _pairs(row.get("texts"), "texts", ("user", "assistant"), place), row, place
    )
    media = media_fields(row, place)
    return place.sample(row, media_first(turn_texts, media, place), media)


def _pairs(value: Any, name: str, keys: tuple[Any, Any], place: Place) -> TurnTexts:
    turn_texts: TurnTexts = []
    for number, pair in enumerate(place.as_list(value, name)):
        try:
            question, answer = pair[keys[0]], pair[keys[1]]
        except (KeyError, IndexError, TypeError) as error:
            problem = f"{name}[{number}] is not a question with an answer"
            raise place.error(problem, f"give it {keys[0]}, {keys[1]}") from error
        turn_texts.append(("user", place.as_string(question, f"{name}[{number}] (question)")))
        turn_texts.append(("assistant", place.as_string(answer, f"{name}[{number}] (answer)")))
    return turn_texts


def _is_question(row: Mapping[str, Any]) -> bool:
    if not {"question", "answer"} <= set(row):
        return False
    media = (name for names in MEDIA_FIELDS.values() for name in names)
    return any(not is_missing(row.get(name)) for name in media) or not any(
        isinstance(row.get(name), str) for name in ("text", "content")
    )


_CHOICES = ("choices", "options", "candidates", "multiple_choices")


def _question(row: Any, place: Place) -> Sample:
    for name in _CHOICES:
        if not is_missing(row.get(name)) and name not in place.ignore:
            raise place.error(
                f"the row has {name}, which are not shown to the model",
                "write them into the question and the right one into the answer, or leave them out "
                f"with ignore_fields: [{name}]",
            )
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    question = place.as_string(row.get("question"), "question")
    turn_texts: TurnTexts = [("user", question), ("assistant", place.as_string(answer, "answer"))]
    turn_texts, media = with_system(turn_texts, row, place), media_fields(row, place)
    if any(token in question for token in PLACEHOLDERS):
        return place.sample(row, *place_media(turn_texts, media, place))
    return place.sample(row, media_first(turn_texts, media, place), media)


QUERY = Reader(
    "query",
    "alpaca (instruction, input, output), query and response, human/assistant or q/a pairs",
    _is_query,
    _query,
)
CAULDRON = Reader(
    "cauldron",
    "The Cauldron and FineVision: images, and texts with user and assistant",
    has_fields("texts", "images"),
    _cauldron,
)
QUESTION = Reader(
    "question", "a question and an answer per row, with image or video", _is_question, _question
)
