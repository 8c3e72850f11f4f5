"""Frozen weights in NF4 (QLoRA), compared with peft on bitsandbytes' layers."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from coat_vlm.config.stage import LoraTraining
from coat_vlm.model.lora import base_layer
from coat_vlm.train.model_setup import set_trainable
from coat_vlm.train.nf4 import Nf4Linear, quantize_frozen_weights

shared = runpy.run_path(str(Path(__file__).with_name("test_lora.py")))
LORA, STAGE = shared["LORA"], shared["STAGE"]
adapted, adapters_of, inputs = (shared[name] for name in ("adapted", "adapters_of", "inputs"))
NF4 = replace(LORA, quantize="nf4")


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the adapters."""
    model.zero_grad()
    loss = model(**inputs(model)).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in adapters_of(model).items()}


def test_a_step_equals_peft_on_layers_of_bitsandbytes(tiny: Any) -> None:
    """The same model with bitsandbytes' Linear4bit under peft's adapters."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = adapted(tiny, replace(STAGE, lora=LORA))
    exact, _ = step(model)
    reference: Any = tiny.model(vision=tiny.vision(hidden_size=32, intermediate_size=48))
    names = [n for n, m in model.named_modules() if base_layer(m) is not m]
    for name in names:
        layer: Any = reference.get_submodule(name)
        made = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=layer.bias is not None,
            compute_dtype=torch.float32, compress_statistics=True, quant_type="nf4",
        )  # fmt: skip
        frozen: Any = base_layer(model.get_submodule(name))
        made.weight = bitsandbytes.nn.Params4bit(
            frozen.weight.data.clone(),
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=True,
        )
        made.bias = layer.bias
        parent, _, last = name.rpartition(".")
        setattr(reference.get_submodule(parent), last, made.to("cpu"))
    config = peft.LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, lora_dropout=0.0, target_modules=names
    )
    peft.inject_adapter_in_model(config, reference)
    rest = {n: p for n, p in model.state_dict().items() if "base_layer.weight" not in n}
    assert not reference.load_state_dict(rest, strict=False).unexpected_keys
    quantize_frozen_weights(model, NF4)
    reference.train()
    loss, gradients = step(model)
    expected, expected_gradients = step(reference)
    assert gradients.keys() == expected_gradients.keys()
    assert abs(loss - expected) < 1e-6 * expected
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).norm() < 1e-5 * gradient.norm(), name
    assert abs(loss - exact) > 1e-4 * exact  # it is quantized


def test_the_original_weights_stay_and_are_quantized_again(tiny: Any) -> None:
    pytest.importorskip("bitsandbytes")
    model = adapted(tiny)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize_frozen_weights(model, NF4)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Nf4Linear)}
    assert len(layers) == 7 * model.config.text_config.num_hidden_layers
    assert all(name.startswith("language_model.model.layers.") for name in layers)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    numbers = sum(layer.weight.numel() for layer in layers.values())
    packed = sum(layer.nf4[0].numel() for layer in layers.values())
    assert packed == numbers / 2
    changed, _ = step(model)
    with torch.no_grad():
        for layer in layers.values():
            layer.weight.mul_(1.5)
    assert step(model)[0] == changed
    quantize_frozen_weights(model, NF4)
    assert step(model)[0] != changed


def test_what_cannot_work_is_an_error_before_the_engine(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="dora reads the whole base weight"):
        LoraTraining(quantize="nf4", dora=True)
    monkeypatch.setattr("coat_vlm.train.nf4.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"needs the bitsandbytes package.*set precision to coat"):
        set_trainable(tiny.model(), replace(STAGE, lora=NF4))
