"""Scores a predictions file against an evaluation folder; needs no model and no images.

``predictions.jsonl`` has ``{"question_id", "prediction"}`` per line (LLaVA's ``text`` may stand for
``prediction``), in any order. Beside the report, ``items.jsonl`` lists every item with question,
reference, raw text, extracted answer and whether it is right.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coat_data.sample import DataError
from coat_eval.item import Item, ScoredItem, by_category
from coat_eval.questions import QUESTIONS_FILE
from coat_eval.table import read_json_lines
from coat_eval.task import Task

ITEMS_FILE = "items.jsonl"
REPORT_FILE = "report.json"


def score_file(
    task: Task,
    folder: Path,
    predictions_path: Path,
    report_path: Path,
    *,
    media_root: Path | str | None = None,
    limit: int | None = None,
    allow_missing: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Score ``predictions_path`` and write ``report_path`` and ``items.jsonl`` beside it.

    Args:
        task: how answers are extracted and added up.
        folder: evaluation folder with questions.jsonl.
        predictions_path: predictions, one JSON object per line.
        report_path: where the report goes; its folder is made.
        media_root: folder or address where relative media paths start; ``folder`` by default.
        limit: score the first ``limit`` questions only, and pass over predictions for the others.
        allow_missing: count questions without a prediction as wrong instead of raising.
        extra: further entries of the report (model, device, ...).

    Returns:
        The report: task, headline, metrics in percent, n, n_unparsed, n_missing, categories (number
        of items each), limit, SHA-256 of both input files, and ``extra``.

    Raises:
        DataError: naming the file and the id of a missing, repeated or unknown prediction, or the
            line that cannot be read.
        FileNotFoundError: a file is absent.
    """
    items = task.load(folder, media_root, check_media=False)
    predictions = read_predictions(predictions_path)
    _check_known(items, predictions, predictions_path, Path(folder) / QUESTIONS_FILE)
    items = items[:limit]
    missing = [item.question_id for item in items if item.question_id not in predictions]
    if missing and not allow_missing:
        raise DataError(
            str(predictions_path),
            f"no prediction for {len(missing)} of {len(items)} questions, first {missing[0]!r}",
            "finish the run, or allow missing predictions (they then count as wrong)",
        )
    scored = task.score_items(items, predictions)
    report = {
        "task": task.name,
        "headline": task.headline,
        "metrics": task.aggregate(scored),
        "n": len(scored),
        "n_unparsed": sum(not one.parsed for one in scored if one.prediction is not None),
        "n_missing": len(missing),
        "categories": {name: len(members) for name, members in by_category(scored).items()},
        "limit": limit,
        "questions_sha256": file_sha256(Path(folder) / QUESTIONS_FILE),
        "predictions_sha256": file_sha256(predictions_path),
        **(extra or {}),
    }
    write_text(report_path.parent / ITEMS_FILE, "".join(_item_lines(scored)))
    write_json(report_path, report)
    return report


def read_predictions(path: Path) -> dict[str, str]:
    """The predicted texts by question id, in file order.

    Raises:
        FileNotFoundError: ``path`` is absent.
        DataError: naming file:line of a row that cannot be read, or whose id came before.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; run coat-vlm eval to write it")
    predictions: dict[str, str] = {}
    for number, row in read_json_lines(path, "repair or remove the line"):
        question_id, text = _read_prediction(row, f"{path}:{number}")
        if question_id in predictions:
            raise DataError(
                f"{path}:{number}",
                f"a second prediction for question {question_id!r}",
                "keep one line per question",
            )
        predictions[question_id] = text
    return predictions


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON; the file is complete or unchanged."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """What :func:`write_json` wrote; empty if nothing is there.

    Raises:
        DataError: the file is not JSON; it says to do ``remedy``.
    """
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(str(path), f"not JSON: {error}", remedy) from error


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file beside ``path`` and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_prediction(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    text = row.get("prediction", row.get("text"))
    if row.get("question_id") is None or not isinstance(text, str):
        raise DataError(
            where,
            f"needs question_id and a text as prediction; the row has {sorted(row)}",
            "repair the line",
        )
    return str(row["question_id"]), text


def _check_known(
    items: Sequence[Item], predictions: Mapping[str, str], path: Path, questions: Path
) -> None:
    known = {item.question_id for item in items}
    unknown = [question_id for question_id in predictions if question_id not in known]
    if unknown:
        raise DataError(
            str(path),
            f"{len(unknown)} predictions for questions that are not in {questions}, "
            f"first {unknown[0]!r}",
            "score against the questions that the predictions were made for",
        )


def _item_lines(scored: Sequence[ScoredItem]) -> Iterable[str]:
    for one in scored:
        turn = [turn for turn in one.item.sample.turns if turn.role == "user"][-1]
        row = {
            "question_id": one.item.question_id,
            "category": one.item.category,
            "question": turn.text.strip(),
            "media": [{"kind": m.kind, "path": m.path} for m in one.item.sample.media],
            "reference": one.item.answer,
            "prediction": one.prediction,
            "extracted": one.extracted,
            "correct": one.correct,
        }
        yield json.dumps(row, ensure_ascii=False) + "\n"
