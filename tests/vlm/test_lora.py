"""LoRA on the language model: next to stock peft and dense layers, and in FP8."""

import copy
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_stage import TRAINS, one_stage
from torch import Tensor, nn

from coat_vlm.config import Fp8Config, ModuleTraining, Precision, StageConfig
from coat_vlm.config.stage import LoraTraining
from coat_vlm.fp8 import arithmetic_of, convert, store_frozen_weights
from coat_vlm.model.lora import (
    adapter_config,
    describe,
    find_scale,
    has_adapters,
    merge,
    split_adapters,
)
from coat_vlm.model.vlm import CoatVlm, count_parameters
from coat_vlm.optim import param_groups
from coat_vlm.train.model_setup import set_train_mode, set_trainable

RANK, ALPHA = 4, 12
LORA = LoraTraining(rank=RANK, alpha=ALPHA, dropout=0.0)
STAGE = one_stage("projector", "language", lora=LORA)
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(tiny: Any, stage: StageConfig = STAGE, **changes: Any) -> CoatVlm:
    """A tiny model in training mode whose adapters are random, B too."""
    model = tiny.model(vision=tiny.vision(hidden_size=32, intermediate_size=48), **changes)
    set_trainable(model, stage)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    set_train_mode(model, stage)
    return model


def inputs(model: CoatVlm) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 60, (2, 24), generator=draw)
    ids[:, 1 : 1 + model.config.tokens_per_image] = 2
    images = torch.randn(2, 3, 28, 28, generator=draw)
    return {"input_ids": ids, "pixel_values": images, "labels": ids.masked_fill(ids == 2, -100)}


def adapters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if ".lora_" in name}


def test_logits_and_gradients_are_those_of_stock_peft(tiny: Any) -> None:
    import peft

    model = adapted(tiny)
    plain = tiny.model(vision=tiny.vision(hidden_size=32, intermediate_size=48)).language_model
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    theirs: Any = peft.get_peft_model(plain, config)
    of_peft = adapters_of(theirs.base_model.model)
    ours = adapters_of(model.language_model)
    assert of_peft.keys() == ours.keys()
    assert len(ours) == 2 * 2 * len(LINEARS)
    for name, parameter in ours.items():
        of_peft[name].data.copy_(parameter.data)
    ids = torch.randint(3, 60, (2, 17), generator=torch.Generator().manual_seed(3))
    outputs = []
    for each in (model, theirs):
        logits = each(input_ids=ids).logits
        logits.square().mean().backward()
        outputs.append(logits)
    assert (outputs[0] - outputs[1]).abs().max() < 1e-6
    for name, parameter in ours.items():
        expected = of_peft[name].grad
        assert parameter.grad is not None
        assert expected is not None
        assert (parameter.grad - expected).norm() <= 1e-6 * expected.norm(), name
    frozen = {name for name, p in model.language_model.named_parameters() if not p.requires_grad}
    assert all(p.grad is None for n, p in model.language_model.named_parameters() if n in frozen)


@pytest.mark.parametrize(
    ("rslora", "dora", "fp8"), [(True, False, True), (False, True, False), (True, True, True)]
)
def test_adapters_of_every_module_merge(tiny: Any, rslora: bool, dora: bool, fp8: bool) -> None:
    lora = replace(LORA, rslora=rslora, dora=dora, modules=["vision", "projector", "language"])
    stage = replace(STAGE, vision=TRAINS, lora=lora)
    model = adapted(tiny, stage, language=tiny.language(hidden_size=64))
    assert adapter_config(model).modules_to_save is None
    assert all(".lora_" in n for n, p in model.named_parameters() if p.requires_grad)
    parts = {name.split(".")[0] for name in adapters_of(model)}
    assert parts == {"vision_tower", "projector", "language_model"}
    for name, parameter in model.named_parameters():
        if "magnitude" in name:  # around the magnitudes, as in training
            parameter.data.abs_().add_(0.5)
    if fp8:
        report = convert(model, Fp8Config(language="coat", vision="coat"))
        assert sum("LoRA" in text for text in report.converted.values()) == 4
    batch = inputs(model)
    model(**batch).loss.backward()
    layers = 2 * 6  # the tower is built without the last block, which is not read
    found = [p for p in adapters_of(model).values() if p.grad is not None and p.grad.any()]
    assert len(found) == (2 + dora) * (layers + 2 * 7 + 2)
    base, weights = split_adapters(model.state_dict())
    merge(base, weights, find_scale(adapter_config(model).to_dict()))
    vision = tiny.vision(hidden_size=32, intermediate_size=48)
    plain = tiny.model(vision=vision, language=tiny.language(hidden_size=64), seed=9)
    plain.load_state_dict(base)
    model.eval()
    with torch.no_grad():
        before, after = model(**batch).logits, plain(**batch).logits
    # Blocks differ by up to 8% each (test_fp8_blocks.py): two of the tower, two of the decoder.
    assert (before - after).norm() < (0.08 * 4**0.5 if fp8 else 1e-5) * after.norm()


