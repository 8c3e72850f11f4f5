"""Writes training rows in LLaVA's JSON format (read back by :mod:`coat_data.readers.llava`)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHORT_ANSWER_SUFFIX = "\nAnswer the question using a single word or phrase."
"""LLaVA 1.5's prompt for short answers (haotian-liu/LLaVA, docs/Evaluation.md)."""

LETTER_SUFFIX = "\nAnswer with the option's letter from the given choices directly."
"""LLaVA 1.5's prompt for multiple choice (haotian-liu/LLaVA, docs/Evaluation.md)."""


def conversation(row_id: str, image: str, turns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """One training row about one image.

    Args:
        row_id: the row's id.
        image: path of the image relative to the media root.
        turns: (question, answer) pairs; the image comes before the first question.
    """
    said: list[dict[str, str]] = []
    for number, (question, answer) in enumerate(turns):
        said.append({"from": "human", "value": question if number else f"<image>\n{question}"})
        said.append({"from": "gpt", "value": answer})
    return {"id": row_id, "image": image, "conversations": said}


def write_conversations(path: Path, rows: Sequence[Mapping[str, Any]]) -> int:
    """Write ``rows`` as a JSON array, one row per line; returns the number of rows."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return len(rows)
