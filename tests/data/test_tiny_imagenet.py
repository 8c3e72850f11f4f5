"""The Tiny-ImageNet converter, on small zips made here."""

import io
import json
import zipfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from coat_data.sample import DataError
from coat_datasets.tiny_imagenet import NUM_CONFUSABLE, convert_tiny_imagenet, find_confusable

CLASSES = {
    # Folder -> name and color: two groups of four that look alike.
    **{f"warm_{n}": (f"warm thing {n}", (240, 20 * n, 0)) for n in range(4)},
    **{f"cold_{n}": (f"cold thing {n}", (0, 20 * n, 240)) for n in range(4)},
}
COUNTS = {"train": 16, "val": 8}
NAMES = ["classification", "presence", "choice"]


def photo(folder, split, number):
    """A JPEG whose bytes differ from every other's."""
    encoded = io.BytesIO()
    noise = np.random.default_rng([*folder.encode(), number]).integers(-9, 10, (64, 64, 3))
    pixels = np.clip(np.array(CLASSES[folder][1]) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(encoded, format="JPEG", comment=f"{split} {folder} {number}")
    return encoded.getvalue()


def make_zip(path, classes=CLASSES, counts=COUNTS, about=None):
    with zipfile.ZipFile(path, "w") as archive:
        for split, count in counts.items():
            for folder in classes:
                for number in reversed(range(count)):  # 7 comes before 10
                    archive.writestr(f"{split}/{folder}/{number}.jpg", photo(folder, split, number))
        listed = [{"folder": name, "name": CLASSES[name][0], "wnid": "n0"} for name in classes]
        archive.writestr("classes.json", json.dumps(listed if about is None else about))
    return path


def questions(out, name):
    """(image, text, answer) of training and validation rows; evaluation asks the latter."""
    found = []
    for file in (f"{name}.json", f"{name}_val.json"):
        rows = json.loads((out / file).read_text())
        turns = [[turn["value"] for turn in row["conversations"]] for row in rows]
        found.append(
            [
                (row["image"], asked.removeprefix("<image>\n"), answer)
                for row, (asked, answer) in zip(rows, turns, strict=True)
            ]
        )
    lines = (out / "eval" / name / "questions.jsonl").read_text().splitlines()
    scored = [json.loads(line) for line in lines]
    assert [(one["image"], one["text"], one["answer"]) for one in scored] == found[1]
    return *found, scored


def name_of(image):
    return CLASSES[image.split("/")[2]][0]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    summary = convert_tiny_imagenet(make_zip(folder / "small.zip"), folder / "out")
    assert summary == {
        "images": 192,
        **{f"{name}.json": 128 for name in NAMES},
        **{f"{name}_val.json": 64 for name in NAMES},
        **{f"eval/{name}": 64 for name in NAMES},
    }
    return folder / "out"


def test_images_are_the_bytes_of_the_zip(out):
    files = {str(p.relative_to(out / "images")): p.read_bytes() for p in out.rglob("*.jpg")}
    assert files == {
        f"{split}/{folder}/{number}.jpg": photo(folder, split, number)
        for split, count in COUNTS.items()
        for folder in CLASSES
        for number in range(count)
    }


@pytest.mark.parametrize("name", NAMES)
def test_train_and_val_are_those_of_the_zip(out, name):
    train, val, _ = questions(out, name)
    for rows, split in ((train, "train"), (val, "val")):
        assert [image for image, _, _ in rows] == [
            f"images/{split}/{folder}/{number}.jpg"
            for folder in CLASSES
            for number in range(COUNTS[split])
        ]


def test_classification_asks_for_the_readable_name(out):
    for rows in questions(out, "classification")[:2]:
        assert all(answer == name_of(image) for image, _, answer in rows)


def test_presence(out):
    *splits, scored = questions(out, "presence")
    for rows in splits:
        answers = Counter()
        for image, text, answer in rows:
            asked = text.removeprefix("Is there a ").partition(" in the photo?")[0]
            assert (answer == "yes") == (asked == name_of(image))
            answers[name_of(image), answer] += 1
        assert len(set(answers.values())) == 1
        assert len(answers) == 16
    near = [one for one in scored if one["category"] == "confusable"]
    assert Counter(one["answer"] for one in near) == {"yes": 16, "no": 16}
    for one in near:
        asked = one["text"].removeprefix("Is there a ").partition(" in the photo?")[0]
        # Each class has six of the seven others: all three of its group, and three of the rest.
        assert asked in [name_of(one["image"]), *find_all(out)[name_of(one["image"])]]


def test_wrong_choices_are_confusable(out):
    *splits, scored = questions(out, "choice")
    confusable = find_all(out)
    for rows in splits:
        assert Counter(answer for _, _, answer in rows) == dict.fromkeys("ABCD", len(rows) / 4)
    for one in scored:
        label = name_of(one["image"])
        assert one["choices"]["ABCD".index(one["answer"])] == label
        assert len(set(one["choices"])) == 4
        assert set(one["choices"]) <= {label, *confusable[label]}


def find_all(out):
    """The confusable classes, from the photographs that were written."""
    means = {}
    for folder, (name, _) in CLASSES.items():
        photos = [Image.open(path) for path in (out / "images/train" / folder).iterdir()]
        small = [np.asarray(one.resize((8, 8), Image.Resampling.BOX), float) for one in photos]
        means[name] = np.mean(small, axis=0)
    return find_confusable(means)


def test_near_classes_are_confusable_and_mutual():
    means = {name: np.full((8, 8, 3), color, float) for name, color in CLASSES.values()}
    three = find_confusable(means, 3)
    for name, others in three.items():
        assert {other[:4] for other in others} == {name[:4]}
        assert len(others) == 3
    assert three["warm thing 0"] == ["warm thing 1", "warm thing 2", "warm thing 3"]
    assert three["cold thing 3"] == ["cold thing 2", "cold thing 1", "cold thing 0"]
    for found in (three, find_confusable(means)):
        assert all(name in found[other] for name, others in found.items() for other in others)
        assert all(name not in others for name, others in found.items())


def test_every_class_is_confusable_with_about_equally_many():
    rng = np.random.default_rng(0)
    means = {str(number): rng.normal(128, 40, (8, 8, 3)) for number in range(60)}
    sizes = [len(others) for others in find_confusable(means).values()]
    assert min(sizes) >= 3
    assert max(sizes) <= NUM_CONFUSABLE + 1
    assert sum(size == NUM_CONFUSABLE for size in sizes) >= 55


def test_a_class_that_is_left_over_gets_the_nearest_others():
    means = {name: np.full((1, 1, 3), float(at)) for at, name in enumerate("abcd")}
    # With one each, a-b and c-d; then all need three, and there are three.
    assert find_confusable(means, 1)["b"] == ["a", "c", "d"]


def test_the_seed_decides_the_questions(out, tmp_path):
    source = make_zip(tmp_path / "small.zip")
    for name, seed in (("same", 0), ("other", 1)):
        convert_tiny_imagenet(source, tmp_path / name, seed=seed)
    for name, differs in zip(NAMES, (False, True, True), strict=True):
        files = [path / f"{name}.json" for path in (out, tmp_path / "same", tmp_path / "other")]
        first, same, other = (file.read_bytes() for file in files)
        assert first == same
        assert (first != other) == differs


def fails(tmp_path, message, **settings):
    source = make_zip(tmp_path / "small.zip", **settings)
    with pytest.raises(DataError, match=message) as caught:
        convert_tiny_imagenet(source, tmp_path / "out")
    assert caught.value.where == str(source)
    assert "classes.json" in caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_a_class_without_photos_is_named(tmp_path):
    about = [{"folder": name, "name": name} for name in (*CLASSES, "lost")]
    fails(tmp_path, r"no photo in \['train/lost', 'val/lost'\]", about=about)


def test_too_few_classes_or_names(tmp_path):
    fails(tmp_path, "3 names of 3 classes", classes=list(CLASSES)[:3])
    same = [{"folder": name, "name": "thing"} for name in CLASSES]
    fails(tmp_path, "1 names of 8 classes", about=same)


def test_a_zip_with_other_classes_json(tmp_path):
    fails(tmp_path, "classes.json: TypeError", about=["warm_0"])


def test_a_damaged_photo(tmp_path):
    source = make_zip(tmp_path / "small.zip")
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr("train/warm_0/99.jpg", b"no photo")
    with pytest.raises(DataError) as caught:
        convert_tiny_imagenet(source, tmp_path / "out")
    assert "train/warm_0/99.jpg" in str(caught.value)
