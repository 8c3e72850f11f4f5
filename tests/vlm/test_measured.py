"""Measured lengths are kept for a source of any form until one of its files changes."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from PIL import Image

from coat_data.load.encode import Size
from coat_data.sample import Sample
from coat_vlm.config import SourceConfig
from coat_vlm.distributed import ALONE, World
from coat_vlm.train.data import measure_sources
from coat_vlm.train.open_sources import open_source

_T = TypeVar("_T")


class Counting:
    """An encoder whose samples have as many tokens as their text has characters."""

    def __init__(self) -> None:
        self.calls = 0

    def measure(self, sample: Sample) -> Size:
        self.calls += 1
        return Size(1 + sum(len(turn.text) for turn in sample.turns), len(sample.media))


def talk(answer: str) -> list[dict[str, Any]]:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": answer}]
    return [{"id": row, "conversations": turns} for row in range(3)]


def jpeg() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    return stream.getvalue()


def write_json(path: Path, answer: str) -> None:
    path.write_text(json.dumps(talk(answer)))


def write_tar(path: Path, answer: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for row in range(3):
            for suffix, data in (("jpg", jpeg()), ("txt", answer.encode())):
                member = tarfile.TarInfo(f"{row:04d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def write_picture(path: Path, answer: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jpeg())
    path.with_suffix(".txt").write_text(answer)


LISTING = "sources:\n- {name: a, path: a.json}\n- {name: b, path: b.json, repeat: 2}\n"

FORMS = {
    "b.json": ("b.json", write_json),
    "list.yaml": ("b.json", write_json),
    "shards": ("shards/1.tar", write_tar),
    "pictures": ("pictures/cat/1.jpg", write_picture),
}
"""Path of a source -> one of its files, and what writes it."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_json(tmp_path / f"{name}.json", "short")
    for number in range(2):
        write_tar(tmp_path / f"shards/{number}.tar", "short")
        write_picture(tmp_path / f"pictures/cat/{number}.jpg", "short")
    (tmp_path / "list.yaml").write_text(LISTING)
    return tmp_path


def lengths_of(data: Path, path: str, encoder: Any, world: World = ALONE) -> list[np.ndarray]:
    source = SourceConfig(name="x", path=path, select="first 90%")
    return measure_sources(
        [source],
        [open_source(source, seed=0)],
        encoder,
        None,
        folder=data / "run",
        world=world,
        num_workers=0,
        skip_bad=False,
    )


@pytest.mark.parametrize("path", FORMS)
def test_a_source_is_measured_again_only_after_a_change(data: Path, path: str) -> None:
    encoder = Counting()
    before = lengths_of(data, path, encoder)
    size = len(before[0][:, 0])
    assert encoder.calls == size > 0
    assert lengths_of(data, path, encoder)[0][:, 0].tolist() == before[0][:, 0].tolist()
    assert encoder.calls == size
    name, write = FORMS[path]
    write(data / name, "a longer answer")
    after = lengths_of(data, path, encoder)
    assert encoder.calls == 2 * size
    # As many more tokens as characters, in each row of the changed file that takes part.
    grown = (after[0][:, 0] - before[0][:, 0]).tolist()
    assert set(grown) <= {0, len("a longer answer") - len("short")}
    assert any(grown)
