"""``lint`` tells what is wrong with every row and goes on, whatever the input is."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clips import write_clip
from encoders import talk
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from coat_cli.main import main
from coat_data.readers.catalogue import READERS
from coat_data.sample import DataError
from coat_data.tools.lint import LintSummary, lint
from coat_vlm.model.processor import CoatVlmProcessor


def problems(path: Path, **options: Any) -> tuple[LintSummary, list[DataError]]:
    found: list[DataError] = []
    return lint(path, found.append, **options), found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Eight rows, of which 1, 3, 4, 5 and 6 are bad, each in its own way."""
    pixels = np.random.default_rng(0).integers(256, size=(20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "text.png").write_text("no image")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.mp4").touch()
    rows = [
        talk("<image>q", image="a.png"),
        talk("<image><image>q", image="a.png"),
        talk("two words"),
        talk("q", image="absent.png"),
        talk("q", image="text.png"),
        talk("q", video="empty.mp4"),
        "{",
        talk("q", image="cut.png"),
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_every_bad_row_is_named_with_a_remedy(source: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["data", "lint", str(source)]) == 1
    lines = capsys.readouterr().out.splitlines()
    words = {2: "2 <image>", 4: "absent.png: no such file", 5: "text.png", 6: "is empty", 7: "JSON"}
    for line, (row, problem) in zip(lines, words.items(), strict=False):
        assert line.startswith(f"{source}:{row}: ")
        assert problem in line
        assert " -> " in line
    assert lines[5].startswith("a: fields used: conversations, image")
    assert lines[6].startswith("a: in 4 of 6 rows media without a placeholder")
    assert lines[7:] == [f"{source}: 8 rows, 5 problems (read as llava)"]
    summary, found = problems(source, check_media="none")
    assert [error.where for error in found] == [f"{source}:2", f"{source}:7"]
    _, found = problems(source, check_media="decode")
    assert [error.where.split(":")[1] for error in found] == ["2", "4", "5", "6", "7", "8"]
    source.write_text(json.dumps(talk("q")))
    assert main(["data", "lint", str(source)]) == 0
    source.write_text(f'[{json.dumps(talk("q"))}, {json.dumps(talk("<image>", image=3))}, {{"c"')
    summary, found = problems(source)
    assert (summary.rows, summary.bad) == (3, 2)
    assert "image is int" in found[0].problem
    assert "is not JSON" in found[1].problem
    source.write_text("[]")
    assert problems(source)[1][0].problem == "there are no rows"


def test_headers_of_videos_are_read(tmp_path: Path) -> None:
    frames = np.zeros((4, 32, 32, 3), dtype=np.uint8)
    write_clip(tmp_path / "good.mp4", frames)
    whole = (tmp_path / "good.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.mp4").write_text("no video\n" * 100)
    (tmp_path / "text.jpg").write_text("no image")
    Image.fromarray(frames[0]).save(tmp_path / "good.jpg")
    videos = ["good.mp4", "cut.mp4", "text.mp4", ["good.jpg", "text.jpg"], ["good.jpg"] * 2]
    source = tmp_path / "a.json"
    source.write_text(json.dumps([talk("<video>q", video=video) for video in videos]))
    for check in ("header", "decode"):
        _, found = problems(source, check_media=check)
        assert {error.where.split(":")[1] for error in found} >= {"2", "3"}, check
        assert {error.where.split(":")[1] for error in found} <= {"2", "3", "4"}, check
    assert len(problems(source)[1]) == 3


def test_equal_problems_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """200 rows of which 180 show images that are elsewhere, and one is bad in another way."""
    rows = [talk("<image>q", image=f"{n}.png") if n % 10 else talk("q") for n in range(200)]
    rows[40] = talk("<image><image>q", image="0.png")
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(rows))
    assert main(["data", "lint", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines[:4]] == [
        f"{path}:2", f"{path}:3", f"{path}:4", f"{path}:41"
    ]  # fmt: skip
    assert lines[4] == (
        f"180 rows in one file have this problem: {lines[0]} "
        "(rows 2-10, 12-20, 22-30, 32-40, 42-50, 52-60, 62-70, 72-80, ...)"
    )
    assert lines[-1] == f"{path}: 200 rows, 181 problems (read as llava)"


FIELDS = [
    "conversations", "messages", "images", "image", "video", "texts", "text_list", "image_info",
    "query", "response", "instruction", "output", "history", "conversation", "captions", "caption",
    "video_path", "system", "objects", "prompt", "completion", "id", "role", "content", "from",
    "value", "type", "text", "path", "bytes", "url", "user", "assistant", "loss", "start",
    "matched_text_index", "image_base64", "file_name", "idx", "ref", "bbox", "turns", "media",
    "row", "__key__", "__clip__", "jpg", "txt", "path", "class",
]  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=4)
    | st.sampled_from(
        ["human", "gpt", "user", "assistant", "<image>", "<video>\n", "a.png", "..", "image",
         "text", "<bbox>", "<ref-object>", "data:image/png;base64,AAAA", "http://x", "\ud800",
         "a\0"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
    ),
    max_leaves=25,
)  # fmt: skip
SAID = st.lists(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("role", "content", "from", "value", "loss", "user"), VALUES),
    ),
    max_size=3,
)
ROWS = st.dictionaries(st.sampled_from(FIELDS), VALUES | SAID, max_size=6) | VALUES
NAMES = st.sampled_from([None, *(reader.name for reader in READERS)])


