"""Models that are not in the table of families: parts and inputs by transformers' conventions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_folders import MAKERS, make_llava
from one_stage import one_stage
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from coat_data.load.collate import collate
from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.config import MODULES
from coat_vlm.config.stage import PackingConfig
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model.families import FAMILIES, derive_family, find_family, find_parts
from coat_vlm.model.family_model import find_unused, load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.folder import is_family
from coat_vlm.train.model_setup import prepare_model
from coat_vlm.train.passes import copy_batch_to_device


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_the_rule_finds_the_parts_of_the_table(kind: str, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    derived, family = derive_family(config), FAMILIES[kind]
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
    found, expected = (find_parts(model, one) for one in (derived, family))
    for role in MODULES:
        own, table = ({id(p) for p in parts[role].parameters()} for parts in (found, expected))
        assert own == table, role
    assert derived.language[0] == family.language[0]
    assert set(family.inputs) <= {*derived.inputs, "batch_num_images"}
    assert derived.token_types == family.token_types


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViP-LLaVA: the projector reads several layers of the tower."""
    folder = tmp_path_factory.mktemp("unknown") / "vipllava"
    make_llava(folder, "VipLlava", vision_feature_layers=[-2, -1])
    return folder


def test_inputs_and_loss_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    assert is_family(folder)
    processor = FamilyProcessor.load("model.pretrained", str(folder), 1024)
    assert processor.notes == (
        "VipLlava is not among the tested families; by the names of transformers' models its parts "
        "are vision: model.vision_tower; projector: model.multi_modal_projector; language: "
        "model.language_model, lm_head; inputs of an image: pixel_values"
    )
    image = tmp_path / "a.png"
    Image.effect_noise((40, 24), 80).convert("RGB").save(image)
    turns = (
        Turn("user", (Part("image"), Part("text", "What color?"))),
        Turn("assistant", (Part("text", "red"),)),
    )
    sample = Sample(id="1", turns=turns, media=(Media(kind="image", path=str(image)),))
    batch = collate([processor.encoder()(sample)], pad_token_id=processor.pad_token_id)
    inputs = copy_batch_to_device(batch, torch.device("cpu"))
    labels = inputs.pop("labels")
    reader: Any = AutoProcessor.from_pretrained(folder)
    given = reader(
        text=["USER: <image>\nWhat color? ASSISTANT: red</s>"], images=[Image.open(image)]
    )
    end = len(given["input_ids"][0])
    assert inputs["input_ids"][0, :end].tolist() == given["input_ids"][0]
    model: Any = load_family_model("model.pretrained", str(folder), torch.float32)
    loss = model(**inputs, labels=labels, skip_logits=True).loss
    stock: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    logits = stock(**inputs).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    stage = one_stage("language", packing=PackingConfig())
    with pytest.raises(ValueError, match=r"VipLlava.* is not in a tested family, so its positions"):
        prepare_model(model, stage, arithmetic_of("fp32", None, torch.device("cpu")))
    prepare_model(model, one_stage(*MODULES), arithmetic_of("fp32", None, torch.device("cpu")))
    unused = find_unused(model, processor.encoder().filler)
    assert unused == ("model.vision_tower.post_layernorm",)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "fuyu"}, "no vision tower next to a language model"),
        ({"model_type": "florence2"}, "its language model has an encoder"),
        ({"model_type": "llama"}, "take its language model or vision tower as a part"),
    ],
)
def test_parts_that_are_not_found(config: Any, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=problem) as caught:
        find_family("model.pretrained", str(tmp_path))
    assert str(caught.value).startswith(
        f"model.pretrained='{tmp_path}' is a checkpoint of model_ty"
    )
    assert "Qwen3-VL (qwen3_vl)" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"image_token": "<picture>"},
            "does not process images and write their tokens as others do",
        ),
        ({"chat_template": None}, "has no chat template"),
    ],
)
def test_processors_that_do_not_fit(
    change: dict[str, Any], problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader: Any = AutoProcessor.from_pretrained(folder)
    for name, value in change.items():
        setattr(reader, name, value)
        setattr(reader.tokenizer, name, value)
    monkeypatch.setattr("coat_vlm.model.family_processor.load_auto", lambda *_, **__: reader)
    with pytest.raises(ValueError, match=problem):
        FamilyProcessor.load("model.pretrained", str(folder), 1024)
