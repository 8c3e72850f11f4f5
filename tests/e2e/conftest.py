"""A tiny run that every end-to-end test can start: 24 drawn images, a model of 30k parameters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import coat_vlm  # noqa: F401 - first, so that torchvision imports

COLORS = {"red": (220, 30, 40), "green": (40, 160, 60), "blue": (30, 70, 220)}


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.json: answers of different lengths; two rows of three show an image, one a video."""
    folder = tmp_path_factory.mktemp("tiny_data")
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
    return folder
