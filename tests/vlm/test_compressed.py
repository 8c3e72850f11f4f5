"""Codes and scales of compressed weights, compared with compressed-tensors' arithmetic."""

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from coat_vlm.model.compressed import (
    SCHEMES,
    Scheme,
    WeightFormat,
    dequantize,
    quantize,
    round_inputs,
    sqnr_db,
)

NAMES: tuple[WeightFormat, ...] = ("fp8", "fp8_block", "int8")


def weight(rows: int, columns: int) -> Tensor:
    """Channels of very different sizes, in BF16."""
    torch.manual_seed(0)
    return (torch.randn(rows, columns) * torch.logspace(-6, 3, rows)[:, None]).bfloat16()


def back(w: Tensor, name: WeightFormat) -> Tensor:
    return dequantize(*quantize(w, SCHEMES[name]), SCHEMES[name])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_constants_come_back_exactly(name: WeightFormat) -> None:
    w = torch.zeros(384, 128)
    w[128:256] = -0.0123
    w[256:] = 3.0e4
    w[256:, ::2] *= -1
    w = w.bfloat16()
    assert torch.equal(back(w, name).bfloat16(), w)
    assert back(torch.zeros(3, 5), name).eq(0).all()
    assert sqnr_db(torch.zeros(3, 5), torch.zeros(3, 5)) == math.inf


PRESETS = {"fp8": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK", "int8": "INT8"}
FIELDS = ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "block_structure")


@pytest.mark.parametrize("name", NAMES)
def test_compressed_tensors_reads_what_we_say(name: WeightFormat) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is in the dev extra")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    scheme = SCHEMES[name]
    parsed = QuantizationConfig.model_validate(scheme.config([]))
    read: Any = parsed.config_groups["group_0"]
    published: Any = preset_name_to_scheme(PRESETS[name], ["Linear"])
    for part in ("weights", "input_activations"):
        ours, theirs = getattr(read, part), getattr(published, part)
        assert all(getattr(ours, key) == getattr(theirs, key) for key in FIELDS), part

    w = weight(200, 256)
    codes, scale = quantize(w, scheme)
    compressor: Any = BaseCompressor.get_value_from_registry(parsed.format)
    values = compressor.decompress({"weight": codes, "weight_scale": scale}, read)["weight"]
    assert torch.equal(values, dequantize(codes, scale, scheme))
    again = compressor.compress({"weight": w.float(), "weight_scale": scale}, read)["weight"]
    assert again.dtype == codes.dtype
    assert torch.equal(again.float(), codes.float())

    x = torch.randn(6, 256) * torch.logspace(-3, 2, 6)[:, None]
    layer: Any = nn.Linear(256, 1)
    layer.quantization_scheme, layer.quantization_status = read, parsed.quantization_status
    theirs = forward_quantize(layer, x[None], "input", read.input_activations)[0]
    ours = inputs_of(x, scheme)
    if name == "int8":  # it scales by amax / 127.5 there, and by amax / 127 in vLLM
        assert ((ours - theirs).abs() <= x.abs().amax(1, keepdim=True) / 127).all()
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def inputs_of(x: Tensor, scheme: Scheme) -> Tensor:
    """What a layer with such weights makes of its input: of an identity's, its output."""
    layer = nn.Linear(x.shape[1], x.shape[1], bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(x.shape[1]))
        with TemporaryDirectory() as folder:
            codes, scale = quantize(layer.weight, scheme)
            tensors = {"language.a.weight": codes, "language.a.weight_scale": scale}
            save_file(tensors, Path(folder) / "model.safetensors")
            language = nn.ModuleDict({"a": layer})
            round_inputs(nn.ModuleDict({"language": language}), scheme, Path(folder))
        return layer(x)
