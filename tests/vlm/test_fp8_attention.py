"""Attention with its output projection, with saved and with recomputed q, k and v."""

import math
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from one_block import DECODERS, decoder, encoder, inputs, run_block
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import attention, convert, norm_mlp, sdpa
from coat_vlm.model.packing import PACKED
from coat_vlm.model.sequence_parallel import SHARD, SequenceGroup, SequenceShard

B, T, D = 5, 24, 64


def heads(count: int, seed: int, length: int = T) -> Tensor:
    x = torch.randn(B, length, count * D, generator=torch.Generator().manual_seed(seed))
    return x.view(B, length, count, D).transpose(1, 2)


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


def block(
    recompute_qkv: bool = True, kind: type[Any] = LlamaConfig, **changes: Any
) -> tuple[Any, Any]:
    """An FP8 decoder block and its rotary embedding; the weights are the same at every call."""
    torch.manual_seed(0)
    config = kind(
        head_dim=64,
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=64,
        **changes,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").bfloat16()
    convert(model, Fp8Config(recompute_qkv=recompute_qkv))
    return model.model.layers[0], model.model.rotary_emb


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("mask", [False, True], ids=["fused", "replayed"])
def test_recomputed_heads_have_the_same_bits(kind: type[Any], mask: bool, device: str) -> None:
    x = torch.randn(2, T, 256, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    masked = torch.ones(T, T, dtype=torch.bool).tril()[None, None].to(device) if mask else None
    results: list[list[Tensor]] = []
    for recompute_qkv in (False, True):
        layer, rotary = (part.to(device) for part in block(recompute_qkv, kind))
        leaf = x.clone().requires_grad_()
        embeddings = rotary(x, torch.arange(T, device=device)[None])
        y = layer(leaf, attention_mask=masked, position_embeddings=embeddings)
        y.backward(torch.ones_like(y))
        grads = [leaf.grad, *(parameter.grad for parameter in layer.parameters())]
        results.append([y.detach(), *(grad for grad in grads if grad is not None)])
    assert len(results[0]) > 10
    for saved, recomputed in zip(*results, strict=True):
        assert saved.abs().sum() > 0
        assert torch.equal(saved, recomputed)


@pytest.mark.parametrize("train", ["all", "output projection", "heads"])
@pytest.mark.parametrize("bf16_forward", [(), ("all",)])
@pytest.mark.parametrize("kind", ["qwen3", "siglip"])
def test_the_kernel_with_the_projection_computes_what_they_compute_apart(
    kind: str, bf16_forward: tuple[str, ...], train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[list[Tensor]] = []
    found: list[sdpa.Fused | None] = []
    choose = attention.fused_kernel
    for apart in (False, True):

        def chosen(*args: Any, apart: bool = apart) -> sdpa.Fused | None:
            found.append(None if apart else choose(*args))
            return found[-1]

        monkeypatch.setattr(attention, "fused_kernel", chosen)
        model = (decoder(kind) if kind in DECODERS else encoder(kind)).bfloat16()
        convert(model, Fp8Config(vision="coat", language="coat", bf16_forward=bf16_forward))
        for name, parameter in model.named_parameters():
            is_output = "o_proj" in name or "out_proj" in name
            parameter.requires_grad_(train == "all" or is_output == (train != "heads"))
        y, dx, gradients = run_block(model, inputs(model).bfloat16())
        results.append([y, dx, *gradients.values()])
    assert [kernel and kernel.kernel for kernel in found] == ["cpu", None]
    assert len(results[0]) > 2
    for together, alone in zip(*results, strict=True):
        assert torch.equal(together, alone)


@pytest.mark.parametrize("recompute_qkv", [False, True])
def test_what_packed_attention_does_not_know_is_refused(recompute_qkv: bool) -> None:
    layer, rotary = block(recompute_qkv)
    layer.self_attn.config._attn_implementation = PACKED
    x = torch.randn(1, T, 256).bfloat16().requires_grad_()
    bounds = torch.tensor([0, 10, T], dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    packed |= {"max_length_q": T, "max_length_k": T}
    embeddings = rotary(x, torch.arange(T)[None])
    layer(x, position_embeddings=embeddings, **packed)
    with pytest.raises(ValueError, match="does not support softcap"):
        layer(x, position_embeddings=embeddings, **packed, softcap=torch.ones(4))
    cache = DynamicCache()
    before = torch.zeros(1, 2, 3, 64).bfloat16()
    cache.update(before, before, 0)
    with pytest.raises(ValueError, match="do not support a cache"):
        layer(x, position_embeddings=embeddings, past_key_values=cache, **packed)


class OnlyRank(SequenceShard):
    """A shard with all tokens, which nobody else has to send."""

    def gather_tokens(self, *heads: Tensor) -> tuple[Tensor, ...]:
        return heads

    def scatter_tokens(self, out: Tensor) -> Tensor:
        return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recompute_qkv", [False, True])
def test_shards_are_refused_without_causal_attention(recompute_qkv: bool, packed: bool) -> None:
    """Shards are filled up to one length, and only causal attention reads no later token."""
    layer, rotary = block(recompute_qkv)
    layer.self_attn.config._attn_implementation = PACKED
    x = torch.randn(1, T, 256).bfloat16().requires_grad_()
    group = SequenceGroup(0, 1, cast(dist.ProcessGroup, None))
    arguments: dict[str, Any] = {
        SHARD: OnlyRank(group),
        "position_embeddings": rotary(x, torch.arange(T)[None]),
    }
    if packed:
        bounds = torch.tensor([0, 10, T], dtype=torch.int32)
        arguments |= {"cu_seq_lens_q": bounds, "max_length_q": T}
    layer(x, **arguments)
    layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="sequence_parallel without causal attention"):
        layer(x, **arguments)


@pytest.mark.parametrize(
    ("recompute_qkv", "replayed"), [(False, False), (True, False), (True, True)]
)
def test_a_block_saves_what_its_formula_says(recompute_qkv: bool, replayed: bool) -> None:
    layer, rotary = block(recompute_qkv)
    own = {p.data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    tokens, h, f, a = 64, 256, 512, 4
    x = torch.randn(1, tokens, h).bfloat16().requires_grad_()
    embeddings = rotary(x, torch.arange(tokens)[None])
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None] if replayed else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x, attention_mask=mask, position_embeddings=embeddings)
    norms = 2 * (h + h / 16 + 4)  # copies and 1 / rms
    # q, k, v of 4 and 2 heads, or the FP8 input of their GEMM; o in FP8, or in BF16 with the
    # log-sum-exp.
    attention = (h if recompute_qkv else 2 * 2 * h) + (h if replayed else 2 * h + 4 * a)
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
