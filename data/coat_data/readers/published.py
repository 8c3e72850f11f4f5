"""Rows with the fields of published data sets: questions with short answers, choices, links.

A table of layouts: the fields by which a row is recognized, where its image is, and its turns.
An ``image`` in the row (Hugging Face's Parquet files of these sets) comes before the names in the
table, which are tried in order below the media root.

- Questions of annotated sets get LLaVA 1.5's prompt for short answers. The most frequent of
  several annotators' answers is the answer, the first of equally frequent ones: VQA v2 publishes
  it as ``multiple_choice_answer`` (GT-Vision-Lab/VQA, README), and LLaVA 1.5 trains on one answer.
- Choices become LLaVA's multiple choice: the hint as ``Context:``, lettered options, the letter as
  the answer (haotian-liu/LLaVA, docs/Evaluation.md).
- PixMo (allenai/pixmo-*, dataset cards): points are percentages in PixMo-Points, as Molmo's
  training reads them (``point_scale=100``); PixMo-Count asks for the number.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from string import ascii_uppercase
from typing import Any, NamedTuple

from coat_data.readers.boxes import tag_box
from coat_data.readers.fields import is_missing
from coat_data.readers.reader import Place, Reader
from coat_data.readers.row_media import existing_path, to_media
from coat_data.readers.turns import TurnTexts, caption_turns, media_first
from coat_data.sample import Media, Sample
from coat_data.text.chat import LETTER_SUFFIX, SHORT_ANSWER_SUFFIX

Row = Mapping[str, Any]
_PERCENT = (100.0, 100.0)
_SPEAKERS = re.compile(r"\[(USER|ASSISTANT)\]")
_OTHER_CLIPS = "write one row per clip, with video, start, end and caption"  # Panda-70M
_OTHER_CHOICES = "rename them to choices, a list of texts, with answer the letter or number"


def _short_answer(row: Row, place: Place) -> TurnTexts:
    question = place.as_string(row.get("question"), "question") + SHORT_ANSWER_SUFFIX
    answer = row.get("multiple_choice_answer")
    if answer is None and is_missing(row.get("answers")):
        answer = row.get("answer")
    elif answer is None:
        given = place.as_list(row["answers"], "answers")
        texts = [one.get("answer") if isinstance(one, Mapping) else one for one in given]
        answers = Counter(text.strip() for text in place.as_strings(texts, "answers"))
        answer = answers.most_common(1)[0][0]
    return _asked(question, answer, place)


def _asked(question: str, answer: Any, place: Place) -> TurnTexts:
    return [("user", question), ("assistant", place.as_string(answer, "answer"))]


def _choice(row: Row, place: Place) -> TurnTexts:
    choices = place.as_strings(row.get("choices"), "choices")
    letters, answer = ascii_uppercase[: len(choices)], row.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        answer = letters[answer]
    if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
        problem = f"answer is {answer!r}, with {len(choices)} choices"
        raise place.error(problem, "give the number of the choice, from 0, or its letter")
    hint = row.get("hint")
    context = [f"Context: {place.as_string(hint, 'hint')}"] if hint else []
    options = [f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True)]
    question = place.as_string(row.get("question"), "question")
    return _asked("\n".join([*context, question, *options]) + LETTER_SUFFIX, answer, place)


def _pixmo_talk(row: Row, place: Place) -> TurnTexts:
    question = place.as_string(row.get("question"), "question")
    _, *pieces = _SPEAKERS.split(question)
    roles, texts = pieces[::2], [text.strip() for text in pieces[1::2]]
    if roles and roles[-1] == "ASSISTANT" and not texts[-1]:  # PixMo-CapQA
        roles, texts = roles[:-1], texts[:-1]
    pairs = zip(roles, texts, strict=True)
    turn_texts: TurnTexts = [
        ("user" if role == "USER" else "assistant", text) for role, text in pairs
    ]
    turn_texts = turn_texts or [("user", question)]
    return [*turn_texts, ("assistant", place.as_string(row.get("answer"), "answer"))]


def _pixmo_points(row: Row, place: Place) -> TurnTexts:
    label = place.as_string(row.get("label"), "label")
    if "collection_method" not in row:
        count = row.get("count")
        if isinstance(count, bool) or not isinstance(count, int):
            raise place.error(f"count is {count!r}", "give a whole number")
        return _asked(f"How many {label} are there?{SHORT_ANSWER_SUFFIX}", str(count), place)
    points = place.as_objects(row.get("points"), "points", "give it x and y")
    texts = [tag_box([p.get("x"), p.get("y")], _PERCENT, place.where) for p in points]
    return _asked(f"Point to {label}.", ", ".join(texts) or "There are none.", place)


def _caption(row: Row, place: Place) -> TurnTexts:
    names = {str(name).lower(): name for name in row}
    name = next(names[one] for one in ("caption", "text") if one in names)
    return [("user", ""), ("assistant", place.as_string(row[name], name))]


class _Layout(NamedTuple):
    has: set[str]
    """Fields of every row."""
    read_texts: Callable[[Row, Place], TurnTexts]
    images: tuple[str, ...] = ()
    """Paths of the image, with fields of the row in braces; empty: the row has the image."""


_VQA = (  # GQA, and rows with the image (VQA v2, OK-VQA, TextVQA and VizWiz from the Hub)
    _Layout(
        {"question", "answer", "imageId"}, _short_answer, ("{imageId}.jpg", "images/{imageId}.jpg")
    ),
    _Layout({"question", "answers", "image"}, _short_answer),
)
_CHOICES = (_Layout({"question", "choices", "answer", "image"}, _choice),)
_PIXMO = (
    _Layout({"image_url", "question", "answer"}, _pixmo_talk, ("{image_url}",)),
    _Layout({"image_url", "label", "count"}, _pixmo_points, ("{image_url}",)),
    _Layout({"image_url", "caption"}, _caption, ("{image_url}",)),
)
_LINKS = (
    _Layout({"URL", "TEXT"}, _caption, ("{URL}",)),  # LAION
    _Layout({"url", "caption"}, _caption, ("{url}",)),  # Re-LAION
    # COYO and DataComp; only a url and a text are a web page (C4, FineWeb)
    _Layout({"url", "text", "width"}, _caption, ("{url}",)),
    _Layout({"url", "text", "original_width"}, _caption, ("{url}",)),
)


def _find(layouts: tuple[_Layout, ...], row: Row) -> _Layout | None:
    return next((layout for layout in layouts if layout.has <= set(row)), None)


def _image(row: Row, layout: _Layout, place: Place) -> list[Media]:
    given = row.get("image")
    if not is_missing(given) and not (isinstance(given, str) and layout.images):
        return [to_media(given, "image", "image", place)]
    if "image" in layout.has and is_missing(given):  # ScienceQA has questions without images
        return []
    names = [pattern.format_map(row) for pattern in layout.images]
    return [Media(kind="image", path=existing_path(names, "the image", place))]


def _reader(name: str, summary: str, layouts: tuple[_Layout, ...]) -> Reader:
    def to_sample(row: Any, place: Place) -> Sample:
        layout = _find(layouts, row)
        if layout is None:
            known = "; or ".join(", ".join(sorted(one.has)) for one in layouts)
            problem = (
                f"the row does not have the fields of {name} (fields: {', '.join(map(str, row))})"
            )
            raise place.error(problem, f"give it {known}")
        place.refuse(row, {"options": _OTHER_CHOICES, "videoID": _OTHER_CLIPS})
        media = _image(row, layout, place)
        turn_texts = layout.read_texts(row, place)
        if layout.read_texts is _caption:
            return place.sample(row, caption_turns(media, turn_texts[1][1]), media)
        ids = [row.get(name) for name in ("question_id", "questionId", "id")]
        own = next(filter(None, ids), ids[-1])
        turns = media_first(turn_texts, media, place)
        return place.sample({"id": own}, turns, media)

    return Reader(name, summary, lambda row: _find(layouts, row) is not None, to_sample)


VQA = _reader(
    "vqa", "VQAv2, OK-VQA, TextVQA, GQA, VizWiz: a question, its answers and its image", _VQA
)
CHOICES = _reader(
    "choices", "ScienceQA: question, choices, answer (number or letter), image", _CHOICES
)
PIXMO = _reader("pixmo", "PixMo: image_url with caption, question and answer, or points", _PIXMO)
LINKS = _reader("links", "image links with captions: LAION (URL, TEXT), COYO, DataComp", _LINKS)
