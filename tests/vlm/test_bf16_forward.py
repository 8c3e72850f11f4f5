"""Blocks whose forward GEMMs are not FP8 (``fp8.bf16_forward``)."""

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


def converted(model: nn.Module, *bf16_forward: str, recompute_qkv: bool = False) -> Any:
    clone = copy.deepcopy(model)
    convert(clone, Fp8Config(bf16_forward=bf16_forward, recompute_qkv=recompute_qkv))
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
    rounded, dx8, gradients8 = run_block(converted(model), x)
    y16, dx16, gradients16 = run_block(converted(model, "all"), x)
    tolerance = 1e-5 if device == "cpu" else 6e-3  # of BF16's own rounding
    assert relative(y16, y) < tolerance < relative(rounded, y) / 3
    # Gradients round as before, but at the probabilities and slopes of the original.
    assert 0.01 < relative(dx16, dx) < 1.05 * relative(dx8, dx)
    assert gradients16.keys() == gradients.keys()
    for name, gradient in gradients.items():
        if gradient.norm() > 1e-3 * x.norm():  # keys have no gradient by their bias
            error = relative(gradients16[name], gradient)
            # The norm of n independent errors deviates by 1 / sqrt(2 n), so two by 1 / sqrt(n);
            # three deviations are allowed.
            most = 1.05 + 3 * gradient.numel() ** -0.5
            assert error < max(0.02, most * relative(gradients8[name], gradient)), name


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
    ("layers", "settings", "chosen"),
    [
        (5, {}, ()),
        (6, {}, (0, 5)),
        (28, {}, (0, 27)),
        (12, {"bf16_forward": ()}, ()),
        (3, {"bf16_forward": ("all",)}, (0, 1, 2)),
        (7, {"bf16_forward": ("first", "model.layers.4")}, (0, 4)),
        (12, {"language": "fp8_linear", "vision": "coat"}, ()),
    ],
)
def test_which_blocks_it_is(layers: int, settings: dict[str, Any], chosen: tuple[int, ...]) -> None:
    report = convert(llama(layers), Fp8Config(**settings))
    texts = [report.converted[f"model.layers.{number}"] for number in range(layers)]
    assert ["forward GEMMs in BF16" in text for text in texts] == [
        number in chosen for number in range(layers)
    ]


def test_a_block_that_is_not_there() -> None:
    message = r"'model.layers.5' does not become an FP8 block; .* model.layers.0 to model.layers.4"
    with pytest.raises(ValueError, match=message):
        convert(llama(5), Fp8Config(bf16_forward=("first", "model.layers.5")))


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
