"""Every format, as its publishers describe it, gives the sample that one reads in it by eye."""

import base64
import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Image
from encoders import Tar, jsonl, shown
from PIL import Image as Pillow

from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError, Sample


def picture(colour: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Pillow.new("RGB", (6, 4), (colour, 0, 0)).save(buffer, kind)
    return buffer.getvalue()


RED, BLUE = picture(200), picture(10)


def only(path: Path, **options: Any) -> list[str]:
    dataset = SampleDataset(path, **options)
    assert len(dataset) == 1
    return shown(dataset[0])


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<image>What?<image>"},
    {"role": "assistant", "content": "A bus, not <image>."},
]
SHOWN = ["system: Be brief.", "user: [a.png]What?[b.png]", "assistant: A bus, not <image>."]


def test_messages_with_placeholders_as_ms_swift_has_them(tmp_path: Path) -> None:
    row = {"messages": CHAT, "images": ["a.png", "b.png"], "videos": [], "audios": None}
    assert only(jsonl(tmp_path / "a.jsonl", row)) == SHOWN
    boxed = {
        "messages": [
            {"role": "user", "content": "<image>Where is <ref-object>?", "loss": False},
            {"role": "assistant", "content": "At <bbox> and <bbox>", "loss": True},
        ],
        "images": ["a.png"],
        "objects": {"ref": ["the sheep"], "bbox": [[1.5, 1, 3, 4], [3, 4]]},
    }
    (tmp_path / "a.png").write_bytes(RED)
    assert only(jsonl(tmp_path / "b.jsonl", boxed)) == [
        "user: [a.png]Where is the sheep?",
        "assistant: At [0.250, 0.250, 0.500, 1.000] and [0.500, 1.000]",
    ]


def test_messages_with_parts_as_openai_and_trl_have_them(tmp_path: Path) -> None:
    address = "data:image/png;base64," + base64.b64encode(RED).decode()
    parts = [
        {"type": "image", "text": None, "image": "a.png"},
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image", "text": None},
        {"type": "text", "text": "What is <image>?", "image": None},
    ]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A tag."}]}
    row = {"messages": [{"role": "user", "content": parts}, answer], "images": ["c.png"]}
    dataset = SampleDataset(jsonl(tmp_path / "a.jsonl", row))
    assert dataset.format == "messages"
    sample = dataset[0]
    assert [media.data for media in sample.media] == [None, RED, None]
    assert [part.kind for part in sample.turns[0].parts] == ["image", "image", "image", "text"]
    assert sample.turns[0].parts[3].text == "What is <image>?"
    assert (sample.media[0].path, sample.media[2].path) == (
        str(tmp_path / "a.png"),
        str(tmp_path / "c.png"),
    )
    row["images"] = []
    with pytest.raises(DataError, match=r"a\.jsonl:1: the messages show more images"):
        SampleDataset(jsonl(tmp_path / "a.jsonl", row))[0]
    split = {"prompt": [CHAT[0], {"role": "user", "content": "Hi"}], "completion": "Yes."}
    assert only(jsonl(tmp_path / "b.jsonl", split)) == [
        "system: Be brief.", "user: Hi", "assistant: Yes."
    ]  # fmt: skip


def hub_rows() -> dict[str, list[Any]]:
    """Columns as ``datasets`` stores them: every key in every part, missing ones null."""
    content = [
        [{"type": "image", "text": None}, {"type": "text", "text": "What?"}],
        [{"type": "text", "text": "Red."}],
    ]
    messages = [
        {"role": role, "content": parts}
        for role, parts in zip(("user", "assistant"), content, strict=True)
    ]
    return {"messages": [messages] * 3, "images": [[{"bytes": RED, "path": "a.png"}]] * 3}


@pytest.mark.parametrize("stored", ["parquet", "disk"])
def test_messages_from_parquet_and_from_datasets_on_disk(tmp_path: Path, stored: str) -> None:
    table = Dataset.from_dict(hub_rows()).cast_column("images", [Image()])
    path = tmp_path / ("a.parquet" if stored == "parquet" else "saved")
    if stored == "parquet":
        table.to_parquet(str(path))
    else:
        table.save_to_disk(str(path))
    dataset = SampleDataset(path)
    streamed = list(dataset.stream())
    assert streamed == [dataset[index] for index in range(3)]
    assert shown(dataset[2]) == ["user: [a.png]What?", "assistant: Red."]
    assert dataset[2].media[0].data == RED  # as stored, not decoded and encoded again
    assert dataset[2].row == 2


def many_rows(path: Path) -> SampleDataset:
    pq.write_table(pyarrow.table({"text": [f"document {n}" for n in range(3000)]}), path)
    return SampleDataset(path)


def read_by_number(dataset: SampleDataset) -> list[str]:
    return [dataset[number].turns[-1].text for number in range(2950, 2980)]


