"""Reads the questions of an evaluation folder.

``questions.jsonl`` has one object per line::

    {"question_id": "7", "image": "img/7.png", "text": "Is there a dog?", "answer": "yes",
     "category": "presence"}

``question_id``, ``text`` and ``answer`` are needed (POPE's ``label`` may stand for ``answer``);
``image`` is a path or a list of paths, ``video`` a path, and a row without either is text only.
``category`` is optional; multiple choice rows have ``choices``. Paths start from the media root.
The text is the prompt exactly as the model saw such prompts in training; when it has no ``<image>``
(``<video>``) placeholder of its own, the media come first, each on its own line
(:func:`coat_data.readers.llava.to_sample` has all rules).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coat_data.containers.remote_file import is_url
from coat_data.media.root import MediaRoot
from coat_data.readers.llava import to_sample
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Sample
from coat_eval.item import Item
from coat_eval.table import read_json_lines

QUESTIONS_FILE = "questions.jsonl"
MEDIA_KEYS = ("image", "images", "video", "videos")


def read_questions(
    folder: Path,
    check_reference: Callable[[Mapping[str, Any]], dict[str, Any]],
    *,
    media_root: Path | str | None = None,
    check_media: bool = True,
) -> list[Item]:
    """The items of ``folder/questions.jsonl`` in file order.

    Args:
        folder: evaluation folder.
        check_reference: the task's check of ``{"answer", "category", "choices"?}``; its ValueError
            is reported with file and line.
        media_root: folder or address where relative media paths start; ``folder`` by default.
        check_media: whether every image and video must exist now (scoring needs none).

    Raises:
        FileNotFoundError: the folder has no questions.jsonl.
        DataError: naming file:line of the first bad row, or the file when it has no row.
    """
    path = Path(folder) / QUESTIONS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; an evaluation folder needs that file")
    start = folder if media_root is None else media_root
    root = MediaRoot(start if is_url(start) else Path(start).absolute(), follow_links=True)
    items: dict[str, Item] = {}
    lines: dict[str, int] = {}
    for number, row in read_json_lines(path, "write one JSON object per line"):
        item = _read_item(row, f"{path}:{number}", number, root, check_reference)
        if item.question_id in items:
            raise DataError(
                f"{path}:{number}",
                f"question_id {item.question_id!r} is also in line {lines[item.question_id]}",
                "give every question its own id",
            )
        if check_media:
            _check_media(item.sample, f"{path}:{number}")
        items[item.question_id] = item
        lines[item.question_id] = number
    if not items:
        raise DataError(str(path), "there is no question", "write one JSON object per line")
    return list(items.values())


def _read_item(
    row: Mapping[str, Any],
    where: str,
    number: int,
    root: MediaRoot,
    check_reference: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> Item:
    _check_fields(row, where)
    question_id = str(row["question_id"])
    reference = {
        "answer": row.get("answer", row.get("label")),
        "category": str(row.get("category") or ""),
        **({"choices": row["choices"]} if "choices" in row else {}),
    }
    if reference["answer"] is None:
        raise DataError(where, "the row has no answer", 'add "answer" (or POPE\'s "label")')
    try:
        reference = check_reference(reference)
    except ValueError as error:
        raise DataError(where, str(error), "correct the row or choose another task") from error
    return Item(
        question_id=question_id, sample=_sample(row, where, number, root), reference=reference
    )


def _check_fields(row: Mapping[str, Any], where: str) -> None:
    missing = [key for key in ("question_id", "text") if row.get(key) in (None, "")]
    if missing:
        raise DataError(
            where, f"missing or empty: {', '.join(missing)}; the row has {sorted(row)}", "add them"
        )


def _sample(row: Mapping[str, Any], where: str, number: int, root: MediaRoot) -> Sample:
    """The question as a conversation, read by the same reader as the training data."""
    media = {key: row[key] for key in MEDIA_KEYS if key in row}
    answer = str(row.get("answer", row.get("label")))
    said = [{"from": "human", "value": row["text"]}, {"from": "gpt", "value": answer}]
    source = where.rsplit(":", 1)[0]
    try:
        return to_sample(
            {"id": str(row["question_id"]), **media, "conversations": said},
            Place(source=source, row=number - 1, root=root),
        )
    except DataError as error:
        raise DataError(where, error.problem, error.remedy) from error


def _check_media(sample: Sample, where: str) -> None:
    for media in sample.media:
        if media.path is not None and not (is_url(media.path) or Path(media.path).exists()):
            raise DataError(
                where,
                f"the {media.kind} {media.path} does not exist",
                "correct the path or the media root",
            )
