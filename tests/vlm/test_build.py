import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from coat_eval.hub_model import HubAdapter
from coat_eval.text import load_language_model
from coat_vlm.config import LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.config.model import ProjectorConfig
from coat_vlm.model import CoatVlm, build_model
from coat_vlm.model.build import build_meta_model
from coat_vlm.model.pretrained import read_config
from coat_vlm.model.processor import build_processor, load_tokenizer
from coat_vlm.model.vision import CONTRASTIVE, VISION_MODELS

FAMILIES = ["llama", "qwen2"]
OTHER_TOWERS = [kind for kind in VISION_MODELS if kind not in CONTRASTIVE]
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


@pytest.fixture(scope="module")
def checkpoints(tiny, tmp_path_factory):
    """Tiny checkpoints in the official layouts, by name, and the models that were saved."""
    torch.manual_seed(11)
    tower = {k: v for k, v in tiny.vision().items() if k != "model_type"}
    models = {
        "siglip": transformers.SiglipModel(
            transformers.SiglipConfig(vision_config=tower, text_config=TEXT)
        ),
        "clip": transformers.CLIPModel(
            transformers.CLIPConfig(vision_config=tower, text_config=TEXT)
        ),
        "siglip_vision": transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**tower)),
        "clip_vision": transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**tower)),
        "clip_text": transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
    }
    for family in FAMILIES:
        config = transformers.AutoConfig.for_model(**tiny.language(family, vocab_size=60))
        models[family] = transformers.AutoModelForCausalLM.from_config(config)
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, model in models.items():
        model.eval().save_pretrained(folder / name)
    return folder, models


def build(
    tiny, tokenizer, vision=None, language=None, projector: Any = "mlp2x_gelu", **kwargs
) -> Any:
    recipe = ModelConfig(
        vision=VisionConfig(name_or_path=str(vision)) if vision else tiny.recipe().vision,
        language=LanguageConfig(name_or_path=str(language)) if language else tiny.recipe().language,
        projector=ProjectorConfig(type=projector),
    )
    return build_model(recipe, tokenizer, **kwargs).eval()


@pytest.mark.parametrize("name", ["siglip", "clip", "siglip_vision", "clip_vision"])
def test_a_pretrained_tower_keeps_its_weights(tiny, tiny_tokenizer, checkpoints, name):
    folder, models = checkpoints
    model = build(tiny, tiny_tokenizer, vision=folder / name)
    whole = models[name] if "vision" in name else models[name].vision_model
    images = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        wanted = whole(images, output_hidden_states=True).hidden_states[-2]
        found = model.vision_tower(images)
    torch.testing.assert_close(found, wanted[:, 1:] if "clip" in name else wanted)


