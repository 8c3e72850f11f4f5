import json

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
)

from coat_vlm.model import CoatVlm
from coat_vlm.model.vision import VISION_MODELS

IMAGE = 2
TRANSFORMERS = [name.removesuffix("_vision_model") for name in VISION_MODELS]
KINDS = [*TRANSFORMERS, "open_clip", "timm"]
LOADERS = [CoatVlm, AutoModel, AutoModelForImageTextToText]


def make(tiny, kind, **kwargs):
    vision = (
        {"config": tiny.vision(kind)}
        if kind in TRANSFORMERS
        else {
            "library": "open_clip",
            "config": {"vision_cfg": tiny.open_clip["clip" if kind == "open_clip" else "timm"]},
        }
    )
    return tiny.model(**vision, **kwargs)


def same_weights(left, right):
    ours, theirs = left.state_dict(), right.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[k], theirs[k]) for k in ours)


def logits(model):
    count, size = model.config.tokens_per_image, model.vision_tower.image_size
    ids = torch.tensor([[5, *[IMAGE] * count, 6, 7]])
    generator = torch.Generator().manual_seed(0)
    pixel_values = torch.randn(1, 3, size, size, generator=generator)
    with torch.no_grad():
        return model(ids, pixel_values=pixel_values).logits


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_is_bit_equal(tiny, tmp_path, in_own_memory, kind):
    model = make(tiny, kind)
    model.save_pretrained(tmp_path)
    for loader in LOADERS:
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is CoatVlm
        assert not loaded.training
        assert same_weights(loaded, model)
        assert torch.equal(logits(in_own_memory(loaded)), logits(model))
        assert loaded.config.to_dict() | {"_name_or_path": None} == (
            model.config.to_dict() | {"_name_or_path": None}
        )


def test_tied_embeddings_are_saved_once_and_stay_tied(tiny, tmp_path, in_own_memory):
    model = make(tiny, "siglip", language=tiny.language("qwen2", tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "language_model.lm_head.weight" not in names
    loaded = CoatVlm.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(logits(in_own_memory(loaded)), logits(model))
    with torch.no_grad():
        loaded.get_input_embeddings().weight[7] += 1
    assert torch.equal(
        loaded.language_model.lm_head.weight[7], loaded.language_model.model.embed_tokens.weight[7]
    )


def test_a_checkpoint_with_missing_weights_is_refused(tiny, tmp_path):
    make(tiny, "clip").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["select_layer"] = -1  # one block more than the file holds
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weights are missing.*vision_tower\.model\.encoder"):
        CoatVlm.from_pretrained(tmp_path)
