"""Turns photographs with class labels into questions and answers for training and evaluation.

    python examples/class_photos.py cifar-10-binary.tar.gz --out data/cifar10
    python examples/class_photos.py tiny-imagenet-200.zip --out data/tiny_imagenet
    python examples/class_photos.py photos --out data/photos     # or photos.zip

Reads CIFAR-10 (www.cs.toronto.edu/~kriz, the binary version), Tiny-ImageNet (cs231n.stanford.edu),
and any folder or zip of ``train/CLASS/*`` and ``val/CLASS/*``, where ``classes.json`` may name the
classes (``[{"folder": ..., "name": ...}]``). Without ``val``, the last photographs of each class
are held out. Writes ``images/``, ``train.json`` and ``val.json`` (LLaVA's JSON, media root
``--out``) and ``eval/questions.jsonl``: the validation questions, for the task ``short_answer``.
"""

import argparse
import io
import json
import re
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from coat_data.text.chat import SHORT_ANSWER_SUFFIX
from coat_data.tools.source import new_folder
from coat_datasets.rows import Question, conversation, write_conversations, write_questions

QUESTION = f"What is in the photo?{SHORT_ANSWER_SUFFIX}"
Files = dict[str, zipfile.Path | Path]
Photo = tuple[str, str, str, bytes]
"""Split (train or val), name of the class, file name, bytes of the file."""


def read_cifar10(path: Path) -> Iterator[Photo]:
    """Yield CIFAR-10's photographs as PNG; its test batch is the split val."""
    with tarfile.open(path) as archive:
        files = [(Path(m.name).name, archive.extractfile(m)) for m in archive]
        contents = {name: file.read() for name, file in files if file is not None}
    names = contents["batches.meta.txt"].decode().split()
    for name in sorted(name for name in contents if name.endswith(".bin")):
        records = np.frombuffer(contents[name], np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        for number, record in enumerate(records):
            encoded = io.BytesIO()
            pixels = record[1:].reshape(3, 32, 32).transpose(1, 2, 0)
            Image.fromarray(pixels).save(encoded, format="PNG")
            split = "val" if name.startswith("test") else "train"
            yield split, names[record[0]], f"{Path(name).stem}_{number:05d}.png", encoded.getvalue()


def read_class_folders(files: Files) -> Iterator[Photo]:
    """Yield the photographs of ``train/CLASS`` and ``val/CLASS``."""
    known = json.loads(files["classes.json"].read_bytes()) if "classes.json" in files else []
    names = {entry["folder"]: entry["name"] for entry in known}
    for name, file in files.items():
        match = re.fullmatch(r"(train|val)/([^/]+)/([^/]+\.(?:jpe?g|png))", name, re.IGNORECASE)
        if match:
            yield match[1], names.get(match[2], match[2]), match[3], file.read_bytes()


def read_tiny_imagenet(files: Files) -> Iterator[Photo]:
    """Yield Tiny-ImageNet's photographs; a class has the first of its names in words.txt."""
    lines = [line.split("\t") for line in files["words.txt"].read_text("utf-8").splitlines()]
    names = {key: words.split(",")[0] for key, words in lines}
    listed = files["val/val_annotations.txt"].read_text("utf-8").splitlines()
    val = {name: names[key] for name, key in (line.split("\t")[:2] for line in listed)}
    for name, file in files.items():
        split, _, folder = name.partition("/")
        photo = Path(name).name
        if split == "train" and photo.endswith(".JPEG"):
            yield split, names[folder.split("/")[0]], photo, file.read_bytes()
        elif split == "val" and photo in val:
            yield split, val[photo], photo, file.read_bytes()


def read_photos(path: Path) -> Iterator[Photo]:
    """Recognize the layout, and yield its photographs."""
    if path.is_file() and tarfile.is_tarfile(path):
        return read_cifar10(path)
    if path.is_dir():
        files = {str(p.relative_to(path)): p for p in sorted(path.rglob("*")) if p.is_file()}
    else:
        archive = zipfile.ZipFile(path)
        files = {name: zipfile.Path(archive, name) for name in sorted(archive.namelist())}
    files = {name.removeprefix("tiny-imagenet-200/"): file for name, file in files.items()}
    return read_tiny_imagenet(files) if "words.txt" in files else read_class_folders(files)


def convert(source: Path, out: Path, val_per_class: int) -> None:
    """Write images, training rows and questions to the new folder ``out``."""
    splits: dict[str, dict[str, list[Question]]] = {n: defaultdict(list) for n in ("train", "val")}
    with new_folder(out) as folder:
        for split, label, name, data in read_photos(source):
            image = f"images/{split}/{label.replace(' ', '_')}/{name}"
            (folder / image).parent.mkdir(parents=True, exist_ok=True)
            (folder / image).write_bytes(data)
            asked = Question(image, image, text=QUESTION, answer=label, category=label)
            splits[split][label].append(asked)
        train, val = splits["train"], splits["val"]
        if not train:
            raise SystemExit(f"{source}: has no photographs train/CLASS/NAME.jpg")
        if not val:
            val = {label: some[-val_per_class:] for label, some in train.items()}
            train = {label: some[:-val_per_class] for label, some in train.items()}
        for split, by_class in (("train", train), ("val", val)):
            some = [question for label in sorted(by_class) for question in by_class[label]]
            rows = [conversation(q.question_id, q.image, [(q.text, q.answer)]) for q in some]
            print(write_conversations(folder / f"{split}.json", rows), f"rows in {split}.json")
        write_questions(folder / "eval", some)  # of val


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("source", type=Path, help="an archive or folder")
    add("--out", type=Path, required=True, help="folder to make")
    add("--val-per-class", type=int, default=500, help="held out if there is no val; default 500")
    convert(**vars(parser.parse_args()))
