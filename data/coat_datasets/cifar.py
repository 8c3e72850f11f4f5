"""CIFAR-10 photographs as conversations: classification, yes/no presence and multiple choice.

The source is the 50,000 training photographs as JPEG files in one zip, ``train/<class>/<n>.jpg``
(Krizhevsky 2009). The photographs with the highest numbers of each class are held out for
validation. Images are written to ``images/<class>/<n>.jpg``; :mod:`coat_datasets.photos` describes
the other files.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from coat_data.sample import DataError
from coat_data.tools.source import new_folder
from coat_datasets.photos import Photo, PhotoSet, open_zip

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

_MEMBER = re.compile(rf"train/({'|'.join(CLASSES)})/(\d+)\.jpg")
_REMEDY = (
    "give the zip of CIFAR-10's training photographs: train/<class>/<number>.jpg for the classes "
    + ", ".join(CLASSES)
)


def convert_cifar10(
    zip_path: str | Path,
    out_dir: str | Path,
    *,
    val_per_class: int = 500,
    seed: int = 0,
) -> dict[str, int]:
    """Convert the zip to training rows and evaluation folders in ``out_dir``.

    Presence questions ask about :data:`CONFUSABLE` classes; wrong choices are drawn from all other
    classes. :meth:`coat_datasets.photos.PhotoSet.write` says how often.

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
    with open_zip(zip_path, _REMEDY) as archive, new_folder(out_dir) as folder:
        train, val = _split(Path(zip_path), archive.namelist(), val_per_class)
        photos = PhotoSet(
            train=train,
            val=val,
            confusable={label: (other,) for label, other in CONFUSABLE.items()},
            options={label: [one for one in CLASSES if one != label] for label in CLASSES},
        )
        return photos.write(archive, folder, seed)


def _split(
    path: Path, members: Sequence[str], val_per_class: int
) -> tuple[list[Photo], list[Photo]]:
    """Return training and validation photographs, sorted by class and number."""
    matches = [match for member in members if (match := _MEMBER.fullmatch(member))]
    by_class: dict[str, list[Photo]] = {label: [] for label in CLASSES}
    for match in matches:
        image = match[0].replace("train/", "images/", 1)
        by_class[match[1]].append(Photo(match[1], int(match[2]), match[0], image))
    short = [f"{name} {len(some)}" for name, some in by_class.items() if len(some) <= val_per_class]
    if short:
        raise DataError(
            str(path),
            f"needs more than val_per_class={val_per_class} photographs of every class, but has "
            f"{', '.join(short)}; its first entries are {list(members[:3])}",
            _REMEDY,
        )
    train: list[Photo] = []
    val: list[Photo] = []
    for photos in by_class.values():
        photos.sort()
        train.extend(photos[:-val_per_class])
        val.extend(photos[-val_per_class:])
    return train, val
