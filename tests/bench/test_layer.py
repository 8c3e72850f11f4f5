"""The layer benchmark: everything but the clock."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from coat_bench import layer as bench
from coat_bench.layer import (
    LayerRow,
    bench_layer,
    find_disagreement,
    format_rows,
    make_inputs,
    relative_error,
    run_passes,
)
from coat_bench.shapes import SHAPES, LayerShape, build_forward, build_layer, find_shape

CPU = torch.device("cpu")
SMALL = {
    "llama": LayerShape("small", "llama", 64, 128, 4, 4, 2, 24),
    "qwen2": LayerShape("small", "qwen2", 64, 128, 4, 2, 2, 24),
    "siglip": LayerShape("small", "siglip", 64, 128, 4, 4, 2, 24),
}


def row(implementation: str = "coat_paper", **changes: float | str) -> LayerRow:
    about = {
        "date": "2026-01-31", "commit": "abc", "gpu": "NVIDIA H200", "torch": "2.11.0",
        "triton": "3.6.0", "shape": "llama-2-7b", "tokens": 16384, "attention": "default",
    }  # fmt: skip
    return dataclasses.replace(LayerRow(implementation=implementation, **about), **changes)  # pyright: ignore[reportArgumentType]


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
    mine = model.model.norm(build_forward(shape, layer, CPU)(x))
    torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("family", ["llama", "qwen2", "siglip"])
@pytest.mark.parametrize("implementation", ["coat_fp8_linear", "coat_paper", "coat_lean"])
def test_ours_are_near_the_original_and_not_it(implementation: str, family: str) -> None:
    shape = SMALL[family]
    layer = build_layer(shape, CPU, torch.float32)
    x, dy = make_inputs(shape, CPU, torch.float32)
    exact = run_passes(layer, build_forward(shape, layer, CPU), x, dy)
    again = run_passes(layer, build_forward(shape, layer, CPU), x, dy)
    assert torch.equal(exact.input_gradient, again.input_gradient)  # nothing accumulates
    coat = bench.IMPLEMENTATIONS[implementation][1](layer)
    result = run_passes(coat, build_forward(shape, coat, CPU), x, dy)
    assert 0 < relative_error(result.output, exact.output) < bench.LIMITS[0]
    assert 0 < relative_error(result.input_gradient, exact.input_gradient) < bench.LIMITS[1]


def test_the_shapes_are_those_of_the_models() -> None:
    parameters = {
        name: sum(
            p.numel() for p in build_layer(shape, torch.device("meta"), torch.bfloat16).parameters()
        )
        for name, shape in SHAPES.items()
        if name != "siglip-so400m"
    }
    # The released models' sizes without embeddings, output layer and last norm.
    assert parameters["llama-2-7b"] == (6_738_415_616 - 2 * 32000 * 4096 - 4096) / 32
    assert parameters["qwen2.5-7b"] == (7_615_616_512 - 2 * 152064 * 3584 - 3584) / 28


def test_wrong_results_get_no_speed() -> None:
    exact = SimpleNamespace(output=torch.ones(4), input_gradient=torch.ones(4))
    for spoilt in (torch.full((4,), 1.1), torch.full((4,), torch.nan)):
        wrong = SimpleNamespace(output=spoilt, input_gradient=torch.ones(4))
        measured = row()
        assert "not correct" in find_disagreement(measured, wrong, exact)  # pyright: ignore[reportArgumentType]
        assert measured.rel_err_out is not None
    assert find_disagreement(row(), exact, exact) == ""  # pyright: ignore[reportArgumentType]


def test_the_table_compares_with_the_first() -> None:
    rows = [
        row("hf_eager", fwdbwd_ms=40.0),
        row(fwdbwd_ms=20.0),
        row("slow", problem="RuntimeError: x"),
    ]
    _, _, first, second, third = format_rows(rows).splitlines()
    assert "| 1.00x |" in first
    assert "| 20.00 | 2.00x |" in second
    assert third.endswith("| RuntimeError: x |")


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = find_shape("llama-2-7b")
    with pytest.raises(ValueError, match=r"use one of llama-2-7b, qwen2\.5-7b, siglip-so400m"):
        find_shape("gpt-2")
    longer = find_shape("qwen2.5-7b", batch=1, length=8192)
    assert (longer.tokens, longer.ffn) == (8192, 18944)
    with pytest.raises(ValueError, match="length is 0; give 1 or more"):
        find_shape("qwen2.5-7b", length=0)
    with pytest.raises(ValueError, match="no implementation is called fast"):
        bench_layer(shape, ["fast"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no GPU"):
        bench_layer(shape, ["coat_lean"])


@pytest.mark.gpu
def test_on_a_gpu_time_and_memory_are_there() -> None:
    small = dataclasses.replace(SHAPES["llama-2-7b"], batch=1)
    tables = {}
    eager, coat = bench_layer(small, ["coat_paper"], on_profile=tables.__setitem__)
    assert "ms on the GPU" in tables["coat_paper"]
    for measured in (eager, coat):
        assert measured.problem == ""
        assert measured.fwd_ms
        assert measured.fwdbwd_ms
    assert coat.saved_mib
    assert eager.saved_mib
    assert coat.saved_mib < 0.5 * eager.saved_mib
    assert coat.fwdbwd_cached_ms
    assert coat.weight_cache_mib == pytest.approx(2 * 202_375_168 / 2**20, rel=1e-3)
