import copy
import json
from typing import Any

import open_clip
import pytest
import torch
import torch.utils.checkpoint
from safetensors.torch import save_file

from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.vision import VISION_MODELS, VisionTower, build_open_clip, load_open_clip

CLASSES = {name.removesuffix("_vision_model"): kind for name, kind in VISION_MODELS.items()}
KINDS = [*CLASSES, "open_clip", "timm"]


def make(kind, tiny, select_layer=-2, select_feature="patch", **changes) -> tuple[Any, Any]:
    """A tower and an untouched copy of the complete model that it was cut from."""
    torch.manual_seed(0)
    if kind in CLASSES:
        model_class = CLASSES[kind]
        vision = model_class.config_class(**tiny.vision(kind, **changes))
        model = model_class(vision).eval()
        whole = copy.deepcopy(model)
    else:
        values = tiny.open_clip["clip" if kind == "open_clip" else "timm"] | changes
        torch.manual_seed(1)
        whole: Any = open_clip.model._build_vision_tower(
            8, open_clip.CLIPVisionCfg(**values)
        ).eval()
        if kind == "timm":
            whole.trunk.set_input_size((32, 32))
        vision, model = build_open_clip({"vision_cfg": values})
        source = whole.trunk if kind == "timm" else whole
        missing = model.visual.load_state_dict(source.state_dict(), strict=False).missing_keys
        assert missing == []
    config = CoatVlmConfig(
        vision_config=vision,
        projector_type="linear",
        select_layer=select_layer,
        select_feature=select_feature,
    )
    return VisionTower(config, model).eval(), whole


def hidden_states(kind, whole, images):
    """All hidden states (N, prefix + P, C), by each library's own way to return them."""
    if kind in CLASSES:
        return list(whole(images, output_hidden_states=True).hidden_states)
    if kind == "open_clip":
        embedded = whole._embeds(images)
        out = whole.forward_intermediates(
            images, intermediates_only=True, output_fmt="NLC", output_extra_tokens=True
        )
        pairs = zip(out["image_intermediates_prefix"], out["image_intermediates"], strict=True)
        return [embedded, *(torch.cat(pair, dim=1) for pair in pairs)]
    pairs = whole.trunk.forward_intermediates(
        images, intermediates_only=True, output_fmt="NLC", return_prefix_tokens=True
    )
    return [None, *(torch.cat((prefix, patches), dim=1) for patches, prefix in pairs)]


@pytest.mark.parametrize("select_layer", [-1, -2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_librarys_hidden_state(kind, select_layer, tiny):
    tower, whole = make(kind, tiny, select_layer, "cls_patch")
    images = torch.randn(2, 3, tower.image_size, tower.image_size)
    with torch.no_grad():
        wanted = hidden_states(kind, whole, images)[select_layer]
        features = tower(images)
    torch.testing.assert_close(features, wanted, rtol=0, atol=1e-6)


@pytest.fixture
def open_clip_folder(tiny, tmp_path):
    """An official open_clip folder, and the model whose weights it holds."""
    model_cfg = {
        "embed_dim": 16,
        "quick_gelu": True,
        "vision_cfg": tiny.open_clip["clip"],
        "text_cfg": {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 1},
    }
    torch.manual_seed(3)
    model = open_clip.CLIP(**model_cfg).eval()
    preprocess = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    text = json.dumps({"model_cfg": model_cfg, "preprocess_cfg": preprocess})
    (tmp_path / "open_clip_config.json").write_text(text)
    save_file(model.state_dict(), tmp_path / "open_clip_model.safetensors")
    return tmp_path, model


def test_an_open_clip_folder_keeps_its_weights(open_clip_folder):
    folder, model = open_clip_folder
    vision, backbone = load_open_clip(str(folder))
    assert vision.quick_gelu
    assert vision.image_mean == [0.1, 0.2, 0.3]
    assert vision.image_std == [0.4, 0.5, 0.6]
    config = CoatVlmConfig(
        vision_config=vision, projector_type="linear", select_feature="cls_patch"
    )
    images = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        wanted = hidden_states("open_clip", model.visual, images)[-2]
        torch.testing.assert_close(VisionTower(config, backbone).eval()(images), wanted)
