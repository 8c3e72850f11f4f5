"""Attention that keeps FP8 copies, against attention by torch's autograd."""

import copy
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_kernels import GROUP_SIZES, INT8, dequantize_group, quantize_group
from coat_vlm.config import BlockPrecision, Fp8Config
from coat_vlm.fp8 import blocks, convert, gemm, linear, norm_mlp, sdpa
from coat_vlm.fp8 import heads as heads_module
from coat_vlm.fp8.attention import fp8_saved_attention, round_heads

B, T, D = 5, 24, 64


def heads(count: int, seed: int, length: int = T) -> Tensor:
    x = torch.randn(B, length, count * D, generator=torch.Generator().manual_seed(seed))
    return x.view(B, length, count, D).transpose(1, 2)


def representable(x: Tensor) -> Tensor:
    """Values that the FP8 copies hold exactly."""
    matrix = x.transpose(1, 2).reshape(B * x.shape[2], -1)
    values = dequantize_group(quantize_group(matrix, 128, INT8))
    return values.view(B, x.shape[2], -1, D).transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """By the formula: softmax(scale q k^T) v, [B, T, H * D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(D))
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["equal", "grouped"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_fused_passes_apart_are_those_of_autograd(
    causal: bool, scale: float | None, kv_heads: int
) -> None:
    q, k, v = heads(4, 1), heads(kv_heads, 2), heads(kv_heads, 3)
    how = sdpa.choose(q, k, v, causal, scale)
    assert how is not None
    assert how == sdpa.Fused("cpu", causal, scale)
    out, statistics = sdpa.forward(how, q, k, v)
    q64, k64, v64 = leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = exact(q64, k64, v64, causal, scale)
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    dy = torch.randn(B, T, 4 * D, generator=torch.Generator().manual_seed(4))
    gradients = sdpa.backward(how, dy, q, k, v, out, statistics)
    for actual, wanted in zip(
        gradients, torch.autograd.grad(expected, leaves, dy.double()), strict=True
    ):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "replayed"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["equal", "grouped"])
def test_with_representable_heads_it_is_attention_and_a_linear_layer(
    fused: bool, kv_heads: int
) -> None:
    """What remains is the copy of the output, of which backward takes the row sums of do * o."""
    torch.manual_seed(0)
    layer = nn.Linear(4 * D, 48)
    reference = copy.deepcopy(layer)
    q, k, v = (representable(heads(n, i)) for i, n in enumerate((4, kv_heads, kv_heads)))
    how = sdpa.choose(q, k, v, True, None) if fused else None
    calls = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(q.shape)
        return exact(q, k, v, True, None)

    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    y = fp8_saved_attention(ours[0], ours[1], ours[2], layer, attend, how)
    y_reference = linear(exact(theirs[0], theirs[1], theirs[2], True, None), reference)
    torch.testing.assert_close(y, y_reference, rtol=1e-2, atol=2e-3)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
    y.backward(dy)
    y_reference.backward(dy)
    assert len(calls) == (0 if fused else 2)
    trained = ([*ours, *layer.parameters()], [*theirs, *reference.parameters()])
    for mine, other in zip(*trained, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        difference = (mine.grad - other.grad).norm() / other.grad.norm()
        assert difference < (0.04 if fused else 1e-3)


def test_its_copies_go_with_the_first_backward_pass() -> None:
    layer = nn.Linear(4 * D, 16)
    q, k, v = (heads(4, i).requires_grad_() for i in range(3))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = fp8_saved_attention(q, k, v, layer, exact_causal, sdpa.choose(q, k, v, True, None))
    codes = [x for x in saved if x.dtype in (torch.float8_e4m3fn, torch.int8)]
    assert sum(x.untyped_storage().nbytes() for x in codes) == 4 * B * T * 4 * D
    y.sum().backward(retain_graph=True)
    assert not sum(x.untyped_storage().nbytes() for x in codes)
    with pytest.raises(RuntimeError, match="ran before"):
        y.sum().backward()


def exact_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return exact(q, k, v, True, None)


def test_attention_works_on_the_round_heads() -> None:
    x = heads(4, 9)
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend((q, k, v))
        return exact(q, k, v, True, None)

    fp8_saved_attention(x, x, x, nn.Linear(4 * D, 16), attend, None)
    for got in seen:
        assert torch.equal(got, representable(x))
    assert torch.equal(round_heads(x), representable(x))
    leaf = x.bfloat16().requires_grad_()
    rounded = round_heads(leaf)
    assert torch.equal(rounded.float(), representable(x.bfloat16().float()))
    rounded.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 1).all()


def block(**changes: Any) -> tuple[Any, Any]:
    """A Llama block that is lean, and its rotary embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=64,
        **changes,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").bfloat16()
    convert(model, Fp8Config(language="coat_lean"))
    return model.model.layers[0], model.model.rotary_emb


