"""Copies of evaluation images and texts in training data are found, and other rows are not."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import talk
from PIL import Image, ImageOps

from coat_cli.main import main
from coat_data.sample import DataError, Media
from coat_data.tools.overlap import Benchmarks, Question, find_overlap
from coat_vlm.config import SourceConfig
from coat_vlm.train.open_sources import open_source, open_sources


def make_photo(seed: int) -> Image.Image:
    """Smooth random colours with edges, as in a photograph."""
    rng = np.random.default_rng(seed)
    small = rng.integers(256, size=(12, 16, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((320, 240), Image.Resampling.BICUBIC)
    for _ in range(4):
        left, top = (int(value) for value in rng.integers(200, size=2))
        color = tuple(int(value) for value in rng.integers(256, size=3))
        image.paste(color, (left, top, left + 60, top + 30))
    return image


def compress(image: Image.Image) -> Image.Image:
    stored = io.BytesIO()
    image.save(stored, "JPEG", quality=40)
    return Image.open(stored).convert("RGB")


def crop(image: Image.Image, side: float) -> Image.Image:
    width, height = image.size
    left, top = round(width * (1 - side) / 2), round(height * (1 - side) / 2)
    return image.crop((left, top, width - left, height - top))


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "same": lambda image: image,
    "square": lambda image: image.resize((336, 336)),
    "compressed": compress,
    "gray": lambda image: image.convert("L"),
    "cropped more": lambda image: crop(image, 0.81),
    "flipped": ImageOps.mirror,
    "all": lambda image: compress(crop(image, 0.9).resize((200, 150))),
}

LONG = "Which of the two ships that lie in the old harbour has the taller mast and no flag?"


@pytest.fixture
def benchmark(tmp_path: Path) -> Path:
    """A question set of twenty images, one of them plain, and a long question."""
    folder = tmp_path / "questions"
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for number in range(20):
        image = make_photo(number) if number else Image.new("RGB", (64, 64), "white")
        image.save(folder / f"{number}.png")
        text = f"What is shown?\nAnswer with one of the {'many ' * 9}words."
        rows.append({"question_id": str(number), "image": f"{number}.png", "text": text})
    rows.append({"question_id": "long", "image": "1.png", "text": LONG})
    lines = [json.dumps({**row, "answer": "x"}) for row in rows]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    return folder


def write_rows(tmp_path: Path, rows: list[dict[str, Any]], name: str = "train.json") -> Path:
    (tmp_path / name).write_text(json.dumps(rows))
    return tmp_path / name


def test_copies_are_listed_and_left_out_by_exclude(
    benchmark: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows: list[dict[str, Any]] = []
    for number, (name, change) in enumerate(COPIES.items(), 1):
        change(make_photo(number)).save(tmp_path / f"{name}.png")
        rows.append(talk("<image>\nWhere?", image=f"{name}.png"))
    near = f"{LONG[:-2].upper()}, they said! And then it rained."
    rows.append(talk("Tell a story.", near))
    bad = len(rows)
    for number in range(100, 115):  # other photographs, and a plain image
        make_photo(number).save(tmp_path / f"{number}.png")
        rows.append(talk("<image>\nWhich ship in the harbour?", image=f"{number}.png"))
    Image.new("RGB", (64, 64), "black").save(tmp_path / "plain.png")
    rows.append(talk(f"<image>\nAnswer with one of the {'many ' * 9}words.", image="plain.png"))
    rows.append(talk("<image>\nq", image="absent.png"))
    path, out = write_rows(tmp_path, rows), tmp_path / "overlap.jsonl"
    for workers in "1", "2":
        words = ["data", "overlap", str(path), "--against", str(benchmark), "--out", str(out)]
        assert main([*words, "--num-workers", workers]) == 0
        printed = capsys.readouterr().out
        assert printed.splitlines()[1].split() == ["train", str(benchmark), "7", "1", "8"]
        assert "1 rows could not be read" in printed
        assert "20 questions are too short to be found by their text" in printed
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [entry["row"] for entry in found] == list(range(1, bad + 1))
    assert [entry["text"] for entry in found] == [False] * 7 + [True]
    assert found[1]["questions"] == [f"{benchmark}/questions.jsonl:3"]

    kept = open_source(SourceConfig(name="any", path=str(path), exclude=str(out)), seed=0)
    assert [kept[n].row for n in range(len(kept))] == list(range(bad, len(rows)))


def test_a_list_of_sources_excludes_the_rows_of_each_file(benchmark: Path, tmp_path: Path) -> None:
    make_photo(3).save(tmp_path / "copy.png")
    clean, copy = talk("Why?"), talk("<image>\nWhere?", image="copy.png")
    (tmp_path / "other").mkdir()
    write_rows(tmp_path, [clean, copy])
    write_rows(tmp_path / "other", [clean, clean])  # a file of the same name
    listing = tmp_path / "mix.yaml"
    listing.write_text("sources: [{path: train.json}, {path: other/train.json, name: other}]")
    out = tmp_path / "overlap.jsonl"
    benchmarks = Benchmarks()
    benchmarks.add("held_out", [Question(where="a:0", text="", media=(photo(3),))])
    counts, _ = find_overlap(listing, benchmarks, out, workers=1)
    assert [(one.source, one.rows) for one in counts] == [("train", 1), ("other", 0)]
    config = SourceConfig(name="mix", path=str(listing), exclude=str(out))
    assert [len(rows) for rows in open_sources([config], 0)[1]] == [1, 2]
    other = SourceConfig(name="b", path=str(tmp_path / "other/train.json"), exclude=str(out))
    with pytest.raises(DataError, match=r"lists no row of source 'b' .*only of .*/train\.json"):
        open_source(other, seed=0)


def photo(seed: int) -> Media:
    stored = io.BytesIO()
    make_photo(seed).save(stored, "PNG")
    return Media(kind="image", path=f"{seed}", data=stored.getvalue())
