"""Sequences packed into one row compute what they compute in rows of their own."""

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import attention, convert, sdpa
from coat_vlm.model.packing import PACKED, Packing, packed_attention

IMAGE = 2
LENGTHS = (5, 1, 9, 17)
TOKENS = sum(LENGTHS)
FAMILIES = ["mistral", "qwen3"]
DEVICES = [
    pytest.param("cpu", id="fp32_cpu"),
    pytest.param("cuda", id="bf16_gpu", marks=pytest.mark.gpu),
]


def bounds(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def arguments(lengths: tuple[int, ...] = LENGTHS, device: str = "cpu") -> dict[str, Any]:
    cut, longest = bounds(lengths).to(device), max(lengths)
    return {
        "cu_seq_lens_q": cut,
        "cu_seq_lens_k": cut,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def tokens(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 60, (1, sum(lengths)), generator=generator)


def language_model(tiny: Any, family: str) -> Any:
    windows = {"sliding_window": 4} if family == "mistral" else {}
    model = tiny.model(language=tiny.language(family, **windows)).language_model
    model.set_attn_implementation(PACKED)
    return model


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_is_its_sequences(tiny: Any, family: str) -> None:
    """Logits and gradients of transformers' own models, Mistral's with a sliding window."""
    model = language_model(tiny, family).train()
    ids = tokens()
    apart = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    wanted = torch.cat(apart, 1)
    dy = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    wanted.backward(dy)
    wanted_gradients = gradients(model)
    masks: list[Tensor] = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda *given: masks.append(given[-1]["attention_mask"]), with_kwargs=True
    )
    logits = model(ids, position_ids=positions(), use_cache=False, **arguments()).logits
    hook.remove()
    logits.backward(dy)
    assert masks[0].numel() == 0
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "fp8",
    [Fp8Config(), Fp8Config(recompute_qkv=True), Fp8Config(language="fp8_linear")],
    ids=["coat", "recompute_qkv", "fp8_linear"],
)
def test_fp8_blocks_take_packed_rows(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, fp8: Fp8Config, family: str, device: str
) -> None:
    """Against the same row under transformers' mask of blocks, for scales are the row's.

    The mask makes recomputation of q, k and v repeat attention.
    """
    repeated = []
    repeat = attention._repeat
    monkeypatch.setattr(attention, "_repeat", lambda *args: repeated.append(1) or repeat(*args))
    changes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    model = tiny.model(language=tiny.language(family, **changes)).language_model
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).train()
    convert(model, fp8)
    ids, places = tokens().to(device), positions().to(device)
    results, counts = [], []
    for implementation, given in (("sdpa", {}), (PACKED, arguments(device=device))):
        model.set_attn_implementation(implementation)
        logits = model(ids, position_ids=places, use_cache=False, **given).logits
        generator = torch.Generator().manual_seed(2)
        logits.backward(torch.randn(logits.shape, generator=generator).to(logits))
        results.append((logits.detach(), gradients(model)))
        counts.append(len(repeated))
    (wanted, wanted_gradients), (logits, ours) = results
    assert counts == ([2, 2] if fp8.recompute_qkv is True else [0, 0])
    rounding = 1e-3 if device == "cpu" else 0.1
    assert relative(logits, wanted) < rounding
    for name, gradient in ours.items():
        assert relative(gradient, wanted_gradients[name]) < rounding, name


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> Tensor:
    """By the formula, under a mask of blocks, [1, T, H, D]."""
    length = q.shape[2]
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(q.device)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    distance = distance.to(q.device)
    seen = owner[:, None] == owner
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def leaves(kv_heads: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def leaf(count: int) -> Tensor:
        x = torch.randn(1, TOKENS, count, 64, generator=generator).to(device, dtype)
        return x.transpose(1, 2).requires_grad_()

    return leaf(4), leaf(kv_heads), leaf(kv_heads)


def check(
    heads: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    dy: Tensor,
    gradients: Sequence[Tensor],
    causal: bool,
    window: int | None = None,
) -> None:
    """Attention [1, T, H, D] and the gradients of its heads against the formula's."""
    q, k, v = wanted_leaves = [x.detach().double().requires_grad_() for x in heads]
    wanted = exact(q, k, v, causal, window)
    limit = 1e-5 if dy.dtype == torch.float32 else 0.02
    assert out.shape == wanted.shape
    assert relative(out, wanted) < limit
    expected = torch.autograd.grad(wanted, wanted_leaves, dy.double())
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours.shape == theirs.shape
        assert relative(ours, theirs) < limit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["equal", "grouped"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 3), (True, 17)])
def test_attention_is_that_of_the_formula(
    causal: bool, window: int | None, kv_heads: int, device: str
) -> None:
    q, k, v = heads = leaves(kv_heads, device)
    settings = {"scaling": 0.3, "sliding_window": window, **arguments(device=device)}
    out, _ = packed_attention(SimpleNamespace(is_causal=causal), q, k, v, None, **settings)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out)
    check(heads, out, dy, torch.autograd.grad(out, heads, dy), causal, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["equal", "grouped"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_fused_passes_apart_are_those_of_the_formula(
    causal: bool, kv_heads: int, device: str
) -> None:
    heads = leaves(kv_heads, device)
    q, k, v = (x.detach() for x in heads)
    how = sdpa.choose(q, k, v, causal, 0.3, Packing(bounds().to(device), max(LENGTHS)))
    assert how is not None
    assert how.kernel == ("cpu" if device == "cpu" else "flash")
    out, statistics = sdpa.forward(how, q, k, v)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out)
    gradients = sdpa.backward(how, dy, q, k, v, out, statistics)
    out, dy = (x.unflatten(-1, (4, 64)) for x in (out, dy))
    check(heads, out, dy, gradients, causal)


def test_rows_that_are_not_packed_are_those_of_sdpa(tiny: Any) -> None:
    """Without a mask, with padding on either side, in the tower and with a cache."""
    model = tiny.model()
    theirs = copy.deepcopy(model)
    model.set_attn_implementation(PACKED)
    assert model.vision_tower.model.config._attn_implementation == PACKED
    ids = tokens((7, 7)).view(2, 7)
    ids[0, 2:6] = IMAGE
    image = torch.randn(1, 3, 28, 28)
    left = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    with torch.no_grad():
        for mask in (None, left, left.flip(1)):
            ours, wanted = (
                m(ids, attention_mask=mask, pixel_values=image).logits for m in (model, theirs)
            )
            assert torch.equal(ours, wanted)
        settings = {"max_new_tokens": 5, "do_sample": False, "attention_mask": left}
        ours, wanted = (m.generate(ids, pixel_values=image, **settings) for m in (model, theirs))
        assert torch.equal(ours, wanted)
