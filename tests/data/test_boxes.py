"""Boxes of ms-swift, Qwen-VL and InternVL become fractions of the image; values by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from encoders import talk
from PIL import Image

from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError


@pytest.fixture(autouse=True)
def images(tmp_path: Path) -> None:
    Image.new("RGB", (640, 480)).save(tmp_path / "a.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn: 480 wide, 640 high
    Image.new("RGB", (640, 480)).save(tmp_path / "turned.jpg", exif=turned)


def answer(folder: Path, row: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return SampleDataset(path)[0].turns[-1].text


def swift(boxes: list[Any], answer: str = "<bbox>", **objects: Any) -> dict[str, Any]:
    """ms-swift's rows (docs/source_en/Customization/Custom-dataset.md, "Grounding")."""
    messages = [
        {"role": "user", "content": "<image>Find the <ref-object> in the image"},
        {"role": "assistant", "content": answer},
    ]
    objects = {"ref": ["sheep"], "bbox": boxes, **objects}
    return {"messages": messages, "images": ["a.jpg"], "objects": objects}


def test_ms_swift_units(tmp_path: Path) -> None:
    boxes = [[160, 120, 320, 480.4], [64, 48]]  # 0.4 pixels below the image
    expected = "[0.250, 0.250, 0.500, 1.000] and [0.100, 0.100]"
    assert answer(tmp_path, swift(boxes, "<bbox> and <bbox>")) == expected
    norm = {"bbox_type": "norm1000"}
    assert (
        answer(tmp_path, swift([[250, 250, 500, 1000]], **norm)) == "[0.250, 0.250, 0.500, 1.000]"
    )
    norm = {"bbox_type": "norm1"}
    assert answer(tmp_path, swift([[0.25, 0, 0.5, 1]], **norm)) == "[0.250, 0.000, 0.500, 1.000]"


def test_pixels_of_the_upright_image_that_image_id_names(tmp_path: Path) -> None:
    row = swift([[48, 64, 240, 320], [64, 48]], "<bbox><bbox>", image_id=[1, 0])
    row["images"] = ["a.jpg", "turned.jpg"]
    row["messages"][0]["content"] = "<image><image>Find the <ref-object>"
    assert answer(tmp_path, row) == "[0.100, 0.100, 0.500, 0.500][0.100, 0.100]"


@pytest.mark.parametrize(
    ("boxes", "objects", "problem"),
    [
        ([[1, 2, 900, 4]], {}, "leaves the image, whose edges are at 640 and 480"),
        ([[100, 100, 50, 40]], {}, "ends before it starts"),
        ([[1, 2, 3, 4]], {"bbox_type": "cxcywh"}, "objects.bbox_type is 'cxcywh'"),
        ([[1, 2, 3, 4]], {"bbox_type": ["real"]}, r"objects.bbox_type is \['real'\]"),
        ([[1, 2, 3, 4]], {"image_id": [2]}, "box 0 is in image 2 of the row's 1 images"),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], {}, "objects has 1 more entries than the texts have <bbox>"),
    ],
)  # fmt: skip
def test_wrong_boxes_are_named(
    tmp_path: Path, boxes: list[Any], objects: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1.*{problem}"):
        answer(tmp_path, swift(boxes, **objects))


def test_wrong_tags_and_pixels_of_unknown_images_are_named(tmp_path: Path) -> None:
    row = {**swift([[1, 2, 3, 4]]), "images": ["https://a.org/a.jpg"]}
    with pytest.raises(DataError, match="in pixels of an image at a URL"):
        answer(tmp_path, row)
    for text, problem in (("(1,2),(3)", "has 3 numbers"), ("(1,2),(3,4000)", "leaves the image")):
        with pytest.raises(DataError, match=problem):
            answer(tmp_path, talk("<image>?", f"<box>{text}</box>", image="a.jpg"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<ref>The dog</ref><box>(221,423),(569,886)</box><box>(0,0),(1000,999)</box> runs",
            "The dog [0.221, 0.423, 0.569, 0.886], [0.000, 0.000, 1.000, 0.999] runs",
        ),
        (
            "<ref>two dogs</ref><box>[[221, 423, 569, 886], [1, 2, 3, 4]]</box>",
            "two dogs [0.221, 0.423, 0.569, 0.886], [0.001, 0.002, 0.003, 0.004]",
        ),
        (
            "<|object_ref_start|>dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>",
            "dog [0.221, 0.423, 0.569, 0.886]",
        ),
        ("click('<|box_start|>(246,113)<|box_end|>')", "click('[0.246, 0.113]')"),
        ("A <box>tag</box> and <ref>a note</ref>", "A <box>tag</box> and <ref>a note</ref>"),
    ],
    ids=["Qwen-VL", "InternVL", "Qwen2-VL", "point", "markup"],
)  # fmt: skip
def test_tags_are_thousandths(tmp_path: Path, text: str, expected: str) -> None:
    row = talk("<image>Where is <ref>it</ref>?", text, image="a.jpg", width=640, height=480)
    assert answer(tmp_path, row) == expected
    asked = SampleDataset(tmp_path / "rows.jsonl")[0].turns[0].text
    assert asked == ("Where is <ref>it</ref>?" if text == expected else "Where is it?")
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "a.jpg"}]},
        {"role": "assistant", "content": [{"type": "text", "text": text}]},
    ]
    assert answer(tmp_path, {"messages": messages}) == expected
    alone = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]}
    assert answer(tmp_path, alone) == text  # no image: not a box of one
