"""Pairs questions with predictions by id, and rejects or counts rows that do not match."""

import re
from collections.abc import Collection, Sequence

from coat_data.sample import DataError
from coat_eval.benchmark import (
    ANSWER_FIELDS,
    Benchmark,
    Pair,
    Prediction,
    Question,
    contains_question,
    keep_letters,
)
from coat_eval.extract import split_reasoning
from coat_eval.files import Table

INPUT_PROBLEMS = ("missing", "unknown", "duplicate", "empty", "not_text", "without_answer")
_ANSWER_FIELDS = frozenset({*ANSWER_FIELDS, "prompt", "answer_id", "model_id", "losses"})
_QUESTION_FIELDS = frozenset(
    {"image", "images", "imageId", "image_id", "image_source", "video", "label", "question_type"}
)
_LONG_QUESTION = 8
"""Questions at least this long are used to detect question files passed as predictions."""
_ODD_PROMPTS = 0.05
"""Up to this share of prompts may lack their question (misprints of question files)."""
_PLACE = re.compile(r"(?::\d+|, row \d+)$")


def is_question_file(benchmark: Benchmark, table: Table) -> bool:
    """Return whether a file has questions or labels, whose ``text`` is not an answer."""
    first = set(table.rows[0]) if table.rows else set[str]()
    if first & _ANSWER_FIELDS or not first & _QUESTION_FIELDS:
        return False
    return benchmark.is_reference(table) or {"question_id", "text"} <= first


def check_repeated_questions(questions: Sequence[Question]) -> None:
    """Raise DataError if two files have the same question (one file may repeat an id)."""
    files: dict[tuple[str, str], tuple[str, str]] = {}
    for one in questions:
        file = _PLACE.sub("", one.where)
        first, where = files.setdefault(one.key, (file, one.where))
        if first != file:
            problem = f"question {one.question_id!r} is also in {where}"
            raise DataError(one.where, problem, "give every question in one reference file")


def join(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    *,
    allowed: Collection[str],
    need_answers: bool = True,
    share_repeated: bool = False,
    warnings: list[str],
) -> tuple[list[Pair], dict[str, int]]:
    """Pair every question with its prediction.

    ``allowed`` are the kinds of :data:`INPUT_PROBLEMS` to count instead of raising. With
    ``share_repeated`` the only prediction for a repeated id applies to all its questions. Returns
    the counted questions, and others with a prediction, in order with their texts; and the number
    of problems by kind. DataError: a problem that is not allowed; prompts of other questions.
    """
    slots: dict[tuple[str, str], list[int]] = {}
    for index, question in enumerate(questions):
        slots.setdefault(question.key, []).append(index)
    categories = list(dict.fromkeys(category for category, _ in slots))
    texts: dict[int, str | None] = {}
    used: dict[tuple[str, str], int] = {}
    problems = _ProblemCounter(allowed)
    matched: list[tuple[Prediction, Question]] = []
    for one in predictions:
        key = _find_key(
            one, [key for name in categories if (key := (name, one.question_id)) in slots]
        )
        if key is None:
            problem = f"question id {one.question_id!r} is not in the references"
            remedy = "score against the questions that the predictions were made for"
            problems.add("unknown", one.where, problem, remedy)
            continue
        place = used.get(key, 0)
        if place == len(slots[key]):
            problem = f"a further prediction for question {one.question_id!r}"
            problems.add("duplicate", one.where, problem, "keep one row per question")
            place -= 1
        used[key] = place + 1
        texts[slots[key][place]] = _check_text(one, problems)
        matched.append((one, questions[slots[key][place]]))
    _check_not_questions(matched)
    _check_not_references(matched)
    _check_prompts(matched, questions, warnings)
    # Files with one row per id, such as those written from a dictionary.
    for key in [key for key, number in used.items() if share_repeated and number == 1]:
        texts.update(dict.fromkeys(slots[key], texts[slots[key][0]]))
    pairs: list[Pair] = []
    for index, question in enumerate(questions):
        text, known = texts.get(index), f"question {question.question_id!r}"
        if not question.counted and index not in texts:
            continue
        if question.answer is None and need_answers:
            problem = f"{known} has no answer (a test split?)"
            remedy = "give the references of a split with answers"
            problems.add("without_answer", question.where, problem, remedy)
            continue
        if text is None and question.counted:
            problem = f"there is no prediction for {known}"
            problems.add("missing", question.where, problem, "finish the run")
        pairs.append((question, text))
    return pairs, problems.counts


