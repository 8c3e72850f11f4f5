"""FP8 blocks against the layers of transformers that they replace."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_block import DECODERS, ENCODERS, decoder, encoder, inputs, relative, run_block
from torch import Tensor, nn

from coat_kernels import Op, reference
from coat_vlm.config import Fp8Config
from coat_vlm.config.fp8 import FP8_PRECISIONS, Fp8Precision
from coat_vlm.fp8 import convert, linear, norm_mlp, watching


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="fp32_cpu"),
        pytest.param("cuda", id="bf16_gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
@pytest.mark.parametrize("precision", FP8_PRECISIONS)
def test_a_block_computes_what_the_original_computes_to_fp8_accuracy(
    precision: Fp8Precision,
    kind: str,
    device: str,
    record_property: Callable[[str, object], None],
) -> None:
    original = decoder(kind) if kind in DECODERS else encoder(kind)
    original = original.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    converted = copy.deepcopy(original)
    convert(converted, Fp8Config().resolved(precision))
    x = inputs(original).to(original.device, original.dtype)
    y, dx, gradients = run_block(original, x)
    y8, dx8, gradients8 = run_block(converted, x)
    assert gradients8.keys() == gradients.keys()
    # Softmax does not change when all keys move alike: that gradient is rounding noise.
    names = [name for name in gradients if not name.endswith("k_proj.bias")]
    errors = {name: relative(gradients8[name], gradients[name]) for name in names}
    errors |= {"output": relative(y8, y), "input": relative(dx8, dx)}
    for name, error in errors.items():
        record_property(name, f"{error:.4f}")  # docs/experiments/fp8_training_loss.md has the table
    assert 1e-3 < errors["output"] <= 0.09
    assert 1e-3 < errors["input"] <= 0.13
    assert max(errors.values()) <= 0.2, errors


def test_a_linear_layer_multiplies_the_rounded_operands() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 32)
    x = torch.randn(3, 5, 48, requires_grad=True)

    def rounded(t: Tensor, dtype: torch.dtype, largest: float, *, weight: bool = False) -> Tensor:
        scale = t.abs().max() * torch.tensor(1 / largest)
        if weight:
            scale = reference.dither_scale(scale, t)
        return (t * (1 / scale)).to(dtype).double() * scale.double()

    x8 = rounded(x.detach(), torch.float8_e4m3fn, 448.0)
    w8 = rounded(layer.weight.detach(), torch.float8_e4m3fn, 448.0, weight=True)
    dy = torch.randn(3, 5, 32)
    dy8 = rounded(dy, torch.float8_e5m2, 57344.0)
    y = linear(x, layer)
    y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    expected = x8 @ w8.t() + layer.bias.detach().double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), dy8 @ w8, rtol=1e-5, atol=1e-5)
    expected_weight = dy8.reshape(-1, 32).t() @ x8.reshape(-1, 48)
    torch.testing.assert_close(layer.weight.grad.double(), expected_weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, dy.sum((0, 1)))


@pytest.mark.parametrize("recompute_qkv", [False, True])
def test_a_block_runs_one_gemm_per_fused_weight(
    recompute_qkv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k and v are one, and so are gate and up; no other op runs more often than needed."""
    calls: Counter[str] = Counter()
    run = Op.__call__

    def count(op: Op, *args: Any) -> Any:
        calls[op.name] += 1
        return run(op, *args)

    monkeypatch.setattr(Op, "__call__", count)
    model = decoder("llama")
    convert(model, Fp8Config(recompute_qkv=recompute_qkv))
    run_block(model, inputs(model))
    assert calls["scaled_mm"] == 4 + 8 + recompute_qkv
    assert sum(calls.values()) == 45 + 3 * recompute_qkv, calls


def test_partly_frozen_linears_train_the_rest() -> None:
    model = decoder("qwen2")
    convert(model, Fp8Config())
    block = model.model.layers[0]
    block.self_attn.q_proj.requires_grad_(False)
    block.mlp.down_proj.requires_grad_(False)
    _, _, gradients = run_block(model, inputs(model))
    assert "self_attn.q_proj.weight" not in gradients
    assert "mlp.down_proj.weight" not in gradients
    assert gradients["self_attn.k_proj.weight"].abs().sum() > 0
    assert gradients["mlp.up_proj.weight"].abs().sum() > 0


