"""A composed model without tower and projector, and what a recipe may say of one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from coat_data.sample import Part, Sample, Turn
from coat_vlm.config import (
    ModelConfig,
    VisionConfig,
)
from coat_vlm.export.hugging_face import export
from coat_vlm.generate import generate
from coat_vlm.model import CoatVlm, build_model
from coat_vlm.model.build import build_meta_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.processor import (
    CoatVlmProcessor,
    build_processor,
    continue_processor,
)
from coat_vlm.model.vlm import module_parameters


@pytest.fixture
def recipe(tiny: Any) -> ModelConfig:
    return dataclasses.replace(tiny.recipe(), vision=None, projector=tiny.recipe().projector)


@pytest.fixture
def model(recipe: ModelConfig, tiny_tokenizer: Any) -> CoatVlm:
    torch.manual_seed(0)
    return build_model(recipe, tiny_tokenizer).eval()


def test_it_computes_what_the_language_model_does(model: CoatVlm, recipe: ModelConfig) -> None:
    ids = torch.tensor([[5, 6, 2, 8], [9, 3, 4, 5]])  # 2 is <image> elsewhere, a word here
    config: Any = model.config.text_config
    stock = Qwen2ForCausalLM(config).eval()
    stock.load_state_dict(model.language_model.state_dict())
    with torch.no_grad():
        expected = stock(input_ids=ids, labels=ids)
        found = model(input_ids=ids, labels=ids)
    assert torch.equal(found.logits, expected.logits)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert set(module_parameters(model)) == {"language"}
    meta_model = build_meta_model(recipe, 60, torch.float32)
    assert {n: p.shape for n, p in meta_model.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    with pytest.raises(ValueError, match="contain 1 images, and the model has no vision tower"):
        model(input_ids=ids, pixel_values=torch.zeros(1, 3, 28, 28))


def test_it_is_saved_loaded_and_exported(
    model: CoatVlm,
    recipe: ModelConfig,
    tiny_tokenizer: Any,
    tmp_path: Path,
    in_own_memory: Callable[[Any], Any],
) -> None:
    config = cast(CoatVlmConfig, model.config)
    processor = build_processor(recipe, tiny_tokenizer, config)
    processor.template = "plain"
    model.save_pretrained(tmp_path / "ours")
    processor.save_pretrained(tmp_path / "ours")
    loaded = CoatVlm.from_pretrained(tmp_path / "ours").eval()
    assert not loaded.config.has_vision
    assert (loaded.config.tokens_per_image, loaded.vision_tower) == (0, None)
    export(tmp_path / "ours", tmp_path / "stock", layout="language")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert type(stock) is Qwen2ForCausalLM
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        of_stock = in_own_memory(stock)(ids).logits
        assert torch.equal(of_stock, in_own_memory(loaded)(input_ids=ids).logits)
    again = CoatVlmProcessor.from_pretrained(str(tmp_path / "ours"))
    turns = (Turn("user", (Part("text", "w5 w6"),)),)
    sample = Sample(id="1", turns=turns)
    assert again.tokens_per_image == 0
    continue_processor(recipe, again, config)
    with pytest.raises(ValueError, match=r"model.vision \(whether there is a tower\) is True in"):
        continue_processor(dataclasses.replace(recipe, vision=_tower()), again, config)
    assert generate(loaded, again, [sample], 4) == generate(model, processor, [sample], 4)
    prompt = again.encoder().prompt(sample)
    assert again.tokenizer.decode(prompt.input_ids) == "w5 w6"  # a text to go on with


def _tower() -> Any:
    return VisionConfig(config={"model_type": "siglip_vision_model"})
