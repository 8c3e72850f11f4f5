"""Imports coat_vlm before the tests' modules, some of which begin with transformers."""

from pathlib import Path

import pytest
import torch

import coat_vlm  # noqa: F401 - first, so that torchvision imports


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 500 lines of nine words."""
    words = ["red", "green", "blue", "circle", "square", "star", "is", "the", "."]
    draws = torch.randint(0, 9, (6000,), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [" ".join(words[i] for i in draws[n : n + 12]) for n in range(0, 6000, 12)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines))
    return path
