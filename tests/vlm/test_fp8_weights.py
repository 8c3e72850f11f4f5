"""FP8 copies of weights that serve several micro-batches."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert, reused_weights, saved_bytes, weights
from coat_vlm.model.loss import linear_cross_entropy

WEIGHT_GROUPS = 4  # q k v, o, gate up, down


def model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=128,
    )
    converted = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    convert(converted, Fp8Config())
    return converted.train()


def backward(model: nn.Module, seed: int) -> None:
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was quantized, in order."""
    calls: list[str] = []
    for name in ("quantize_layouts", "quantize_again"):
        original: Callable[..., Any] = getattr(weights, name)

        def counted(*args: Any, _name: str = name, _call: Any = original, **kwargs: Any) -> Any:
            calls.append(_name)
            return _call(*args, **kwargs)

        monkeypatch.setattr(weights, name, counted)
    return calls


@pytest.mark.parametrize("checkpointing", [False, True])
def test_reused_weights_change_no_gradient_and_are_quantized_once(
    checkpointing: bool, quantized: list[str]
) -> None:
    plain = model()
    reusing = copy.deepcopy(plain)
    if checkpointing:
        reusing.gradient_checkpointing_enable({"use_reentrant": False})
    for seed in (1, 2):
        backward(plain, seed)
    assert len(quantized) == 2 * 2 * 2 * WEIGHT_GROUPS  # layers, micro-batches, passes
    quantized.clear()
    with reused_weights():
        for seed in (1, 2):
            backward(reusing, seed)
        assert quantized == ["quantize_layouts"] * 2 * WEIGHT_GROUPS
        blocks = plain.model.layers
        matrices = [p for p in blocks.parameters() if p.ndim == 2]
        assert saved_bytes() == 2 * sum(p.numel() for p in matrices)
    assert saved_bytes() == 0
    for (name, expected), actual in zip(
        plain.named_parameters(), reusing.parameters(), strict=True
    ):
        assert expected.grad is not None
        assert actual.grad is not None
        assert torch.equal(actual.grad, expected.grad), name


def test_copies_of_an_output_layer_serve_all_chunks_and_losses() -> None:
    """The loss works on shallow copies of the layer, which die with it."""
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        vocab_size=64,
    )  # fmt: skip
    converted = AutoModelForCausalLM.from_config(config)
    convert(converted, Fp8Config(language="bf16", lm_head="fp8_linear"))
    head = converted.lm_head
    hidden, targets = torch.randn(9, 32, requires_grad=True), torch.arange(9)
    with reused_weights():
        for _ in range(3):
            divisor = torch.tensor(9)
            linear_cross_entropy(head, hidden, targets, divisor, chunk_bytes=3 * 64 * 4).backward()
        assert saved_bytes() == 2 * head.weight.numel()
    assert weights.key_of([copy.copy(head)]) == weights.key_of([head])
    assert weights.key_of([copy.deepcopy(head)]) != weights.key_of([head])
