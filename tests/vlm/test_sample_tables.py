"""Tables of answered questions, as TensorBoard and Weights & Biases read them back."""

import io
import json
import re
from hashlib import sha256
from html import unescape
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.config import TrackingConfig
from coat_vlm.train.sample_tables import COLUMNS, AnsweredSample
from coat_vlm.train.tracking import Metrics

HARD = "a | b *c* <b>d</b> [e](http://f) `g` h_i_j\nsecond \\| line 1. - # ![k](l) &lt;"
ORANGE, BLUE = (255, 128, 0), (0, 0, 255)


def save(path: Path, color: tuple[int, int, int], size: tuple[int, int]) -> Media:
    Image.new("RGB", size, color).save(path)
    return Media(kind="image", path=str(path))


def ask(number: int, text: str, reference: str, *media: Media) -> Sample:
    parts = (*(Part("image") for _ in media), Part("text", text))
    turns = (Turn("user", parts), Turn("assistant", (Part("text", reference),)))
    return Sample(id=str(number), turns=turns, media=media)


@pytest.fixture
def answered(tmp_path: Path) -> list[AnsweredSample]:
    """Sixteen questions, of which those with even numbers are in the table."""
    small = save(tmp_path / "small.png", ORANGE, (40, 30))
    large = save(tmp_path / "large.png", BLUE, (512, 1024))
    rows = [
        AnsweredSample(ask(0, "Which color?", "orange", small), "orange", True),
        AnsweredSample(ask(2, "What differs?", "the size", small, large), HARD, False),
        AnsweredSample(ask(4, "No image?", "none"), "", False),
        AnsweredSample(
            ask(6, "Gone?", "yes", Media(kind="image", path=str(tmp_path / "gone.png"))),
            "no",
            False,
        ),
        *(AnsweredSample(ask(n, f"Question {n}", "yes"), "yes", True) for n in (8, 10, 12, 14)),
    ]
    unseen = AnsweredSample(ask(99, "Never shown", "never"), "never", False)
    return [one for row in rows for one in (row, unseen)]


def write(folder: Path, answered: list[AnsweredSample], **tracking: object) -> None:
    metrics = Metrics(folder, TrackingConfig(**tracking), "run", enabled=True)  # type: ignore[arg-type]
    for step in (10, 20):
        metrics.write_samples("sft", step, {"colors": answered})
    metrics.close()


def test_tensorboard_shows_the_texts_as_they_are(
    tmp_path: Path, answered: list[AnsweredSample]
) -> None:
    write(tmp_path, answered)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    events = board.Tensors("sft/samples/colors/text_summary")
    assert [event.step for event in events] == [10, 20]
    page = markdown_to_safe_html(events[1].tensor_proto.string_val[0])
    rows = [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in page.split("<tr>")[1:]]
    cells = [[unescape(cell) for cell in row] for row in rows]
    assert cells[0] == ["#", "question", "reference", "prediction", "right or wrong"]
    assert cells[1] == ["1", "Which color?", "orange", "orange", "right"]
    assert cells[2] == ["2", "What differs?", "the size", HARD.replace("\n", " "), "wrong"]
    assert cells[4][1].startswith("Gone? (")
    assert "gone.png" in cells[4][1]
    assert [row[1] for row in cells[5:]] == [f"Question {n}" for n in (8, 10, 12, 14)]


def test_wandb_stores_the_table_with_its_images(
    tmp_path: Path, answered: list[AnsweredSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    folders = {name: str(tmp_path / name.lower()) for name in ("DATA_DIR", "CACHE_DIR")}
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", **folders}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    write(tmp_path, answered, tensorboard=False, wandb_project="mine")
    # The files that "wandb sync" uploads: one table for each step, and the pictures by their hash.
    staged = [path.read_bytes() for path in (tmp_path / "data_dir/artifacts/staging").iterdir()]
    pictures = {sha256(data).hexdigest(): data for data in staged if data.startswith(b"\x89PNG")}
    tables = [json.loads(data) for data in staged if data.startswith(b"{")]
    for table in tables:
        assert table["columns"] == ["image", "question", *COLUMNS[1:]]
        first, second, *others = table["data"]
        assert first[1:] == ["Which color?", "orange", "orange", "right"]
        assert second[1:] == ["What differs?", "the size", HARD, "wrong"]
        assert [row[0] for row in others] == [None] * 6
        with Image.open(io.BytesIO(pictures[second[0]["sha256"]])) as picture:
            assert picture.size == (40 + 128, 256)
            assert picture.convert("RGB").getpixel((0, 0)) == ORANGE
            assert picture.convert("RGB").getpixel((100, 200)) == BLUE
    (run,) = (tmp_path / "wandb").glob("offline-run-*/files")
    names = {path.name[:8] for path in (run / "media/table/sft/samples").iterdir()}
    assert names == {"colors_0", "colors_1"}
