"""VILA's three folders: written as VILA's loader reads them, and read back."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from saved_model import saved
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPVisionModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from coat_cli.main import main
from coat_vlm.generate import load
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm

TOWERS = {"clip": CLIPVisionModel, "siglip": SiglipVisionModel}
SCALES = {"mode": "dynamic_s2", "s2_scales": (28, 56), "max_tiles": 4}


def make(tiny: Any, folder: Path, tower: str, language: str, **choices: Any) -> Path:
    text = tiny.language(language, rope_theta=500.0, tie_word_embeddings=language == "qwen2")
    parts = {"vision": tiny.vision(tower), "language": text, "projector": "mlp_downsample"}
    return saved(tiny, folder, **parts | choices)


CASES = [
    ("clip", "llama", {"projector": "mlp2x_gelu"}, "patch"),
    ("siglip", "qwen2", {"projector": "mlp_downsample_3x3_fix", "image": SCALES}, "cls_patch"),
]


@pytest.mark.parametrize(("tower", "language", "choices", "feature"), CASES)
def test_there_and_back(
    tiny: Any,
    tmp_path: Path,
    in_own_memory: Callable[[Any], Any],
    tower: str,
    language: str,
    choices: dict[str, Any],
    feature: str,
) -> None:
    source = make(tiny, tmp_path / "ours", tower, language, **choices)
    vila, back = tmp_path / "vila", tmp_path / "back"
    assert main(["export", "--model", str(source), "--to", str(vila), "--format", "vila"]) == 0
    ours, processor = load(source)
    assert isinstance(ours, CoatVlm)
    weights = ours.state_dict()
    # Each part loads by itself, as in llava/model/language_model/builder.py and its neighbours.
    llm: Any = AutoModelForCausalLM.from_pretrained(vila / "llm", dtype="auto")
    assert llm.config.rope_parameters["rope_theta"] == 500.0
    for name, weight in llm.state_dict().items():
        assert torch.equal(weight, weights[f"language_model.{name}"]), name
    found, info = TOWERS[tower].from_pretrained(vila / "vision_tower", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    pixels = torch.rand(2, 3, 28, 28)
    with torch.no_grad():
        hidden = found(pixels, output_hidden_states=True).hidden_states[-1]
        hidden = hidden[:, 1:] if feature == "patch" else hidden
        assert ours.vision_tower is not None
        torch.testing.assert_close(hidden, ours.vision_tower(pixels), rtol=0, atol=1e-6)
    image_processor = SiglipImageProcessor.from_pretrained(vila / "vision_tower")
    assert list(image_processor.image_mean) == [0.3, 0.5, 0.6]
    layers = load_file(vila / "mm_projector" / "model.safetensors")
    assert {f"projector.{name}" for name in layers} == {
        name for name in weights if name.startswith("projector.")
    }
    top = json.loads((vila / "config.json").read_text())
    assert top["architectures"] == ["LlavaLlamaModel"]
    assert top["mm_vision_select_feature"] == feature
    assert top["mm_hidden_size"] == (48 if "image" in choices else 24)
    assert top["model_dtype"] == "torch.float32"
    assert {"llm_cfg", "vision_tower_cfg", "mm_projector_cfg"} <= top.keys()
    old = json.loads((vila / "llm" / "config.json").read_text())
    assert (old["rope_theta"], old["torch_dtype"]) == (500.0, "float32")  # for transformers 4
    # And back.
    assert main(["export", "--model", str(vila), "--to", str(back)]) == 0
    returned, its_processor = load(back)
    assert isinstance(processor, CoatVlmProcessor)
    assert isinstance(its_processor, CoatVlmProcessor)
    theirs = returned.state_dict()
    assert theirs.keys() == weights.keys()
    assert all(torch.equal(theirs[name], weight) for name, weight in weights.items())
    picture = Image.linear_gradient("L").convert("RGB").resize((60, 40))
    inputs, others = (p(images=picture, text="<image>What?") for p in (processor, its_processor))
    assert inputs.keys() == others.keys()
    assert all(torch.equal(inputs[name], others[name]) for name in inputs)
    with torch.no_grad():
        assert torch.equal(
            in_own_memory(ours)(**inputs).logits, in_own_memory(returned)(**others).logits
        )


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_checkpoint_as_vila_publishes_it(tiny: Any, tmp_path: Path) -> None:
    """The whole tower, a select layer of -2, a vocabulary without a row for <image>."""
    source = make(tiny, tmp_path / "ours", "siglip", "qwen2")
    vila = tmp_path / "vila"
    main(["export", "--model", str(source), "--to", str(vila), "--format", "vila"])
    whole = SiglipVisionModel(SiglipVisionConfig(**tiny.vision("siglip")))
    whole.save_pretrained(vila / "vision_tower")
    changed(vila / "config.json", mm_vision_select_layer=-2)
    changed(vila / "mm_projector" / "config.json", mm_projector_type="mlp_downsample_2x2_fix")
    tokenizer = AutoTokenizer.from_pretrained(vila / "llm")
    llm: Any = AutoModelForCausalLM.from_pretrained(vila / "llm")
    rows = len(tokenizer)
    tokenizer.add_tokens(["<more>"], special_tokens=True)
    tokenizer.save_pretrained(vila / "llm")
    assert main(["export", "--model", str(vila), "--to", str(tmp_path / "back")]) == 0
    model: Any = load(tmp_path / "back")[0]
    embeddings = model.get_input_embeddings().weight
    assert embeddings.shape[0] == rows + 1
    assert torch.equal(embeddings[:rows], llm.get_input_embeddings().weight)
    assert model.config.projector_type == "mlp_downsample"
    pixels = torch.rand(1, 3, 28, 28)
    with torch.no_grad():
        expected = whole.eval()(pixels, output_hidden_states=True).hidden_states[-2]
        torch.testing.assert_close(model.vision_tower(pixels), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (".", {"mm_vision_select_feature": "patch"}, "drops the first patch.*cls_patch"),
        ("mm_projector", {"mm_projector_type": "mlp3x_gelu"}, "'mlp3x_gelu'; allowed: linear"),
        ("mm_projector", None, "mm_projector.*cannot be loaded"),
    ],
)
def test_what_cannot_be_read(
    tiny: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    part: str,
    values: dict[str, Any] | None,
    message: str,
) -> None:
    source, vila = make(tiny, tmp_path / "ours", "siglip", "llama"), tmp_path / "vila"
    main(["export", "--model", str(source), "--to", str(vila), "--format", "vila"])
    if values is None:
        save_file({"layers.1.weight": torch.zeros(3)}, vila / part / "model.safetensors")
    else:
        changed(vila / part / "config.json", **values)
    assert main(["export", "--model", str(vila), "--to", str(tmp_path / "back")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "back").exists()