def test_a_lean_block_keeps_what_its_formula_says() -> None:
    layer, rotary = block()
    own = {p.data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    tokens, h, f, k, a = 64, 256, 512, 128, 4
    x = torch.randn(1, tokens, h).bfloat16().requires_grad_()
    embeddings = rotary(x, torch.arange(tokens)[None])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x, position_embeddings=embeddings)
    norms = 2 * (h + h / 16 + 4)  # copies and 1 / rms
    attention = (h + 2 * k) * (1 + 1 / 64) + h + 4 * a  # q, k, v; o; log-sum-exp
    mlp = 2 * f * (1 + 1 / 16)
    scales = 64
    expected = tokens * (norms + attention + mlp)  # cos and sin are those of all layers
    assert expected <= sum(kept.values()) <= expected + scales


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_and_other_implementations_give_the_same(implementation: str) -> None:
    layer, rotary = block()
    x = torch.randn(1, T, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    embeddings = rotary(x, torch.arange(T)[None])
    results = []
    for mask in (None, torch.ones(T, T, dtype=torch.bool).tril()[None, None]):
        given = mask
        if mask is not None and implementation == "eager":
            layer.self_attn.config._attn_implementation = "eager"
            given = torch.zeros(1, 1, T, T).masked_fill(~mask, -math.inf).bfloat16()
        leaf = x.clone().requires_grad_()
        y = layer(leaf, attention_mask=given, position_embeddings=embeddings)
        y.backward(torch.ones_like(y))
        assert leaf.grad is not None
        results.append((y.detach().float(), leaf.grad.float()))
    for fused, replayed in zip(*results, strict=True):
        assert (fused - replayed).norm() / fused.norm() < 0.02


def test_dropout_in_attention_is_not_repeated_but_recorded() -> None:
    layer, rotary = block(attention_dropout=0.5)
    x = torch.randn(1, T, 256).bfloat16().requires_grad_()
    embeddings = rotary(x, torch.arange(T)[None])
    first, second = (layer.train()(x, position_embeddings=embeddings) for _ in range(2))
    assert not torch.equal(first, second)
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_copies_made_with_the_rotation_give_the_same_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """From FP32 instead of from rounded heads: apart by a code now and then."""
    layer, rotary = block()
    x = torch.randn(1, T, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    embeddings = rotary(x, torch.arange(T)[None])
    results = []
    for sizes in (GROUP_SIZES, ()):
        monkeypatch.setattr(heads_module, "GROUP_SIZES", sizes)
        leaf = x.clone().requires_grad_()
        y = layer(leaf, position_embeddings=embeddings)
        y.backward(torch.ones_like(y))
        assert leaf.grad is not None
        results.append((y.detach().float(), leaf.grad.float()))
    for together, apart in zip(*results, strict=True):
        assert not torch.equal(together, apart)
        assert (together - apart).norm() / apart.norm() < 0.02


def test_heads_that_torch_would_pad_are_not_given_to_a_kernel() -> None:
    x = torch.randn(1, 2, 8, 12)
    assert sdpa.choose(x, x, x, True, None) is None


@pytest.mark.parametrize("use", ["residual", "both"])
def test_the_residual_stream_alone_has_a_gradient(use: str) -> None:
    layer, _ = block()
    x = torch.randn(1, T, 256).bfloat16().requires_grad_()
    delta = torch.randn(1, T, 256).bfloat16().requires_grad_()
    mlp = layer.mlp
    y, residual = norm_mlp(
        x, layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), mlp.down_proj,
        "silu_mul", 16, delta,
    )  # fmt: skip
    (residual if use == "residual" else residual + y).sum().backward()
    assert x.grad is not None
    assert delta.grad is not None
    assert torch.equal(x.grad, delta.grad)
    assert (x.grad == 1).all() == (use == "residual")


@pytest.mark.parametrize("precision", ["coat", "coat_lean"])
def test_nothing_holds_the_joint_projection_while_the_mlp_runs(
    precision: BlockPrecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name in the block's forward pass would keep 6 bytes per token and channel at the peak."""
    layer, rotary = block()
    layer.fp8_lean = precision == "coat_lean"
    fused: list[Any] = []
    product, mlp = gemm.forward, blocks.norm_mlp

    def watched(*args: Any) -> Any:
        y, scale = product(*args)
        fused.append(weakref.ref(y))
        return y, scale

    def checked(*args: Any, **kwargs: Any) -> Any:
        assert fused[0]() is None
        return mlp(*args, **kwargs)

    monkeypatch.setattr(gemm, "forward", watched)
    monkeypatch.setattr(blocks, "norm_mlp", checked)
    x = torch.randn(1, T, 256).bfloat16().requires_grad_()
    layer(x, position_embeddings=rotary(x, torch.arange(T)[None])).sum().backward()
    assert fused
