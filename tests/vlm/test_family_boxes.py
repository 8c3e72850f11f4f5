"""Boxes of rows in the convention of each family; values by hand.

Before, every family was trained on fractions such as [0.250, 0.250, 0.500, 1.000].
"""

import json
from pathlib import Path
from typing import Any

import pytest
from family_folders import MAKERS
from PIL import Image

from coat_data.load.check_labels import check_labels
from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import IGNORE_INDEX
from coat_data.sample import DataError, Sample
from coat_data.tools.ingest import ingest
from coat_data.tools.preview import preview
from coat_vlm.model.families import FAMILIES
from coat_vlm.model.family_processor import FamilyProcessor

ONLY_QWEN = pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
TAGS = ["<ref>", "</ref>", "<box>", "</box>"]
# 640 x 480 pixels become 32 x 24: at most 1,024 pixels, in multiples of 8.
SWIFT = {
    "qwen2_vl": '{"bbox_2d": [250, 250, 500, 1000], "label": "sheep"} sheep[100, 100]',
    "qwen2_5_vl": '{"bbox_2d": [8, 6, 16, 23], "label": "sheep"} sheep[3, 2]',
    "qwen3_vl": '{"bbox_2d": [250, 250, 500, 1000], "label": "sheep"} sheep[100, 100]',
    "qwen3_vl_moe": '{"bbox_2d": [250, 250, 500, 1000], "label": "sheep"} sheep[100, 100]',
    "qwen3_5": '{"bbox_2d": [250, 250, 500, 1000], "label": "sheep"} sheep[100, 100]',
    "internvl": '{"bbox_2d": [250, 250, 500, 1000], "label": "sheep"} '
    "<ref>sheep</ref><box>[[100, 100]]</box>",
}
TAGGED = {
    "qwen2_vl": "The dog [250, 250, 500, 999], [0, 0, 1000, 1000] runs",
    "qwen2_5_vl": "The dog [8, 6, 16, 23], [0, 0, 31, 23] runs",
    "qwen3_vl": "The dog [250, 250, 500, 999], [0, 0, 1000, 1000] runs",
    "qwen3_vl_moe": "The dog [250, 250, 500, 999], [0, 0, 1000, 1000] runs",
    "qwen3_5": "The dog [250, 250, 500, 999], [0, 0, 1000, 1000] runs",
    "internvl": "<ref>The dog</ref><box>[[250, 250, 500, 999], [0, 0, 1000, 1000]]</box> runs",
}
FRACTIONS = "The dog [0.250, 0.250, 0.500, 0.999], [0.000, 0.000, 1.000, 1.000] runs"
ROW_TAGS = "<ref>The dog</ref><box>[[250, 250, 500, 999], [0, 0, 1000, 1000]]</box> runs"


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The family's name and a processor, whose tokenizer has InternVL's tags."""
    folder = tmp_path_factory.mktemp("published") / request.param
    MAKERS[request.param](folder)
    processor = FamilyProcessor.load("model.pretrained", str(folder), 1024)
    if request.param == "internvl":
        processor.tokenizer.add_tokens(TAGS, special_tokens=True)
    return request.param, processor


def write(folder: Path, answer: str, objects: Any = None, *, worse: str = "") -> Path:
    Image.new("RGB", (640, 480)).save(folder / "a.jpg")
    said = [
        {"role": "user", "content": "<image>Where?"},
        {"role": "assistant", "content": answer},
    ]
    row: dict[str, Any] = {"messages": said, "images": ["a.jpg"]}
    row |= {"objects": objects} if objects else {}
    row |= {"rejected_response": worse} if worse else {}
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def trained(processor: Any, sample: Sample) -> str:
    encoder = processor.encoder()
    laid_out, labels = encoder.layout(sample)
    check_labels(sample, laid_out, labels, encoder)
    encoded = encoder(sample)
    ids = encoded.input_ids[encoded.labels != IGNORE_INDEX].tolist()
    text = processor.tokenizer.decode(ids[:-1])
    if "<ref>" in text:  # each tag is one token, as in InternVL's own training
        tags = processor.tokenizer.convert_tokens_to_ids(TAGS)
        assert sum(ids.count(tag) for tag in tags) == 4
    return text.strip()


def test_objects(family: Any, tmp_path: Path) -> None:
    name, processor = family
    text = '{"bbox_2d": <bbox>, "label": "<ref-object>"} <ref-object><bbox>'
    boxes = [[160, 120, 320, 480.4], [64, 48]]
    path = write(tmp_path, text, {"ref": ["sheep", "sheep"], "bbox": boxes})
    fractions = '{"bbox_2d": [0.250, 0.250, 0.500, 1.000], "label": "sheep"} sheep[0.100, 0.100]'
    assert trained(processor, SampleDataset(path)[0]) == SWIFT.get(name, fractions)
    kept = '{"bbox_2d": [160, 120, 320, 480.4], "label": "sheep"} sheep[64, 48]'
    assert trained(processor, SampleDataset(path, boxes="keep")[0]) == kept


def test_tags_in_texts(family: Any, tmp_path: Path) -> None:
    name, processor = family
    sample = SampleDataset(write(tmp_path, ROW_TAGS))[0]
    assert trained(processor, sample) == TAGGED.get(name, FRACTIONS)
    assert sample.turns[-1].text == FRACTIONS
    folder = tmp_path / "ingested"
    ingest(tmp_path / "rows.jsonl", folder, workers=1)
    assert trained(processor, SampleDataset(folder)[0]) == TAGGED.get(name, FRACTIONS)
    for path in (folder, tmp_path / "rows.jsonl"):
        assert SampleDataset(path, boxes="keep")[0].turns[-1].text == ROW_TAGS
    pair = SampleDataset(write(tmp_path, "none", worse=ROW_TAGS))[0]
    rejected = processor.encoder()(pair).rejected
    ids = rejected.input_ids[rejected.labels != IGNORE_INDEX].tolist()
    assert processor.tokenizer.decode(ids[:-1]).strip() == TAGGED.get(name, FRACTIONS)


@ONLY_QWEN
@pytest.mark.parametrize("size", [(640, 480), (33, 70), (9, 8), (500, 31)])
def test_pixels_are_those_of_the_resized_image(family: Any, tmp_path: Path, size: Any) -> None:
    _, processor = family
    path = write(tmp_path, "<bbox>", {"ref": [], "bbox": [[0, 0, 1, 1]], "bbox_type": "norm1"})
    Image.new("RGB", size).save(tmp_path / "a.jpg")
    sample = SampleDataset(path)[0]
    _, rows, columns = processor.encoder()(sample).extras["image_grid_thw"][0].tolist()
    assert trained(processor, sample) == f"[0, 0, {4 * columns - 1}, {4 * rows - 1}]"


@ONLY_QWEN
def test_images_that_the_processor_refuses(family: Any, tmp_path: Path) -> None:
    _, processor = family
    path = write(tmp_path, "<bbox>", {"ref": [], "bbox": [[0, 0, 1, 1]], "bbox_type": "norm1"})
    Image.new("RGB", (4000, 8)).save(tmp_path / "a.jpg")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: images of 4000 x 8 pixels"):
        processor.encoder()(SampleDataset(path)[0])


def test_the_preview_shows_the_box_of_the_row(tmp_path: Path) -> None:
    preview(write(tmp_path, ROW_TAGS), tmp_path / "page.html")
    assert "&lt;/ref&gt;&lt;box&gt;[[250, 250," in (tmp_path / "page.html").read_text()


@ONLY_QWEN
def test_each_box_is_in_its_image(family: Any, tmp_path: Path) -> None:
    """A box of a field is in the image of image_id, a tagged one in the last image before it."""
    _, processor = family
    Image.new("RGB", (640, 480)).save(tmp_path / "a.jpg")
    Image.new("RGB", (24, 16)).save(tmp_path / "b.jpg")
    asked = (
        "<image> <box>(0,0),(1000,1000)</box> <image> <box>(0,0),(1000,1000)</box> <bbox> <bbox>"
    )
    row = {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "x"}],
        "images": ["a.jpg", "b.jpg"],
        "objects": {"bbox": [[0, 0, 24, 16], [0, 0, 640, 480]], "image_id": [1, 0]},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    sample = SampleDataset(tmp_path / "rows.jsonl")[0]
    whole, prompt = processor.encoder()(sample), processor.encoder().prompt(sample)
    text = processor.tokenizer.decode(prompt.input_ids, skip_special_tokens=True)
    first, second = "[0, 0, 31, 23]", "[0, 0, 23, 15]"
    assert f" {first} " in text
    assert f" {second} {second} {first}" in text
    assert whole.input_ids[: len(prompt.input_ids)].equal(prompt.input_ids)
