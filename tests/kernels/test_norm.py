"""Norms against torch's own in FP64: values, statistics, gradients; what makes them go wrong."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_check import TOLERANCE, Run, assert_same_bits, relative_rms, run_reference
from torch import Tensor

from coat_kernels import (
    GroupScaled,
    dequantize_group,
    norm,
    norm_bwd,
    norm_fwd,
    quantize_group,
    reference,
)

EPS = 1e-2
"""Large enough to be seen against the variance of the smaller rows."""

KINDS = pytest.mark.parametrize(
    ("centered", "has_bias"), [(False, False), (True, True), (True, False)], ids=str
)


def inputs(has_bias: bool, rows: int = 21, columns: int = 80) -> tuple[Tensor, Tensor, Any]:
    """An input that FP8 represents exactly, so that its copy is no source of error; parameters."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * 2 + 0.7
    x[::3] /= 16
    x = dequantize_group(quantize_group(x, 16))
    weight = torch.rand(columns, generator=generator) + 0.5
    return x, weight, torch.randn(columns, generator=generator) if has_bias else None


WIDTHS = pytest.mark.parametrize("columns", [80, 144, 336])
"""A part of one piece; 128 + 16 without an idle lane; 256 + 80 of 128."""


def exact_norm(x: Tensor, weight: Tensor, bias: Tensor | None, centered: bool) -> Tensor:
    """torch's, in the dtype of the arguments."""
    if centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


@WIDTHS
@KINDS
def test_values_and_statistics(centered: bool, has_bias: bool, columns: int, run: Run):
    x, weight, bias = inputs(has_bias, columns=columns)
    x64 = x.double()
    y64 = exact_norm(x64, weight.double(), None if bias is None else bias.double(), centered)
    middle = x64 - x64.mean(-1, keepdim=True) if centered else x64
    rstd64 = (middle.square().mean(-1) + EPS).rsqrt()

    for body in (run, run_reference):
        _, q, exponents, rstd, mean, codes, scale = body(
            "norm_fwd", (x, None, weight, bias, EPS, centered, 16, "e4m3")
        )
        assert_same_bits("copy", dequantize_group(GroupScaled(q, exponents)), x)
        assert relative_rms(rstd, rstd64) < 1e-6
        assert relative_rms(mean, x64.mean(-1) if centered else torch.empty(0)) < 1e-6
        bound = columns**0.5 * weight.double().max()
        bound += 0 if bias is None else bias.double().abs().max()
        torch.testing.assert_close(scale.double(), bound / 448, rtol=1e-6, atol=0)

        y = reference.norm_values(x, weight, bias, rstd, mean if centered else None)
        assert relative_rms(y, y64) < 1e-6
        half_step = torch.maximum(y64.abs() * 2**-4, scale.double() * 2**-10)
        assert ((codes.double() * scale - y64).abs() <= half_step + 1e-6 * y64.abs().amax()).all()
        args = (q, exponents, weight, bias, rstd, mean, scale, "e4m3")
        (transposed,) = body("norm_recompute", args)
        assert_same_bits("transposed", transposed[:, :21].t().contiguous(), codes)
        assert not transposed[:, 21:].float().any()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_scale_bounds_any_input(has_bias: bool, sign: int, run: Run):
    """A row with one value is sqrt(N) there, which is the largest value of FP8."""
    x = torch.zeros(1, 256)
    x[0, 7] = sign * 1e6
    weight = torch.full((256,), 0.1)
    weight[7] = -3.0
    bias = torch.where(weight < 0, -sign * 5.0, 0.2) if has_bias else None
    args = (x, None, weight, bias, 1e-6, False, 16, "e4m3")
    for body in (run, run_reference):
        *_, codes, scale = body("norm_fwd", args)
        torch.testing.assert_close(scale.item() * 448, 16 * 3.0 + 5 * has_bias)
        assert codes.float()[0, 7] == -sign * 448


@KINDS
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(80, torch.float32), (80, torch.float16), (144, torch.bfloat16), (336, torch.float32)],
)
def test_gradients(centered: bool, has_bias: bool, dtype: torch.dtype, columns: int, run: Run):
    x, weight, bias = inputs(has_bias, columns=columns)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, *([bias] if has_bias else []))]
    y64 = exact_norm(leaves[0], leaves[1], leaves[2] if has_bias else None, centered)
    dx64, dweight64, *dbias64 = torch.autograd.grad(y64, leaves, dy.double())

    args = (x, None, weight, bias, EPS, centered, 16, "e4m3")
    _, q, exponents, rstd, mean, *_ = reference.norm_fwd(*args)
    for body in (run, run_reference):
        dx, dweight, dbias = body("norm_bwd", (dy, q, exponents, weight, rstd, mean, None, True))
        # One rounding to dtype: at most half a unit in the last place of each element.
        rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        assert relative_rms(dx, dx64) < rounding + TOLERANCE["norm_bwd", torch.float32]
        assert relative_rms(dweight, dweight64) < 3e-6
        if has_bias:
            assert relative_rms(dbias, dbias64[0]) < 3e-6


def test_layer_norm_keeps_its_precision_far_from_zero(run: Run):
    """The mean of squares minus the square of the mean would leave nothing of the variance."""
    x = 1000 + torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(64)
    _, _, _, rstd, mean, *_ = run("norm_fwd", (x, None, ones, None, 1e-6, True, 16, "e4m3"))
    assert relative_rms(mean, x.double().mean(-1)) < 1e-6
    assert relative_rms(rstd, 1 / x.double().std(-1, correction=0)) < 1e-5


