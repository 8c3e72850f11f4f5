"""Rotary embedding against complex multiplication, and its gradient against autograd, in FP64."""

from typing import Any

import pytest
import torch
from op_check import Run
from torch import Tensor

from coat_kernels import E4M3, TensorScaled, dequantize_tensor, rope, rope_gradient

TOKENS, PERIOD, HEADS, KV_HEADS, CHANNELS = 40, 20, 5, 2, 24


def embedding() -> tuple[Tensor, Tensor]:
    """cos and sin of 20 positions, as Llama makes them: both halves are the same."""
    frequencies = 10000.0 ** (-torch.arange(0, CHANNELS, 2, dtype=torch.float64) / CHANNELS)
    angles = torch.arange(PERIOD, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().repeat(1, 2).float(), angles.sin().repeat(1, 2).float()


def projection() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * CHANNELS, generator=generator)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of channels (j, j + D / 2) times exp(i angle), FP64."""
    turn = torch.complex(cos.double(), sin.double())[:, : CHANNELS // 2]
    first, second = x.double().view(TOKENS, -1, CHANNELS).chunk(2, -1)
    product = torch.complex(first, second) * turn.repeat(TOKENS // PERIOD, 1)[:, None]
    return torch.cat([product.real, product.imag], -1).flatten(1)


def test_q_and_k_are_rotated_and_v_is_copied(run: Run):
    qkv, (cos, sin) = projection(), embedding()
    q, k, v = qkv.split([n * CHANNELS for n in (HEADS, KV_HEADS, KV_HEADS)], -1)
    arguments = (qkv, cos, sin, HEADS, KV_HEADS)
    for result in (run("rope", arguments), rope(*arguments)):
        torch.testing.assert_close(result[0].double(), rotated(q, cos, sin), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result[1].double(), rotated(k, cos, sin), rtol=1e-6, atol=1e-6)
        assert torch.equal(result[2], v)


def test_gradient_is_autograds(run: Run):
    qkv, (cos, sin) = projection().double().requires_grad_(), embedding()
    sizes = [n * CHANNELS for n in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = qkv.split(sizes, -1)
    gradients = [torch.randn(TOKENS, size) for size in sizes]
    outputs = [rotated(q, cos, sin), rotated(k, cos, sin), v]
    torch.autograd.backward(outputs, [g.double() for g in gradients])
    assert qkv.grad is not None
    dq, dk, dv = gradients
    rows, transposed, scale, bias = run(
        "rope_gradient", (dq, dk, dv, cos, sin, "e4m3", True, True, True)
    )
    largest = qkv.grad.abs().max()
    torch.testing.assert_close(scale.double(), largest / 448, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(bias.double(), qkv.grad.sum(0), rtol=1e-6, atol=1e-5)
    values = dequantize_tensor(TensorScaled(rows, scale)).double()
    # Half a step: 2^-4 of the value, for the smallest 2^-10 of the scale.
    torch.testing.assert_close(values, qkv.grad, rtol=2.0**-4, atol=float(scale) * 2.0**-10)
    assert torch.equal(transposed[:, :TOKENS].t().float(), rows.float())
    codes = rope_gradient(dq, dk, dv, cos, sin, E4M3, bias=True)
    assert torch.equal(codes.rows.q.float(), rows.float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 6}, "qkv has 216 columns; 6 heads of q and 2 of k and v with 24 channels"),
        ({"cos": torch.ones(19, CHANNELS), "sin": torch.ones(19, CHANNELS)}, "must divide"),
        ({"sin": torch.ones(PERIOD, 22)}, r"sin has shape \(20, 22\)"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str):
    cos, sin = embedding()
    arguments = {"qkv": projection(), "cos": cos, "sin": sin, "heads": 5, "kv_heads": 2, **change}
    with pytest.raises(ValueError, match=words):
        rope(**arguments)
    gradients = rope(projection(), cos, sin, 5, 2)
    with pytest.raises(ValueError, match="same number of rows"):
        rope_gradient(gradients[0], gradients[1][:20], gradients[2][:20], cos, sin)
