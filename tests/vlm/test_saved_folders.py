"""The folders of a stage's model and of exports, for bases that only just load."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from family_folders import publish, write
from one_stage import TRAINS, one_stage
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from coat_vlm.config import LanguageConfig, ModelConfig, Recipe
from coat_vlm.config.stage import LoraTraining
from coat_vlm.distributed import ALONE
from coat_vlm.export.hugging_face import export, save_model
from coat_vlm.generate import set_stop_tokens
from coat_vlm.model import build_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.folder import load_model, load_processor
from coat_vlm.model.processor import CoatVlmProcessor, prepare_tokenizer, train_tokenizer
from coat_vlm.train.model_setup import set_trainable


def finish(model: Any, processor: Any, target: Path) -> Path:
    """Save as at the end of a stage."""
    recipe = Recipe(
        name="a",
        output_dir=str(target.parent),
        precision="fp32",
        model=ModelConfig(language=LanguageConfig(config={"model_type": "qwen2"}), vision=None),
        stages={"sft": one_stage("language")},
    )
    save_model(target, model, processor, recipe, "sft", 1, ALONE)
    return target


@pytest.fixture
def language(tiny: Any, tmp_path: Path) -> Path:
    """A Llama like the published ones whose settings transformers reads and does not write."""
    tokenizer = train_tokenizer(["What is in the image?", "A red circle."] * 5, 320)
    config = tiny.language("llama", vocab_size=len(tokenizer), eos_token_id=[2, 7])
    part = ModelConfig(language=LanguageConfig(config=config), vision=None)
    folder = tmp_path / "llama"
    build_model(part, tokenizer).language_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # lmsys/vicuna-7b-v1.5: without do_sample, GenerationConfig.validate refuses the other two.
    settings = {"eos_token_id": [2, 7], "temperature": 0.9, "top_p": 0.6}
    write(folder / "generation_config.json", settings)
    return folder


def compose(tiny: Any, language: Path) -> tuple[Any, CoatVlmProcessor]:
    recipe = ModelConfig(
        vision=tiny.recipe().vision,
        language=LanguageConfig(name_or_path=str(language)),
        projector=tiny.recipe(projector="mlp2x_gelu").projector,
    )
    tokenizer = prepare_tokenizer(AutoTokenizer.from_pretrained(language))
    model: Any = build_model(recipe, tokenizer)
    tokens = model.config.tokens_per_image
    processor = CoatVlmProcessor(tokenizer, image_size=28, tokens_per_image=tokens)
    set_stop_tokens(model, processor)
    return model, processor


def test_settings_that_transformers_refuses_are_saved(
    tiny: Any, language: Path, tmp_path: Path
) -> None:
    model, processor = compose(tiny, language)
    ends = sorted({2, 7, processor.tokenizer.eos_token_id})
    saved = finish(model, processor, tmp_path / "model")
    exported = export(saved, tmp_path / "exported", layout="language")
    for folder in (saved, exported):
        settings = json.loads((folder / "generation_config.json").read_text())
        assert settings["temperature"] == 0.9
        assert settings["top_p"] == 0.6
        assert "do_sample" not in settings
        assert settings["eos_token_id"] == ends
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"  # also in transformers 4
    assert load_model(saved, "auto").generation_config.eos_token_id == ends  # pyright: ignore[reportOptionalMemberAccess]
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == [2, 7]


def test_an_output_layer_of_its_own_is_saved(tiny: Any, language: Path, tmp_path: Path) -> None:
    """The configuration says tied, and the file has both, as transformers 5 loads them."""
    config = json.loads((language / "config.json").read_text())
    write(language / "config.json", config | {"tie_word_embeddings": True})
    head = load_file(language / "model.safetensors")["lm_head.weight"]
    model, processor = compose(tiny, language)
    output = model.get_output_embeddings().weight
    assert torch.equal(output[: len(head)], head)
    saved = finish(model, processor, tmp_path / "model")
    name = "language_model.lm_head.weight"
    for layout in ("language", "llava", "vila"):
        folder = export(saved, tmp_path / layout, layout=layout)  # pyright: ignore[reportArgumentType]
        folder = folder / "llm" if layout == "vila" else folder
        weights = load_file(folder / "model.safetensors")
        assert torch.equal(weights[name if layout == "llava" else "lm_head.weight"], output)
        stock = AutoModelForImageTextToText if layout == "llava" else AutoModelForCausalLM
        found: Any = stock.from_pretrained(folder)
        assert found.config.get_text_config().tie_word_embeddings is False
        assert torch.equal(found.get_output_embeddings().weight, output)


def test_adapters_of_a_model_with_tied_embeddings(tmp_path: Path) -> None:
    """The tower has adapters; embeddings and output layer, one tensor, are trained."""
    base = tmp_path / "base"
    publish("qwen3_vl", base)
    model: Any = load_model(base, torch.float32)
    lora = LoraTraining(rank=2, alpha=2, modules=["vision"])
    settings: Any = {"vision": TRAINS, "lora": lora}
    set_trainable(model, one_stage("language", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    saved = finish(model, load_processor(base), tmp_path / "model")
    assert "lm_head.weight" not in load_file(saved / "model.safetensors")
    stock: Any = AutoModelForImageTextToText.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(stock, saved / "adapter").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = load_model(saved, torch.float32).eval()(input_ids=ids).logits
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_weights_of_more_than_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coat_vlm.export.folder._SHARD_SIZE", "50KB")
    base = tmp_path / "base"
    publish("llava", base)
    (base / "LICENSE").write_text("MIT")
    (base / "tokenizer").mkdir()  # not a file of the tokenizer
    saved = finish(load_model(base, torch.float32), load_processor(base), tmp_path / "model")
    assert (saved / "LICENSE").read_text() == "MIT"
    index = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    expected = load_file(base / "model.safetensors")
    assert index.keys() == expected.keys()
    stock: Any = AutoModelForImageTextToText.from_pretrained(saved)
    found = AutoModelForImageTextToText.from_pretrained(base).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in stock.state_dict().items())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_only_the_dtype_of_the_configuration_changes(kind: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    publish(kind, base)
    config = json.loads((base / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    write(base / "config.json", config)
    saved = finish(load_model(base, torch.float32), load_processor(base), tmp_path / "model")
    found = json.loads((saved / "config.json").read_text())
    assert found == config | {"torch_dtype": "float32"}


def test_quantized_bases_are_refused(tmp_path: Path) -> None:
    publish("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", config | {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ValueError, match="quantized weights; use the original model"):
        load_model(tmp_path, torch.float32)


def test_an_empty_tokenizer_is_refused(tmp_path: Path) -> None:
    publish("llava", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="has no processor that transformers can load"):
        load_processor(tmp_path)


def test_max_pixels_in_files_of_transformers_4(tmp_path: Path) -> None:
    base = tmp_path / "base"
    publish("qwen2_5_vl", base)
    path = base / "preprocessor_config.json"
    old = json.loads(path.read_text())
    size = old.pop("size")
    old |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    write(path, old)
    target = tmp_path / "target"
    target.mkdir()
    FamilyProcessor.load("model.pretrained", str(base), 64, 256).save_pretrained(target)
    assert json.loads((target / path.name).read_text()) == old | {
        "max_pixels": 256,
        "size": size | {"longest_edge": 256},
    }
    shutil.copy(base / "config.json", target)
    limited: Any = FamilyProcessor.load("model.pretrained", str(target), 64)
    assert limited.image_processor.size["longest_edge"] == 256
