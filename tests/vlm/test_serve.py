"""transformers' server answers an OpenAI client with a run's model, in both layouts."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from served import serve

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
    words = [
        "export",
        "--model",
        str(found["coat"]),
        "--to",
        str(found["llava"]),
        "--format",
        "llava",
    ]
    assert main(words) == 0
    return found


@pytest.mark.parametrize("layout", sorted(LINES))
def test_an_openai_client_gets_the_answer_of_generate(
    layout: str, folders: dict[str, Path], tmp_path: Path
):
    words = LINES[layout]
    assert len(words) == words.index("serve") + 2, "the command and the folder"
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
    with serve(folders[layout]) as ask:
        answer = ask(path, QUESTION, MAX).choices[0]
        assert answer.message.content.strip() == expected
        streamed = ask(path, QUESTION, MAX, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in streamed]
        # The streamer leaves out the last token if it is a part of a character.
        assert "".join(pieces).strip() == expected.rstrip("\ufffd")
        assert ask(None, QUESTION, MAX).choices[0].message.content.strip() == blind
