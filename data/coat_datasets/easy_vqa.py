"""easy-VQA (github.com/vzhou842/easy-VQA): questions about images of one colored shape.

The source is the repository's folder ``data``: ``train/questions.json``, an array of [question,
answer, image id], and the images, ``train/images/<id>.png`` or the same files in
``train/images.zip`` as ``images/<id>.png``. The images with the highest ids are kept out for
testing. The output folder is also the media root of every file in it::

    images/<id>.png
    shape.json                   training rows, one for each question whose answer is a shape
    conversations.json           training rows, one for each image with all its questions
    eval/test/questions.jsonl    the questions about the images that were kept out
"""

import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coat_data.sample import DataError
from coat_data.tools.source import new_folder
from coat_datasets.rows import (
    Question,
    conversation,
    write_conversations,
    write_questions,
    write_training_rows,
)

_REMEDY = "give the folder `data` of easy-VQA, with train/questions.json and train/images"


def convert_easy_vqa(
    folder: str | Path, out_dir: str | Path, *, num_test: int = 400
) -> dict[str, int]:
    """Convert the training split to training rows and an evaluation folder in ``out_dir``.

    Questions and images keep their texts and bytes. A question's category is ``shape`` or
    ``color``, after its answer, or ``yes_no`` or ``negated``: "is there not a red shape?", "is no
    red shape present?". The source asks for shape and color first; a conversation has its questions
    in an order that is drawn (seed 0), so that questions of each category come without an answer
    before them that tells theirs.

    Args:
        folder: easy-VQA's folder ``data``.
        out_dir: folder to make.
        num_test: images to keep out for testing, those with the highest ids, with all their
            questions.

    Returns:
        Number of images, rows or questions by file or folder.

    Raises:
        ValueError: ``num_test`` is not positive.
        DataError: a file is missing, damaged or not in easy-VQA's format, no more than
            ``num_test`` images have questions, or ``out_dir`` is not empty.
    """
    if num_test < 1:
        raise ValueError(f"num_test={num_test}: use a positive number")
    split = Path(folder) / "train"
    questions = _read_questions(split / "questions.json")
    ids = sorted(questions)
    if len(ids) <= num_test:
        raise DataError(
            str(split / "questions.json"),
            f"has questions about {len(ids)} images, no more than num_test={num_test}",
            _REMEDY,
        )
    with new_folder(out_dir) as target:
        (target / "images").mkdir()
        for name, data in _read_images(split, ids):
            (target / name).write_bytes(data)
        summary = {"images": len(ids)}
        train, test = (
            [one for image in some for one in questions[image]]
            for some in (ids[:-num_test], ids[-num_test:])
        )
        shapes = [one for one in train if one.category == "shape"]
        summary["shape.json"] = write_training_rows(target / "shape.json", shapes)
        order = random.Random(0)
        rows = [_converse(image, questions[image], order) for image in ids[:-num_test]]
        summary["conversations.json"] = write_conversations(target / "conversations.json", rows)
        summary["eval/test"] = write_questions(target / "eval" / "test", test)
        return summary


def _converse(image: int, questions: list[Question], order: random.Random) -> dict[str, Any]:
    """Return one row with all questions about an image."""
    asked = order.sample(questions, len(questions))
    return conversation(str(image), asked[0].image, [(one.text, one.answer) for one in asked])


def _read_questions(path: Path) -> dict[int, list[Question]]:
    """Read the questions by image id, in the order of the file."""
    if not path.is_file():
        raise DataError(str(path), "there is no such file", _REMEDY)
    questions: dict[int, list[Question]] = {}
    row: Any = None
    try:
        for row in json.loads(path.read_text(encoding="utf-8")):
            text, answer, image = row
            asked = questions.setdefault(int(image), [])
            asked.append(
                Question(
                    question_id=f"{image}-{len(asked)}",
                    image=f"images/{int(image)}.png",
                    text=text,
                    answer=answer,
                    category=_category(text, answer),
                )
            )
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            str(path),
            f"not easy-VQA's questions: {type(error).__name__} {error}; last row {row!r}",
            "an array of [question, answer, image id] is expected",
        ) from error
    return questions


def _category(text: str, answer: str) -> str:
    if answer in ("yes", "no"):
        return "negated" if {"not", "no"} & set(text.split()) else "yes_no"
    return "color" if "color" in text.split() else "shape"


def _read_images(split: Path, ids: list[int]) -> Iterator[tuple[str, bytes]]:
    """Yield ``images/<id>.png`` and its bytes for each id."""
    packed = split / "images.zip"
    names = [f"images/{image}.png" for image in ids]
    try:
        if (split / "images").is_dir():
            for name in tqdm(names, desc="images"):
                yield name, (split / name).read_bytes()
        else:
            with zipfile.ZipFile(packed) as archive:
                for name in tqdm(names, desc="images"):
                    yield name, archive.read(name)
    except (FileNotFoundError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(str(split), f"an image cannot be read: {error}", _REMEDY) from error