@pytest.mark.parametrize("side", [28, 56])
@pytest.mark.parametrize("kind", OTHER_TOWERS)
def test_a_tower_without_a_text_model_has_the_size_of_its_image_processor(
    tiny, tiny_tokenizer, tmp_path, kind, side
):
    torch.manual_seed(12)
    config = VISION_MODELS[kind].config_class(**tiny.vision(kind))
    # Published ViTs are classifiers, without a pooling head.
    whole: Any = transformers.ViTForImageClassification(config) if kind == "vit" else None
    whole = (whole or VISION_MODELS[kind](config)).eval()
    whole.save_pretrained(tmp_path)
    images = {"do_center_crop": True, "crop_size": {"height": side, "width": side}}
    images |= {"size": {"shortest_edge": 64}, "image_mean": [0.1, 0.2, 0.3], "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    recipe = ModelConfig(
        vision=VisionConfig(name_or_path=str(tmp_path)),
        language=tiny.recipe().language,
        projector=ProjectorConfig(type="mlp2x_gelu"),
    )
    model: Any = build_model(recipe, tiny_tokenizer).eval()
    processor = build_processor(recipe, tiny_tokenizer, model.config)
    assert (processor.image_size, processor.image_resample) == (side, 2)
    assert processor.image_mean == [0.1, 0.2, 0.3]

    pixels = torch.randn(2, 3, side, side)
    options = {"interpolate_pos_encoding": True} if kind == "vit" else {}
    with torch.no_grad():
        states = getattr(whole, "vit", whole)(pixels, output_hidden_states=True, **options)
        found = model.vision_tower(pixels)
    prefix = 1 + getattr(config, "num_register_tokens", 0)
    assert found.shape[1] == model.config.tokens_per_image == (side // 7) ** 2
    torch.testing.assert_close(found, states.hidden_states[-2][:, prefix:])
    planned = build_meta_model(recipe, 60, torch.float32).named_parameters()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: parameter.shape for name, parameter in planned} == shapes
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        again = CoatVlm.from_pretrained(tmp_path / "saved").vision_tower(pixels)
    torch.testing.assert_close(again, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pretrained_language_model_keeps_its_weights(
    tiny, tiny_tokenizer, checkpoints, in_own_memory, family
):
    folder, models = checkpoints
    model = build(tiny, tiny_tokenizer, language=folder / family)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(in_own_memory(model)(ids).logits, models[family](ids).logits)
    assert model.config.text_config.model_type == family


def larger(tokenizer, extra):
    copied = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens={"image_token": "<image>"},
    )
    copied.add_tokens([f"new{index}" for index in range(extra)])
    return copied


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_grow_to_the_tokenizer(tiny, tiny_tokenizer, tmp_path, tied):
    config = transformers.AutoConfig.for_model(
        **tiny.language("qwen2", vocab_size=50, tie_word_embeddings=tied)
    )
    source: Any = transformers.AutoModelForCausalLM.from_config(config)
    source.save_pretrained(tmp_path)
    model = build(tiny, tiny_tokenizer, language=tmp_path)
    for table, old in [
        (model.get_input_embeddings().weight, source.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, source.get_output_embeddings().weight),
    ]:
        assert table.shape[0] == 60
        assert torch.equal(table[:50], old)
        # New rows stand at the old ones' mean.
        assert (table[50:] - old.mean(0)).abs().max() < 0.02 < old.abs().max()
    assert model.config.text_config.vocab_size == 60
    weight = model.get_input_embeddings().weight
    assert (weight is model.get_output_embeddings().weight) == tied


@pytest.mark.parametrize(("given", "wanted"), [(None, 65), (10, 65), (80, 80)])
def test_a_new_language_model_has_room_for_the_tokenizer(tiny, tiny_tokenizer, given, wanted):
    language = tiny.language() if given is None else tiny.language(vocab_size=given)
    model: Any = build_model(tiny.recipe(language=language), larger(tiny_tokenizer, 5))
    assert model.get_input_embeddings().weight.shape[0] == wanted
    assert model.generation_config.eos_token_id == 1
    assert model.generation_config.pad_token_id == 0


def test_a_published_models_end_tokens_stay(tiny, tiny_tokenizer, checkpoints, tmp_path):
    model = checkpoints[1]["qwen2"]
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    built = build(tiny, tiny_tokenizer, language=tmp_path)
    assert built.generation_config.eos_token_id == [7, 8]
    assert built.generation_config.suppress_tokens == [2]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_all_weights_have_one_dtype(tiny, tiny_tokenizer, checkpoints, tmp_path, dtype):
    folder, _ = checkpoints
    transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen2").bfloat16().save_pretrained(
        tmp_path
    )
    model = build(tiny, tiny_tokenizer, folder / "siglip", tmp_path, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype or torch.float32}
    model.save_pretrained(tmp_path / "composed")
    loaded = CoatVlm.from_pretrained(tmp_path / "composed")
    assert {p.dtype for p in loaded.parameters()} == {dtype or torch.float32}


@pytest.mark.parametrize(
    ("part", "name", "message"),
    [
        ("vision", "qwen2", "model.vision.name_or_path=.*qwen2.* 'qwen2'; allowed: siglip, clip"),
        ("language", "clip_text", "model.language.name_or_path=.*'clip_text_model'.*llama"),
        ("language", "bert", "'bert' .BertForMaskedLM., not a causal language model"),
    ],
)
def test_checkpoints_of_another_kind(tiny, tiny_tokenizer, checkpoints, part, name, message):
    folder, _ = checkpoints
    with pytest.raises(ValueError, match=message):
        build(tiny, tiny_tokenizer, **{part: folder / name})