@pytest.mark.parametrize("make", [lambda: decoder("qwen2"), lambda: encoder("siglip")])
def test_a_down_projection_that_trains_alone_has_the_same_gradient(
    make: Callable[[], Any],
) -> None:
    """The recomputed activation does not depend on the gradient, which is not computed here."""
    model = make()
    convert(model, Fp8Config())
    layers = [module for module in model.modules() if hasattr(module, "fp8_group_size")]
    mlp = layers[0].mlp
    x = torch.randn(2, 5, mlp.config.hidden_size)
    layer = mlp.down_proj if hasattr(mlp, "down_proj") else mlp.fc2
    norm = getattr(layers[0], "post_attention_layernorm", None) or layers[0].layer_norm2
    into = (mlp.gate_proj, mlp.up_proj) if hasattr(mlp, "down_proj") else (mlp.fc1,)
    kind = "silu_mul" if hasattr(mlp, "down_proj") else "gelu_tanh"
    found = []
    for wanted in (True, False):
        model.requires_grad_(wanted)
        layer.weight.requires_grad_(True)
        layer.weight.grad = None
        y, _ = norm_mlp(x, norm, into, layer, kind, 16)
        y.square().sum().backward()
        found.append(layer.weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_do_not_become_good_ones(bad: float) -> None:
    model = decoder("qwen2")
    convert(model, Fp8Config())
    block = model.model.layers[0]
    x = torch.randn(1, 4, 256)
    x[0, 2, 7] = bad
    out, _ = norm_mlp(
        x,
        block.post_attention_layernorm,
        (block.mlp.gate_proj, block.mlp.up_proj),
        block.mlp.down_proj,
        "silu_mul",
        16,
    )
    assert out[0, 2].isnan().all()


def test_the_monitor_counts_each_kind_of_tensor() -> None:
    model = decoder("qwen2")
    convert(model, Fp8Config())
    x = inputs(model)
    with watching() as counts:
        run_block(model, x)
    rates = counts.rates()
    assert set(rates) == {
        "weight",
        "gradient",
        "linear input",
        "norm input",
        "norm output",
        "activation input",
        "activation output",
    }
    assert rates["norm input"]["values"] == 2 * x.numel()
    assert rates["norm output"]["saturated"] == 0.0  # the scale is a bound
    assert 0 < rates["linear input"]["saturated"] < 0.01
    assert all(0 <= rate["underflowed"] < 0.5 for rate in rates.values())
    # Powers of two across more than FP8's range: what is too small for the largest underflows.
    layer = nn.Linear(32, 16)
    with watching() as counts:
        linear(torch.exp2(-torch.arange(32.0))[None], layer)
    expected = int((torch.exp2(-torch.arange(32.0)) * 448 <= 2**-10).sum())
    assert counts.rates()["linear input"]["underflowed"] == pytest.approx(expected / 32)


@pytest.mark.parametrize(
    "trained",
    ["norm.weight", "norm.bias", "into.weight", "into.bias", "out.weight", "out.bias", "nothing"],
)
def test_gradients_of_partly_frozen_mlps(trained: str) -> None:
    """As if all trained, up to the rounding to E5M2 with another scale: at most 2^-3 each."""
    torch.manual_seed(0)
    norm, into, out = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
    mlp = nn.ModuleDict({"norm": norm, "into": into, "out": out})
    parameters = dict(mlp.named_parameters())
    x, grad = torch.randn(24, 32), torch.randn(24, 32)

    def gradients() -> dict[str, Tensor | None]:
        leaf = x.clone().requires_grad_()
        y, _ = norm_mlp(leaf, norm, [into], out, "gelu_tanh", 16)
        mlp.zero_grad(set_to_none=True)
        y.backward(grad)
        return {"x": leaf.grad} | {name: p.grad for name, p in parameters.items()}

    expected = gradients()
    for name, parameter in parameters.items():
        parameter.requires_grad_(name == trained)
    found = gradients()
    assert {name for name, g in found.items() if g is not None} == {"x", trained} - {"nothing"}
    for name in {"x", trained} - {"nothing"}:
        wanted, actual = expected[name], found[name]
        assert wanted is not None
        assert actual is not None
        assert (actual - wanted).norm() < 2 * 2.0**-3 * wanted.norm(), name
