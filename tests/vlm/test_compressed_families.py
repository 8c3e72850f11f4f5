"""Published models exported with compressed weights, read by stock transformers and by us."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_folders import publish
from family_samples import conversation, picture
from safetensors.torch import load_file

from coat_cli.main import main
from coat_data.load.collate import collate
from coat_vlm.generate import load
from coat_vlm.model.compressed import SCHEMES, RoundedInputLinear, dequantize, quantize
from coat_vlm.model.families import FAMILIES
from coat_vlm.train.passes import copy_batch_to_device

EXPERTS = ("qwen3_vl_moe",)


def export(source: Path, target: Path, *options: str) -> int:
    return main(["export", "--model", str(source), "--to", str(target), *options])


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("llava", "qwen3_vl") else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(FAMILIES.keys() - EXPERTS)
    ],
)
def test_stock_transformers_computes_what_we_do(family: str, tmp_path: Path) -> None:
    """It also quantizes inputs; the tower, the projector and the output layer are as they were."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is in the dev extra")
    from transformers import AutoModelForImageTextToText

    publish(family, tmp_path / family)
    # As after training; a LLaVA-1.5 without it becomes a composed model.
    (tmp_path / family / "training.json").write_text('{"pretrained": "published"}')
    target = tmp_path / "fp8"
    assert export(tmp_path / family, target, "--weights", "fp8", "--dtype", "float32") == 0
    before, found = (load_file(path / "model.safetensors") for path in (tmp_path / family, target))
    layers = {name.removesuffix("_scale") for name in found if name.endswith(".weight_scale")}
    assert found.keys() == before.keys() | {f"{name}_scale" for name in layers}
    for name, tensor in before.items():
        if name in layers:
            data, scale = quantize(tensor, SCHEMES["fp8"])
            assert torch.equal(found[name].float(), data.float())
            assert torch.equal(found[f"{name}_scale"], scale)
        else:
            assert torch.equal(found[name], tensor.float()), name
    names = [
        row["layer"] for row in json.loads((target / "quantization.json").read_text())["layers"]
    ]
    assert len(names) == len(layers)
    ours, processor = load(target)
    rounded = {name for name, m in ours.named_modules() if isinstance(m, RoundedInputLinear)}
    assert rounded == set(names)
    assert all("language_model" in name or "text_model" in name for name in names)
    stock: Any = AutoModelForImageTextToText
    theirs, info = stock.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    sample = conversation(picture(3), answers=("red",))
    batch = collate([processor.encoder()(sample)], pad_token_id=processor.pad_token_id)
    inputs: Any = copy_batch_to_device(batch, torch.device("cpu"))
    model: Any = ours
    inputs |= model.make_token_types(inputs["input_ids"], inputs.pop("labels"))
    with torch.no_grad():
        a, b = theirs(**inputs).logits, ours(**inputs).logits
    assert (a - b).norm() / b.norm() < 1e-5


def test_weights_are_decompressed_for_training_and_export(tmp_path: Path) -> None:
    publish("qwen2_5_vl", tmp_path / "qwen")
    assert export(tmp_path / "qwen", tmp_path / "int8", "--weights", "int8") == 0
    assert export(tmp_path / "int8", tmp_path / "plain") == 0
    found, plain = (load_file(tmp_path / n / "model.safetensors") for n in ("int8", "plain"))
    for name, tensor in plain.items():
        if (scale := found.get(f"{name}_scale")) is not None:
            expected = dequantize(found[name], scale, SCHEMES["int8"]).bfloat16()
            assert torch.equal(tensor, expected)
    assert sum(name.endswith("_scale") for name in found) == 2 * 7
    before, after = (
        json.loads((tmp_path / n / "config.json").read_text()) for n in ("qwen", "plain")
    )
    assert after == before | {"torch_dtype": "bfloat16"}


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish("qwen3_vl_moe", tmp_path / "moe")
    assert export(tmp_path / "moe", tmp_path / "fp8", "--weights", "fp8") == 2
    assert "has the weights of several experts, which are not compressed" in capsys.readouterr().err
    assert export(tmp_path / "moe", tmp_path / "llava", "--format", "llava") == 2
    assert "--format llava is only for composed models" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"moe"}
