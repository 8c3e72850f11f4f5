"""The CIFAR-10 converter, on small zips made here."""

import io
import json
import zipfile
from collections import Counter

import pytest
from PIL import Image

from coat_data.sample import DataError
from coat_datasets.cifar import CONFUSABLE, convert_cifar10

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SHORT = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."
NAMES = ["classification", "presence", "choice"]


def photo(label, number):
    """A JPEG whose bytes differ from every other's."""
    encoded = io.BytesIO()
    color = (CLASSES.index(label) * 25, number * 5 % 256, 99)
    Image.new("RGB", (8, 8), color).save(encoded, format="JPEG", comment=f"{label} {number}")
    return encoded.getvalue()


def make_zip(path, classes=CLASSES, per_class=48, folder="train"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "not a photograph")
        for label in classes:
            # Out of order, and with numbers whose order as text is another: 7 > 10.
            for number in reversed(range(per_class)):
                archive.writestr(f"{folder}/{label}/{number}.jpg", photo(label, number))
    return path


def read_json(path):
    return json.loads(path.read_text(encoding="ascii"))


def read_eval(out, name):
    lines = (out / "eval" / name / "questions.jsonl").read_text(encoding="ascii").splitlines()
    return [json.loads(line) for line in lines]


def turn(row):
    human, gpt = row["conversations"]
    assert (human["from"], gpt["from"]) == ("human", "gpt")
    assert human["value"].startswith("<image>\n")
    return human["value"].removeprefix("<image>\n"), gpt["value"]


def label_of(image):
    top, label, _ = image.split("/")
    assert top == "images"
    return label


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    summary = convert_cifar10(make_zip(folder / "small.zip"), folder / "out", val_per_class=8)
    assert summary == {
        "images": 480,
        **{f"{name}.json": 400 for name in NAMES},
        **{f"{name}_val.json": 80 for name in NAMES},
        **{f"eval/{name}": 80 for name in NAMES},
    }
    return folder / "out"


def test_images_are_the_bytes_of_the_zip(out):
    for label in CLASSES:
        files = {path.name: path.read_bytes() for path in (out / "images" / label).iterdir()}
        assert files == {f"{number}.jpg": photo(label, number) for number in range(48)}


@pytest.mark.parametrize("name", NAMES)
def test_each_photo_is_in_one_row_and_the_last_are_for_validation(out, name):
    train = [row["image"] for row in read_json(out / f"{name}.json")]
    val = [row["image"] for row in read_json(out / f"{name}_val.json")]
    assert sorted(train) == sorted(f"images/{c}/{n}.jpg" for c in CLASSES for n in range(40))
    assert sorted(val) == sorted(f"images/{c}/{n}.jpg" for c in CLASSES for n in range(40, 48))
    assert [row["image"] for row in read_eval(out, name)] == val


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_asks_exactly_as_training_does(out, name):
    rows, questions = read_json(out / f"{name}_val.json"), read_eval(out, name)
    assert [turn(row) for row in rows] == [(one["text"], one["answer"]) for one in questions]
    assert len({one["question_id"] for one in questions}) == len(questions)


def test_classification(out):
    for row in read_json(out / "classification.json"):
        assert turn(row) == (f"What is in the photo?{SHORT}", label_of(row["image"]))
    assert all(one["category"] == one["answer"] for one in read_eval(out, "classification"))


def test_presence_answers_and_balance(out):
    for rows, per_class in (
        (read_json(out / "presence.json"), 40),
        (read_eval(out, "presence"), 8),
    ):
        kinds = Counter()
        for row in rows:
            text, said = (row["text"], row["answer"]) if "text" in row else turn(row)
            label = label_of(row["image"])
            article, asked = text.removeprefix("Is there ").split()[:2]
            assert text == f"Is there {article} {asked} in the photo?{SHORT}"
            assert (article == "an") == (asked in ("airplane", "automobile"))
            assert asked in CLASSES
            assert said == ("yes" if asked == label else "no")
            kinds[label, said] += 1
            if "category" in row:
                if (row["category"], said) == ("confusable", "no"):
                    assert asked == CONFUSABLE[label]
                kinds[label, row["category"], said] += 1
        for label in CLASSES:
            assert kinds[label, "yes"] == kinds[label, "no"] == per_class / 2
            if per_class == 8:
                for category in ("uniform", "confusable"):
                    assert kinds[label, category, "yes"] == kinds[label, category, "no"] == 2


