"""The Cornell NLVR corpus (Suhr et al., ACL 2017): statements about shapes, true or false.

A split is ``<split>.json``, one example per line, and ``<split>_images.tar`` with six PNG files per
example, ``<split>-<identifier>-<0..5>.png``, which show its three boxes in all orders
(lil-lab/nlvr, README). Every image becomes a yes/no question. The output folder is also the media
root of every file in it::

    images/<split>/<split>-<identifier>-<0..5>.png
    <split>.json                        training rows
    eval/<split>/questions.jsonl        the same questions, for scoring
"""

import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from coat_data.sample import DataError
from coat_data.tools.source import new_folder
from coat_datasets.rows import Question, write_questions, write_training_rows

NUM_PERMUTATIONS = 6
QUESTION = "Is this statement true? Answer yes or no."
ANSWERS = {"true": "yes", "false": "no"}

_SPLIT = re.compile(r"\w+")
_IDENTIFIER = re.compile(r"\d+-\d+")


def convert_nlvr(
    folder: str | Path,
    out_dir: str | Path,
    *,
    split: str | Sequence[str],
) -> dict[str, int | float]:
    """Convert one or several splits to training rows and evaluation folders in ``out_dir``.

    The order of the source is kept. A question's category is ``tower`` (stacked squares) or
    ``scatter``, the two kinds of images in the corpus.

    Args:
        folder: folder with ``<split>.json`` and ``<split>_images.tar``.
        out_dir: folder to make.
        split: ``train``, ``dev``, ``test`` or ``hidden``, or several of them.

    Returns:
        Number of images, rows or questions by file or folder, and the accuracy of the majority
        answer of a split, in percent, as ``<split> majority``.

    Raises:
        ValueError: ``split`` is empty or not a name.
        DataError: a file is missing, damaged or not in NLVR's format (with file and line), an
            image is missing, or ``out_dir`` is not empty.
    """
    splits = [split] if isinstance(split, str) else list(split)
    if not splits or not all(_SPLIT.fullmatch(name) for name in splits):
        raise ValueError(f"split={split!r}: name at least one split, such as dev or hidden")
    summary: dict[str, int | float] = {}
    with new_folder(out_dir) as target:
        for name in splits:
            questions = _read_questions(_source_file(Path(folder), f"{name}.json"), name)
            archive = _source_file(Path(folder), f"{name}_images.tar")
            summary[f"images/{name}"] = _extract(
                archive,
                [Path(one.image).name for one in questions],
                target / "images" / name,
            )
            summary[f"{name}.json"] = write_training_rows(target / f"{name}.json", questions)
            summary[f"eval/{name}"] = write_questions(target / "eval" / name, questions)
            share = sum(one.answer == "yes" for one in questions) / len(questions)
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


def _read_questions(path: Path, split: str) -> list[Question]:
    """Read the six questions of every example."""
    questions: list[Question] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                questions += _questions(line, f"{path}:{number}", split)
    if not questions:
        raise DataError(str(path), "there is no example", "one JSON object per line is expected")
    return questions


def _questions(line: str, where: str, split: str) -> list[Question]:
    """Parse the six questions of one example.

    Its category is ``tower`` if all items are medium squares of a stack in the middle of their box.
    """
    try:
        row = json.loads(line)
        identifier = str(row["identifier"])
        sentence = row["sentence"].strip()
        answer = ANSWERS[str(row["label"]).lower()]
        items = [item for box in row["structured_rep"] for item in box]
        kinds = {(item["type"], item["size"], item["x_loc"]) for item in items}
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
    names = [f"{split}-{identifier}-{order}" for order in range(NUM_PERMUTATIONS)]
    return [
        Question(
            question_id=name,
            image=f"images/{split}/{name}.png",
            text=f"{sentence}\n{QUESTION}",
            answer=answer,
            category="tower" if kinds <= {("square", 20, 40)} else "scatter",
        )
        for name in names
    ]


def _extract(archive: Path, wanted: Sequence[str], folder: Path) -> int:
    """Write the files in ``wanted`` into ``folder``, from any folder of the archive.

    Only the last part of a member's name is used, and only if it is wanted, so that no member can
    be written elsewhere; links and other special members are skipped.
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
