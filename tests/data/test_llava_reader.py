import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coat_data.containers import json_file
from coat_data.containers.json_file import JsonRows
from coat_data.load.dataset import SampleDataset
from coat_data.media.root import MediaRoot
from coat_data.readers.llava import READER
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Media, Part, Sample, Turn

ROOT = Path("/media")


def read(row: Any) -> Sample:
    return READER.read(row, Place(source="file.json", row=7, root=MediaRoot(ROOT)))


def talk(*texts: str, **fields: Any) -> dict[str, Any]:
    """A row in which human and gpt take turns."""
    speakers = ["human", "gpt"] * len(texts)
    said = [{"from": who, "value": text} for who, text in zip(speakers, texts, strict=False)]
    return {"id": "a", **fields, "conversations": said}


def parts(row: Any, turn: int = 0) -> list[str]:
    """The parts of a turn: text as it is, media as [kind]."""
    return [
        part.text if part.kind == "text" else f"[{part.kind}]"
        for part in read(row).turns[turn].parts
    ]


def refused(row: Any, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        read(row)
    assert caught.value.where == "file.json:8"
    for word in words:
        assert word in str(caught.value)


def test_the_documented_row() -> None:
    row = talk("<image>\nWhat colour is the bus?", "Red.", image="coco/a.jpg")
    assert read(row) == Sample(
        id="a",
        turns=(
            Turn("user", (Part("image"), Part("text", "\nWhat colour is the bus?"))),
            Turn("assistant", (Part("text", "Red."),)),
        ),
        media=(Media(kind="image", path="/media/coco/a.jpg"),),
        source="file.json",
        row=7,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"image": ["a.jpg", "/media/sub/b.jpg"]},
        {"images": [{"path": "a.jpg"}, {"path": "/media/sub/b.jpg", "bytes": None}]},
        {"image": None, "images": ["a.jpg", "/media/sub/b.jpg"], "video": None, "videos": []},
    ],
)
def test_several_images_keep_their_places_in_every_turn(fields: dict[str, Any]) -> None:
    row = talk("Is <image> like", "No", "<image>this?\n", "Yes", **fields)
    assert [media.path for media in read(row).media] == ["/media/a.jpg", "/media/sub/b.jpg"]
    assert parts(row, 0) == ["Is ", "[image]", " like"]
    assert parts(row, 2) == ["[image]", "this?\n"]


def test_media_without_a_placeholder_comes_first() -> None:
    assert parts(talk("What?", "A bus", image="a.jpg")) == ["[image]", "\nWhat?"]
    both = talk("What?", "A bus", video="a.mp4", image="a.jpg")
    assert parts(both) == ["[image]", "\n", "[video]", "\nWhat?"]
    system = talk("What?", "A bus", image="a.jpg")
    system["conversations"].insert(0, {"from": "system", "value": "Look at <image>."})
    assert parts(system, 0) == ["Look at <image>."]
    assert parts(system, 1) == ["[image]", "\nWhat?"]


def test_placeholders_that_are_text() -> None:
    assert parts(talk("What is <image> in HTML?", "A tag")) == ["What is <image> in HTML?"]
    row = talk("<image>\nWhich tag?", "It is <image>, not <video>", image="a.jpg")
    assert parts(row, 1) == ["It is <image>, not <video>"]
    assert parts(talk("<video> and <image>?", "x", video="a.mp4")) == ["[video]", " and <image>?"]
    assert parts(talk("q <Image> <image >", "a", image="a")) == ["[image]", "\nq <Image> <image >"]


def test_images_and_videos_in_the_order_of_their_placeholders() -> None:
    row = talk("<video> <image><image>", "x", image=["a.jpg", "b.jpg"], video="c.mp4")
    assert [media.path for media in read(row).media] == [
        "/media/c.mp4",
        "/media/a.jpg",
        "/media/b.jpg",
    ]
    assert [media.kind for media in read(row).media] == ["video", "image", "image"]
    assert parts(row) == ["[video]", " ", "[image]", "[image]"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (talk("<image><image>", "a", image="a.jpg"), ["2 <image>", "1 image"]),
        (talk("q", " \n"), ["answer in turn 1 is empty"]),
        (talk("q"), ["no answer"]),
        (talk("q", "a", image=[""]), ["image '' is not a path"]),
        (talk("q", "a", images=[{"bytes": "x"}]), ["images.bytes is not base64"]),
        (talk("q", "a", image="../b.jpg"), ["'../b.jpg' leaves the media root /media"]),
        (talk("q", "a", image="ftp://x.org/b.jpg"), ["URL", "download"]),
        (talk("q", "a", image="a", images=["b"]), ["both image and images"]),
        (talk("q", "a", id=[1]), ["id is list"]),
        (talk("q", "half \ud83d"), ["conversations[1].value", "broken character"]),
        ({"messages": []}, ["no field conversations", "fields: messages"]),
        ({"conversations": ["hello"]}, ["conversations[0] is str, not an object"]),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, ["'narrator'", "human"]),
        ({"conversations": [{"from": "human"}]}, ["conversations[0].value is null"]),
        ([1, 2], ["the row is list, not an object"]),
    ],
)
def test_bad_rows_are_named(row: Any, words: list[str]) -> None:
    refused(row, *words)


