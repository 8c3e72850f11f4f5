"""Converts predictions that lmms-eval and VLMEvalKit write to rows of question id and prediction.

lmms-eval (``--log_samples``, ``*_samples_TASK.jsonl``; lmms_eval/evaluator.py and
loggers/evaluation_tracker.py): ``doc_id``, ``resps`` and ``filtered_resps``, the data set's row as
``doc`` in logs of versions that keep it, and metrics that may name the question. VLMEvalKit
(result tables, xlsx, tsv or json): the data set's row with ``index``, and ``prediction``. Neither
always has the official question id. Rows without it are found by position or by question and
choices; the position must be right by the prompt, the table's own answer must be the reference.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    """Return a table of rows with ``question_id``, ``category``, ``prediction``, ``question``.

    Args:
        table: predictions; those of no other tool are returned unchanged.
        benchmark: the benchmark.
        questions: all questions of the references.

    Raises:
        DataError: a row contains no text, its question cannot be found, or the table's own answer
            is not the reference.
    """
    if _is_sample_log(table):
        rows = [
            _convert_sample(row, table.where(index), benchmark, questions)
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
    row: Mapping[str, Any], where: str, benchmark: Benchmark, questions: Sequence[Question]
) -> dict[str, Any]:
    doc = row["doc"] if isinstance(row.get("doc"), dict) else {}
    places = [doc, *(value for value in row.values() if isinstance(value, dict))]
    names = (*benchmark.id_fields, *_IDS)
    found = next((str(one[name]) for one in places for name in names if name in one), None)
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
    prompt = row.get("input") or doc.get("question")
    return {
        "question_id": found,
        "category": category if any(one.category for one in questions) else "",
        "prediction": _find_response(row, where),
        "question": prompt if isinstance(prompt, str) else None,
    }


def _find_response(row: Mapping[str, Any], where: str) -> str:
    """Return the first response as the model wrote it, or as the task's filter left it."""
    value = row.get("resps", row.get("filtered_resps"))
    while isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str):
        raise DataError(
            where, f"the response is {value!r}, not a text", "log a task that generates answers"
        )
    return value


def _convert_results(
    table: Table, benchmark: Benchmark, questions: Sequence[Question]
) -> list[dict[str, Any]]:
    known = {one.question_id: one for one in questions}
    categories = {one.category.lower() for one in questions}
    for name in (*benchmark.id_fields, *_IDS, "index"):
        if all(str(row.get(name)) in known for row in table.rows):
            found: Iterator[Question] = iter([known[str(row[name])] for row in table.rows])
            break
    else:
        found = iter(_find_by_content(table, questions))
    rows = []
    for index, (row, own) in enumerate(zip(table.rows, found, strict=True)):
        answer = row.get("answer")
        given = _fold(answer)  # VLMEvalKit writes "Yes" for POPE's "yes", and numbers as numbers
        if isinstance(own.answer, str) and given not in ("", _fold(own.answer)):
            raise DataError(
                table.where(index),
                f"the row's answer is {answer!r}, that of question {own.question_id!r} "
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
    if not table.has("question"):
        raise DataError(
            table.where(0),
            f"has no question id of the references and no question: {sorted(table.rows[0])}",
            "give VLMEvalKit's whole result table, or add question_id",
        )
    groups: dict[tuple[str, ...], list[Question]] = {}
    for one in questions:
        choices = one.details.get("choices") or {}
        listed = choices.values() if isinstance(choices, dict) else choices
        groups.setdefault(_make_key(one.text, [str(text) for text in listed]), []).append(one)
    numbers: dict[tuple[str, ...], int] = {}
    found = []
    for index, row in enumerate(table.rows):
        listed = [str(row[letter]) for letter in _CHOICES if row.get(letter) not in (None, "")]
        key = _make_key(str(row["question"]), listed)
        place = numbers[key] = numbers.get(key, -1) + 1
        if place >= len(groups.get(key, ())):
            problem = "is not in the references" if not place else "occurs more often than there"
            raise DataError(
                table.where(index),
                f"the question {row['question']!r} with the choices {listed} {problem}",
                "give the references that the table was made from, or add question_id",
            )
        found.append(groups[key][place])
    for key, last in numbers.items():
        if last + 1 < len(groups[key]) and len(groups[key]) > 1:
            raise DataError(
                str(table.path),
                f"has {last + 1} rows for the {len(groups[key])} questions "
                f"{groups[key][0].text!r} with equal choices, so they cannot be paired",
                "add question_id",
            )
    return found


def _fold(answer: Any) -> str:
    return "" if answer is None else str(answer).strip().lower()


def _make_key(text: str, choices: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(keep_letters, (text, *choices)))
