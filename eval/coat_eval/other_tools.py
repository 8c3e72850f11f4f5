"""Converts predictions that lmms-eval and VLMEvalKit wrote to rows of this project.

lmms-eval: sample logs, ``*_samples_TASK.jsonl`` (loggers/evaluation_tracker.py), whose rows without
an official id are matched by position. VLMEvalKit: result tables with ``index`` and ``prediction``,
matched by question and choices. Prompt and answer of a row must agree with the reference.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coat_data.sample import DataError
from coat_eval.benchmark import Benchmark, Question, keep_letters
from coat_eval.files import Table

_IDS = ("question_id", "questionId", "id")
_CHOICES = "ABCDEFGH"


def is_of_other_tool(table: Table) -> bool:
    """Return whether the rows are an lmms-eval sample log or a VLMEvalKit result table."""
    return _is_sample_log(table) or _is_result_table(table)


def convert_rows(table: Table, benchmark: Benchmark, questions: Sequence[Question]) -> Table:
    """Return a table of rows with ids and ``prediction``; rows of no other tool unchanged."""
    if _is_sample_log(table):
        ids = (*benchmark.id_fields, *_IDS)
        rows = [
            _convert_sample(row, table.where(index), ids, questions)
            for index, row in enumerate(table.rows)
        ]
    elif _is_result_table(table):
        rows = _convert_results(table, benchmark, questions)
    else:
        return table
    return replace(table, rows=rows, form="rows")


def _is_sample_log(table: Table) -> bool:
    return table.has("doc_id") and (table.has("resps") or table.has("filtered_resps"))


def _is_result_table(table: Table) -> bool:
    own = table.has("question_id") or table.has("questionId")  # the rows of coat-vlm eval
    return table.has("index", "prediction") and not own


def _convert_sample(
    row: Mapping[str, Any], where: str, ids: Sequence[str], questions: Sequence[Question]
) -> dict[str, Any]:
    doc = row["doc"] if isinstance(row.get("doc"), dict) else {}
    parts = [doc, *(value for value in row.values() if isinstance(value, dict))]
    found = next((str(part[name]) for part in parts for name in ids if name in part), None)
    category = str(doc.get("category") or "")
    if found is None or (len({one.category for one in questions}) > 1 and not category):
        try:
            own = questions[int(row["doc_id"])]
        except (IndexError, ValueError):
            raise DataError(
                where,
                f"has no question id, and its doc_id {row['doc_id']!r} is not a position among the "
                f"{len(questions)} questions of the references",
                "give the references that lmms-eval read (the Hub's Parquet files)",
            ) from None
        found, category = own.question_id, own.category
    response = row.get("resps", row.get("filtered_resps"))
    while isinstance(response, list) and response:  # the first, as the model wrote it
        response = response[0]
    if not isinstance(response, str):
        problem = f"the response is {response!r}, not a text"
        raise DataError(where, problem, "log a task that generates answers")
    prompt = row.get("input") or doc.get("question")
    return {
        "question_id": found,
        "category": category if any(one.category for one in questions) else "",
        "prediction": response,
        "question": prompt if isinstance(prompt, str) else None,
    }


def _convert_results(
    table: Table, benchmark: Benchmark, questions: Sequence[Question]
) -> list[dict[str, Any]]:
    known = {one.question_id: one for one in questions}
    categories = {one.category.lower() for one in questions}
    for name in (*benchmark.id_fields, *_IDS, "index"):
        if all(str(row.get(name)) in known for row in table.rows):
            found = [known[str(row[name])] for row in table.rows]
            break
    else:
        found = _find_by_content(table, questions)
    rows = []
    for index, (row, own) in enumerate(zip(table.rows, found, strict=True)):
        answer = row.get("answer")
        given = _fold(answer)  # VLMEvalKit writes "Yes" for POPE's "yes", and numbers as numbers
        if isinstance(own.answer, str) and given not in ("", _fold(own.answer)):
            raise DataError(
                table.where(index),
                f"the row's answer is {answer!r}, but the answer of question {own.question_id!r} "
                f"({own.where}) is {own.answer!r}",
                "give the references that the table was made from",
            )
        category = str(row.get("category") or "").lower()
        rows.append(
            {
                "question_id": own.question_id,
                "category": category if category in categories else own.category,
                "prediction": row["prediction"],
                "question": row.get("question"),
            }
        )
    return rows


def _find_by_content(table: Table, questions: Sequence[Question]) -> list[Question]:
    """Find each row's question by its text and choices; equal ones pair in order."""
    groups: dict[tuple[str, ...], list[Question]] = {}
    for question in questions:
        choices = question.details.get("choices") or {}
        listed = choices.values() if isinstance(choices, dict) else choices
        groups.setdefault(_make_key(question.text, listed), []).append(question)
    used: Counter[tuple[str, ...]] = Counter()
    found = []
    for index, row in enumerate(table.rows):
        listed = [row[letter] for letter in _CHOICES if row.get(letter) not in (None, "")]
        key = _make_key(row.get("question") or "", listed)
        if used[key] == len(groups.get(key, ())):
            raise DataError(
                table.where(index),
                f"the question {row.get('question')!r} with the choices {listed} is not in the "
                "references, or occurs more often than there",
                "give the references that the table was made from, or add question_id",
            )
        found.append(groups[key][used[key]])
        used[key] += 1
    for key, count in used.items():
        if count < len(groups[key]):
            problem = (
                f"has {count} rows for the {len(groups[key])} questions {groups[key][0].text!r} "
                "with equal choices, so they cannot be paired"
            )
            raise DataError(str(table.path), problem, "add question_id")
    return found


def _fold(answer: Any) -> str:
    return "" if answer is None else str(answer).strip().lower()


def _make_key(text: Any, choices: Any) -> tuple[str, ...]:
    return tuple(keep_letters(str(one)) for one in (text, *choices))
