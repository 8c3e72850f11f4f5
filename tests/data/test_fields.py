"""No medium, turn or weight of the loss of a row is left out without a word."""

from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from encoders import encoder_of, jsonl, talk
from transformers import PreTrainedTokenizerFast

from coat_cli.main import main
from coat_data.load.check_labels import check_labels
from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import IGNORE_INDEX
from coat_data.sample import DataError, Sample
from coat_data.tools.export import export
from coat_data.tools.ingest import ingest
from coat_data.tools.lint import lint
from coat_vlm.config import SourceConfig
from coat_vlm.train.open_sources import find_row_warnings, open_source


def read(folder: Path, row: Any, **options: Any) -> Sample:
    return SampleDataset(jsonl(folder / "rows.jsonl", row), **options)[0]


@pytest.mark.parametrize(
    "row",
    [
        {"images": ["0.jpg"], "text": "a caption"},
        {"image": "0.jpg", "question": "a", "answer": "caption", "text": "other words"},
    ],
)
def test_images_beside_a_text_are_shown(tmp_path: Path, row: dict[str, Any]) -> None:
    sample = read(tmp_path, row)
    assert [Path(medium.path or "").name for medium in sample.media] == ["0.jpg"]
    assert not sample.is_document
    assert "caption" in sample.turns[1].text


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"audio": "0.wav", "text": "t"}, "audio"),
        ({"url": "https://x.org/0.jpg", "text": "t"}, "url"),
        (talk("What?", image_path="0.jpg"), "image_path"),
        (
            {"messages": [{"role": "user", "content": "q", "tool_calls": [{"id": "1"}]},
                          {"role": "assistant", "content": "a"}]},
            "tool_calls",
        ),
        (talk("What?", weight=0.5), "weight"),
        (talk("What?", video="0.mp4", start_time=3.0), "start_time"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_read_is_refused_by_name(
    tmp_path: Path, row: dict[str, Any], field: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1.*\b{field} looks like") as caught:
        read(tmp_path, row)
    assert f"ignore_fields: [{field}]" in caught.value.remedy
    assert (
        len(SampleDataset(jsonl(tmp_path / "rows.jsonl", row), ignore_fields=[field])[0].turns) == 2
    )


@pytest.mark.parametrize(
    "row",
    [
        {"text": "t", "url": "https://x.org/wiki/File:Cat.jpg", "timestamp": "2019"},  # C4
        {"text": "t", "dump": "CC-MAIN", "url": "https://x.org", "file_path": "s3://a/b.warc.gz"},
        talk("What?", image="0.jpg", url="https://x.org/0.jpg", image_size="640x480", weight=1),
        talk("What?", image="0.jpg", width_list=[6], image_source="coco", video_topic="sport"),
    ],
)
def test_properties_and_addresses_of_pages_are_only_listed(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    reading = read(tmp_path, row).reading
    assert reading.used | reading.ignored == set(row)
    assert reading.notes == (("media_first",) if "image" in row else ())


@pytest.mark.parametrize(
    "text",
    [
        "<image>\nWhat?",
        "Picture 1: <img>0.jpg</img>\nWhat?",
        "A <|image_1|> here?",
    ],
)
def test_a_placeholder_without_a_medium_is_not_trained_as_text(tmp_path: Path, text: str) -> None:
    without: list[dict[str, Any]] = [{}, {"image": None}, {"images": []}]
    for fields in without:
        with pytest.raises(DataError, match="but no image or video there"):
            read(tmp_path, talk(text, **fields))
    with pytest.raises(DataError, match="but no image or video there"):
        read(tmp_path, {"text": text})


def test_quoted_placeholders_and_media_without_one_are_noted(tmp_path: Path) -> None:
    rows = [
        talk("What is <image> in HTML?"),
        talk("What?", image="0.jpg"),
        talk("<image>\nWhat?", image="0.jpg", model="x"),
    ]
    path = jsonl(tmp_path / "rows.jsonl", *rows)
    notes = [cast(Sample, sample).reading.notes for sample in SampleDataset(path).stream()]
    assert notes == [("placeholder_as_text",), ("media_first",), ()]
    summary = lint(path, print, check_media="none")
    assert summary.bad == 0
    assert summary.fields["rows"].lines("rows") == [
        "rows: fields used: conversations, image (2 of 3 rows); ignored: model (1 of 3 rows)",
        "rows: in 1 of 3 rows a placeholder such as <image> without a file is read as text; "
        f"first {path}:1",
        "rows: in 1 of 3 rows media without a placeholder are shown before the first question; "
        f"first {path}:2",
    ]
    config = SourceConfig(name="chat", path=str(path))
    warnings = find_row_warnings([config], [open_source(config, 0)])
    assert [line.partition(": ")[0] for line in warnings] == ["chat", "chat"]


WEIGHTED = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "first", "weight": 0},
    {"role": "user", "content": "r", "loss": False},
    {"role": "assistant", "content": "second", "weight": 1},
]
UNSUPERVISED = [True, False, True, True]


def llava(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    said = [dict(message) for message in messages]
    for turn in said:
        turn["from"], turn["value"] = turn.pop("role"), turn.pop("content")
    return said


@pytest.mark.parametrize("name", ["conversation", "conversations"])  # Mantis, MiniCPM-V
def test_role_and_content_under_other_names(tmp_path: Path, name: str) -> None:
    turns = [
        {"role": "user", "content": "<image> and <image>?"},
        {"role": "assistant", "content": "A bus."},
    ]
    row = {"id": 7.0, "images": ["0.jpg", "1.jpg"], name: turns, "label": "bus"}
    sample = read(tmp_path, row)
    assert (sample.id, len(sample.media), sample.turns[1].text) == ("7", 2, "A bus.")
    assert [part.kind for part in sample.turns[0].parts] == ["image", "text", "image", "text"]
    with pytest.raises(DataError, match="has label"):  # TRL's unpaired preferences
        read(tmp_path, row | {"label": False})


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_the_weight_of_a_turn_survives_reading_ingest_and_export(tmp_path: Path, name: str) -> None:
    row = {name: WEIGHTED if name == "messages" else llava(WEIGHTED)}
    path = jsonl(tmp_path / "rows.jsonl", row)
    ingest(path, tmp_path / "ingested")
    sources = [path, tmp_path / "ingested"]
    for to in ("llava", "messages"):
        sources.append(export(path, tmp_path / to, to).path)
    for source in sources:
        turns = SampleDataset(source)[0].turns
        assert [turn.supervised for turn in turns] == UNSUPERVISED, source


@pytest.mark.parametrize("template", ["vicuna_v1", "plain", "tokenizer"])
def test_an_answer_of_weight_0_has_no_labels_and_the_same_tokens(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    encoder = encoder_of(tokenizer, template, image_token_id=None)
    plain = [{k: v for k, v in m.items() if k in ("role", "content")} for m in WEIGHTED]
    full, part = (encoder(read(tmp_path, {"messages": m})) for m in (plain, WEIGHTED))
    assert part.input_ids.tolist() == full.input_ids.tolist()
    runs = [label for label in full.labels.tolist() if label != IGNORE_INDEX]
    kept = [label for label in part.labels.tolist() if label != IGNORE_INDEX]
    assert 0 < len(kept) < len(runs)
    assert runs[-len(kept) :] == kept
    assert "first" not in tokenizer.decode(kept)
    assert "second" in tokenizer.decode(kept)
    last = read(tmp_path, {"messages": plain}, supervise="last")
    assert encoder(last).labels.tolist() == part.labels.tolist()
    sample = read(tmp_path, {"messages": WEIGHTED})
    check_labels(sample, *encoder.layout(sample), encoder)


@pytest.mark.parametrize(
    ("field", "turn", "words"),
    [
        ({"weight": 0.5}, 1, "set weight to 0 or 1"),
        ({"weight": 1}, 0, "only answers can be supervised"),
        ({"loss_scale": 2.0}, 1, "weight of the loss"),
        ({"weight": 0}, 1, "no answer is supervised"),
    ],
)
def test_other_weights_are_refused(
    tmp_path: Path, field: dict[str, Any], turn: int, words: str
) -> None:
    row = talk()
    row["conversations"][turn] |= field
    with pytest.raises(DataError, match=words):
        read(tmp_path, row)


def test_clips_in_the_row_and_in_parts_of_qwen(tmp_path: Path) -> None:
    spans: list[dict[str, Any]] = [
        {"start": 1.5, "end": 4},
        {"video_start": 1.5, "video_end": 4.0},
    ]
    for fields in spans:
        for row in (talk("<video>?", video="a.mp4", **fields),
                    {"video": "a.mp4", "caption": "Rain", **fields}):  # fmt: skip
            medium = read(tmp_path, row).media[0]
            assert (medium.start, medium.end) == (1.5, 4)
        part = {"type": "video", "video": "a.mp4", **fields}
        content = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Rain"}]
        medium = read(tmp_path, {"messages": content}).media[0]
        assert (medium.start, medium.end) == (1.5, 4)
    with pytest.raises(DataError, match="two times"):
        read(tmp_path, talk("?", video={"path": "a.mp4", "start": 1}, start=2))
    with pytest.raises(DataError, match=r"the time \[2\] is wrong"):
        read(tmp_path, talk("?", video="a.mp4", start=[2]))
    with pytest.raises(DataError, match="videoid has a broken character"):
        read(tmp_path, {"videoid": "\ud800", "page_dir": "a", "name": "Rain"})
    with pytest.raises(DataError, match="looks like a time of the video"):
        read(tmp_path, talk("?", video=["a.mp4", "b.mp4"], start=2))


FLAT = {"img_path": "0.jpg", "q": "What?", "a": "A bus."}
COLUMNS = {"image": "img_path", "question": "q", "answer": "a"}


def test_columns_of_any_flat_row_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "flat.csv"
    path.write_text(",".join(FLAT) + "\n" + ",".join(FLAT.values()) + "\n")
    listed = tmp_path / "mix.yaml"
    listed.write_text(yaml.safe_dump({"sources": [{"path": path.name, "columns": COLUMNS}]}))
    recipe = SourceConfig(name="x", path=str(path), columns=COLUMNS)
    for dataset in (
        SampleDataset(path, columns=COLUMNS),
        SampleDataset(listed),
        open_source(recipe, 0),
    ):
        sample = dataset[0]
        assert [turn.text for turn in sample.turns] == ["\nWhat?", "A bus."]
        assert sample.media[0].path == str(tmp_path / "0.jpg")


def test_wrong_columns_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "rows.jsonl", FLAT)
    with pytest.raises(ValueError, match=r"columns has the key 'picture'; allowed: id, .*image"):
        SampleDataset(path, columns={"picture": "img_path"})
    with pytest.raises(DataError, match=r"no column 'image_path' for image \(columns: img_path"):
        SampleDataset(path, columns={"image": "image_path"}, format="question")[0]
    Path(tmp_path / "0.jpg").write_bytes(b"")
    mapped = [f"{name}={column}" for name, column in COLUMNS.items()]
    assert main(["data", "lint", str(path), "--check-media", "none", "--columns", *mapped]) == 0
    assert "fields used: answer, image, question; ignored: none" in capsys.readouterr().out
    path = jsonl(tmp_path / "rows.jsonl", {"text": "t", "audio": "a.wav"})
    arguments = ["data", "lint", str(path), "--check-media", "none"]
    assert main(arguments) == 1
    assert main([*arguments, "--ignore-fields", "audio"]) == 0
