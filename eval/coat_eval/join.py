"""Pairs questions with predictions by id, and says what does not fit.

Without ``allow_missing`` the first misfit is an error that names file and id; with it every misfit
is counted: a missing, non-string prediction is wrong, an empty one is scored as the text it is, an
unknown one is passed over, and of repeated ones the last counts, as in the official scripts.
Where the references repeat an id (SEED-Bench 49914) the rows pair in order; a single row for it
serves all its questions where the benchmark says so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coat_data.sample import DataError
from coat_eval.benchmark import Prediction, Question

Key = tuple[str, str]


@dataclass(slots=True)
class Joined:
    """Questions with their texts, in the order of the references, and what did not fit."""

    pairs: list[tuple[Question, str | None]] = field(default_factory=list)
    """Counted questions, and those others that have a prediction."""
    misfits: dict[str, int] = field(default_factory=dict)
    """How many predictions were missing, unknown, duplicate, empty, not_text; and how many
    questions had no answer."""


def join(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    *,
    allow_missing: bool,
    need_answers: bool = True,
    share_repeated: bool = False,
) -> Joined:
    """Pair every question with its prediction.

    Args:
        questions: the references; their ids may repeat.
        predictions: rows in file order, for any order of questions.
        allow_missing: count misfits instead of raising.
        need_answers: whether a counted question without an answer is a misfit.
        share_repeated: whether the only prediction for a repeated id serves all its questions.

    Raises:
        DataError: naming file, row and id of the first misfit.
    """
    slots, by_id = _slots(questions)
    texts: dict[int, object] = {}
    used: dict[Key, int] = {}
    misfits = _Misfits(allow_missing)
    for one in predictions:
        key = _key(one, slots, by_id)
        if key is None:
            misfits.add(
                "unknown",
                one.where,
                f"question id {one.question_id!r} is not in the references",
                "score against the questions that the predictions were made for",
            )
            continue
        place = used.get(key, 0)
        if place == len(slots[key]):
            misfits.add(
                "duplicate",
                one.where,
                f"a further prediction for question {one.question_id!r}",
                "keep one row per question",
            )
            place -= 1
        used[key] = place + 1
        texts[slots[key][place]] = _text(one, misfits)
    if share_repeated:
        # Files that hold one row per id, as a dictionary by id writes them.
        for key, number in used.items():
            if number == 1:
                texts.update(dict.fromkeys(slots[key], texts[slots[key][0]]))
    joined = Joined(misfits=misfits.counts)
    for index, question in enumerate(questions):
        if question.counted or index in texts:
            _append(joined, question, texts.get(index), misfits, need_answers)
    return joined


class _Misfits:
    """Counts misfits, or raises the first one."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        kinds = ("missing", "unknown", "duplicate", "empty", "not_text", "without_answer")
        self.counts: dict[str, int] = dict.fromkeys(kinds, 0)

    def add(
        self, kind: str, where: str, problem: str, remedy: str, allow: str = "count such rows"
    ) -> None:
        if not self.allowed:
            raise DataError(where, problem, f"{remedy}, or {allow} with --allow-missing")
        self.counts[kind] += 1


def _slots(
    questions: Iterable[Question],
) -> tuple[dict[Key, list[int]], dict[str, list[Key]]]:
    """Places of the questions by (category, id) and, for predictions without category, by id."""
    slots: dict[Key, list[int]] = {}
    by_id: dict[str, list[Key]] = {}
    for index, question in enumerate(questions):
        key = (question.category, question.question_id)
        if key not in slots:
            by_id.setdefault(question.question_id, []).append(key)
        slots.setdefault(key, []).append(index)
    return slots, by_id


def _key(one: Prediction, slots: dict[Key, list[int]], by_id: dict[str, list[Key]]) -> Key | None:
    keys = by_id.get(one.question_id, [])
    if len(keys) == 1 and "" in (one.category, keys[0][0]):
        return keys[0]
    key = (one.category, one.question_id)
    if key in slots:
        return key
    if len(keys) > 1 and not one.category:
        raise DataError(
            one.where,
            f"question id {one.question_id!r} stands for several questions: "
            f"{', '.join(category for category, _ in keys)}",
            'add the field "category" to every prediction',
        )
    return None


def _text(one: Prediction, misfits: _Misfits) -> str | None:
    if not isinstance(one.text, str):
        misfits.add(
            "not_text",
            one.where,
            f"the prediction for question {one.question_id!r} is {one.text!r}, not a text",
            "write the model's text",
        )
        return None
    if not one.text.strip():
        misfits.add(
            "empty",
            one.where,
            f"the prediction for question {one.question_id!r} is empty",
            "finish the run",
            "score it as the empty text, as the official scorers do,",
        )
    return one.text


def _append(
    joined: Joined, question: Question, text: object, misfits: _Misfits, need_answers: bool
) -> None:
    if question.answer is None and need_answers:
        misfits.add(
            "without_answer",
            question.where,
            f"question {question.question_id!r} has no answer (a test split?)",
            "give the references of a split with answers",
        )
        return
    if text is None and question.counted:
        misfits.add(
            "missing",
            question.where,
            f"there is no prediction for question {question.question_id!r}",
            "finish the run",
        )
    joined.pairs.append((question, text if isinstance(text, str) else None))
