"""Tiny-ImageNet photographs as conversations, with wrong answers that look alike.

The source is one zip: ``train/<class>/<n>.jpg`` and ``val/<class>/<n>.jpg`` of 64 x 64 pixels, and
``classes.json``, an array of objects with ``folder`` (``<class>``) and ``name`` (the answer).
Images are written to ``images/{train,val}/<class>/<n>.jpg``; :mod:`coat_datasets.photos` describes
the other files.
"""

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from coat_data.media.image import open_image
from coat_data.sample import DataError, Media
from coat_data.tools.source import new_folder
from coat_datasets.photos import NUM_CHOICES, Photo, PhotoSet, open_zip

NUM_CONFUSABLE = 6
"""Maximum confusable classes of a class, except for those added so that it has three."""
THUMBNAIL = 8
"""Width and height in pixels."""

_MEMBER = re.compile(r"(train|val)/([^/]+)/(\d+)\.jpg")
_REMEDY = (
    "give a zip with train/<class>/<number>.jpg, val/<class>/<number>.jpg and classes.json, an "
    'array of {"folder": <class>, "name": ...} with at least four classes'
)


def convert_tiny_imagenet(
    zip_path: str | Path, out_dir: str | Path, *, seed: int = 0
) -> dict[str, int]:
    """Convert the zip to training rows and evaluation folders in ``out_dir``.

    Confusable classes (:func:`find_confusable`) are asked about in half of the presence questions
    with the answer no, and are the wrong choices of all multiple choice questions.
    :meth:`coat_datasets.photos.PhotoSet.write` says how often.

    Args:
        zip_path: the zip.
        out_dir: folder to make.
        seed: seed of all random choices.

    Returns:
        Number of images, rows or questions by file or folder.

    Raises:
        DataError: the zip or a photograph is missing, damaged or not in this layout, or ``out_dir``
            is not empty.
    """
    with open_zip(zip_path, _REMEDY) as archive, new_folder(out_dir) as folder:
        photos = _list_photos(archive, str(zip_path))
        confusable = find_confusable(_mean_thumbnails(archive, photos["train"]))
        photo_set = PhotoSet(**photos, confusable=confusable, options=confusable)
        return photo_set.write(archive, folder, seed)


def find_confusable(
    thumbnails: Mapping[str, NDArray[np.float64]], number: int = NUM_CONFUSABLE
) -> dict[str, list[str]]:
    """Return the confusable classes of each class: those whose mean photographs look alike.

    Pairs of classes become confusable with each other in the order of the Euclidean distance
    between their mean thumbnails, except pairs of which one class has ``number`` already: so all
    classes are named about equally often, and the class that a question asks about does not tell
    the answer. (With the nearest six of each class of Tiny-ImageNet, some classes would be named by
    16 others and some by none.) A class that is left with fewer than three gets the nearest others.

    Args:
        thumbnails: class -> mean thumbnail, (pixels, pixels, 3) in 0..255; at least four classes.
        number: maximum confusable classes of a class.

    Returns:
        Class -> at least three other classes, the nearest first; mutual.
    """
    labels = list(thumbnails)
    flat = np.stack([thumbnails[label].ravel() for label in labels])
    distance = np.linalg.norm(flat[:, None] - flat[None], axis=-1)
    linked: list[set[int]] = [set() for _ in labels]
    first, second = np.triu_indices(len(labels), 1)
    for index in np.argsort(distance[first, second], kind="stable"):
        one, other = int(first[index]), int(second[index])
        if len(linked[one]) < number and len(linked[other]) < number:
            linked[one].add(other)
            linked[other].add(one)
    order = [[int(other) for other in np.argsort(row, kind="stable")] for row in distance]
    for one, others in enumerate(linked):
        for other in order[one]:
            if len(others) < NUM_CHOICES - 1 and other != one:
                others.add(other)
                linked[other].add(one)
    return {
        label: [labels[other] for other in order[one] if other in linked[one]]
        for one, label in enumerate(labels)
    }


def _list_photos(archive: zipfile.ZipFile, where: str) -> dict[str, Sequence[Photo]]:
    """Return the photographs of ``train`` and ``val``, sorted by class and number."""
    members = archive.namelist()
    try:
        classes = json.loads(archive.read("classes.json"))
        names = {str(one["folder"]): str(one["name"]) for one in classes}
    except (KeyError, ValueError, TypeError) as error:
        problem = f"classes.json: {type(error).__name__} {error}; first entries {members[:3]}"
        raise DataError(where, problem, _REMEDY) from error
    by_class = {split: {folder: [] for folder in names} for split in ("train", "val")}
    for match in filter(None, map(_MEMBER.fullmatch, members)):
        split, folder, number = match[1], match[2], int(match[3])
        if folder in names:
            photo = Photo(names[folder], number, match[0], f"images/{match[0]}")
            by_class[split][folder].append(photo)
    empty = [f"{s}/{f}" for s, own in by_class.items() for f, some in own.items() if not some]
    if empty or len(set(names.values())) < max(NUM_CHOICES, len(names)):
        problem = f"{len(set(names.values()))} names of {len(names)} classes, no photo in {empty}"
        raise DataError(where, problem, _REMEDY)
    return {
        split: [photo for some in own.values() for photo in sorted(some)]
        for split, own in by_class.items()
    }


def _mean_thumbnails(
    archive: zipfile.ZipFile, photos: Sequence[Photo]
) -> dict[str, NDArray[np.float64]]:
    """Return class -> mean of its photographs, scaled to 8 x 8 pixels; sums of integers: exact."""
    sums: dict[str, NDArray[np.float64]] = {}
    sizes: dict[str, int] = {}
    for photo in tqdm(photos, desc="thumbnails"):
        image = open_image(Media(kind="image", path=photo.member, data=archive.read(photo.member)))
        small = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
        zero = np.zeros((THUMBNAIL, THUMBNAIL, 3))
        sums[photo.label] = sums.get(photo.label, zero) + np.asarray(small)
        sizes[photo.label] = sizes.get(photo.label, 0) + 1
    return {label: total / sizes[label] for label, total in sums.items()}
