"""The NLVR converter, on small corpora made here."""

import io
import json
import tarfile

import pytest
from PIL import Image

from coat_data.sample import DataError
from coat_datasets.nlvr import convert_nlvr

QUESTION = "Is this statement true? Answer yes or no."
STACK = [[{"type": "square", "size": 20, "x_loc": 40, "y_loc": 80, "color": "Yellow"}], [], []]
LOOSE = [[{"type": "circle", "size": 10, "x_loc": 7, "y_loc": 33, "color": "Black"}], [], []]
EXAMPLES = [
    {
        "identifier": "7-0",
        "sentence": "There is a tower. ",
        "label": "true",
        "structured_rep": STACK,
    },
    {
        "identifier": "7-1",
        "sentence": "A circle is blue",
        "label": "false",
        "structured_rep": LOOSE,
    },
    {
        "identifier": "12-3",
        "sentence": "One box is empty",
        "label": "true",
        "structured_rep": LOOSE,
    },
]


def picture(name):
    encoded = io.BytesIO()
    Image.new("RGB", (4, 1), (len(name), sum(name.encode()) % 256, 0)).save(encoded, format="PNG")
    return encoded.getvalue()


def image_names(split):
    return [f"{split}-{one['identifier']}-{order}.png" for one in EXAMPLES for order in range(6)]


def add(tar, path, data):
    info = tarfile.TarInfo(path)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def make_corpus(folder, split="dev", examples=EXAMPLES, names=None, prefix="images/3/"):
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in examples)
    (folder / f"{split}.json").write_text(lines)
    with tarfile.open(folder / f"{split}_images.tar", "w") as tar:
        for name in reversed(image_names(split) if names is None else names):
            add(tar, prefix + name, picture(name))
    return folder


def test_six_yes_no_rows_for_every_statement(tmp_path):
    source, out = make_corpus(tmp_path / "nlvr"), tmp_path / "out"
    assert convert_nlvr(source, out, split="dev") == {
        "images/dev": 18,
        "dev.json": 18,
        "eval/dev": 18,
        "dev majority": 66.67,
    }
    rows = json.loads((out / "dev.json").read_text())
    lines = (out / "eval/dev/questions.jsonl").read_text().splitlines()
    expected = [
        *[("There is a tower.", "yes", "tower")] * 6,
        *[("A circle is blue", "no", "scatter")] * 6,
        *[("One box is empty", "yes", "scatter")] * 6,
    ]
    for row, line, name, (sentence, answer, category) in zip(
        rows, lines, image_names("dev"), expected, strict=True
    ):
        assert row == {
            "id": name[:-4],
            "image": f"images/dev/{name}",
            "conversations": [
                {"from": "human", "value": f"<image>\n{sentence}\n{QUESTION}"},
                {"from": "gpt", "value": answer},
            ],
        }
        assert json.loads(line) == {
            "question_id": name[:-4],
            "image": f"images/dev/{name}",
            "text": f"{sentence}\n{QUESTION}",
            "answer": answer,
            "category": category,
        }
        assert (out / row["image"]).read_bytes() == picture(name)


def test_two_splits_in_one_folder(tmp_path):
    source = make_corpus(tmp_path / "nlvr")
    make_corpus(source, "hidden", prefix="")
    summary = convert_nlvr(source, tmp_path / "out", split=("dev", "hidden"))
    assert summary["dev.json"] == summary["hidden.json"] == 18
    for split in ("dev", "hidden"):
        files = sorted(path.name for path in (tmp_path / "out/images" / split).iterdir())
        assert files == sorted(image_names(split))


def test_the_archive_cannot_write_elsewhere(tmp_path):
    source = make_corpus(tmp_path / "nlvr", prefix="../../../escaped/")
    with tarfile.open(source / "dev_images.tar", "a") as tar:
        add(tar, "../evil.png", b"evil")
        add(tar, str(tmp_path / "absolute.png"), b"evil")
        link = tarfile.TarInfo("images/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/"
        tar.addfile(link)
    convert_nlvr(source, tmp_path / "out", split="dev")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nlvr", "out"]
    written = [path.name for path in (tmp_path / "out/images").rglob("*") if not path.is_dir()]
    assert sorted(written) == sorted(image_names("dev"))


def test_an_image_that_is_a_link_counts_as_missing(tmp_path):
    names = image_names("dev")
    source = make_corpus(tmp_path / "nlvr", names=names[1:])
    with tarfile.open(source / "dev_images.tar", "a") as tar:
        link = tarfile.TarInfo(names[0])
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    fails(tmp_path, source, rf"dev_images\.tar: 1 of 18 images are missing, first {names[0]}")


def fails(tmp_path, source, message, split="dev"):
    with pytest.raises(DataError, match=message):
        convert_nlvr(source, tmp_path / "out", split=split)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_missing_images_are_counted(tmp_path):
    source = make_corpus(tmp_path / "nlvr", names=image_names("dev")[:-2])
    fails(tmp_path, source, r"2 of 18 images are missing, first dev-12-3-4\.png")


def test_a_missing_split_lists_what_is_there(tmp_path):
    source = make_corpus(tmp_path / "nlvr")
    fails(tmp_path, source, r"train\.json: there is no such file.*'dev\.json'", split="train")


@pytest.mark.parametrize("keep", [100, 1500])
def test_a_truncated_archive(tmp_path, keep):
    source = make_corpus(tmp_path / "nlvr")
    archive = source / "dev_images.tar"
    archive.write_bytes(archive.read_bytes()[:keep])
    fails(tmp_path, source, r"dev_images\.tar: (not a sound tar file|\d+ of 18 images)")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        (json.dumps(EXAMPLES[0] | {"label": "maybe"}), "KeyError 'maybe'"),
        (json.dumps({"identifier": "7-0"}), "KeyError 'sentence'"),
        (json.dumps(EXAMPLES[0] | {"sentence": None}), "AttributeError"),
        (json.dumps(EXAMPLES[0] | {"identifier": "../../x"}), r"identifier '\.\./\.\./x'"),
        (json.dumps(EXAMPLES[0] | {"sentence": " "}), "sentence ''"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    source = make_corpus(tmp_path / "nlvr")
    text = (source / "dev.json").read_text().splitlines()
    (source / "dev.json").write_text("\n".join([text[0], line, text[2]]))
    fails(tmp_path, source, rf"dev\.json:2: .*{message}")


def test_an_example_that_occurs_twice(tmp_path):
    source = make_corpus(tmp_path / "nlvr", examples=[*EXAMPLES, EXAMPLES[0]])
    fails(tmp_path, source, "question_id 'dev-7-0-0' occurs twice")


def test_an_empty_split(tmp_path):
    source = make_corpus(tmp_path / "nlvr", examples=[])
    fails(tmp_path, source, r"dev\.json: there is no example")


@pytest.mark.parametrize("split", ["", [], "../dev", ["dev", "a/b"]])
def test_the_split_must_be_a_name(tmp_path, split):
    with pytest.raises(ValueError, match="name at least one split"):
        convert_nlvr(tmp_path, tmp_path / "out", split=split)
