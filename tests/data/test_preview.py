"""The page shows what the model gets: its pixels, and every token by its label."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coat_cli.main import main
from coat_data.load.encode import IGNORE_INDEX
from coat_data.load.readable import token_spans
from coat_data.tools.preview import to_picture
from coat_vlm.model.processor import CoatVlmProcessor

ANSWER = "Red.\n\u4e2d\U0001f600 <b>&amp;</b>"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    Image.new("RGB", (64, 64), (250, 10, 40)).save(tmp_path / "a.png")
    said = [
        {"from": "human", "value": "<image>\nWhich <script>?"},
        {"from": "gpt", "value": ANSWER},
    ]
    rows = [{"id": name, "image": f"{name}.png", "conversations": said} for name in ("a", "absent")]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    return path


def spans(html: str, kind: str) -> str:
    """The text of all spans of a kind in the tokens of the page."""
    tokens = re.search(r'<div class="tokens">(.*?)</div>', html, flags=re.DOTALL)
    assert tokens is not None
    found = re.findall(rf'<span class="{kind}">(.*?)</span>', tokens[1], flags=re.DOTALL)
    text = "".join(found).replace("&lt;", "<").replace("&gt;", ">").replace("&#34;", '"')
    return text.replace("&amp;", "&").replace("\u21b5\n", "\n")


def test_a_page_with_a_model(source: Path, tmp_path: Path, make_tokenizer: Any) -> None:
    processor = CoatVlmProcessor(
        make_tokenizer("llama2_first"), image_size=16, tokens_per_image=4, template="vicuna_v1"
    )
    processor.save_pretrained(tmp_path / "model")
    out = tmp_path / "pages/p.html"
    arguments = ["data", "preview", str(source), "--out", str(out)]
    assert main([*arguments, "--model", str(tmp_path / "model")]) == 0
    html = out.read_text(encoding="utf-8")
    assert spans(html, "trained").lstrip(" ") == ANSWER + "</s>"
    assert spans(html, "image") == "[4 image tokens]"
    assert "Which <script>?" in spans(html, "context")
    assert "<script>" not in html
    assert "absent.png: no such file" in html
    assert main([*arguments, "--ids"]) == 2
    address = re.search(r"data:image/png;base64,([^\"]+)", html)
    assert address is not None
    with Image.open(io.BytesIO(base64.b64decode(address[1]))) as shown:
        assert shown.size == (16, 16)
        assert shown.getpixel((8, 8)) == (250, 10, 40)


def test_pixels_are_turned_back() -> None:
    values = np.random.default_rng(0).integers(256, size=(5, 7, 3), dtype=np.uint8)
    mean, std = (0.48, 0.45, 0.4), (0.26, 0.2, 0.27)
    pixels = (values / 255 - np.array(mean)) / np.array(std)
    picture = to_picture(torch.tensor(pixels.transpose(2, 0, 1), dtype=torch.float32), mean, std)
    assert np.array_equal(np.asarray(picture), values)


def test_tokens_of_a_character_are_one_piece() -> None:
    characters = ["a", "\xe9", "\u4e2d", "b"]
    data = "".join(characters).encode()
    ids, labels = [999, 999, *data, 999], [IGNORE_INDEX] * 3 + [*data[1:], IGNORE_INDEX]
    spans = token_spans(
        ids, labels, lambda own: bytes(own).decode(errors="replace"), {999: "image"}
    )
    assert [(span.text, span.kind) for span in spans] == [
        ("[2 image tokens]", "image"), ("a", "context"), ("\xe9", "trained"), ("\u4e2d", "trained"),
        ("b", "trained"), ("[1 image tokens]", "image"),
    ]  # fmt: skip
