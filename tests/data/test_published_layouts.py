"""Training files in the layouts of their publishers, with their own first rows, on real images."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from encoders import shown
from PIL import Image

from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError

SHORT = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."


def picture(path: Path, width: int = 64, height: int = 48) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (200, 30, 0)).save(path)
    return path.read_bytes()


def dump(path: Path, content: Any, **options: Any) -> Path:
    path.write_text(json.dumps(content, **options), encoding="utf-8")
    return path


GQA = {
    "02930152": {
        "semantic": [{"operation": "select", "dependencies": [], "argument": "sky (2486325)"}],
        "entailed": ["02930160"], "equivalent": ["02930152"], "question": "Is the sky dark?",
        "imageId": "2354786", "isBalanced": True, "groups": {"global": None},
        "answer": "yes", "fullAnswer": "Yes, the sky is dark.",
    },
    "07333408": {
        "semantic": [], "entailed": [], "equivalent": ["07333408"], "imageId": "2375429",
        "question": "What is on the white wall?", "isBalanced": True, "answer": "pipe",
        "fullAnswer": "The pipe is on the wall.",
    },
}  # fmt: skip


def test_gqa_is_an_object_of_questions(tmp_path: Path) -> None:
    for name in ("2354786", "2375429"):
        picture(tmp_path / "images" / f"{name}.jpg")
    path = dump(tmp_path / "train_balanced_questions.json", GQA, indent=2)
    dataset = SampleDataset(path, tmp_path)
    assert (dataset.format, len(dataset), dataset[1].id) == ("vqa", 2, "07333408")
    assert shown(dataset[0]) == ["user: [2354786.jpg]\nIs the sky dark?" + SHORT, "assistant: yes"]
    bad = {"1": {**GQA["02930152"], "answer": None}, "2": GQA["07333408"]}
    with pytest.raises(DataError, match=r"questions\.json:1: answer is null"):
        SampleDataset(dump(path, bad), tmp_path)[0]


def test_textvqa_from_the_hub(tmp_path: Path) -> None:
    row = {
        "question": "what is the brand of phone?", "image_id": "0054c91397f2fe05",
        "image_classes": ["Belt", "Headphones", "Mobile phone"], "question_id": 0,
        "flickr_original_url": "https://farm6.staticflickr.com/2891/9134076951_f65b421097_o.jpg",
        "image_width": 1024, "image_height": 730, "set_name": "train",
        "image": {"bytes": picture(tmp_path / "a.jpg"), "path": "0054c91397f2fe05.jpg"},
        "answers": ["nokia", "nokia", "nokia", "nokia", "toshiba", "nokia", "nokia", "nokia"],
    }  # fmt: skip
    pq.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train-00000-of-00001.parquet")
    said = ["user: [0054c91397f2fe05.jpg]\nwhat is the brand of phone?" + SHORT, "assistant: nokia"]
    assert shown(SampleDataset(tmp_path / "train-00000-of-00001.parquet")[0]) == said


SCIENCE_QA: list[dict[str, Any]] = [
    {
        "question": "Which of these states is farthest north?", "answer": 0, "hint": "", "id": "1",
        "choices": ["West Virginia", "Louisiana", "Arizona", "Oklahoma"], "image": "1/image.png",
        "task": "closed choice", "grade": "grade2", "subject": "social science",
        "lecture": "Maps have four cardinal directions.", "solution": "...", "split": "train",
    },
    {
        "question": "Which better describes the Shenandoah Forest?", "answer": 1, "split": "train",
        "hint": "Figure: Shenandoah.", "choices": ["tundra", "forest"], "image": None, "id": "3",
    },
]  # fmt: skip


def test_scienceqa_shows_lettered_choices(tmp_path: Path) -> None:
    picture(tmp_path / "1" / "image.png")
    dataset = SampleDataset(dump(tmp_path / "train.json", SCIENCE_QA))
    assert (dataset.format, [dataset[row].id for row in range(len(dataset))]) == (
        "choices",
        ["1", "3"],
    )
    options = "\nA. West Virginia\nB. Louisiana\nC. Arizona\nD. Oklahoma"
    assert shown(dataset[0]) == [
        f"user: [image.png]\nWhich of these states is farthest north?{options}{LETTER}",
        "assistant: A",
    ]
    context = "Context: Figure: Shenandoah.\nWhich better describes the Shenandoah Forest?"
    assert shown(dataset[1]) == [f"user: {context}\nA. tundra\nB. forest{LETTER}", "assistant: B"]


def test_an_object_with_several_splits_or_lists_is_refused(tmp_path: Path) -> None:
    path = dump(tmp_path / "problems.json", {row["id"]: row for row in SCIENCE_QA}, indent=2)
    with pytest.raises(DataError, match="whose rows have a split"):
        SampleDataset(path)
    coco = {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [{"image_id": 1}]}
    for indent in (None, 2):
        with pytest.raises(DataError, match="format of the rows is unknown"):
            SampleDataset(dump(tmp_path / "captions_train2017.json", coco, indent=indent))


def test_obelics_keeps_the_order_of_images_and_texts(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    row = {
        "images": [None, "a.jpg", None, None, "https://example.org/b.jpg"],
        "metadata": '[{"src": "https://example.org/a.jpg"}]',
        "general_metadata": '{"url": "https://example.org"}',
        "texts": ["The forum <image> of Urus.", None, "It costs 9 billion.", "Comments.", None],
    }
    columns = {key: [value] for key, value in row.items()}
    path = tmp_path / "train-00000-of-01335.parquet"
    pq.write_table(pyarrow.table(columns), path)
    dataset = SampleDataset(path)
    assert dataset.format == "obelics"
    page = "The forum <image> of Urus.[a.jpg]It costs 9 billion.\n\nComments.[b.jpg]"
    assert shown(dataset[0]) == ["user: ", f"assistant: {page}"]
    assert [part.kind for part in dataset[0].turns[1].parts].count("image") == 2

    path = dump(tmp_path / "pages.json", [row, {**row, "images": [None] * 5}])
    with pytest.raises(DataError, match=r":2: images\[1\] and texts\[1\] are both null or miss"):
        SampleDataset(path)[1]


@pytest.mark.parametrize(
    "row",
    [
        {"URL": "https://a.org/b.jpg", "TEXT": "A cat", "WIDTH": 8, "NSFW": "UNLIKELY"},
        {"url": "https://a.org/b.jpg", "caption": "A cat", "similarity": 0.3, "pwatermark": 0.1},
    ],
    ids=["laion", "relaion"],
)  # fmt: skip
def test_tables_of_links_show_the_image(tmp_path: Path, row: dict[str, Any]) -> None:
    pq.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "part.parquet")
    dataset = SampleDataset(tmp_path / "part.parquet")
    assert dataset.format == "links"
    assert shown(dataset[0]) == ["user: [b.jpg]", "assistant: A cat"]
    assert dataset[0].media[0].path == "https://a.org/b.jpg"


LINK = {"image_url": "https://a.org/b.jpg", "image_sha256": "0a"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {**LINK, "caption": "A red car.", "transcripts": ["it is a car", "red"]},
            ["user: [b.jpg]", "assistant: A red car."],
        ),
        (
            {
                **LINK, "question": "[USER] Is it red? [ASSISTANT] Yes. [USER] Which? [ASSISTANT]",
                "answer": "A Polo.", "messages": ["Is it red?", "Yes.", "Which?", "A Polo."],
            },
            ["user: [b.jpg]\nIs it red?", "assistant: Yes.", "user: Which?", "assistant: A Polo."],
        ),
        (
            {
                **LINK, "points": [{"x": 10.25, "y": 50}, {"x": 99, "y": 0}], "count": 2,
                "label": "wheels", "collection_method": "counting",
            },
            ["user: [b.jpg]\nPoint to wheels.", "assistant: [0.102, 0.500], [0.990, 0.000]"],
        ),
        (
            {**LINK, "points": [], "count": 0, "label": "dogs", "collection_method": "pointing"},
            ["user: [b.jpg]\nPoint to dogs.", "assistant: There are none."],
        ),
        (
            {**LINK, "count": 4, "points": {"x": [1.0], "y": [2.0]}, "label": "people"},
            ["user: [b.jpg]\nHow many people are there?" + SHORT, "assistant: 4"],
        ),
    ],
    ids=["cap", "cap-qa", "points", "no points", "count"],
)  # fmt: skip
def test_pixmo(tmp_path: Path, row: dict[str, Any], said: list[str]) -> None:
    pq.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    dataset = SampleDataset(tmp_path / "train.parquet")
    assert (dataset.format, shown(dataset[0])) == ("pixmo", said)