def test_what_trains_and_what_does_not(tiny: Any) -> None:
    model = adapted(tiny)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    projector = {name for name in trained if name.startswith("projector.")}
    lora = trained - projector
    assert model.projector is not None
    assert projector == {f"projector.{name}" for name, _ in model.projector.named_parameters()}
    assert {name.split(".")[5] for name in lora} == LINEARS
    assert all(".lora_" in name and name.startswith("language_model.") for name in lora)
    # Two layers: hidden 32, keys and values 16, MLP 48 wide; r (K + N) each.
    sums = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48)
    expected = 2 * RANK * sums
    assert count_parameters(model.language_model, trainable_only=True) == expected
    assert "rank 4, alpha 12, dropout 0 on 14 layers" in describe(model)
    assert f": {expected:,} parameters" in describe(model)
    groups = param_groups(model, replace(STAGE, language=replace(TRAINS, lr=2e-4)))
    rates = {group["module"]: group["peak_lr"] for group in groups}
    assert rates == {"projector": 1e-3, "language": 2e-4}


@pytest.mark.parametrize("precision", ["fp8_linear", "coat"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_frozen_layers_are_those_without_adapters(
    tiny: Any, precision: Precision, dropout: float
) -> None:
    """With B = 0 the language model computes what a frozen one does without adapters, to the bit.

    The forward GEMMs of its first and last block are not BF16. With dropout it is under fp8_linear.
    """
    stage = replace(STAGE, vision=TRAINS, lora=replace(LORA, dropout=dropout))
    separate = bool(dropout) or precision == "fp8_linear"
    results = []
    for of_lora in (True, False):
        model = tiny.model(vision=tiny.vision(hidden_size=32, intermediate_size=48))
        frozen = replace(stage, lora=None, language=ModuleTraining(train=False))
        set_trainable(model, stage if of_lora else frozen)
        fp8 = Fp8Config(language="fp8_linear") if separate and not of_lora else Fp8Config()
        report = arithmetic_of(precision, fp8, torch.device("cpu")).apply(model)
        if of_lora:
            store_frozen_weights(model)
        set_train_mode(model, stage)
        loss = model(**inputs(model)).loss
        loss.backward()
        kept = {name: p.grad for name, p in model.named_parameters() if ".lora_" not in name}
        results.append((report, loss, kept))
    (report, loss, gradients), (_, expected, theirs) = results
    assert loss.item() == expected.item()
    for name, gradient in gradients.items():
        if name.startswith(("vision", "projector")) and theirs[name] is not None:
            assert torch.equal(gradient, theirs[name]), name
        elif name.startswith("language"):
            assert gradient is None, name
    text = report.converted["language_model.model.layers.0"]
    assert "LoRA adapters in BF16" in text
    assert text.startswith("frozen linear layers in FP8") == separate
    assert (f"not {precision}: of lora" in text) == (separate and precision != "fp8_linear")
    what = report.converted["vision_tower.model.encoder.layers.0"]
    assert ("encoder block" in what) == (precision != "fp8_linear")


def test_what_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model()
    with pytest.raises(ValueError, match=r"'qproj' is not a linear layer .* did you mean q_proj"):
        set_trainable(model, replace(STAGE, lora=LoraTraining(target_modules=["qproj"])))
    assert not has_adapters(model)
    with pytest.raises(ValueError, match=r"lora has no effect with a frozen vision module"):
        replace(STAGE, lora=LoraTraining(modules=["vision"]))
    with pytest.raises(ValueError, match="lora has no effect with a frozen language model"):
        replace(STAGE, language=ModuleTraining(train=False))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"needs peft.*pip install -e '.\[lora\]'"):
        set_trainable(copy.deepcopy(model), STAGE)
