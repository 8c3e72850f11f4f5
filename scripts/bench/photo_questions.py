"""Makes training conversations and evaluation questions from photographs with class names.

Tiny-ImageNet is a zip with ``classes.json``, an array of objects with ``folder`` and ``name``, and
``train/FOLDER/N.jpg`` and ``val/FOLDER/N.jpg``. CIFAR-10 is a zip with ``train/CLASS/N.jpg``; the
last 500 of each class are held out. Media paths are relative to the folder that is written::

    images/{tiny_imagenet,cifar10}/{train,val}/CLASS/N.jpg
    captions.json  tiny_imagenet.json  cifar10.json  presence.json  choice.json    training rows
    eval/{tiny_imagenet,cifar10,presence,choice}/questions.jsonl    about held-out photographs

The answer of a classification question is the class name. Half of the presence questions have the
answer no. Half of these, and all wrong choices, name a similar class: one of the six nearest in the
order of the classes, which for Tiny-ImageNet is WordNet's.
"""

import json
import random
import re
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coat_datasets.rows import article, conversation, write_conversations

HELD_OUT, CIFAR_TRAIN = 500, 1000
"""CIFAR-10's photographs per class that are held out, and those that are trained on."""
CIFAR_ORDER = (
    *("airplane", "ship", "truck", "automobile", "horse"),
    *("deer", "dog", "cat", "frog", "bird"),
)
"""Similar classes next to each other, and the last next to the first."""
NAME, GENERAL_NAME, PRESENCE, CHOICE = (
    ("What is this? Answer with its exact name.", "Name exactly what the photo shows."),
    ("What kind of thing is this?", "Which general class of things does the photo show?"),
    ("Is there {} in the photo? Answer yes or no.", "Does the photo show {}? Answer yes or no."),
    ("Which of these is in the photo?", "What does the photo show?"),
)
CAPTIONS = (
    ("Describe the photo in one sentence.", "A photo of {}."),
    ("Write a caption.", "This picture shows {}."),
    ("What can be seen here?", "There is {} in this image."),
)
"""Questions with their answers."""
SPLITS = ("train", "val")
MIN_CLASSES = 4
_MEMBER = re.compile(r"(train|val)/([^/]+)/(\d+)\.jpg")


@dataclass(frozen=True, slots=True)
class Photo:
    """A photograph; ``names`` are the classes of its set, with similar ones near each other."""

    source: str
    name: str
    path: str
    names: Sequence[str]

    def draw_other(self, number: int, rng: random.Random, *, similar: bool) -> list[str]:
        """Draw the names of ``number`` other classes, among the six nearest ones if similar."""
        place, size = self.names.index(self.name), len(self.names)
        reach = 3 if similar else size // 2
        steps = (step for step in range(-reach, reach + 1) if step % size)
        others = dict.fromkeys(self.names[(place + step) % size] for step in steps)
        return rng.sample(list(others), number)


_SOURCES: Mapping[str, Sequence[str]] = {
    "captions": ("tiny_imagenet", "cifar10"),
    "tiny_imagenet": ("tiny_imagenet",),
    "cifar10": ("cifar10",),
    "presence": ("tiny_imagenet", "cifar10"),
    "choice": ("tiny_imagenet", "cifar10"),
}
"""Kind of question -> sets whose photographs it is asked about."""


def _ask(
    kind: str, photo: Photo, number: int, wording: int, rng: random.Random
) -> tuple[str, str, dict[str, Any]]:
    """Return question, answer and more fields; ``number`` decides between yes, no and letters."""
    if kind == "captions":
        question, answer = CAPTIONS[wording % len(CAPTIONS)]
        return question, answer.format(_with_article(photo.name)), {}
    if kind == "presence":
        name = photo.name
        if number % 2:
            (name,) = photo.draw_other(1, rng, similar=number % 4 == 1)
        question = PRESENCE[wording % len(PRESENCE)].format(_with_article(name))
        return question, "no" if number % 2 else "yes", {}
    if kind == "choice":
        names = photo.draw_other(3, rng, similar=True)
        names.insert(number % 4, photo.name)
        options = "".join(f"\n{letter}. {name}" for letter, name in zip("ABCD", names, strict=True))
        question = f"{CHOICE[wording % len(CHOICE)]}{options}\nAnswer with the letter."
        return question, "ABCD"[number % 4], {"choices": names}
    questions = NAME if kind == "tiny_imagenet" else GENERAL_NAME
    return questions[wording % len(questions)], photo.name, {}


def _with_article(name: str) -> str:
    return f"{article(name.lower())} {name}"


def make_questions(tiny_imagenet: Path, cifar10: Path, folder: Path) -> None:
    """Write photographs, rows and questions into an empty folder; ValueError for another zip."""
    train, held_out = _extract(tiny_imagenet, "tiny_imagenet", folder)
    for photos, more in zip((train, held_out), _extract(cifar10, "cifar10", folder), strict=True):
        photos += more
    for kind, sources in _SOURCES.items():
        rng, rows, questions = random.Random(kind), [], []
        for number, photo in enumerate(photo for photo in train if photo.source in sources):
            question, answer, _ = _ask(kind, photo, number, rng.randrange(6), rng)
            rows.append(conversation(f"{kind}-{number}", photo.path, [(question, answer)]))
        write_conversations(folder / f"{kind}.json", rows)
        # Presence and choice are evaluated on the first set, whose classes are harder.
        for number, photo in enumerate(photo for photo in held_out if photo.source == sources[0]):
            question, answer, more = _ask(kind, photo, number, 0, rng)
            row = {"question_id": f"{kind}-{number}", "image": photo.path, "text": question}
            questions.append(json.dumps({**row, "answer": answer, **more}) + "\n")
        if kind != "captions":
            (folder / "eval" / kind).mkdir(parents=True)
            path = folder / "eval" / kind / "questions.jsonl"
            path.write_text("".join(questions), encoding="utf-8")


def _extract(path: Path, source: str, folder: Path) -> tuple[list[Photo], list[Photo]]:
    """Extract the photographs to train on and those that are held out, by class and number."""
    with zipfile.ZipFile(path) as archive:
        members: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
        for match in filter(None, map(_MEMBER.fullmatch, archive.namelist())):
            members[match[1], match[2]].append((int(match[3]), match[0]))
        if source == "cifar10":
            names = {name: name for name in CIFAR_ORDER}
            for name in names:
                photos = sorted(members["train", name])
                members["train", name] = photos[:-HELD_OUT][:CIFAR_TRAIN]
                members["val", name] = photos[-HELD_OUT:]
        else:
            try:
                classes = json.loads(archive.read("classes.json"))
                names = {row["folder"]: row["name"] for row in classes}
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}: classes.json must be an array of objects with folder and name: "
                    f"{type(error).__name__} {error}"
                ) from error
        empty = [f"{split}/{own}" for own in names for split in SPLITS if not members[split, own]]
        if empty or len(names) < MIN_CLASSES:
            raise ValueError(
                f"{path}: {len(names)} classes, no photograph N.jpg in {empty[:3]}; give a zip of "
                f"{source} with at least {MIN_CLASSES} classes"
            )
        found: list[list[Photo]] = []
        for split in SPLITS:
            found.append([])
            for own, name in names.items():
                for number, member in sorted(members[split, own]):
                    target = f"images/{source}/{split}/{own}/{number}.jpg"
                    (folder / target).parent.mkdir(parents=True, exist_ok=True)
                    (folder / target).write_bytes(archive.read(member))
                    found[-1].append(Photo(source, name, target, [*names.values()]))
    return found[0], found[1]
