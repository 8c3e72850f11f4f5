"""The Cornell NLVR corpus (Suhr et al., ACL 2017): statements about shapes, true or false.

A split is ``<split>.json``, one example per line, and ``<split>_images.tar`` with six PNG files per
example, ``<split>-<identifier>-<0..5>.png``, that show its three boxes in all orders (lil-lab/nlvr,
README). Every picture becomes a yes/no question. Layout of the folder that is made, which is also
the media root of every file in it::

    images/<split>/<split>-<identifier>-<0..5>.png
    <split>.json                        training rows
    eval/<split>/questions.jsonl        the same questions, for scoring
"""

import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coat_data.sample import DataError
from coat_data.tools.source import new_folder
from coat_datasets.rows import Question, write_questions, write_training_rows

NUM_PERMUTATIONS = 6
QUESTION = "Is this statement true? Answer yes or no."
ANSWERS = {"true": "yes", "false": "no"}

_SPLIT = re.compile(r"\w+")
_IDENTIFIER = re.compile(r"\d+-\d+")


@dataclass(frozen=True, slots=True)
class _Example:
    identifier: str
    sentence: str
    answer: str
    category: str


def convert_nlvr(
    folder: str | Path,
    out_dir: str | Path,
    *,
    split: str | Sequence[str],
) -> dict[str, int | float]:
    """Convert one or several splits to training rows and evaluation folders in ``out_dir``.

    The order is that of the source. A question's category is ``tower`` (stacked squares) or
    ``scatter``, the corpus' two kinds of pictures.

    Args:
        folder: folder with ``<split>.json`` and ``<split>_images.tar``.
        out_dir: folder to make.
        split: ``train``, ``dev``, ``test`` or ``hidden``, or several of them.

    Returns:
        Number of images, rows or questions by file or folder, and the accuracy of always giving a
        split's commonest answer, in percent, as ``<split> majority``.

    Raises:
        ValueError: ``split`` names none.
        DataError: a file is missing, damaged or not in NLVR's format (with file and line), an
            image is missing, or ``out_dir`` is not empty.
    """
    splits = [split] if isinstance(split, str) else list(split)
    if not splits or not all(_SPLIT.fullmatch(name) for name in splits):
        raise ValueError(f"split={split!r}: name at least one split, such as dev or hidden")
    summary: dict[str, int | float] = {}
    with new_folder(out_dir) as target:
        for name in splits:
            examples = _read_examples(_source_file(Path(folder), f"{name}.json"))
            archive = _source_file(Path(folder), f"{name}_images.tar")
            questions = _questions(examples, name)
            summary[f"images/{name}"] = _extract(
                archive,
                [Path(one.image).name for one in questions],
                target / "images" / name,
            )
            summary[f"{name}.json"] = write_training_rows(target / f"{name}.json", questions)
            summary[f"eval/{name}"] = write_questions(target / "eval" / name, questions)
            share = sum(one.answer == "yes" for one in examples) / len(examples)
            summary[f"{name} majority"] = round(100 * max(share, 1 - share), 2)
    return summary


def _source_file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        found = sorted(child.name for child in folder.iterdir()) if folder.is_dir() else "no folder"
        raise DataError(
            str(path),
            f"there is no such file (found: {found})",
            "give a folder with <split>.json and <split>_images.tar, and one of its splits",
        )
    return path


def _read_examples(path: Path) -> list[_Example]:
    examples: list[_Example] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                examples.append(_read_example(line, f"{path}:{number}"))
    if not examples:
        raise DataError(str(path), "there is no example", "one JSON object per line is expected")
    return examples


def _read_example(line: str, where: str) -> _Example:
    try:
        row = json.loads(line)
        identifier = str(row["identifier"])
        sentence = row["sentence"].strip()
        answer = ANSWERS[str(row["label"]).lower()]
        category = _category(row)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            where,
            f"not an NLVR example: {type(error).__name__} {error}",
            "a JSON object with identifier, sentence, label (true or false) and structured_rep "
            "is expected",
        ) from error
    if not _IDENTIFIER.fullmatch(identifier) or not sentence:
        raise DataError(
            where,
            f"identifier {identifier!r}, sentence {sentence!r}",
            "two numbers such as 1572-0 and a sentence are expected",
        )
    return _Example(identifier, sentence, answer, category)


def _category(row: Mapping[str, Any]) -> str:
    """``tower`` when all items are the medium squares of a stack in the middle of their box."""
    items = [item for box in row["structured_rep"] for item in box]
    stacked = all((one["type"], one["size"], one["x_loc"]) == ("square", 20, 40) for one in items)
    return "tower" if stacked else "scatter"


def _questions(examples: Sequence[_Example], split: str) -> list[Question]:
    """The six questions of every example."""
    questions: list[Question] = []
    for example in examples:
        for order in range(NUM_PERMUTATIONS):
            name = f"{split}-{example.identifier}-{order}"
            questions.append(
                Question(
                    question_id=name,
                    image=f"images/{split}/{name}.png",
                    text=f"{example.sentence}\n{QUESTION}",
                    answer=example.answer,
                    category=example.category,
                )
            )
    return questions


def _extract(archive: Path, wanted: Sequence[str], folder: Path) -> int:
    """Write the files in ``wanted`` into ``folder``, whatever folder of the archive holds them.

    Only the last part of a member's name is used, and only if it is wanted, so that no member can
    end up elsewhere; links and other special members are passed over.
    """
    missing = dict.fromkeys(wanted)
    folder.mkdir(parents=True)
    try:
        with (
            tarfile.open(archive) as tar,
            tqdm(total=len(missing), desc=archive.name) as bar,
        ):
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                stream = tar.extractfile(member) if member.isfile() and name in missing else None
                if stream is not None:
                    (folder / name).write_bytes(stream.read())
                    del missing[name]
                    bar.update()
    except (tarfile.TarError, EOFError) as error:
        raise DataError(
            str(archive), f"not a sound tar file: {error}", "copy or download it again"
        ) from error
    if missing:
        raise DataError(
            str(archive),
            f"{len(missing)} of {len(wanted)} images are missing, first {next(iter(missing))}",
            "copy or download it again; six images per example are expected",
        )
    return len(wanted)