@pytest.mark.parametrize(
    ("part", "damage"),
    [("vision", "gone"), ("vision", "incomplete"), ("language", "cut"), ("language", "reshaped")],
)
def test_damaged_checkpoints(tiny, tiny_tokenizer, checkpoints, tmp_path, part, damage):
    folder, _ = checkpoints
    source = folder / {"vision": "siglip", "language": "qwen2"}[part]
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    file = tmp_path / "model.safetensors"
    weights = load_file(source / "model.safetensors")
    victim = next(name for name in sorted(weights) if "layers.1.mlp" in name and "text" not in name)
    if damage == "incomplete":
        weights.pop(victim)
    if damage == "reshaped":
        weights[victim] = weights[victim][:-1].contiguous()
    if damage != "gone":
        save_file(weights, file, metadata={"format": "pt"})
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"model.{part}.name_or_path=.*{tmp_path.name}"):
        build(tiny, tiny_tokenizer, **{part: tmp_path})


def test_pickles_that_are_more_than_weights_are_refused(
    tiny, tiny_tokenizer, checkpoints, tmp_path
):
    source = checkpoints[0] / "qwen2"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    weights = dict(load_file(source / "model.safetensors"), surprise=build)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"the weights cannot be loaded"):
        build(tiny, tiny_tokenizer, language=tmp_path)


def test_a_larger_base_extends_the_context(tiny, tiny_tokenizer, checkpoints):
    """The same logits as a model that was configured with the base, and a longer context."""
    folder, _ = checkpoints
    language = LanguageConfig(name_or_path=str(folder / "qwen2"), rope_theta=5e5)
    recipe = dataclasses.replace(tiny.recipe(), language=language, max_length=4096)
    model: Any = build_model(recipe, tiny_tokenizer).eval()
    text = model.config.text_config
    assert text is model.language_model.config
    assert text.rope_parameters["rope_theta"] == 5e5
    assert text.max_position_embeddings >= 4096
    expected: Any = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(text)).eval()
    expected.load_state_dict(model.language_model.state_dict())
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found = model.language_model(ids).logits
        assert torch.equal(found, expected(ids).logits)
        original = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen2").eval()
        assert not torch.equal(found[..., :60], original(ids).logits)  # ids below 60


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/models/nowhere", "the folder /models/nowhere does not exist"),
        ("models/qwen/nowhere", "models/qwen/nowhere does not exist"),
        (__file__, "test_build.py is not a folder"),
    ],
)
def test_a_wrong_local_path_is_not_taken_for_a_hub_id(path: str, message: str):
    with pytest.raises(ValueError, match=r"^model\.language\.name_or_path=") as caught:
        read_config("model.language.name_or_path", path)
    assert message in str(caught.value)
    assert "Repo id" not in str(caught.value)


CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path({folder!r}, "was_run").touch()
class Foreign(PretrainedConfig):
    model_type = "foreign"
"""


@pytest.mark.parametrize(
    "load",
    [
        lambda folder: read_config("KEY", folder),
        lambda folder: load_language_model(Path(folder)),
        lambda folder: HubAdapter.load(folder, torch.device("cpu"), 8),
        lambda folder: load_tokenizer(
            ModelConfig(vision=None, language=LanguageConfig(name_or_path=folder))
        ),
    ],
    ids=["configuration", "language model", "model", "tokenizer"],
)
def test_code_in_a_folder_is_never_run(load, tiny_tokenizer, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    tiny_tokenizer.save_pretrained(tmp_path)
    classes = {"AutoConfig": "code.Foreign", "AutoTokenizer": [None, "code.Foreign"]}
    config = {"model_type": "foreign", "auto_map": classes}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({**config, "tokenizer_class": "Foreign"}))
    (tmp_path / "code.py").write_text(CODE.format(folder=str(tmp_path)))
    # AutoProcessor goes on after the error, and finds no other class.
    message = r"needs custom Python code \(auto_map\)|Unrecognized processing class"
    with pytest.raises(ValueError, match=message) as caught:
        load(str(tmp_path))
    assert not asked
    assert not (tmp_path / "was_run").exists()
    assert "trust_remote_code" not in str(caught.value)
