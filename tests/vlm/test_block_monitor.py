"""FP8 blocks compared with BF16 on live inputs."""

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from coat_vlm.config import Fp8Config
from coat_vlm.config.fp8 import MonitorConfig
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import ALONE
from coat_vlm.fp8 import Arithmetic, convert, fp8_blocks
from coat_vlm.train.fp8_monitor import Fp8Monitor, select_blocks

LAYERS = 5
CPU = Arithmetic(torch.float32, Fp8Config().resolved("coat"), round_linears=True)


SIZES = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}


def plain_model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).train()


def watched(config: MonitorConfig, **fp8: Any) -> tuple[Any, Fp8Monitor]:
    model, settings = plain_model(), Fp8Config(**fp8)
    report = convert(model, settings)
    return model, Fp8Monitor(model, report, config, CPU, ALONE, split=False)


def train_step(model: Any, step: int = 0) -> dict[str, Tensor]:
    """Gradients by name, of a step with dropout."""
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def measured(model: Any, monitor: Fp8Monitor) -> dict[str, Any]:
    with monitor.capture():
        train_step(model)
    return monitor.measure()[0]


@pytest.mark.parametrize("precision", ["coat", "fp8_linear"])
def test_a_healthy_model_is_within_the_default_limits(precision: Any) -> None:
    model, monitor = watched(MonitorConfig(every=1), language=precision)
    row = measured(model, monitor)
    assert list(row["layers"]) == [f"model.layers.{n}" for n in (0, 2, 4)]
    assert row["warnings"] == []
    for values in row["layers"].values():
        assert 0.005 < values["output_error"] < 0.2
        assert 0.005 < values["input_gradient_error"] < 0.4
        assert values["weight"].keys() == {"saturated", "underflowed"}
        assert "gradient" in values


def test_the_error_is_that_of_the_two_models_computed_whole() -> None:
    """Of the first block: its input is the embedding in both, so whole models can be compared."""
    ids = torch.arange(24).view(2, 12)
    exact = plain_model().eval()
    fp8, monitor = watched(MonitorConfig(every=1, layers=("first",)))
    with torch.no_grad():
        x = exact.model.embed_tokens(ids)
        y, y8 = (
            m.eval()(input_ids=ids, output_hidden_states=True).hidden_states[1]
            for m in (exact, fp8)
        )
    by_hand = (y8 - y).norm() / (y - x).norm()
    with monitor.capture():
        fp8.train()(input_ids=ids, labels=ids).loss.backward()
    values = monitor.measure()[0]["layers"]["model.layers.0"]
    # Ours compares with BF16's rounding instead of FP32, which is a tenth of FP8's.
    assert values["output_error"] == pytest.approx(by_hand.item(), rel=0.1)


def test_a_block_with_huge_weights_is_named() -> None:
    model, monitor = watched(MonitorConfig(every=1, layers=("all",)))
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] = 3e6
    with monitor.capture():
        train_step(model)
    _, warnings = monitor.measure()
    assert warnings
    assert all("model.layers.3:" in text for text in warnings if "weight" in text)
    (text,) = [text for text in warnings if "weight, underflowed" in text]
    assert text.startswith("model.layers.3: weight, underflowed is ")
    assert "the limit is 0.25; " in text
    assert "start with fp8.bf16_forward: [first, last, model.layers.3]" in text


@pytest.mark.parametrize("trouble", ["weight", "gradient"])
def test_what_bf16_cannot_hold_either_is_not_blamed_on_fp8(trouble: str) -> None:
    model, monitor = watched(MonitorConfig(every=1, layers=("all",)))
    with monitor.capture():
        ids = torch.arange(24).view(2, 12)
        if trouble == "weight":
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
        loss = model(input_ids=ids, labels=ids).loss
        (loss * (torch.inf if trouble == "gradient" else 1)).backward()
    row, warnings = monitor.measure()
    assert warnings == []
    assert len(row["layers"]) == 5
    assert not any("output_error" in values for values in row["layers"].values())


def test_the_step_is_the_same_with_and_without_the_monitor() -> None:
    """Gradients, random state and weights, bit for bit, in the step that is measured and after."""
    model, monitor = watched(MonitorConfig(every=1, layers=("all",)))
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    with monitor.capture():
        ours = train_step(model, 1)
    monitor.measure()
    ours_next = train_step(model, 2)
    torch.manual_seed(5)
    theirs, theirs_next = train_step(other, 1), train_step(other, 2)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
        assert torch.equal(ours_next[name], theirs_next[name]), name
    assert not any(b._forward_hooks or b._forward_pre_hooks for _, b in fp8_blocks(model))


NAMES = [f"tower.layers.{n}" for n in range(2)] + [f"model.layers.{n}" for n in range(5)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (("first",), [0, 2]),
        (("last", "middle"), [1, 4, 6]),
        (("model.layers.1", "first"), [0, 2, 3]),
        (("all",), range(7)),
    ],
)
def test_which_blocks_are_meant(layers: tuple[str, ...], expected: Any) -> None:
    assert select_blocks(NAMES, layers) == [NAMES[number] for number in expected]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.9 is not an FP8 block.*first, middle"):
        select_blocks(NAMES, ("model.layers.9",))
    with pytest.raises(ValueError, match="no FP8 block"):
        select_blocks([], ("first",))
    with pytest.raises(ValidationError, match=r"monitor\.layers"):
        MonitorConfig(every=1, layers=())
    with pytest.raises(ValueError, match="monitor has no effect with precision: bf16"):
        load_recipe("quickstart", ["precision=bf16", "monitor.every=5"])
