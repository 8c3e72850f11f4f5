"""Activations against torch and transformers in FP64: values, derivatives, extremes, scales."""

from collections.abc import Callable, Sequence

import pytest
import torch
from op_check import TOLERANCE, Run, assert_same_bits, relative_rms, run_reference
from torch import Tensor

from coat_kernels import (
    ACTIVATIONS,
    GroupScaled,
    activation,
    activation_bwd_stats,
    activation_fwd,
    dequantize_group,
    quantize_group,
    reference,
    share_scales,
)

Exact = Callable[[Tensor, str], Tensor]
KINDS = pytest.mark.parametrize("kind", ACTIVATIONS)
TWO_KINDS = pytest.mark.parametrize("kind", ["silu_mul", "gelu_tanh"])


def representable_input(kind: str, rows: int = 21, columns: int = 48) -> Tensor:
    """Values that FP8 represents exactly, so that the kept copy is no source of error."""
    width = 2 * columns if kind.endswith("_mul") else columns
    a = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 2
    return dequantize_group(quantize_group(a, 16))


def backward(
    body: Run, dh: Tensor, copy: Sequence[Tensor], kind: str, fmt: str, *layout: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both passes: codes in two layouts, their scale, and sums over the tokens."""
    scale, _ = body("activation_bwd_stats", (dh, *copy, kind, None, "e4m3", fmt))
    q, qt, sums = body("activation_bwd", (dh, *copy, kind, fmt, *layout, scale))
    return q, qt, scale, sums


@KINDS
def test_values(kind: str, run: Run, exact_activation: Exact):
    a = representable_input(kind)
    h64 = exact_activation(a.double(), kind)
    assert relative_rms(reference.activation_values(a, kind), h64) < 1e-6
    for body in (run, run_reference):
        q, exponents, scale = body("activation_stats", (a, kind, 16, "e4m3"))
        assert_same_bits("copy", dequantize_group(GroupScaled(q, exponents)), a)
        torch.testing.assert_close(scale.double(), h64.abs().amax() / 448, rtol=2e-6, atol=0)
        (codes,) = body("activation_apply", (a, kind, scale, "e4m3"))
        half_step = torch.maximum(h64.abs() * 2**-4, scale.double() * 2**-10)
        assert ((codes.double() * scale - h64).abs() <= half_step + 1e-6 * h64.abs().amax()).all()
        stats = (torch.zeros(h64.shape), q, exponents, kind, scale, "e4m3", "e4m3")
        _, transposed = body("activation_bwd_stats", stats)
        assert_same_bits("transposed", transposed[:, :21].t().contiguous(), codes)
        assert not transposed[:, 21:].float().any()


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients(kind: str, dtype: torch.dtype, run: Run, exact_activation: Exact):
    a = representable_input(kind)
    leaf = a.double().requires_grad_()
    h64 = exact_activation(leaf, kind)
    dh = torch.randn(h64.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    (da64,) = torch.autograd.grad(h64, leaf, dh.double())
    for body in (run, run_reference):
        copy = reference.quantize_group(a, 16, "e4m3")
        q, qt, scale, sums = backward(body, dh, copy, kind, "e5m2", True, True, True)
        torch.testing.assert_close(scale.double(), da64.abs().amax() / 57344, rtol=3e-6, atol=0)
        half_step = torch.maximum(da64.abs() * 2**-3, scale.double() * 2**-17)
        error = (q.double() * scale - da64).abs()
        assert (error <= half_step + 3e-6 * da64.abs().amax()).all()
        assert_same_bits("transposed", qt[:, : len(a)].t().contiguous(), q)
        assert not qt[:, len(a) :].float().any()
        assert relative_rms(sums, da64.sum(0)) < TOLERANCE["activation_bwd", torch.float32]
        one, other, _, no_sums = backward(body, dh, copy, kind, "e5m2", False, True, False)
        assert one.numel() == no_sums.numel() == 0
        assert_same_bits("transposed alone", other, qt)


@KINDS
def test_extreme_inputs_stay_finite_and_follow_the_limits(
    kind: str, run: Run, exact_activation: Exact
):
    extremes = torch.tensor([-1e4, -300.0, -90.0, -20.0, -0.0, 20.0, 90.0, 300.0, 1e4, 1e15])
    a = torch.zeros(2, 10, 16)  # one extreme per group, so that the FP8 copy holds them all
    a[:, :, 3] = torch.stack([extremes, extremes.flip(0)])
    a = dequantize_group(quantize_group(a.flatten(1), 16))
    if kind.endswith("_mul"):
        a = torch.cat([a, torch.ones_like(a)], -1)
    leaf = a.double().requires_grad_()
    h64 = exact_activation(leaf, kind)
    dh = torch.ones(h64.shape)
    (da64,) = torch.autograd.grad(h64, leaf, dh.double())
    q, exponents, scale = run("activation_stats", (a, kind, 16, "e4m3"))
    assert scale.isfinite()
    # One row after the other: its sum over the tokens is the gradient itself, in FP32.
    rows = [
        backward(run, d, (c, e), kind, "e5m2", True, False, True)[3]
        for d, c, e in zip(dh.split(1), q.split(1), exponents.split(1), strict=True)
    ]
    torch.testing.assert_close(torch.stack(rows).double(), da64, rtol=1e-5, atol=1e-6)
    values = reference.activation_values(a, kind).double()
    torch.testing.assert_close(values, h64.detach(), rtol=1e-5, atol=1e-6)


@TWO_KINDS
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_bad_element_never_gives_plausible_numbers(kind: str, bad: float, run: Run):
    a = representable_input(kind)
    a[2, 5] = bad
    q, exponents, scale = run("activation_stats", (a, kind, 16, "e4m3"))
    (codes,) = run("activation_apply", (a, kind, scale, "e4m3"))
    if bad != -float("inf"):
        assert (codes.float() * scale).isnan().all()
    assert (codes.float() * scale)[2, 5].isnan()
    dh = torch.ones(codes.shape)
    _, transposed = run("activation_bwd_stats", (dh, q, exponents, kind, scale, "e4m3", "e4m3"))
    assert not transposed[:, 21:].float().any()
    da, da_t, da_scale, sums = backward(run, dh, (q, exponents), kind, "e5m2", True, True, True)
    assert da_scale.isnan()
    assert (da.float() * da_scale).isnan().all()
    assert not da_t[:, 21:].float().any()
    assert sums[:16].isnan().all()
    assert sums[16:48].isfinite().all()


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize("largest", [-0.5, 0.01, 0.3, 0.51])
def test_the_largest_output_is_found_among_negative_inputs(
    kind: str, largest: float, run: Run, exact_activation: Exact
):
    """A GELU of -0.75 is -0.17: more than that of a small positive input, whichever comes first."""
    a = torch.full((3, 32), -0.75)
    a[1, 5] = largest
    *_, scale = run("activation_stats", (a, kind, 16, "e4m3"))
    expected = exact_activation(a.double(), kind).abs().amax() / 448
    torch.testing.assert_close(scale.double(), expected, rtol=2e-6, atol=0)
    for bad in (float("nan"), float("-inf")):
        a[0, 0] = bad  # next to an input that is large enough, and in a group of its own
        a[1, 5] = 3.0
        assert run("activation_stats", (a, kind, 16, "e4m3"))[2].isnan()


# What follows is activation_once, which reads a large input once and guesses the scale.

PLACES = {"nowhere": None, "in the sample": 32, "just above the guess": 33, "far above it": 5}
"""Where one row is larger than the others: rows 0, 16 and 32 are the sample."""

FACTORS = {"nowhere": 1.0, "in the sample": 50.0, "just above the guess": 2.5, "far above it": 50.0}


def make_input(kind: str, place: str) -> Tensor:
    """Return input with 40 rows, which FP8 represents exactly."""
    width = 96 if kind.endswith("_mul") else 48
    draw = torch.Generator().manual_seed(width)
    a = torch.rand(40, width, generator=draw) + 0.5
    row = PLACES[place]
    if row is not None:
        a[row] *= FACTORS[place]
    return dequantize_group(quantize_group(a, 16))


def expected_scale(values: Tensor, largest: float) -> Tensor:
    """In FP64: twice the sample's largest magnitude, or the largest of all."""
    guess = 2 * values[[0, 16, 32]].abs().amax()
    return torch.maximum(guess, values.abs().amax()) / largest


@TWO_KINDS
@pytest.mark.parametrize("place", PLACES)
def test_the_scale_is_the_guess_or_the_exact_one(
    kind: str, place: str, run: Run, exact_activation: Exact
):
    a = make_input(kind, place)
    h64 = exact_activation(a.double(), kind)
    whole = h64.abs().amax() / 448
    for body in (run, run_reference):
        q, exponents, h, scale = body("activation_once", (a, kind, 16, "e4m3"))
        torch.testing.assert_close(scale.double(), expected_scale(h64, 448.0), rtol=2e-6, atol=0)
        assert (scale > 1.01 * whole) == (place in ("nowhere", "in the sample"))
        half_step = torch.maximum(h64.abs() * 2**-4, scale.double() * 2**-10)
        assert ((h.double() * scale - h64).abs() <= half_step + 1e-6 * h64.abs().amax()).all()
        copy = reference.quantize_group(a, 16, "e4m3")
        for actual, expected in zip((q, exponents), copy, strict=True):
            assert_same_bits("copy", actual, expected)


@TWO_KINDS
@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_frozen_layers(kind: str, place: str, run: Run, exact_activation: Exact):
    leaf = make_input(kind, "nowhere").double().requires_grad_()
    h64 = exact_activation(leaf, kind)
    dh, row = torch.rand(h64.shape, generator=torch.Generator().manual_seed(5)) + 0.5, PLACES[place]
    if row is not None:
        dh[row] *= FACTORS[place]
    (da64,) = torch.autograd.grad(h64, leaf, dh.double())
    whole = da64.abs().amax() / 57344
    *copy, h_scale = reference.activation_stats(leaf.detach().float(), kind, 16, "e4m3")
    for body in (run, run_reference):
        given = (dh, *copy, kind)
        q, scale, h = body("activation_bwd_once", (*given, h_scale, "e4m3", "e5m2"))
        torch.testing.assert_close(scale.double(), expected_scale(da64, 57344), rtol=3e-6, atol=0)
        assert (scale > 1.01 * whole) == (place in ("nowhere", "in the sample"))
        half_step = torch.maximum(da64.abs() * 2**-3, scale.double() * 2**-17)
        assert ((q.double() * scale - da64).abs() <= half_step + 3e-6 * da64.abs().amax()).all()
        _, h_t = body("activation_bwd_stats", (*given, h_scale, "e4m3", "e5m2"))
        assert_same_bits("output", h, h_t[:, :40].t().contiguous())
        alone, _, nothing = body("activation_bwd_once", (*given, None, "e4m3", "e5m2"))
        assert_same_bits("without the output", alone, q)
        assert not nothing.numel()


@TWO_KINDS
@pytest.mark.parametrize("row", [16, 17])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_element_of_the_sample_or_beside_it_spoils_all(
    kind: str, row: int, bad: float, run: Run
):
    a = make_input(kind, "nowhere")
    a[row, 3] = bad
    *copy, h, scale = run("activation_once", (a, kind, 16, "e4m3"))
    assert (h.float() * scale).isnan().all()
    dh = torch.ones(h.shape)
    q, scale, _ = run("activation_bwd_once", (dh, *copy, kind, None, "e4m3", "e5m2"))
    assert (q.float() * scale).isnan().all()


@TWO_KINDS
def test_large_tensors_are_read_once(kind: str, monkeypatch: pytest.MonkeyPatch):
    a = make_input(kind, "far above it")
    twice, _ = activation_fwd(a, kind, group_size=16)
    monkeypatch.setattr(activation, "ONE_PASS", 40 * 48)
    once, saved = activation_fwd(a, kind, group_size=16)
    assert once.scale == saved.scale == twice.scale, "values above the guess have the exact scale"
    assert_same_bits("the same scale", once.q, twice.q)
    a = make_input(kind, "in the sample")
    once, saved = activation_fwd(a, kind, group_size=16)
    dh = torch.ones(once.q.shape)
    _, again = activation_bwd_stats(dh, saved, kind)
    assert_same_bits("recomputed", again.q[:, :40].t().contiguous(), once.q)
    monkeypatch.setattr(activation, "ONE_PASS", 40 * 48 + 1)
    twice, _ = activation_fwd(a, kind, group_size=16)
    assert once.scale == saved.scale == 2 * twice.scale
    monkeypatch.setattr(activation, "ONE_PASS", 1)
    with share_scales(lambda _: None):
        assert activation_fwd(a, kind, group_size=16)[0].scale == twice.scale
