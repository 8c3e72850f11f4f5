"""Writes training rows in LLaVA's JSON format, and evaluation folders.

:mod:`coat_data.readers.llava` reads the training rows; an evaluation folder holds
``questions.jsonl``, one :class:`Question` per line.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coat_data.sample import DataError


def article(word: str) -> str:
    """Return ``a`` or ``an``, as required before the word."""
    return "an" if word.startswith(("a", "e", "i", "o", "u", "hour")) else "a"


def conversation(row_id: str, image: str, turns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a training row about one image.

    Args:
        row_id: the row's id.
        image: path of the image relative to the media root.
        turns: (question, answer) pairs; the image comes before the first question.
    """
    messages: list[dict[str, str]] = []
    for number, (question, answer) in enumerate(turns):
        messages.append({"from": "human", "value": question if number else f"<image>\n{question}"})
        messages.append({"from": "gpt", "value": answer})
    return {"id": row_id, "image": image, "conversations": messages}


def write_conversations(path: Path, rows: Sequence[Mapping[str, Any]]) -> int:
    """Write ``rows`` as a JSON array, one row per line; returns the number of rows."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return len(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One line of ``questions.jsonl``."""

    question_id: str
    image: str
    """Path relative to the media root."""
    text: str
    """The prompt as in training, without the image placeholder."""
    answer: str
    """``yes`` or ``no``, the letter of the right choice, or a word or phrase, depending on task."""
    category: str
    """Accuracy is also reported per category."""
    choices: tuple[str, ...] = ()
    """The options of a multiple choice question, A first; empty for the other tasks."""

    def row(self) -> dict[str, Any]:
        """Return the question as a JSON object; ``choices`` only if there are any."""
        row = asdict(self)
        choices = row.pop("choices")
        return {**row, "choices": list(choices)} if choices else row


def write_training_rows(path: Path, questions: Sequence[Question]) -> int:
    """Write each question and its answer as a row of LLaVA's JSON; returns the number of rows."""
    return write_conversations(
        path,
        [conversation(one.question_id, one.image, [(one.text, one.answer)]) for one in questions],
    )


def write_questions(folder: Path, questions: Sequence[Question]) -> int:
    """Create ``folder`` with a ``questions.jsonl``; returns the number of questions.

    Raises:
        DataError: two questions have the same id.
    """
    seen: set[str] = set()
    for number, question in enumerate(questions):
        if question.question_id in seen:
            raise DataError(
                f"{folder}:{number}",
                f"question_id {question.question_id!r} occurs twice",
                "give every question its own id",
            )
        seen.add(question.question_id)
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(question.row()) + "\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
    return len(questions)
