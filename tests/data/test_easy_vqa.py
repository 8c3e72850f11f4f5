"""The easy-VQA converter, on small folders made here."""

import io
import json
import zipfile

import pytest
from PIL import Image

from coat_data.sample import DataError
from coat_datasets.easy_vqa import convert_easy_vqa

ASKED = [
    ("what color is the shape?", "red", "color"),
    ("what is the color of the circle?", "red", "color"),
    ("what is the red shape?", "circle", "shape"),
    ("what shape is present?", "circle", "shape"),
    ("is there a red shape in the image?", "yes", "yes_no"),
    ("does the image contain a triangle?", "no", "yes_no"),
    ("is no triangle present?", "yes", "negated"),
    ("does the image not contain a circle?", "no", "negated"),
]


def picture(number):
    encoded = io.BytesIO()
    Image.new("RGB", (4, 2), (number, 2 * number, 255)).save(encoded, format="PNG")
    return encoded.getvalue()


def make_source(folder, numbers=range(12), packed=False, rows=None):
    """Questions about ``numbers``, the highest first; an image of number 99 has no question."""
    split = folder / "train"
    split.mkdir(parents=True)
    made = [[text, answer, one] for one in reversed(numbers) for text, answer, _ in ASKED]
    (split / "questions.json").write_text(json.dumps(made if rows is None else rows))
    names = {f"images/{number}.png": picture(number) for number in (*numbers, 99)}
    if packed:
        with zipfile.ZipFile(split / "images.zip", "w") as archive:
            for name, data in names.items():
                archive.writestr(name, data)
    else:
        (split / "images").mkdir()
        for name, data in names.items():
            (split / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_the_last_images_are_kept_out_with_all_their_questions(tmp_path, packed):
    out = tmp_path / "out"
    summary = convert_easy_vqa(make_source(tmp_path / "data", packed=packed), out, num_test=3)
    assert summary == {
        "images": 12,
        "shape.json": 18,
        "conversations.json": 9,
        "eval/test": 24,
    }
    files = {path.name: path.read_bytes() for path in (out / "images").iterdir()}
    assert files == {f"{number}.png": picture(number) for number in range(12)}
    assert json.loads((out / "shape.json").read_text()) == [
        {
            "id": f"{number}-{index}",
            "image": f"images/{number}.png",
            "conversations": [
                {"from": "human", "value": f"<image>\n{text}"},
                {"from": "gpt", "value": answer},
            ],
        }
        for number in range(9)  # not by text: 10 < 9
        for index, (text, answer, category) in enumerate(ASKED)
        if category == "shape"
    ]
    rows = json.loads((out / "conversations.json").read_text())
    assert [(row["id"], row["image"]) for row in rows] == [
        (str(number), f"images/{number}.png") for number in range(9)
    ]
    orders = [[turn["value"] for turn in row["conversations"]] for row in rows]
    assert len({tuple(order) for order in orders}) > 1  # drawn for each image
    for order in orders:
        placeholder, _, first = order[0].partition("\n")
        assert placeholder == "<image>"
        pairs = list(zip([first, *order[2::2]], order[1::2], strict=True))
        assert sorted(pairs) == sorted((text, answer) for text, answer, _ in ASKED)
    lines = (out / "eval/test/questions.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "question_id": f"{number}-{index}",
            "image": f"images/{number}.png",
            "text": text,
            "answer": answer,
            "category": category,
        }
        for number in range(9, 12)
        for index, (text, answer, category) in enumerate(ASKED)
    ]


def fails(tmp_path, message, num_test=3):
    with pytest.raises(DataError, match=message) as caught:
        convert_easy_vqa(tmp_path / "data", tmp_path / "out", num_test=num_test)
    assert caught.value.where.startswith(str(tmp_path / "data" / "train"))
    assert not (tmp_path / "out").exists()


def test_another_folder(tmp_path):
    fails(tmp_path, "there is no such file")


@pytest.mark.parametrize(
    "rows", [{"a": 1}, [["what?", "red"]], [["what?", "red", "x"]], [[1, 2, 3]]]
)
def test_other_questions(tmp_path, rows):
    make_source(tmp_path / "data", rows=rows)
    fails(tmp_path, "not easy-VQA's questions: .*last row")


@pytest.mark.parametrize("packed", [False, True])
def test_a_missing_image(tmp_path, packed):
    rows = [["what shape is present?", "circle", number] for number in (0, 1, 77)]
    make_source(tmp_path / "data", packed=packed, rows=rows)
    fails(tmp_path, r"an image cannot be read: .*77\.png", num_test=1)


def test_a_damaged_zip(tmp_path):
    make_source(tmp_path / "data", packed=True)
    (tmp_path / "data/train/images.zip").write_bytes(b"no zip")
    fails(tmp_path, "an image cannot be read: .*zip")


def test_too_few_images(tmp_path):
    make_source(tmp_path / "data", numbers=range(3))
    fails(tmp_path, "about 3 images, no more than num_test=3")
    with pytest.raises(ValueError, match="num_test=0: use a positive number"):
        convert_easy_vqa(tmp_path / "data", tmp_path / "out", num_test=0)
