"""The save before the first step: it writes what the last one writes, except the weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_folders import MAKERS
from one_stage import one_stage
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3MoeConfig

from coat_vlm.config.stage import LoraTraining
from coat_vlm.export.folder import write_tensors
from coat_vlm.export.hugging_face import check_save, write_trained
from coat_vlm.model.folder import load_model, load_processor
from coat_vlm.model.processor import build_processor
from coat_vlm.train.model_setup import set_trainable

LORA = LoraTraining(rank=4, modules=["vision", "projector"])


def compose(tiny: Any, tokenizer: Any, model_type: str) -> tuple[Any, Any]:
    model = tiny.model(language=tiny.language(model_type, tie_word_embeddings=True))
    return model, build_processor(tiny.recipe(), tokenizer, model.config)


def read_files(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.suffix != ".safetensors"
    }


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", ["qwen2", "mixtral", "llava", "qwen3_vl"])
def test_a_dry_save_writes_what_the_save_of_the_weights_writes(
    kind: str,
    lora: LoraTraining | None,
    tiny: Any,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind in MAKERS:
        MAKERS[kind](tmp_path / "base")
        model: Any = load_model(tmp_path / "base", torch.float32)
        processor: Any = load_processor(tmp_path / "base")
    else:
        model, processor = compose(tiny, tiny_tokenizer, kind)
    set_trainable(model, one_stage("vision", "projector", "language", lora=lora))
    check_save(tmp_path / "sft", model, processor)
    assert not list((tmp_path / "sft").iterdir())
    write_trained(tmp_path / "real", model, processor, model.state_dict())
    names: dict[str, list[str]] = {}

    def record(path: Path, tensors: dict[str, Tensor]) -> None:
        names[str(path.relative_to(tmp_path / "dry"))] = sorted(tensors)
        write_tensors(path, tensors)

    monkeypatch.setattr("coat_vlm.export.folder.write_tensors", record)
    monkeypatch.setattr("coat_vlm.export.hugging_face.write_tensors", record)
    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    write_trained(tmp_path / "dry", model, processor, state)
    assert read_files(tmp_path / "dry") == read_files(tmp_path / "real")
    written = {}
    for path in (tmp_path / "real").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            written[str(path.relative_to(tmp_path / "real"))] = sorted(file.keys())
    assert names == written


def test_tensors_that_share_memory_are_refused_as_safetensors_refuses_them(tmp_path: Path) -> None:
    for device in ("cpu", "meta"):
        whole = torch.zeros(4, 4, device=device)
        with pytest.raises((RuntimeError, ValueError), match=r"(?s)share.*memory"):
            write_tensors(
                tmp_path / "a.safetensors", {"a.weight": whole, "b.weight": whole.view(16)}
            )
    alone = {"a.weight": torch.zeros(4, device="meta"), "b.weight": torch.zeros(4, device="meta")}
    write_tensors(tmp_path / "a.safetensors", alone)
    assert not list(tmp_path.iterdir())


def test_a_published_model_with_experts_can_be_saved(tmp_path: Path) -> None:
    """Files have the experts one by one, and the model all of them in one tensor."""
    MAKERS["internvl"](tmp_path / "base")
    config: Any = AutoConfig.from_pretrained(tmp_path / "base")
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    text = config.text_config.to_dict() | experts | {"head_dim": 8, "model_type": "qwen3_moe"}
    config.text_config = Qwen3MoeConfig(**text)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "base")
    model: Any = load_model(tmp_path / "base", torch.float32)
    processor = load_processor(tmp_path / "base")
    with pytest.raises(OSError, match=r"could not be saved: .*Not a directory"):
        check_save(tmp_path / "base" / "config.json" / "sft", model, processor)
    names = json.loads(check_save(tmp_path / "sft", model, processor)["tensors.json"])
    fused = {name for name in names if name.endswith(("gate_up_proj", "experts.down_proj"))}
    assert {name for name, known in names.items() if known is None} == fused
    write_trained(tmp_path / "real", model, processor, model.state_dict())
    folders = (tmp_path / name / "model.safetensors" for name in ("base", "real"))
    base, real = map(load_file, folders)
    assert base.keys() == real.keys()
    assert len(base) > len(names)
