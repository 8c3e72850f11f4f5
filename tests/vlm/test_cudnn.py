"""cuDNN attention is used where its gradients are right, and nowhere else."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from attention_calls import Call, record_attention
from one_stage import one_stage
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coat_vlm.fp8 import arithmetic_of, sdpa
from coat_vlm.model.cudnn import avoid_unsafe_cudnn, set_cudnn_attention
from coat_vlm.train.model_setup import set_train_mode, set_trainable

PLAIN = F.scaled_dot_product_attention
STAGE = one_stage("vision", "projector", "language")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = F.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled()
    yield
    F.scaled_dot_product_attention = before[0]
    torch.backends.cuda.enable_cudnn_sdp(before[1])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    return record_attention(monkeypatch)


@pytest.mark.parametrize(
    ("allowed", "enabled"),
    [
        ("auto", [False, False, True, True]),
        (True, [True, True, True, True]),
        (False, [False, False, False, False]),
    ],
)
def test_each_setting_allows_its_calls(
    allowed: Literal["auto"] | bool, enabled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 tokens that are not causal, with a mask, and causal; 63 tokens; for both paths."""
    set_cudnn_attention(allowed)
    x, y = (torch.randn(1, 2, tokens, 8) for tokens in (64, 63))
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    arguments = [(x, None, False), (x, mask, False), (x, None, True), (y, None, False)]
    inside = []
    for key, given, causal in arguments:
        with avoid_unsafe_cudnn(key, causal=causal, masked=given is not None):
            inside.append(torch.backends.cuda.cudnn_sdp_enabled())
        actual = F.scaled_dot_product_attention(key, key, key, given, is_causal=causal)
        assert actual.equal(PLAIN(key, key, key, given, is_causal=causal))
    assert inside == enabled
    assert torch.backends.cuda.cudnn_sdp_enabled() == (allowed is not False)
    # FP8 blocks ask torch for its choice and call the kernel themselves.
    chosen = []

    def choose(*_: Any, **__: Any) -> int:
        chosen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return 1

    monkeypatch.setattr(sdpa, "_ATEN", SimpleNamespace(_fused_sdp_choice=choose))
    for key, given, causal in arguments:
        if given is None:
            sdpa.choose(key, key, key, causal, None)
    assert chosen == [enabled[0], *enabled[2:]]


@pytest.mark.parametrize(
    ("tower", "prefix", "family", "precision", "checkpointing"),
    [
        ("siglip", 0, "qwen2", "fp32", True),
        ("siglip", 0, "mistral", "coat", False),
        ("clip", 1, "qwen2", "coat", True),
    ],
)
def test_every_attention_of_a_training_step_is_checked(
    tiny: Any,
    calls: list[Call],
    tower: str,
    prefix: int,
    family: str,
    precision: Any,
    checkpointing: bool,
) -> None:
    """8 x 8 patches and 64 tokens of text; Mistral has a window, so transformers makes a mask."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "image_size": 32, "patch_size": 4}
    windows = {"sliding_window": 4} if family == "mistral" else {}
    model = tiny.model(
        vision=tiny.vision(tower, **sizes), language=tiny.language(family, **windows)
    )
    stage = replace(STAGE, gradient_checkpointing=checkpointing)
    set_trainable(model, stage)
    arithmetic_of(precision, None, torch.device("cpu")).apply(model)
    set_train_mode(model, stage)
    set_cudnn_attention("auto")
    ids = torch.arange(64)[None] % 50 + 3
    # Without an image, a zero image passes the tower.
    model(ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    passes = 1 + checkpointing
    in_tower = Call(64 + prefix, causal=False, masked=False, cudnn=prefix > 0)
    masked = family == "mistral"
    in_language = Call(64, causal=not masked, masked=masked, cudnn=not masked)
    assert Counter(calls) == {
        in_tower: passes * len(model.vision_tower.model.encoder.layers),
        in_language: passes * len(model.language_model.model.layers),
    }


LOW = -120.0
"""Scores whose log-sum-exp is below -88.7, where cuDNN's error appears."""


