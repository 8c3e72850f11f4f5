"""Questions about photographs of one class each: classification, presence and multiple choice.

:mod:`coat_datasets.cifar` and :mod:`coat_datasets.tiny_imagenet` find the photographs in a zip and
say which classes are easily confused; this module writes the folder, which is also the media root
of every file in it::

    images/...
    classification.json      presence.json      choice.json        one row per training photograph
    classification_val.json  presence_val.json  choice_val.json    the validation photographs
    eval/{classification,presence,choice}/questions.jsonl          the same questions, for scoring
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from coat_data.sample import DataError
from coat_data.text.chat import LETTER_SUFFIX, SHORT_ANSWER_SUFFIX
from coat_datasets.rows import Question, article, write_questions, write_training_rows

NUM_CHOICES = 4

_PRESENCE_KINDS = (
    ("uniform", "yes"),
    ("uniform", "no"),
    ("confusable", "yes"),
    ("confusable", "no"),
)


@dataclass(frozen=True, slots=True, order=True)
class Photo:
    """A photograph in a zip."""

    label: str
    """Name of its class, the answer."""
    number: int
    """Number in its file name, which gives the order."""
    member: str
    """Name in the zip."""
    image: str
    """Path below the media root."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PhotoSet:
    """The photographs of a data set, and the classes that its questions name."""

    train: Sequence[Photo]
    val: Sequence[Photo]
    confusable: Mapping[str, Sequence[str]]
    """Every class -> the classes that are easily confused with it. The answer to presence questions
    does not follow from the class asked about if every class is named about equally often."""
    options: Mapping[str, Sequence[str]]
    """Every class -> the classes from which the wrong choices are drawn, at least three."""

    def write(self, archive: zipfile.ZipFile, folder: Path, seed: int) -> dict[str, int]:
        """Write images, training rows and evaluation folders.

        Half of the presence questions of each class have the answer yes; half of the others ask
        about a uniformly drawn other class, half about a confusable one. As in POPE, this gives two
        categories, ``uniform`` and ``confusable``, with equally many yes and no answers in each.
        The right letter of the multiple choice questions is each of A to D equally often.

        Args:
            archive: the zip with the photographs.
            folder: empty folder, the media root.
            seed: seed of all random choices.

        Returns:
            Number of images, rows or questions by file or folder.

        Raises:
            zipfile.BadZipFile: a photograph is damaged.
        """
        photos = [*self.train, *self.val]
        for parent in {(folder / photo.image).parent for photo in photos}:
            parent.mkdir(parents=True)
        for photo in tqdm(photos, desc="photographs"):
            (folder / photo.image).write_bytes(archive.read(photo.member))
        summary = {"images": len(photos)}
        rng = np.random.default_rng(seed)
        makers = {
            "classification": self._ask_class,
            "presence": self._ask_presence,
            "choice": self._ask_choice,
        }
        for name, make in makers.items():
            asked, asked_val = make(self.train, rng), make(self.val, rng)
            for file, some in ((f"{name}.json", asked), (f"{name}_val.json", asked_val)):
                summary[file] = write_training_rows(folder / file, some)
            summary[f"eval/{name}"] = write_questions(folder / "eval" / name, asked_val)
        return summary

    def _ask_class(self, photos: Sequence[Photo], _: np.random.Generator) -> list[Question]:
        text = f"What is in the photo?{SHORT_ANSWER_SUFFIX}"
        return [photo.question(text, photo.label, photo.label) for photo in photos]

    def _ask_presence(self, photos: Sequence[Photo], rng: np.random.Generator) -> list[Question]:
        questions: list[Question] = []
        for photo, index in zip(photos, self._even(photos, len(_PRESENCE_KINDS), rng), strict=True):
            category, answer = _PRESENCE_KINDS[index]
            asked = photo.label
            if answer == "no":
                near = category == "confusable"
                others = self.confusable[photo.label] if near else self._others(photo.label)
                asked = others[int(rng.integers(len(others)))]
            text = f"Is there {article(asked)} {asked} in the photo?{SHORT_ANSWER_SUFFIX}"
            questions.append(photo.question(text, answer, category))
        return questions

    def _ask_choice(self, photos: Sequence[Photo], rng: np.random.Generator) -> list[Question]:
        questions: list[Question] = []
        for photo, right in zip(photos, self._even(photos, NUM_CHOICES, rng), strict=True):
            others = self.options[photo.label]
            drawn = rng.permutation(len(others))[: NUM_CHOICES - 1]
            options = [others[int(index)] for index in drawn]
            options.insert(right, photo.label)
            listed = "\n".join(
                f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)
            )
            text = f"What is in the photo?\n{listed}{LETTER_SUFFIX}"
            questions.append(photo.question(text, "ABCD"[right], photo.label, tuple(options)))
        return questions

    def _others(self, label: str) -> list[str]:
        return [other for other in self.confusable if other != label]

    def _even(self, photos: Sequence[Photo], number: int, rng: np.random.Generator) -> list[int]:
        """Return one of 0 to ``number - 1`` per photograph, random, equally often per class.

        The photographs are sorted by class, in the order of ``confusable``.
        """
        drawn: list[int] = []
        for label in self.confusable:
            size = sum(photo.label == label for photo in photos)
            drawn.extend(int(index) for index in rng.permutation(np.arange(size) % number))
        return drawn


@contextmanager
def open_zip(path: str | Path, remedy: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip; damage that is found inside the block is a DataError, too.

    Raises:
        DataError: the zip is missing or damaged.
    """
    if not Path(path).is_file():
        raise DataError(str(path), "there is no such file", remedy)
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise DataError(str(path), f"not a sound zip: {error}", remedy) from error
