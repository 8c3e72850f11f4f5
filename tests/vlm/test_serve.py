"""transformers' server answers an OpenAI client with a run's model, in both layouts."""

import base64
import io
import shlex
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coat_cli.main import main
from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.generate import generate, load, set_stop_tokens
from coat_vlm.model import build_model
from coat_vlm.model.processor import CoatVlmProcessor, prepare_tokenizer, train_tokenizer

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "sharing.md"
LINES = {
    ("coat" if "coat_vlm" in line else "llava"): shlex.split(line)
    for line in GUIDE.read_text(encoding="utf-8").splitlines()
    if " serve " in line and not line.startswith("vllm")
}
"""The guide's command by the layout that it serves."""
QUESTION = "\nWhat is in the image?"
MAX = 12


@pytest.fixture(scope="module")
def folders(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same random model as a run writes it and as export does."""
    tokenizer = prepare_tokenizer(train_tokenizer([QUESTION, "A red circle."] * 5, 320))
    torch.manual_seed(0)
    model = build_model(tiny.recipe(projector="mlp2x_gelu"), tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 * parameter[0].numel() ** -0.5)
    tokens: Any = model.config.tokens_per_image
    processor = CoatVlmProcessor(tokenizer, image_size=28, tokens_per_image=tokens)
    processor.adopt_template("chatml")
    set_stop_tokens(model, processor)
    parent = tmp_path_factory.mktemp("served")
    found = {"coat": parent / "coat", "llava": parent / "llava"}
    model.save_pretrained(found["coat"])
    processor.save_pretrained(found["coat"])
    words = ["export", str(found["coat"]), "--to", str(found["llava"]), "--format", "llava"]
    assert main(words) == 0
    return found


@pytest.fixture(scope="module", params=sorted(LINES))
def served(request: Any, folders: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """The address of a server that the guide's command has started, and its model's name."""
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package, reason="pip install openai 'transformers[serving]'")
    from transformers.cli.transformers import app

    words = LINES[request.param]
    folder = str(folders[request.param])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--non-blocking", "--device", "cpu", "--dtype", "float32", "--port", port]
    start = words.index("serve")
    assert len(words) == start + 2, "the command and the folder"
    server = app(["serve", folder, *options], standalone_mode=False)
    address = f"http://localhost:{port}"
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"{address}/v1", folder
    finally:
        server.kill_server()


def decode_with_pillow(data: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """As torchvision's decode_image, which is missing where its wheel does not fit torch's."""
    image = Image.open(io.BytesIO(data.numpy().tobytes())).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_an_openai_client_gets_the_answer_of_generate(
    served: tuple[str, str],
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    from openai import OpenAI

    monkeypatch.setattr("torchvision.io.decode_image", decode_with_pillow)

    path = tmp_path / "a.png"
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    media = (Media(kind="image", path=str(path)),)
    turn = Turn("user", (Part("image"), Part("text", QUESTION)))
    own = load(folders["coat"], "cpu")
    expected, blind = generate(
        *own,
        [
            Sample(id="a", turns=(turn,), media=media),
            Sample(id="b", turns=(Turn("user", (Part("text", QUESTION),)),)),
        ],
        MAX,
    )
    assert expected != blind, "the test could not see that the image was left out"

    address, model = served
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    content: Any = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]
    client = OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)

    def ask(**options: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        return client.chat.completions.create(
            model=model, messages=messages, max_tokens=MAX, temperature=0, **options
        )

    answer = ask().choices[0]
    assert answer.message.content.strip() == expected
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    # The streamer leaves out the last token if it is a part of a character.
    assert "".join(pieces).strip() == expected.rstrip("\ufffd")
    content.pop(0)
    assert ask().choices[0].message.content.strip() == blind
