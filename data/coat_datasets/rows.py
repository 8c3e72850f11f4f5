"""Writes training rows in LLaVA's JSON format, and evaluation folders.

:mod:`coat_data.readers.llava` reads the training rows; an evaluation folder holds
``questions.jsonl``, one :class:`Question` per line.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


def article(word: str) -> str:
    """Return ``a`` or ``an``, as required before the word."""
    return "an" if word[0] in "aeiou" else "a"


def conversation(row_id: str, image: str, turns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a training row with (question, answer) pairs; the image is first."""
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


@dataclass(frozen=True, slots=True)
class Question:
    """One line of ``questions.jsonl``."""

    question_id: str
    image: str  # path relative to the media root
    text: str  # the prompt as in training, without the image placeholder
    answer: str
    category: str  # accuracy is also reported per category


def write_questions(folder: Path, questions: Sequence[Question]) -> int:
    """Create ``folder`` with a ``questions.jsonl``; returns the number of questions."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(question)) + "\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
    return len(questions)