@given(st.lists(ROWS, max_size=4), NAMES, st.booleans())
def test_no_row_makes_lint_crash(rows: list[Any], name: str | None, array: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        lines = "\n".join(json.dumps(row) for row in rows)
        path.write_text(json.dumps(rows) if array else lines)
        summary, found = problems(path, format=name)
        assert summary.bad == len(found)
        assert all(error.problem and error.remedy for error in found)


HEADS = [b"", b"[", b'{"a":', b"PAR1", b"\x1f\x8b", b"image,caption\n", b"datasets: ["]
FILES = ["a.json", "a.jsonl", "a.csv", "a.parquet", "a.tar", "a.tgz", "a.pkl", "a.yaml", "a"]


@given(st.binary(max_size=60), st.sampled_from(HEADS), st.sampled_from(FILES))
def test_no_file_makes_lint_crash(content: bytes, head: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(head + content)
        summary, found = problems(path)
        assert summary.bad == len(found)
        assert all(error.where.startswith(folder) for error in found)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("key", "check"), [("image", "header"), ("video", "decode")])
def test_a_named_pipe_or_a_device_is_refused_instead_of_waited_for(
    tmp_path: Path, key: str, check: Any
) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "device.mp4").symlink_to("/dev/zero")
    rows = [talk(f"<{key}>q", **{key: name}) for name in ("pipe.mp4", "device.mp4")]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    summary, found = problems(tmp_path / "a.json", check_media=check, follow_links=True)
    assert summary.bad == 2
    assert "is a named pipe (FIFO), which may never end" in found[0].problem
    assert "is a device, which may never end" in found[1].problem


def test_lint_with_a_template_that_refuses_a_row(
    tmp_path: Path, make_tokenizer: Any, capsys: pytest.CaptureFixture
) -> None:
    tokenizer = make_tokenizer("llama2_first")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ '[' + m['role'] + ']' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    CoatVlmProcessor(
        tokenizer, image_size=16, tokens_per_image=4, template="tokenizer"
    ).save_pretrained(tmp_path / "model")
    refused = talk("q")
    refused["conversations"].insert(0, {"from": "system", "value": "Be brief."})
    path = tmp_path / "chat.jsonl"
    path.write_text(f"{json.dumps(talk('q'))}\n\n{json.dumps(refused)}\n")
    assert main(["data", "lint", str(path), "--model", str(tmp_path / "model")]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"{path}:3: ")
    assert "no system" in line