class _ProblemCounter:
    """Counts problems, or raises the first one that is not allowed."""

    def __init__(self, allowed: Collection[str]) -> None:
        self.allowed = allowed
        self.counts: dict[str, int] = dict.fromkeys(INPUT_PROBLEMS, 0)

    def add(
        self, kind: str, where: str, problem: str, remedy: str, allow: str = "count such rows"
    ) -> None:
        if kind not in self.allowed:
            raise DataError(where, problem, f"{remedy}, or {allow} with --allow-missing")
        self.counts[kind] += 1


def _find_key(one: Prediction, keys: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the one of the questions' ``keys`` that a prediction belongs to."""
    if len(keys) == 1 and "" in (one.category, keys[0][0]):
        return keys[0]
    if one.key in keys:
        return one.key
    if len(keys) > 1 and not one.category:
        raise DataError(
            one.where,
            f"question id {one.question_id!r} belongs to several questions: "
            f"{', '.join(category for category, _ in keys)}",
            'add the field "category" to every prediction',
        )
    return None


def _check_text(one: Prediction, problems: _ProblemCounter) -> str | None:
    subject = f"the prediction for question {one.question_id!r} is"
    if not isinstance(one.text, str):
        problem = f"{subject} {one.text!r}, not a text"
        remedy = "write the model's text"
        if isinstance(one.text, list):
            problem, remedy = f"{subject} the losses {one.text!r}", "compute finite losses"
        problems.add("not_text", one.where, problem, remedy)
        return None
    if not one.text.strip():
        allow = "score it as the empty text, as the official scorers do,"
        problems.add("empty", one.where, f"{subject} empty", "finish the run", allow)
    return one.text


def _check_not_questions(matched: Sequence[tuple[Prediction, Question]]) -> None:
    """Raise DataError if the text of every prediction contains its question."""
    answered = [
        (one, own)
        for one, own in matched
        if isinstance(one.text, str) and len(keep_letters(own.text)) >= _LONG_QUESTION
    ]
    answers = [(split_reasoning(one.text)[1] or "", own.text) for one, own in answered]
    if answered and all(contains_question(*pair) for pair in answers):
        raise DataError(
            answered[0][0].where,
            f"the text is the question {answered[0][1].text!r}, as in all rows: all are questions",
            "give the model's answers",
        )


def _check_not_references(matched: Sequence[tuple[Prediction, Question]]) -> None:
    """Raise DataError if all texts are the references, and other fields may be the predictions."""
    for one, own in matched:
        gold = own.answer if isinstance(own.answer, list) else [own.answer]
        if not one.unread or str(one.text).strip().lower() not in (str(a).lower() for a in gold):
            return
    if matched:
        raise DataError(
            matched[0][0].where,
            f"the answer is the reference, as in all {len(matched)} rows, and the rows also have "
            f"{', '.join(matched[0][0].unread)}: that may be the model's answer",
            'name the model\'s answer "prediction"',
        )


def _check_prompts(
    matched: Sequence[tuple[Prediction, Question]],
    questions: Sequence[Question],
    warnings: list[str],
) -> None:
    """Raise DataError if a prediction's prompt belongs to another question."""
    asked = [
        (one, own) for one, own in matched if keep_letters(own.text) and keep_letters(one.prompt)
    ]
    wrong = [(one, own) for one, own in asked if not contains_question(one.prompt, own.text)]
    if not wrong:
        return
    known = {keep_letters(one.text) for one in questions} - {""}
    others = any(keep_letters(line) in known for one, _ in wrong for line in one.prompt.split("\n"))
    some = _ODD_PROMPTS * len(asked) < len(wrong) < len(asked)
    if some or others:
        one, own = wrong[0]
        raise DataError(
            one.where,
            f"the prompt is {one.prompt[:80]!r}, but question {own.question_id!r} of {own.where} "
            f"is {own.text[:80]!r}; {len(wrong)} of {len(asked)} prompts contradict the references",
            "give the references of the questions that were answered",
        )
    warnings.append(
        f"{len(asked) - len(wrong) or 'none'} of the {len(asked)} prompts in the predictions "
        "contain their question: check that the references belong to them"
    )
