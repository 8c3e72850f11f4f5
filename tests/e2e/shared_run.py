"""What end-to-end and fault tests share: 24 drawn images, and a small run on them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_run import small_recipe, train

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_data.folder_lock import hold_lock

COLORS = {"red": (220, 30, 40), "green": (40, 160, 60), "blue": (30, 70, 220)}


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.json: answers of different lengths; two rows of three show an image, one a video."""
    return make_once(tmp_path_factory, "tiny_data", make_data)


@pytest.fixture(scope="session")
def small_run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in FP32 without dropout: six steps, checkpoints of steps 2, 4 and 6.

    Tests that change it copy it before (:func:`tiny_run.copy_run`).
    """

    def make(folder: Path) -> None:
        done = train(small_recipe(tiny_data, folder / "run"), folder)
        assert done.returncode == 0, done.stderr[-3000:]

    return make_once(tmp_path_factory, "small_run", make) / "run"


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Make a folder once for all processes of pytest-xdist; they wait for the first one."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / name
    with hold_lock(base / f"{name}.lock", "tests", wait=True):
        if not (base / f"{name}.made").exists():
            folder.mkdir()
            make(folder)
            (base / f"{name}.made").touch()
    return folder


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(24):
        color = list(COLORS)[number % 3]
        answer = " ".join([color] * (1 + number % 4))
        row: dict[str, Any] = {"id": number}
        question = "Which color?"
        if number % 3:
            noise = rng.integers(-20, 21, size=(16, 16, 3))
            pixels = np.clip(np.array(COLORS[color]) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            row["image"] = f"{number}.png"
            question = f"<image>\n{question}"
        if number == 21:
            (folder / "clip").mkdir()
            for frame in range(2):
                Image.new("RGB", (16, 16), COLORS[color]).save(folder / f"clip/{frame}.png")
            row["video"] = "clip"
            question = f"<video>\n{question}"
        row["conversations"] = [
            {"from": "human", "value": question},
            {"from": "gpt", "value": answer},
        ]
        rows.append(row)
    (folder / "data.json").write_text(json.dumps(rows))
