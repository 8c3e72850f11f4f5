"""Exports with compressed weights: what is in the files, who reads them, what they compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved_model import saved
from torch import Tensor

from coat_cli.main import main
from coat_vlm.config import Fp8Config
from coat_vlm.generate import load
from coat_vlm.model.compressed import (
    SCHEMES,
    RoundedInputLinear,
    WeightFormat,
    dequantize,
    quantize,
)
from coat_vlm.model.vlm import CoatVlm

NAMES: tuple[WeightFormat, ...] = ("fp8", "fp8_block", "int8")
LAYERS = 2 * 7
DOWN = "language_model.model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only the inputs of down_proj are not a multiple of 128."""
    text = tiny.language("llama", hidden_size=128, intermediate_size=144, head_dim=32)
    return saved(tiny, tmp_path_factory.mktemp("compressed") / "ours", language=text)


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("exported")
    for name in NAMES:
        for layout in ("coat", "llava"):
            target = parent / f"{name}-{layout}"
            assert export(source, target, "--weights", name, "--format", layout) == 0
    assert export(source, parent / "plain", "--dtype", "bfloat16") == 0
    return {path.name: path for path in parent.iterdir()}


def export(source: Path, target: Path, *options: str) -> int:
    return main(["export", "--model", str(source), "--to", str(target), *options])


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_the_files_hold_codes_scales_and_the_rest_in_bf16(
    exported: dict[str, Path], name: WeightFormat
) -> None:
    plain, found = weights(exported["plain"]), weights(exported[f"{name}-coat"])
    scheme = SCHEMES[name]
    layers = [key.removesuffix("_scale") for key in found if key.endswith(".weight_scale")]
    assert len(layers) == (LAYERS - 2 if name == "fp8_block" else LAYERS)
    assert found.keys() == plain.keys() | {f"{key}_scale" for key in layers}
    for key, tensor in plain.items():
        if key in layers:
            codes, scale = quantize(tensor, scheme)
            assert torch.equal(found[key].float(), codes.float()), key
            assert torch.equal(found[f"{key}_scale"], scale), key
        else:
            assert torch.equal(found[key], tensor), key
    assert not any("lm_head" in key or "projector" in key or "vision" in key for key in layers)


@pytest.mark.parametrize("name", NAMES)
def test_stock_transformers_computes_what_we_do(
    exported: dict[str, Path], name: WeightFormat
) -> None:
    """It also quantizes inputs."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is in the dev extra")
    from transformers import LlavaForConditionalGeneration

    stock: Any = LlavaForConditionalGeneration
    theirs, info = stock.from_pretrained(
        exported[f"{name}-llava"], dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, _ = load(exported[f"{name}-coat"])
    ids = torch.tensor([[5, 9, 17, 40, 33, 8]])
    with torch.no_grad():
        a, b = theirs(input_ids=ids).logits, ours(input_ids=ids).logits
    # INT8: it scales inputs by amax / 127.5, we and vLLM by amax / 127.
    assert (a - b).norm() / b.norm() < (0.1 if name == "int8" else 1e-5)


def test_weights_alone_are_decompressed_for_training_and_export(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    folder = exported["fp8-coat"]
    model = CoatVlm.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert not any(isinstance(module, RoundedInputLinear) for module in model.modules())
    found = weights(folder)
    expected = dequantize(
        found[f"{DOWN}.weight"], found[f"{DOWN}.weight_scale"], SCHEMES["fp8"]
    ).bfloat16()
    assert torch.equal(model.get_submodule(DOWN).weight, expected)
    assert model.generation_config.suppress_tokens == [model.config.image_token_id]
    assert export(folder, tmp_path / "plain") == 0
    assert torch.equal(weights(tmp_path / "plain")[f"{DOWN}.weight"], expected)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


def test_what_is_refused(
    source: Path, exported: dict[str, Path], tmp_path: Path, tiny: Any, capsys: Any
) -> None:
    target = tmp_path / "x"
    assert export(source, target, "--weights", "fp8", "--format", "vila") == 2
    assert "model_dtype" in capsys.readouterr().err
    assert export(exported["int8-coat"], target, "--weights", "fp8") == 2
    assert "already compressed" in capsys.readouterr().err
    narrow = saved(tiny, tmp_path / "narrow", language=tiny.language("llama"))
    assert export(narrow, target, "--weights", "fp8_block") == 2
    message = capsys.readouterr().err
    assert "K = 48 is not a multiple of 128" in message
    assert "allowed here: fp8, int8" in message
    assert [path.name for path in tmp_path.iterdir()] == ["narrow"]  # nothing half written
    with pytest.raises(ValueError, match="precision=coat has no effect"):
        load(exported["fp8-coat"], precision="coat", fp8=Fp8Config())
    config = exported["fp8-coat"] / "config.json"
    other = tmp_path / "other"
    other.mkdir()
    text = config.read_text().replace("float-quantized", "pack-quantized")
    (other / "config.json").write_text(text)
    with pytest.raises(ValueError, match="pack-quantized"):
        load(other)
