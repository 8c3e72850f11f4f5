"""MathVista (testmini): 1,000 mathematical questions about figures, plots, charts and photographs.

Source: Lu et al., "MathVista: Evaluating Mathematical Reasoning of Foundation Models in Visual
Contexts"; lupantech/MathVista evaluation/extract_answer.py and calculate_score.py.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import Benchmark, Question, Settings, pick
from coat_eval.data_folder import Layouts, MediaFile, Row
from coat_eval.files import Table, Tables
from coat_eval.tasks.docvqa import compute_distance

TABLES = ("question_type", "answer_type")
METADATA = ("language", "source", "category", "task", "context", "grade")
_QUOTED = re.compile(r'The answer is "(.*)"\.')
_LETTER = re.compile(r"\(([a-zA-Z])\)")
_FLOAT = "requiring a floating-point number with {} decimal place{} and provide the final value"
_HINTS = {
    "text": "and provide the correct option letter, e.g., A, B, C, D,",
    "integer": "requiring an integer answer and provide the final value, e.g., 1, 2, 3,",
    "float1": f"{_FLOAT.format('one', '')}, e.g., 1.2, 1.3, 1.4,",
    "float2": f"{_FLOAT.format('two', 's')}, e.g., 1.23, 1.34, 1.45,",
    "list": "requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], "
    "[1.2, 1.3, 1.4],",
}
"""What the prompt says about the answer, by type; floats by their number of places."""


class MathVista(Benchmark):
    """Accuracy overall, by type of question and answer, and by the metadata of the questions."""

    name = "mathvista"
    source = "lupantech/MathVista evaluation/extract_answer.py, calculate_score.py @53d5258"
    headline = ("overall", "question_type.free_form", "question_type.multi_choice")
    sizes: ClassVar[Mapping[str, int]] = {"testmini": 1000}
    id_fields = ("question_id", "pid")
    text_fields = ("response", "prediction", "text", "extraction")
    carries_answers = True
    judged = True
    layouts: ClassVar[Layouts] = {
        "testmini": (("annot_testmini.json",), ("testmini.json",), ("testmini-*.parquet",))
    }

    def is_reference(self, table: Table) -> bool:
        """annot_testmini.json, results in its layout, or rows of AI4Math/MathVista."""
        return table.has(*TABLES, "choices", "precision", "metadata")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; a question may have several ``skills``."""
        kind, choices = str(row["question_type"]), row.get("choices") or []
        if (kind == "multi_choice") != bool(choices):
            raise DataError(where, f"is {kind} with {len(choices)} choices", "download it again")
        about = row["metadata"]
        answer = row.get("answer")
        return Question(
            question_id=str(pick(row, self.id_fields, where)),
            answer=str(answer) if answer not in (None, "") else None,
            tables={name: str(row[name]) for name in TABLES}
            | {name: str(about[name]) for name in METADATA if about.get(name) is not None},
            labels=tuple(f"skills.{skill}" for skill in dict.fromkeys(about.get("skills") or ())),
            details={"choices": [str(one) for one in choices], "precision": row["precision"]},
            text=str(row.get("question") or ""),
            cluster=str(row.get("image") or ""),
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the published query, or build it for annotations without it."""
        return str(row.values.get("query") or _build_query(row.values, row.where))

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the figure, in a folder or in Parquet."""
        name = str(row.values.get("image")).rpartition("/")[2]
        return (row.image(name, ("images", "."), column="decoded_image"),)

    def saved_verdicts(self, tables: Tables) -> dict[tuple[str, str], Any]:
        """Return the saved extractions, which may be numbers."""
        return {
            ("", str(pick(row, self.id_fields, table.where(index)))): row["extraction"]
            for table in tables
            for index, row in enumerate(table.rows)
            if row.get("extraction") is not None
        }

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the normalized answer of a text that needs no judge, else None."""
        found = extract_directly(text, question)
        return None if found is None else normalize_extraction(found, question)

    def needs_judge(
        self, extracted: Any, text: str, question: Question, settings: Settings
    ) -> bool:
        """Return whether the official script asks GPT-4 about a text."""
        return extract_directly(text, question) is None

    def ask_judge(self, question: Question, text: str) -> str:
        """Ask for the answer in the response, as an option or a value."""
        listed = [
            f"({chr(ord('A') + place)}) {choice}"
            for place, choice in enumerate(question.details["choices"])
        ]
        form = "option letter" if listed else f"value ({question.tables['answer_type']})"
        lines = [
            "A model was asked a question. Which final answer does its response give?",
            f"Reply with the {form} alone.",
            f"\nQuestion: {question.text}",
            *listed,
            f"\nResponse: {text}",
            "\nFinal answer:",
        ]
        return "\n".join(lines)

    def read_verdict(self, verdict: Any, question: Question) -> str | None:
        """Normalize an extraction; None if it is not of the answer's type."""
        return normalize_extraction(verdict, question)


def extract_directly(text: str, question: Question) -> str | None:
    """Apply the part of ``extract_answer.py`` before it asks GPT-4; None if it would ask."""
    if not text or text in question.details["choices"]:
        return text
    convert = {"integer": int, "float": float}.get(question.tables["answer_type"])
    if convert is not None:
        try:
            return str(convert(text))
        except ValueError:
            pass
    found = _QUOTED.search(text)
    return found[1] if found else None


def normalize_extraction(extraction: Any, question: Question) -> str | None:
    """Apply ``normalize_extracted_answer``; None if a number is required and the text is none."""
    choices, kind = question.details["choices"], question.tables["answer_type"]
    if choices:
        text = str(extraction).strip()
        letters = _LETTER.findall(text)
        text = letters[0].upper() if letters else text
        place = ord(text) - ord("A") if len(text) == 1 else -1
        if 0 <= place < len(choices):
            return choices[place]
        return min(choices, key=lambda choice: compute_distance(text, choice))
    try:
        if kind == "integer":
            return str(int(float(extraction)))
        if kind == "float":
            precision = question.details["precision"]
            return str(round(float(extraction), None if precision is None else int(precision)))
    except (ValueError, TypeError, OverflowError):
        return None
    return str(extraction)


def _build_query(row: Mapping[str, Any], where: str) -> str:
    """Build the query of AI4Math/MathVista: hint, question with unit, choices."""
    kind = str(row["answer_type"])
    kind += str(int(row["precision"])) if kind == "float" and row["precision"] else ""
    if kind not in _HINTS:
        raise DataError(where, f"answer_type {kind!r} has no hint", f"allowed: {', '.join(_HINTS)}")
    unit = f" (Unit: {row['unit']})" if row.get("unit") else ""
    choices = [f"({chr(ord('A') + i)}) {one}" for i, one in enumerate(row.get("choices") or ())]
    lines = [
        f"Hint: Please answer the question {_HINTS[kind]} at the end.",
        f"Question: {row['question']}{unit}",
        *(["Choices:", *choices] if choices else []),
    ]
    return "\n".join(lines)