def test_half_of_the_training_noes_are_the_confusable_class(out):
    asked = Counter()
    for row in read_json(out / "presence.json"):
        text, said = turn(row)
        if said == "no":
            asked[CONFUSABLE[label_of(row["image"])] == text.split()[3]] += 1
    # Half by design, and a ninth of the uniform half by chance.
    assert asked[True] + asked[False] == 200
    assert 100 <= asked[True] <= 125


def test_confusable_is_one_to_one_and_mutual():
    assert sorted(CONFUSABLE) == sorted(CONFUSABLE.values()) == CLASSES
    assert all(CONFUSABLE[other] == label != other for label, other in CONFUSABLE.items())


def test_choice(out):
    letters = Counter()
    for row in read_json(out / "choice.json"):
        text, said = turn(row)
        question, *options = text.removesuffix(LETTER).split("\n")
        assert text.endswith(LETTER)
        assert question == "What is in the photo?"
        assert [option[:3] for option in options] == ["A. ", "B. ", "C. ", "D. "]
        names = [option[3:] for option in options]
        assert len(set(names)) == 4
        assert set(names) < set(CLASSES)
        assert names["ABCD".index(said)] == label_of(row["image"])
        letters[said] += 1
    assert letters == dict.fromkeys("ABCD", 100)
    for one in read_eval(out, "choice"):
        listed = [f"{letter}. {name}" for letter, name in zip("ABCD", one["choices"], strict=True)]
        assert "\n".join(listed) in one["text"]


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_seed_decides_every_byte(out, tmp_path):
    source = make_zip(tmp_path / "small.zip")
    convert_cifar10(source, tmp_path / "same", val_per_class=8)
    convert_cifar10(source, tmp_path / "other", val_per_class=8, seed=1)
    assert contents(tmp_path / "same") == contents(out)
    same, other = contents(tmp_path / "same"), contents(tmp_path / "other")
    changed = {name for name in same if same[name] != other[name]}
    assert changed == {name for name in same if "presence" in name or "choice" in name}


def test_photos_come_by_class_and_number(out):
    train = [row["image"] for row in read_json(out / "classification.json")]
    val = [row["image"] for row in read_json(out / "classification_val.json")]
    assert train == [f"images/{label}/{number}.jpg" for label in CLASSES for number in range(40)]
    assert val == [f"images/{label}/{number}.jpg" for label in CLASSES for number in range(40, 48)]


def fails(tmp_path, source, message, **settings):
    with pytest.raises(DataError, match=message) as caught:
        convert_cifar10(source, tmp_path / "out", **settings)
    assert caught.value.where == str(source)
    assert "train/<class>/<number>.jpg" in caught.value.remedy
    assert [path.name for path in tmp_path.iterdir()] in ([], [source.name])


def test_a_missing_zip(tmp_path):
    fails(tmp_path, tmp_path / "none.zip", "there is no such file")


def test_a_file_that_is_no_zip(tmp_path):
    source = tmp_path / "cifar.zip"
    source.write_bytes(b"<html>not found</html>")
    fails(tmp_path, source, "not a sound zip")


def test_a_damaged_photo(tmp_path):
    source = make_zip(tmp_path / "small.zip", per_class=4)
    data = bytearray(source.read_bytes())
    data[data.index(photo("dog", 2)) + 40] ^= 0xFF
    source.write_bytes(data)
    fails(tmp_path, source, r"not a sound zip.*train/dog/2\.jpg", val_per_class=1)


def test_another_zip_says_what_it_holds(tmp_path):
    source = make_zip(tmp_path / "test.zip", folder="test", per_class=2)
    fails(tmp_path, source, r"airplane 0, .*first entries are .*'test/airplane/1\.jpg'")


def test_a_class_without_enough_photos_is_named(tmp_path):
    source = make_zip(tmp_path / "small.zip", classes=CLASSES[:9], per_class=4)
    fails(tmp_path, source, "but has truck 0;", val_per_class=3)


def test_the_number_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="val_per_class=0"):
        convert_cifar10(tmp_path / "x.zip", tmp_path / "out", val_per_class=0)