@pytest.mark.parametrize("centered", [False, True])
def test_rows_of_zeros_give_the_bias_and_no_nan(centered: bool, run: Run):
    weight, bias = torch.full((48,), 2.0), torch.full((48,), 0.5)
    x = torch.zeros(3, 48)
    _, q, exponents, rstd, mean, codes, scale = run(
        "norm_fwd", (x, None, weight, bias, 1e-6, centered, 16, "e4m3")
    )
    torch.testing.assert_close(rstd, torch.full((3,), 1000.0))
    error = (codes.float() * scale - 0.5).abs()
    assert (error <= 0.5 * 2**-4).all()
    dx, _, _ = run("norm_bwd", (torch.zeros(3, 48), q, exponents, weight, rstd, mean, None, True))
    assert not dx.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_element_never_gives_plausible_numbers(bad: float, run: Run):
    x = torch.randn(4, 48)
    x[1, 3] = bad
    weight = torch.ones(48)
    args = (x, None, weight, None, 1e-6, True, 16, "e4m3")
    _, q, exponents, rstd, mean, codes, scale = run("norm_fwd", args)
    (transposed,) = run("norm_recompute", (q, exponents, weight, None, rstd, mean, scale, "e4m3"))
    for y in (codes.float(), transposed.float()[:, :4].t()):
        assert y[1].isnan().all()
        assert y[[0, 2, 3]].isfinite().all()
    assert not transposed[:, 4:].float().any()
    dx, dweight, _ = run(
        "norm_bwd", (torch.randn(4, 48), q, exponents, weight, rstd, mean, None, True)
    )
    assert dx[1].isnan().all()
    assert dx[[0, 2, 3]].isfinite().all()
    assert dweight.isnan().all()


def test_programs_fill_the_multiprocessors_of_the_gpu(monkeypatch: pytest.MonkeyPatch):
    gpu = SimpleNamespace(multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    rows, columns = 10**6, 1024
    half, _ = norm._persistent("bwd", rows, columns, torch.device("cuda", 90))
    of_h200, _ = norm._persistent("bwd", rows, columns, torch.device("cpu"))
    assert half == of_h200 // 2 == 66 * 8


def test_weight_gradients_of_many_row_blocks(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Each program then sums over several tiles of rows, the last one partly outside."""
    monkeypatch.setattr(norm, "count_sms", lambda _: 1)
    x, weight, _ = inputs(has_bias=False, rows=60, columns=144)
    stats = (x, None, weight, None, EPS, False, 16, "e4m3")
    _, q, exponents, rstd, mean, *_ = reference.norm_fwd(*stats)
    args = (torch.randn(x.shape), q, exponents, weight, rstd, mean, None, True)
    dx, dweight, dbias = run("norm_bwd", args)
    for actual, expected in zip((dx, dweight, dbias), reference.norm_bwd(*args), strict=True):
        assert relative_rms(actual, expected) < TOLERANCE["norm_bwd", torch.float32]
    assert_same_bits("again", run("norm_bwd", args)[1], dweight)


@pytest.mark.parametrize(
    ("centered", "columns", "dtype"),
    [(False, 48, torch.bfloat16), (True, 48, torch.float32), (True, 144, torch.bfloat16)],
)
def test_a_residual_connection_is_added_before_and_its_gradient_after(
    centered: bool, columns: int, dtype: torch.dtype, run: Run
):
    generator = torch.Generator().manual_seed(7)
    shape = (19, columns)
    x, delta, dy, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    weight = 1 + 0.1 * torch.randn(columns, generator=generator)
    settings = (weight, None, EPS, centered, 16, "e4m3")
    for body in (run, run_reference):
        total, *summed = body("norm_fwd", (x, delta, *settings))
        assert_same_bits("sum", total, x + delta)
        _, *given = body("norm_fwd", (x + delta, None, *settings))
        for actual, expected in zip(summed, given, strict=True):
            if actual.dtype == torch.float32:  # another kernel's sums round in another order
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
            else:
                assert_same_bits("copy of the sum", actual, expected)
        q, exponents, rstd, mean, *_ = summed
        args = (q, exponents, weight, rstd, mean)
        with_residual = body("norm_bwd", (dy, *args, residual, True))[0]
        plain = body("norm_bwd", (dy.float(), *args, None, True))[0]  # not rounded to dtype
        # On a GPU the last product and this sum are one instruction.
        expected = (plain + residual.float()).to(dtype)
        assert with_residual.dtype == dtype
        assert relative_rms(with_residual, expected) <= TOLERANCE["norm_bwd", dtype]
    source, y, saved = norm_fwd(x, weight, None, EPS, centered=centered, group_size=16, delta=delta)
    assert_same_bits("sum", source, x + delta)
    _, y_of_sum, _ = norm_fwd(x + delta, weight, None, EPS, centered=centered, group_size=16)
    assert_same_bits("y", y.q, y_of_sum.q)
    assert_same_bits("dx", norm_bwd(dy, saved, weight, residual)[0], with_residual)
    frozen, *sums = norm_bwd(dy, saved, weight, residual, frozen=True)
    assert_same_bits("dx of a frozen norm", frozen, with_residual)
    assert not any(map(len, sums))
