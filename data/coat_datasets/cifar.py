"""CIFAR-10 photographs as conversations: classification, yes/no presence and multiple choice.

The source is the 50,000 training photographs as JPEG files in one zip, ``train/<class>/<n>.jpg``
(Krizhevsky 2009). The photographs with the highest numbers of each class are held out for
validation. The output folder is also the media root of every file in it::

    images/<class>/<n>.jpg
    classification.json      presence.json      choice.json        one row per training photograph
    classification_val.json  presence_val.json  choice_val.json    the validation photographs
    eval/{classification,presence,choice}/questions.jsonl          the same questions, for scoring
"""

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from coat_data.sample import DataError
from coat_data.text.chat import LETTER_SUFFIX, SHORT_ANSWER_SUFFIX
from coat_data.tools.source import new_folder
from coat_datasets.rows import Question, article, write_questions, write_training_rows

CONFUSABLE: dict[str, str] = {
    "airplane": "ship",
    "automobile": "truck",
    "bird": "frog",
    "cat": "dog",
    "deer": "horse",
    "dog": "cat",
    "frog": "bird",
    "horse": "deer",
    "ship": "airplane",
    "truck": "automobile",
}
"""The most confusable class, one to one.

Of all ways to pair the ten classes, this pairing has the most mistakes between partners: 380 of the
1,167 mistakes of a three-layer convolutional network (trained on the other photographs, 77%
accuracy) on the last 500 photographs of each class. It is one to one so that every class is asked
about equally often. With each class's own most frequent mistake, deer and cat would be asked about
twice and horse and frog never: "Is there a horse?" would then mostly have the answer yes.
"""

CLASSES = tuple(CONFUSABLE)
NUM_CHOICES = 4

_MEMBER = re.compile(rf"train/({'|'.join(CLASSES)})/(\d+)\.jpg")
_PRESENCE_KINDS = (
    ("uniform", "yes"),
    ("uniform", "no"),
    ("confusable", "yes"),
    ("confusable", "no"),
)
_REMEDY = (
    "give the zip of CIFAR-10's training photographs: train/<class>/<number>.jpg for the classes "
    + ", ".join(CLASSES)
)


@dataclass(frozen=True, slots=True, order=True)
class _Photo:
    label: str
    number: int
    member: str

    @property
    def image(self) -> str:
        """Path below the media root."""
        return self.member.replace("train/", "images/", 1)

    def question(
        self, text: str, answer: str, category: str, choices: tuple[str, ...] = ()
    ) -> Question:
        """Return a question about the photograph."""
        return Question(
            question_id=f"{self.label}-{Path(self.member).stem}",
            image=self.image,
            text=text,
            answer=answer,
            category=category,
            choices=choices,
        )

    @property
    def others(self) -> list[str]:
        """The other classes."""
        return [label for label in CLASSES if label != self.label]


def convert_cifar10(
    zip_path: str | Path,
    out_dir: str | Path,
    *,
    val_per_class: int = 500,
    seed: int = 0,
) -> dict[str, int]:
    """Convert the zip to training rows and evaluation folders in ``out_dir``.

    Half of the presence questions of each class have the answer yes; half of the others ask about a
    uniformly drawn other class, half about :data:`CONFUSABLE`. As in POPE, this gives two
    categories, ``uniform`` and ``confusable``, with equally many yes and no answers in each. The
    right letter of the multiple choice questions is each of A to D equally often.

    Args:
        zip_path: zip with ``train/<class>/<n>.jpg``.
        out_dir: folder to make.
        val_per_class: validation photographs of each class: those with the highest numbers.
        seed: seed of all random choices.

    Returns:
        Number of images, rows or questions by file or folder.

    Raises:
        ValueError: ``val_per_class`` is not positive.
        DataError: the zip is missing, damaged or not CIFAR-10, or ``out_dir`` is not empty.
    """
    if val_per_class < 1:
        raise ValueError(f"val_per_class={val_per_class}: use a positive number")
    path = Path(zip_path)
    if not path.is_file():
        raise DataError(str(path), "there is no such file", _REMEDY)
    try:
        with zipfile.ZipFile(path) as archive, new_folder(out_dir) as folder:
            train, val = _split(path, archive.namelist(), val_per_class)
            for label in CLASSES:
                (folder / "images" / label).mkdir(parents=True)
            for photo in tqdm([*train, *val], desc="photographs"):
                (folder / photo.image).write_bytes(archive.read(photo.member))
            summary = {"images": len(train) + len(val)}
            rng = np.random.default_rng(seed)
            makers = {
                "classification": _ask_class,
                "presence": partial(_ask_presence, rng),
                "choice": partial(_ask_choice, rng),
            }
            for name, make in makers.items():
                asked, asked_val = make(train), make(val)
                for file, some in ((f"{name}.json", asked), (f"{name}_val.json", asked_val)):
                    summary[file] = write_training_rows(folder / file, some)
                summary[f"eval/{name}"] = write_questions(folder / "eval" / name, asked_val)
            return summary
    except zipfile.BadZipFile as error:
        raise DataError(str(path), f"not a sound zip: {error}", _REMEDY) from error