def test_a_cache_of_arrow_files_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed at the lock, although nothing has to be written."""
    path = tmp_path / "a.parquet"
    texts = read_by_number(many_rows(path))
    open_file = os.open

    def refuse(file: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(file).startswith(str(tmp_path / "hf")):
            raise OSError(errno.EROFS, "Read-only file system", file)
        return open_file(file, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert read_by_number(SampleDataset(path)) == texts


@pytest.mark.parametrize("whole_batches", [True, False])
def test_an_arrow_file_of_the_cache_that_broke_off(tmp_path: Path, whole_batches: bool) -> None:
    """Reading ended with an IndexError, or with an error that named no file."""
    path = tmp_path / "a.parquet"
    read_by_number(many_rows(path))
    (copy,) = tmp_path.glob("hf/**/*.arrow")
    if whole_batches:
        with pyarrow.OSFile(str(copy)) as file:
            table = pyarrow.ipc.open_stream(file).read_all()
        with pyarrow.ipc.new_stream(str(copy), table.schema) as stream:
            stream.write_table(table.slice(0, 2000))
    else:
        os.truncate(copy, copy.stat().st_size // 2)
    with pytest.raises(DataError, match=r"/hf.*: (has 2000 of the 3000 rows|.*damaged).*delete"):
        read_by_number(SampleDataset(path))


def test_the_cauldron_and_onevision_parquet(tmp_path: Path) -> None:
    pairs = [
        {"user": "What?", "assistant": "Two <image>.", "source": "x"},
        {"user": "Sure?", "assistant": "Yes", "source": "x"},
    ]
    images = [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": "b.png"}]
    folder = tmp_path / "vqa"
    folder.mkdir()
    for number in range(2):
        table = {"images": [images], "texts": [pairs], "relevance_ratings": [[5, 4]]}
        pq.write_table(pyarrow.table(table), folder / f"train-{number:05d}-of-00002.parquet")
    dataset = SampleDataset(folder)
    assert (len(dataset), dataset.format) == (2, "cauldron")
    assert dataset[1].where == f"{folder}/train-00001-of-00002.parquet:1"
    assert [media.data for media in dataset[1].media] == [RED, BLUE]
    assert [part.kind for part in dataset[1].turns[0].parts] == ["image", "text", "image", "text"]
    assert [turn.text for turn in dataset[1].turns] == [
        "\n\nWhat?", "Two <image>.", "Sure?", "Yes"
    ]  # fmt: skip
    said = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Red"}]
    row = {"id": ["7"], "image": [images[1]], "conversations": [said], "data_source": ["s"]}
    pq.write_table(pyarrow.table(row), tmp_path / "ov.parquet")
    assert only(tmp_path / "ov.parquet") == ["user: [b.png]\nWhat?", "assistant: Red"]


def test_questions_and_answers_in_fields(tmp_path: Path) -> None:
    alpaca = {
        "instruction": "<image>Name it.", "input": "Short.", "output": "Bus", "system": "S",
        "history": [["q", "a"]], "images": ["a.png"],
    }  # fmt: skip
    assert only(jsonl(tmp_path / "a.jsonl", alpaca)) == [
        "system: S", "user: q", "assistant: a", "user: [a.png]Name it.\nShort.", "assistant: Bus"
    ]  # fmt: skip
    swift = {"query": "<video>Why?", "response": "So", "videos": ["v.mp4"]}
    assert only(jsonl(tmp_path / "b.jsonl", swift)) == ["user: [v.mp4]Why?", "assistant: So"]
    pairs = {"system": "S", "conversation": [{"human": "q", "assistant": "a"}]}
    assert only(jsonl(tmp_path / "c.jsonl", pairs)) == ["system: S", "user: q", "assistant: a"]


DOCUMENT = {
    "text_list": ["One.", "Two.", "Three."],
    "image_info": [
        {"image_name": "b.png", "matched_text_index": 2, "matched_sim": 0.3},
        {"image_name": "a.png", "matched_text_index": 0, "matched_sim": 0.2},
    ],
    "similarity_matrix": [[0.1, 0.1, 0.3], [0.2, 0.1, 0.1]],
}


def test_interleaved_documents(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", DOCUMENT)
    assert only(path) == ["user: ", "assistant: [a.png]One. Two. [b.png]Three."]
    wrong = json.loads(json.dumps(DOCUMENT))
    wrong["image_info"][0]["matched_text_index"] = 3
    with pytest.raises(DataError, match="matched_text_index is 3"):
        SampleDataset(jsonl(path, wrong))[0]


def test_caption_pairs_in_tars(tar: Tar, tmp_path: Path) -> None:
    """img2dataset's layout; the key ends at the first dot of the file's name."""
    first = {
        "x/0001.jpg": picture(3, "JPEG"),
        "x/0001.txt": b"A bus\n",
        "x/0001.json": json.dumps({"url": "http://x", "key": "0001", "width": 6}).encode(),
        "x/0002.jpg": picture(4, "JPEG"),
        "x/0002.json": json.dumps({"caption": "Two", "status": "success"}).encode(),
    }
    tar(tmp_path / "shard-000.tar", first)
    tar(tmp_path / "shard-001.tar", {"y.1.mp4": b"v", "y.txt": b"Clip"})
    dataset = SampleDataset(tmp_path / "shard-{000..001}.tar")
    assert [shown(sample) for sample in dataset.stream()] == [
        ["user: [0001.jpg]", "assistant: A bus"],
        ["user: [0002.jpg]", "assistant: Two"],
        ["user: [y.1.mp4]", "assistant: Clip"],
    ]
    assert dataset[0].media[0].data == first["x/0001.jpg"]
    assert dataset[2].where == f"{tmp_path}/shard-001.tar:1"
    assert dataset[2].media[0].kind == "video"
    assert list(SampleDataset(tmp_path).stream()) == list(dataset.stream())


def test_conversations_in_tars_with_compound_endings(tar: Tar, tmp_path: Path) -> None:
    said = [
        {"from": "human", "value": "<image-1> or <image-2>?"},
        {"from": "gpt", "value": "Red"},
    ]
    members = {
        "0001.img10.png": BLUE,
        "0001.img2.png": RED,
        "0001.json": json.dumps({"conversations": said, "image": ["old/a.png"]}).encode(),
    }
    sample = SampleDataset(tar(tmp_path / "a.tar", members))[0]
    assert [media.data for media in sample.media] == [RED, BLUE]
    assert shown(sample) == ["user: [0001.img2.png] or [0001.img10.png]?", "assistant: Red"]


def test_video_sets(tmp_path: Path) -> None:
    share = {
        "video_id": "v", "video_path": "p/v.mp4", "timestamp": ["0", "2"], "keyframe": [0, 48],
        "captions": [{"idx": "1", "content": "first"}, {"idx": "-1", "content": "All of it."},
                     {"idx": "2", "content": "later"}],
    }  # fmt: skip
    assert only(jsonl(tmp_path / "s.jsonl", share)) == ["user: [v.mp4]", "assistant: All of it."]
    webvid = tmp_path / "w.csv"
    webvid.write_text(
        "videoid,contentUrl,duration,page_dir,name\n7,http://x/7.mp4,PT1S,0_9,A dog\n"
    )
    (tmp_path / "0_9").mkdir()
    (tmp_path / "0_9/7.mp4").touch()
    assert only(webvid) == ["user: [7.mp4]", "assistant: A dog"]
    assert SampleDataset(webvid)[0].media[0].path == str(tmp_path / "0_9/7.mp4")
    panda = tmp_path / "p.csv"
    panda.write_text("videoID,url,timestamp,caption\nabc,https://y/abc,[],[]\n")
    with pytest.raises(DataError, match="the row has videoID -> write one row per clip"):
        SampleDataset(panda)[0]


def test_folders_of_files_and_captions_in_tables(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for name in ("big_dog/1.png", "cat/2.png", "cat/3.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(RED)
    (folder / "cat/3.txt").write_text("A cat sleeps.\n")
    (folder / "cat/notes.md").write_text("no medium")
    question = "What is in the image?\nAnswer the question using a single word or phrase."
    assert [shown(sample) for sample in SampleDataset(folder).stream()] == [
        [f"user: [1.png]\n{question}", "assistant: big dog"],
        [f"user: [2.png]\n{question}", "assistant: cat"],
        ["user: [3.png]", "assistant: A cat sleeps."],
    ]
    table = 'file_name,caption\n1.png,"A dog, and\nits ""bone"""\n\n2.mp4,B\n'
    (folder / "big_dog/metadata.csv").write_text(table, encoding="utf-8-sig")
    rows = list(SampleDataset(folder / "big_dog").stream())
    assert [shown(row) for row in rows if isinstance(row, Sample)] == [
        ["user: [1.png]", 'assistant: A dog, and\nits "bone"'],
        ["user: [2.mp4]", "assistant: B"],
    ]
    assert [media.kind for row in rows if isinstance(row, Sample) for media in row.media] == [
        "image", "video"
    ]  # fmt: skip
    (folder / "b.tsv").write_text("image\tcaption\na.png\tone\ttoo many\nb.png\ttwo\n")
    bad, good = SampleDataset(folder / "b.tsv").stream()
    assert isinstance(bad, DataError)
    assert "3 fields, but the header has 2" in bad.problem
    assert isinstance(good, Sample)


def test_a_format_can_be_named_and_unknown_rows_are_explained(tmp_path: Path) -> None:
    both = {"conversations": [], "messages": CHAT, "images": ["a.png", "b.png"]}
    path = jsonl(tmp_path / "a.jsonl", both)
    assert SampleDataset(path).format == "llava"
    assert only(path, format="messages") == SHOWN
    with pytest.raises(ValueError, match=r"allowed: .*webdataset.*llava"):
        SampleDataset(path, format="lava")
    with pytest.raises(DataError, match=r"format of the rows is unknown \(fields: x, y\)"):
        SampleDataset(jsonl(path, {"x": 1, "y": 2}))
    path.write_text("\n".join(["{"] * 3) + "\n" + json.dumps(both))
    assert SampleDataset(path).format == "llava"  # the first rows are broken
