"""Activations against torch and transformers in FP64: values, derivatives, extremes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coat_kernels import (
    ACTIVATIONS,
    E4M3,
    E5M2,
    GroupScaled,
    activation_bwd,
    activation_fwd,
    activation_recompute,
    dequantize_group,
    quantize_group,
    reference,
)
from coat_kernels.testing import TOLERANCE, assert_same_bits, relative_rms

Run = Callable[[str, Sequence[Any]], list[Tensor]]
KINDS = pytest.mark.parametrize("kind", ACTIVATIONS)


def exact_activation(a: Tensor, kind: str) -> Tensor:
    """torch's or transformers' own, in the dtype of the argument."""
    if kind == "silu_mul":
        gate, up = a.chunk(2, -1)
        return F.silu(gate) * up
    if kind == "quick_gelu":
        from transformers.activations import QuickGELUActivation

        return QuickGELUActivation()(a)
    return F.gelu(a, approximate="tanh" if kind == "gelu_tanh" else "none")


def representable_input(kind: str, rows: int = 21, columns: int = 48) -> Tensor:
    """Values that FP8 represents exactly, so that the kept copy is no source of error."""
    width = 2 * columns if kind == "silu_mul" else columns
    a = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 2
    return dequantize_group(quantize_group(a, 16))


def run_reference(op: str, args: Sequence[Any]) -> list[Tensor]:
    result = getattr(reference, op)(*args)
    return [result] if isinstance(result, Tensor) else list(result)


def test_every_kind_is_compared_with_another_one():
    """Two kinds that differ little, exact and approximate GELU, are told apart by the tolerance."""
    a = representable_input("gelu").double()
    difference = relative_rms(exact_activation(a, "gelu_tanh"), exact_activation(a, "gelu"))
    assert difference > 10 * 1e-6


@KINDS
def test_values(kind: str, run: Run):
    a = representable_input(kind)
    h64 = exact_activation(a.double(), kind)
    assert relative_rms(reference.activation_values(a, kind), h64) < 1e-6
    for body in (run, run_reference):
        q, exponents, scale = body("activation_stats", (a, kind, 16, "e4m3"))
        assert_same_bits("copy", dequantize_group(GroupScaled(q, exponents)), a)
        torch.testing.assert_close(scale.double(), h64.abs().amax() / 448, rtol=2e-6, atol=0)
        for source in ((a, None), (q, exponents)):
            args = (*source, kind, scale, "e4m3", True, True)
            codes, transposed = body("activation_apply", args)
            half_step = torch.maximum(h64.abs() * 2**-4, scale.double() * 2**-10)
            assert (
                (codes.double() * scale - h64).abs() <= half_step + 1e-6 * h64.abs().amax()
            ).all()
            assert_same_bits("transposed", transposed[:, :21].t().contiguous(), codes)
            assert not transposed[:, 21:].float().any()


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients(kind: str, dtype: torch.dtype, run: Run):
    a = representable_input(kind)
    leaf = a.double().requires_grad_()
    h64 = exact_activation(leaf, kind)
    dh = torch.randn(h64.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    (da64,) = torch.autograd.grad(h64, leaf, dh.double())
    for body in (run, run_reference):
        args = (dh, *reference.quantize_group(a, 16, "e4m3"), kind, "e5m2")
        da, scale = body("activation_bwd", args)
        assert da.dtype == dtype
        rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        assert relative_rms(da, da64) < rounding + TOLERANCE["activation_bwd", torch.float32]
        # The scale is that of da as it was rounded: no code of the next quantization saturates.
        assert scale == reference.tensor_scale(da, "e5m2")


@KINDS
def test_extreme_inputs_stay_finite_and_follow_the_limits(kind: str, run: Run):
    extremes = torch.tensor([-1e4, -300.0, -90.0, -20.0, -0.0, 20.0, 90.0, 300.0, 1e4, 1e15])
    a = torch.zeros(2, 10, 16)  # one extreme per group, so that the FP8 copy holds them all
    a[:, :, 3] = torch.stack([extremes, extremes.flip(0)])
    a = dequantize_group(quantize_group(a.flatten(1), 16))
    if kind == "silu_mul":
        a = torch.cat([a, torch.ones_like(a)], -1)
    leaf = a.double().requires_grad_()
    h64 = exact_activation(leaf, kind)
    dh = torch.ones(h64.shape)
    (da64,) = torch.autograd.grad(h64, leaf, dh.double())
    q, exponents, scale = run("activation_stats", (a, kind, 16, "e4m3"))
    assert scale.isfinite()
    da, _ = run("activation_bwd", (dh, q, exponents, kind, "e5m2"))
    torch.testing.assert_close(da.double(), da64, rtol=1e-5, atol=1e-6)
    values = reference.activation_values(a, kind).double()
    torch.testing.assert_close(values, h64.detach(), rtol=1e-5, atol=1e-6)


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_element_never_gives_plausible_numbers(kind: str, bad: float, run: Run):
    a = representable_input(kind)
    a[2, 5] = bad
    q, exponents, scale = run("activation_stats", (a, kind, 16, "e4m3"))
    codes, transposed = run("activation_apply", (a, None, kind, scale, "e4m3", True, True))
    if bad != -float("inf"):
        assert (codes.float() * scale).isnan().all()
    assert (codes.float() * scale)[2, 5].isnan()
    assert not transposed[:, 21:].float().any()
    da, da_scale = run("activation_bwd", (torch.ones(codes.shape), q, exponents, kind, "e5m2"))
    assert da[2, :16].isnan().all()
    assert da_scale.isnan()
    assert da[[0, 1, 3]].isfinite().all()


@KINDS
def test_public_functions_fit_together(kind: str):
    a = representable_input(kind).bfloat16()
    h, saved = activation_fwd(a, kind, group_size=16)
    assert h.q.dtype == saved.a.q.dtype == E4M3.dtype
    again = activation_recompute(saved, kind)
    assert_same_bits("recomputed", again.q[:, :21].t().contiguous(), h.q)
    da, scale = activation_bwd(torch.ones(h.q.shape, dtype=torch.bfloat16), saved, kind, E5M2)
    assert (da.dtype, da.shape, scale.shape) == (torch.bfloat16, a.shape, ())