def _split(
    path: Path, members: Sequence[str], val_per_class: int
) -> tuple[list[_Photo], list[_Photo]]:
    """Return training and validation photographs, sorted by class and number."""
    matches = [match for member in members if (match := _MEMBER.fullmatch(member))]
    by_class: dict[str, list[_Photo]] = {label: [] for label in CLASSES}
    for match in matches:
        by_class[match[1]].append(_Photo(match[1], int(match[2]), match[0]))
    short = [f"{name} {len(some)}" for name, some in by_class.items() if len(some) <= val_per_class]
    if short:
        raise DataError(
            str(path),
            f"needs more than val_per_class={val_per_class} photographs of every class, but has "
            f"{', '.join(short)}; its first entries are {list(members[:3])}",
            _REMEDY,
        )
    train: list[_Photo] = []
    val: list[_Photo] = []
    for photos in by_class.values():
        photos.sort()
        train.extend(photos[:-val_per_class])
        val.extend(photos[-val_per_class:])
    return train, val


def _ask_class(photos: Sequence[_Photo]) -> list[Question]:
    text = f"What is in the photo?{SHORT_ANSWER_SUFFIX}"
    return [photo.question(text, photo.label, photo.label) for photo in photos]


def _ask_presence(rng: np.random.Generator, photos: Sequence[_Photo]) -> list[Question]:
    questions: list[Question] = []
    for photo, index in zip(photos, _even(photos, len(_PRESENCE_KINDS), rng), strict=True):
        category, answer = _PRESENCE_KINDS[index]
        if answer == "yes":
            asked = photo.label
        elif category == "confusable":
            asked = CONFUSABLE[photo.label]
        else:
            asked = photo.others[int(rng.integers(len(CLASSES) - 1))]
        text = f"Is there {article(asked)} {asked} in the photo?{SHORT_ANSWER_SUFFIX}"
        questions.append(photo.question(text, answer, category))
    return questions


def _ask_choice(rng: np.random.Generator, photos: Sequence[_Photo]) -> list[Question]:
    questions: list[Question] = []
    for photo, right in zip(photos, _even(photos, NUM_CHOICES, rng), strict=True):
        others = photo.others
        options = [others[index] for index in rng.permutation(len(others))[: NUM_CHOICES - 1]]
        options.insert(right, photo.label)
        listed = "\n".join(
            f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)
        )
        text = f"What is in the photo?\n{listed}{LETTER_SUFFIX}"
        questions.append(photo.question(text, "ABCD"[right], photo.label, tuple(options)))
    return questions


def _even(photos: Sequence[_Photo], number: int, rng: np.random.Generator) -> list[int]:
    """Return one of 0 to ``number - 1`` per photograph, random, equally often per class."""
    drawn: list[int] = []
    for label in CLASSES:
        size = sum(photo.label == label for photo in photos)
        drawn.extend(int(index) for index in rng.permutation(np.arange(size) % number))
    return drawn