def make_heads(tokens: int, head_dim: int, kv_heads: int, shift: float) -> tuple[Tensor, ...]:
    """Queries, keys, values and an output gradient in BF16; ``shift`` is added to every score."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, heads, tokens, head_dim, device="cuda", generator=generator)

    query, key, value, grad = draw(4), draw(kv_heads), draw(kv_heads), draw(4)
    if shift:
        query[..., 0], key[..., 0] = 1.0, shift * math.sqrt(head_dim)
    return tuple(x.bfloat16() for x in (query, key, value, grad))


def attention_gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, causal: bool
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of queries, keys and values in FP64, and bounds of the error of a fused kernel.

    A kernel adds products of BF16 in FP32 and rounds to BF16: the probabilities P (for P V and
    P^T dO), the output, dS, and the gradients, also those of each query head that shares keys.
    ``u`` is half the spacing of BF16 relative to a value, ``f`` that of FP32 (twice: tensor cores
    may truncate). Errors of first order are added with their signs removed; 5% are for the rest.
    """
    u, f = 2.0**-8, 2.0**-23
    (_, heads, tokens, width), kv_heads = query.shape, key.shape[1]
    shared = heads // kv_heads
    q, k, v, do = (x.double() for x in (query, key, value, grad))
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scale = width**-0.5
    scores = scale * q @ k.mT
    if causal:
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    p = scores.softmax(-1)
    out, dp = p @ v, do @ v.mT
    ds = p * (dp - (do * out).sum(-1, keepdim=True))
    # The exponent's error is that of the score and of the log-sum-exp, at most the row's largest.
    of_p = 2 * (width + 8) * f * (1 + scale * (q.abs() @ k.abs().mT).amax(-1, keepdim=True))
    of_out = u * out.abs() + (u + of_p) * (p @ v.abs())
    of_delta = (do.abs() * (of_out + width * f * out.abs())).sum(-1, keepdim=True)
    of_dp = width * f * (do.abs() @ v.abs().mT)
    of_ds = (of_p + 2 * u) * ds.abs() + p * (of_delta + of_dp)
    sums = tokens * f
    results = [
        (scale * ds @ k, scale * (of_ds + sums * ds.abs()) @ k.abs()),
        (scale * ds.mT @ q, scale * (of_ds + sums * ds.abs()).mT @ q.abs()),
        (p.mT @ do, (p * (u + of_p + sums)).mT @ do.abs()),
    ]
    found = []
    for exact, bound in results:
        bound = bound + u * exact.abs()
        if exact is not results[0][0]:
            exact, bound = (x.unflatten(1, (kv_heads, shared)).sum(2) for x in (exact, bound))
        found.append((exact, 1.05 * (bound + u * exact.abs())))
    return found


def backward_kernels(out: Tensor) -> str:
    """Names of the autograd functions near an output, which name the kernel."""
    names, todo = [], [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.append(node.name())
            todo += [parent for parent, _ in node.next_functions]
    return " ".join(names)


def check_gradients(
    actual: tuple[Tensor, ...], wanted: list[tuple[Tensor, Tensor]], shape: str
) -> None:
    for name, x, (exact, bound) in zip("qkv", actual, wanted, strict=True):
        assert x.isfinite().all(), f"{shape}: the gradient of {name} is not finite"
        worst = float(((x.double() - exact).abs() / bound).max())
        assert worst <= 1, f"{shape}: the gradient of {name} is wrong by {worst:.2f} of its bound"


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="torch prefers cuDNN attention on Hopper",
)
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["equal", "grouped"])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize(
    ("tokens", "causal", "masked", "safe"),
    [
        (64, True, False, True),
        (704, True, False, True),
        (577, False, False, True),
        (1024, False, False, True),
        (64, False, False, False),
        (704, False, False, False),
        (576, False, True, False),
    ],
)
def test_gradients_are_those_of_the_formula(
    tokens: int, causal: bool, masked: bool, safe: bool, head_dim: int, kv_heads: int
) -> None:
    """Safe calls through cuDNN and others without it; and with the passes of FP8 blocks."""
    shape = f"{tokens} tokens, causal {causal}, mask {masked}, heads of {head_dim}, {kv_heads}"
    q, k, v, grad = make_heads(tokens, head_dim, kv_heads, LOW)
    wanted = attention_gradients(q, k, v, grad, causal or masked)
    set_cudnn_attention("auto")
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").tril() if masked else None
    for x in (q, k, v):
        x.requires_grad_()
    # As transformers does, which repeats keys only if there is a mask.
    shared = q.shape[1] // kv_heads
    keys, values = (x.repeat_interleave(shared, 1) if masked else x for x in (k, v))
    # Where only cuDNN is allowed, a call without it is an error.
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if safe else nullcontext():
        out = F.scaled_dot_product_attention(
            q, keys, values, mask, is_causal=causal, enable_gqa=shared > 1 and not masked
        )
        assert ("Cudnn" in backward_kernels(out)) == safe, f"{shape}: {backward_kernels(out)}"
        check_gradients(torch.autograd.grad(out, (q, k, v), grad), wanted, shape)
        if masked:
            return
        with torch.no_grad():
            how = sdpa.choose(q, k, v, causal, None)
            assert how is not None, shape
            assert how.kernel == ("cudnn" if safe else "flash"), shape
            flat, statistics = sdpa.forward(how, q, k, v)
            dy = grad.transpose(1, 2).flatten(-2)
            found = sdpa.backward(how, dy, q, k, v, flat, statistics)
    check_gradients(found, wanted, f"{shape}, separate passes")
