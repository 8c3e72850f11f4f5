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
from saved_model import QUESTION, SIDE, saved
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from coat_cli.main import main
from coat_vlm import torchvision_ops
from coat_vlm.generate import PromptEncoder, load
from coat_vlm.model.pretrained import check_composed_folder
from coat_vlm.model.processor import train_tokenizer

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


VICUNA_OF_LLAVA_HF = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] %}{{ part['text'] or '<image>\\n' }}{% endfor %}"
    "{{ ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def stock_checkpoint(folder: Path, tiny: Any, crop: bool = True, **changes: Any) -> Any:
    """A checkpoint like llava-hf's, written by transformers: a whole CLIP tower, layer -2."""
    tokenizer: Any = train_tokenizer([QUESTION, "A red circle."] * 5, 320)
    tower = tiny.vision("clip") | changes.pop("vision", {})
    language = tiny.language("llama")
    config = LlavaConfig(
        vision_config=tower,
        text_config=language | {"vocab_size": len(tokenizer) + 7, "dtype": "float32"},
        image_token_index=tokenizer.get_vocab()["<image>"],
        **{"vision_feature_layer": -2, "vision_feature_select_strategy": "default"} | changes,
    )
    torch.manual_seed(1)
    model: Any = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    images: Any = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE} if crop else {"height": SIDE, "width": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        do_center_crop=crop,
    )
    LlavaProcessor(
        images, tokenizer, patch_size=7, chat_template=VICUNA_OF_LLAVA_HF
    ).save_pretrained(folder)
    return model


def test_a_checkpoint_of_transformers_is_read(tiny: Any, tmp_path: Path) -> None:
    stock = stock_checkpoint(tmp_path / "llava", tiny)
    with pytest.raises(ValueError, match="convert it first: coat-vlm export"):
        check_composed_folder(str(tmp_path / "llava"))
    assert main(["export", "--model", str(tmp_path / "llava"), "--to", str(tmp_path / "ours")]) == 0
    loaded: Any = load(tmp_path / "ours", dtype=torch.float32)
    model, processor = loaded
    assert (processor.template, processor.image_mode) == ("vicuna_v1", "pad")
    assert model.config.select_layer == -2
    values = np.random.default_rng(1).integers(0, 256, (30, 44, 3), dtype=np.uint8)
    inputs = ask(processor, Image.fromarray(values))
    with torch.no_grad():
        expected = stock(**inputs).logits
        logits = model(**inputs).logits
    assert logits.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
