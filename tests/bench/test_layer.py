"""The layer benchmark: everything but the clock."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import layer as bench
from layer import LayerResult, bench_layer, find_disagreement, make_inputs, relative_rms, run_pass
from layer_shapes import SHAPES, LayerShape, build_forward, build_layer, find_shape

CPU = torch.device("cpu")
SMALL = {
    "llama": LayerShape("small", "llama", 64, 128, 4, 4, 2, 24),
    "qwen2": LayerShape("small", "qwen2", 64, 128, 4, 2, 2, 24),
    "siglip": LayerShape("small", "siglip", 64, 128, 4, 4, 2, 24),
}


def result(implementation: str = "coat_paper", **changes: Any) -> LayerResult:
    origin = ("2026-01-31", "abc", "NVIDIA H200", "2.11.0", "3.6.0")
    made = LayerResult(*origin, "llama-2-7b", 16384, implementation, "default")
    return dataclasses.replace(made, **changes)


def test_a_llama_layer_is_causal_and_that_of_the_model() -> None:
    shape = SMALL["llama"]
    layer = build_layer(shape, CPU, torch.float32)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=1,
        vocab_size=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.model.layers[0].load_state_dict(layer.state_dict())
    x, _ = make_inputs(shape, CPU, torch.float32)
    exact = model.model(inputs_embeds=x, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.model.norm(build_forward(shape, layer, CPU)(x)), exact)


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("implementation", ["coat_fp8_linear", "coat_paper", "coat_recompute_qkv"])
def test_ours_are_near_the_original_and_not_it(implementation: str, family: str) -> None:
    shape = SMALL[family]
    layer = build_layer(shape, CPU, torch.float32)
    x, dy = make_inputs(shape, CPU, torch.float32)
    exact = run_pass(layer, build_forward(shape, layer, CPU), x, dy)
    again = run_pass(layer, build_forward(shape, layer, CPU), x, dy)
    assert torch.equal(exact.input_gradient, again.input_gradient)  # nothing accumulates
    coat = bench.IMPLEMENTATIONS[implementation][1](layer)
    actual = run_pass(coat, build_forward(shape, coat, CPU), x, dy)
    assert 0 < relative_rms(actual.output, exact.output) < bench.LIMITS[0]
    assert 0 < relative_rms(actual.input_gradient, exact.input_gradient) < bench.LIMITS[1]


def test_the_shapes_are_those_of_the_models() -> None:
    """The released models' sizes without embeddings, output layer and last norm."""
    sizes = {
        "llama-2-7b": (6_738_415_616 - 2 * 32000 * 4096 - 4096) / 32,
        "qwen2.5-7b": (7_615_616_512 - 2 * 152064 * 3584 - 3584) / 28,
    }
    for name, size in sizes.items():
        layer = build_layer(SHAPES[name], torch.device("meta"), torch.bfloat16)
        assert sum(p.numel() for p in layer.parameters()) == size
    assert find_shape("qwen2.5-7b", batch=1, length=8192).tokens == 8192


def test_wrong_results_get_no_speed() -> None:
    exact: Any = SimpleNamespace(output=torch.ones(4), input_gradient=torch.ones(4))
    assert find_disagreement(result(), exact, exact) == ""
    for value in (1.1, torch.nan):
        wrong: Any = SimpleNamespace(output=torch.full((4,), value), input_gradient=torch.ones(4))
        assert "not correct" in find_disagreement(result(), wrong, exact)


@pytest.mark.gpu
def test_on_a_gpu_time_and_memory_are_there() -> None:
    small = dataclasses.replace(SHAPES["llama-2-7b"], batch=1)
    eager, coat = bench_layer(small, ["coat_paper"])
    for measured in (eager, coat):
        assert measured.problem == ""
        assert measured.fwd_ms
        assert measured.fwdbwd_ms
    assert coat.saved_mib
    assert eager.saved_mib
    assert coat.saved_mib < 0.5 * eager.saved_mib
    assert coat.fwdbwd_cached_ms
    assert coat.weight_cache_mib == pytest.approx(2 * 202_375_168 / 2**20, rel=1e-3)