@pytest.mark.parametrize("fields", [{}, {"image": "a.jpg"}])
def test_an_answer_may_precede_the_first_question(fields: dict[str, Any]) -> None:
    gpt_first = talk("q", "a", **fields)
    gpt_first["conversations"].insert(0, {"from": "gpt", "value": "Hello <image>"})
    assert read(gpt_first).turns[1:] == read(talk("q", "a", **fields)).turns
    gpt_first["conversations"].insert(0, {"from": "system", "value": "Be brief."})
    assert [turn.text for turn in read(gpt_first).turns][:2] == ["Be brief.", "Hello <image>"]
    gpt_only = {"conversations": [{"from": "gpt", "value": "Hello"}], **fields}
    refused(gpt_only, "start with a human turn")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=8,
)


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def read_rows(path: Path) -> list[Any]:
    rows = JsonRows([path])
    return [rows[index] for index in range(len(rows))]


def test_json_and_jsonl_give_the_same_rows(tmp_path: Path) -> None:
    rows = [talk("q\u2028\x85\xe9", "a"), {"x": [1, None]}]
    array = write(tmp_path / "a.json", "\ufeff \n" + json.dumps(rows, indent=1, ensure_ascii=False))
    lines = "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    jsonl = write(tmp_path / "a.jsonl", f"\n{lines}\n\n")
    assert read_rows(array) == rows
    assert read_rows(jsonl) == rows
    assert read_rows(write(tmp_path / "b.json", json.dumps(rows[0]))) == rows[:1]
    assert read_rows(write(tmp_path / "c.json", "[]")) == []


@pytest.mark.parametrize(
    ("text", "good", "problem"),
    [
        ('[{"a": 1},\n {"a": }]', 1, "line 2"),
        ('[{"a": 1},\n {"a": 2},\n', 2, "line 3"),
        ('[{"a": 1}]\n 3', 1, "Extra data"),
        ("[" * 100_000, 0, "recursion"),
    ],
)
def test_an_array_that_breaks_off_keeps_its_rows(
    tmp_path: Path, text: str, good: int, problem: str
) -> None:
    path = write(tmp_path / "a.json", text)
    rows = JsonRows([path])
    assert len(rows) == good
    assert problem in str(rows.damage)
    with pytest.raises(DataError, match=problem):
        SampleDataset(path, format="llava")


@pytest.mark.parametrize(
    ("text", "bad", "line", "problem"),
    [
        ('{"a": 1}\n\n{"a"\n{"a": 3}\n', 1, 3, "line 3"),
        ('{"a": 1}\n' + "[" * 100_000, 1, 2, "recursion"),
        ('{"a": ' + "9" * 10_000 + "}", 0, 1, "digits"),
        ("id,image\n1,a.jpg", 0, 1, "line 1"),
    ],
)
def test_a_line_that_does_not_parse_is_one_bad_row(
    tmp_path: Path, text: str, bad: int, line: int, problem: str
) -> None:
    """Rows were counted from 0, without blank lines."""
    path = write(tmp_path / "a.json", text)
    rows = JsonRows([path])
    errors = [row for row in rows.stream() if isinstance(row, DataError)]
    assert errors[0].where == f"{path}:{line}"
    assert problem in errors[0].problem
    with pytest.raises(DataError, match=problem):
        rows[bad]


@given(st.lists(VALUES, max_size=6), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]))
@example([-0.0], 1, False, None)  # a window that ends behind the point of a number
def test_an_array_is_cut_as_the_json_module_parses_it(
    rows: list[Any], window: int, escaped: bool, indent: int | None
) -> None:
    """Whatever stands at the end of a window: numbers, escapes, characters of several bytes."""
    text = json.dumps(rows, ensure_ascii=escaped, indent=indent)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(json_file, "_WINDOW_BYTES", window),
    ):
        path = Path(folder) / "a.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        read = JsonRows([path])
        assert read.damage is None
        assert len(read) == len(rows)
        for index, row in enumerate(rows):
            if any(0xD800 <= ord(c) < 0xE000 for c in json.dumps(row, ensure_ascii=False)):
                continue  # not UTF-8 unless escaped
            assert repr(read[index]) == repr(json.loads(json.dumps(row)))
