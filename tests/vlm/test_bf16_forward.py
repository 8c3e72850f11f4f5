"""First blocks whose forward GEMMs are not FP8 (``fp8.bf16_forward_first``)."""

import copy
from typing import Any

import pytest
import torch
from one_block import (
    DECODERS,
    ENCODERS,
    decoder,
    encoder,
    inputs,
    relative,
    run_block,
)
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert, linear, norm_mlp


def converted(model: nn.Module, first: int | None, *, recompute_qkv: bool = False) -> Any:
    clone = copy.deepcopy(model)
    convert(clone, Fp8Config(bf16_forward_first=first, recompute_qkv=recompute_qkv))
    return clone


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_its_output_is_the_original_blocks_and_its_gradients_are_fp8s(
    kind: str, device: str
) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = (decoder(kind) if kind in DECODERS else encoder(kind)).to(device, dtype)
    x = inputs(model).to(device, dtype)
    y, dx, gradients = run_block(copy.deepcopy(model), x)
    rounded, dx8, gradients8 = run_block(converted(model, 0), x)
    y16, dx16, gradients16 = run_block(converted(model, 1), x)
    tolerance = 1e-5 if device == "cpu" else 6e-3  # of BF16's own rounding
    assert relative(y16, y) < tolerance < relative(rounded, y) / 3
    # Gradients round as before, but at the probabilities and slopes of the original.
    assert 0.01 < relative(dx16, dx) < 1.05 * relative(dx8, dx)
    assert gradients16.keys() == gradients.keys()
    for name, gradient in gradients.items():
        if gradient.norm() > 1e-3 * x.norm():  # keys have no gradient by their bias
            error = relative(gradients16[name], gradient)
            assert error < max(0.02, 1.05 * relative(gradients8[name], gradient)), name


def llama(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=96,
        vocab_size=128,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("layers", "settings", "first"),
    [
        (5, {}, 0),
        (6, {}, 1),
        (28, {}, 2),
        (12, {"bf16_forward_first": 0}, 0),
        (3, {"bf16_forward_first": 9}, 3),
        (12, {"language": "fp8_linear", "vision": "coat"}, 0),
    ],
)
def test_how_many_blocks_it_is(layers: int, settings: dict[str, Any], first: int) -> None:
    report = convert(llama(layers), Fp8Config(**settings))
    texts = [report.converted[f"model.layers.{number}"] for number in range(layers)]
    assert ["forward GEMMs in BF16" in text for text in texts] == [
        number < first for number in range(layers)
    ]


@pytest.mark.parametrize(
    ("centered", "autocast", "weight", "x"),
    [
        (True, True, torch.float32, torch.float32),
        (False, True, torch.bfloat16, torch.float32),
    ],
)
def test_inputs_may_have_another_dtype_than_weights(
    centered: bool, autocast: bool, weight: torch.dtype, x: torch.dtype
) -> None:
    """As in other FP8 blocks; results have the input's."""
    torch.manual_seed(0)
    norm: Any = nn.LayerNorm(64, 0.5) if centered else LlamaRMSNorm(64, 0.5)
    layers = [nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)]
    for layer in layers:
        vars(layer)["fp8_bf16_forward"] = True
    gate, up, down = layers
    source = torch.randn(5, 64)
    normed = norm(source)
    expected = down(F.silu(gate(normed)) * up(normed))
    for module in (norm, *layers):
        module.to(weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        leaf = source.to(x).requires_grad_()
        y, _ = norm_mlp(leaf, norm, (gate, up), down, "silu_mul", 16)
        z = linear(leaf, gate)
    assert (y.dtype, z.dtype) == (x, x)
    assert relative(y.detach(), expected.detach()) < 0.02
    (y.float().sum() + z.float().sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == x
    assert all(layer.weight.grad is not None for layer in layers)
