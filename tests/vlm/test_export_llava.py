"""Folders in the layout of LlavaForConditionalGeneration, read by transformers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from saved_model import QUESTION, saved

from coat_cli.main import main
from coat_vlm import torchvision_ops
from coat_vlm.generate import PromptEncoder, load
from coat_vlm.model.pretrained import check_composed_folder

STOCK = """
import runpy, sys
# Declares torchvision's operators where its wheel does not fit torch's; imports nothing of ours.
kept = runpy.run_path(sys.argv.pop())
kept["ensure_torchvision"]()
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

def answered(folder):
    model, info = LlavaForConditionalGeneration.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    wrong = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(info[name] for name in wrong), info
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    assert type(processor).__name__ == "LlavaProcessor"
    messages = [{"role": "user", "content": [
        {"type": "image"}, {"type": "text", "text": "\\nWhat is in the image?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    image = Image.open(folder + ".png")
    inputs = processor(images=image, text=text, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
        answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    default = AutoProcessor.from_pretrained(folder)(images=image, text=text, return_tensors="pt")
    return {**inputs, "logits": logits, "answer": answer, "torchvision": default["pixel_values"]}

out, *folders = sys.argv[1:]
torch.save([answered(folder) for folder in folders], out)
assert not [name for name in sys.modules if name.split(".")[0].startswith("coat_")]
"""


def ask(processor: Any, image: Any) -> Any:
    content = [{"type": "image", "image": image}, {"type": "text", "text": f"\n{QUESTION}"}]
    options: Any = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    chat = [{"role": "user", "content": content}]
    return processor.apply_chat_template(chat, add_generation_prompt=True, **options)


CASES = [
    ("clip", "llama", {"select_feature": "patch"}, "default", 16),
    ("clip", "qwen2", {"select_feature": "cls_patch", "select_layer": -1}, "full", 17),
    ("siglip", "llama", {"image": {"mode": "pad"}, "template": "vicuna_v1"}, "full", 16),
    ("siglip", "qwen2", {"select_layer": 1}, "full", 16),
]


@pytest.fixture(scope="module")
def stock(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """All cases exported, and what the stock classes make of them in a process without us."""
    parent = tmp_path_factory.mktemp("llava")
    values = np.random.default_rng(1).integers(0, 256, (30, 44, 3), dtype=np.uint8)
    folders = []
    for number, (tower, language, choices, _, _) in enumerate(CASES):
        tied = language == "qwen2"
        text = tiny.language(language, rope_theta=500.0, tie_word_embeddings=tied)
        source = saved(
            tiny, parent / f"ours{number}", vision=tiny.vision(tower), language=text, **choices
        )
        folder = parent / f"llava{number}"
        assert (
            main(["export", "--model", str(source), "--to", str(folder), "--format", "llava"]) == 0
        )
        Image.fromarray(values).save(f"{folder}.png")
        folders.append(str(folder))
    out = parent / "out.pt"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", STOCK, str(out), *folders, torchvision_ops.__file__]
    done = subprocess.run(
        command, env=environment, cwd=parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return parent, torch.load(out)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_stock_transformers_answers_as_we_do(
    stock: tuple[Path, list[dict[str, Any]]], number: int
) -> None:
    parent, results = stock
    theirs, (*_, strategy, tokens) = results[number], CASES[number]
    config = json.loads((parent / f"llava{number}" / "config.json").read_text())
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    assert config["vision_feature_select_strategy"] == strategy
    assert config["text_config"]["rope_theta"] == 500.0  # transformers 4 reads this one
    loaded: Any = load(parent / f"ours{number}", dtype=torch.float32)
    model, processor = loaded
    inputs = ask(processor, parent / f"llava{number}.png")
    assert torch.equal(inputs["input_ids"], theirs["input_ids"])
    assert (inputs["input_ids"] == config["image_token_index"]).sum() == tokens
    torch.testing.assert_close(theirs["pixel_values"], inputs["pixel_values"], rtol=0, atol=1e-6)
    difference = (theirs["torchvision"] - inputs["pixel_values"]).abs().max().item()
    assert difference <= 1.01 / 255 / 0.4  # a step of a pixel's value, divided by the deviation
    names = ("input_ids", "attention_mask", "pixel_values")
    with torch.no_grad():
        logits = model(**{name: theirs[name] for name in names}).logits
        answer = model.generate(
            **inputs,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=PromptEncoder(processor).stop_token_ids,
        )
    assert logits.std() > 0.5
    torch.testing.assert_close(theirs["logits"], logits, rtol=0, atol=1e-5)
    assert torch.equal(theirs["answer"], answer)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"projector": "mlp_downsample"}, "projector is mlp_downsample.*allowed: mlp2x_gelu"),
        ({"language": "gemma2", "attn_implementation": "eager"}, "Gemma2ForCausalLM.*soft cap"),
        ({"open_clip": True}, "coat_open_clip_vision"),
    ],
)
def test_what_does_not_fit_is_named(
    tiny: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    choices: dict[str, Any],
    message: str,
) -> None:
    options = dict(choices)
    if "language" in options:
        options["language"] = tiny.language(options["language"])
    if options.pop("open_clip", False):
        options |= {"library": "open_clip", "config": {"vision_cfg": tiny.open_clip["clip"]}}
    source = saved(tiny, tmp_path / "ours", **options)
    status = main(
        ["export", "--model", str(source), "--to", str(tmp_path / "x"), "--format", "llava"]
    )
    assert status == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "x").exists()


def test_a_written_folder_is_a_published_model(stock: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = stock[0] / "llava2"
    with pytest.raises(ValueError, match=r"train it with model\.pretrained="):
        check_composed_folder(str(folder))
    assert type(load(folder)[0]).__name__ == "LlavaForConditionalGeneration"
