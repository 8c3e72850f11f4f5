"""The comparisons can fail: each tolerance refuses a small error and plausible mistakes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_check import COPIES_OF_INPUT, OFF_BY_ONE, QUANTIZED, TOLERANCE, assert_matches
from op_examples import examples
from torch import Tensor

from coat_kernels import OPS, reference
from coat_kernels.formats import Format
from op_cases import run_op


def noisy(x: Tensor, error: float) -> Tensor:
    """``x`` with this relative RMS error: Gaussian noise, or some codes one step off."""
    generator = torch.Generator().manual_seed(0)
    if x.dim() == 0:
        return x * (1 + error)
    if x.dtype not in QUANTIZED:
        noise = torch.randn(x.shape, generator=generator) * x.double().square().mean().sqrt()
        return (x.double() + error * noise).to(x.dtype)
    wrong = x.view(torch.uint8).flatten()
    neighbour = wrong ^ 1
    difference = (wrong.view(x.dtype).double() - neighbour.view(x.dtype).double()).square()
    order = torch.randperm(wrong.numel(), generator=generator)
    enough = difference[order].cumsum(0) <= error**2 * x.double().square().sum()
    chosen = order[: int(enough.sum()) + 1]
    return wrong.index_copy(0, chosen, neighbour[chosen]).view(x.dtype).view(x.shape)


@pytest.mark.parametrize("op", OFF_BY_ONE)
def test_more_codes_off_by_one_than_allowed_are_refused(op: str):
    for args in examples(op).values():
        expected = run_op(op, OPS[op].reference, args)
        for i, result in enumerate(expected):
            is_copy = i < COPIES_OF_INPUT.get(op, 0)  # compared bit by bit
            if result.dtype not in QUANTIZED or not result.numel() or is_copy:
                continue
            codes = result.view(torch.uint8).flatten()
            some = torch.arange(codes.numel()) < 2 * OFF_BY_ONE[op] * codes.numel()
            wrong = list(expected)
            # The smallest codes: so small an error that the relative RMS error does not show it.
            smallest = result.float().abs().flatten().argsort()
            wrong[i] = codes.scatter(0, smallest, codes[smallest] ^ some.to(torch.uint8))
            wrong[i] = wrong[i].view(result.dtype).view(result.shape)
            with pytest.raises(AssertionError, match=f"{op}, result {i}"):
                assert_matches(op, wrong, expected)
            wrong[i] = codes ^ (torch.arange(codes.numel()) == 5).to(torch.uint8) * 2
            wrong[i] = wrong[i].view(result.dtype).view(result.shape)
            with pytest.raises(AssertionError, match=r"steps apart|relative RMS"):
                assert_matches(op, wrong, expected)


@pytest.mark.parametrize(("op", "dtype"), TOLERANCE, ids=str)
def test_noise_of_three_times_the_tolerance_is_refused(op: str, dtype: torch.dtype):
    precision = torch.float32 if dtype in QUANTIZED else dtype
    seen = 0
    for args in examples(op, dtype=precision).values():
        expected = run_op(op, OPS[op].reference, args)
        assert_matches(op, expected, expected)
        for i, result in enumerate(expected):
            checked = result.dtype == dtype and result.numel()
            if not checked or (op == "adamw_step" and i in {3, 6}):  # k has a bound of its own
                continue
            wrong = list(expected)
            wrong[i] = noisy(result, 3 * TOLERANCE[op, dtype])
            with pytest.raises(AssertionError, match=f"{op}, result {i}"):
                assert_matches(op, wrong, expected)
            seen += 1
    assert seen, "no example has a result of this dtype"


def replaced(position: int, value: Any) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Arguments with one of them changed."""
    return lambda args: (*args[:position], value, *args[position + 1 :])


def scaled(position: int, factor: float) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Arguments with one of them multiplied."""
    return lambda args: (*args[:position], args[position] * factor, *args[position + 1 :])


def reversed_rows(position: int) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Arguments with one of them upside down."""
    return lambda args: (*args[:position], args[position].flip(0), *args[position + 1 :])


def doubly_rounded(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The scale from the FP8 copy instead of from the input; the copy itself is the same."""
    a, kind, group, fmt = args
    copy = reference.dequantize_group(*reference.quantize_group(a, group, fmt), torch.float32)
    return (copy, kind, group, fmt)


MISTAKES = [
    ("tensor_scale", "e4m3", "the other format's maximum", replaced(1, "e5m2")),
    (
        "tensor_scale",
        "e4m3",
        "amax without the last row",
        lambda args: ([args[0][0][:40]], args[1]),
    ),
    ("quantize_tensor", "e4m3-both", "a scale a little off", scaled(1, 1 + 2.0**-12)),
    ("quantize_tensor", "stacked", "another order", lambda a: (a[0][::-1], *a[1:])),
    ("quantize_gradient", "side-by-side", "another order", lambda a: (a[0][::-1], *a[1:])),
    ("quantize_gradient", "both-bias", "the bias's gradient left out", replaced(4, False)),
    ("quantize_group", "e4m3-16", "another group size", replaced(1, 208)),
    ("quantize_group", "e5m2-16", "tokens in another order", reversed_rows(0)),
    ("dequantize_group", "e4m3-16", "exponents off by one", scaled(1, 0)),
    ("transpose_quantized", "e4m3", "the tokens in another order", reversed_rows(0)),
    ("dequantize_tensor", "e5m2", "a scale a little off", scaled(1, 1 + 2.0**-12)),
    ("norm_stats", "rms", "epsilon left out", replaced(4, 0.0)),
    ("norm_stats", "rms", "mean subtracted", replaced(5, True)),
    ("norm_stats", "layer", "mean not subtracted", replaced(5, False)),
    ("norm_stats", "layer", "bias left out", replaced(3, None)),
    ("norm_stats", "rms-of-a-sum", "the residual left out", replaced(1, None)),
    ("norm_apply", "layer-both", "bias left out", replaced(3, None)),
    ("norm_apply", "layer-grouped", "mean left out", replaced(5, torch.empty(0))),
    ("norm_apply", "rms-both", "statistics a little off", scaled(4, 1.005)),
    ("norm_bwd", "layer", "mean left out", replaced(5, torch.empty(0))),
    ("norm_bwd", "rms", "statistics a little off", scaled(4, 1 + 1e-5)),
    ("norm_bwd", "rms-of-a-sum", "the residual's gradient left out", replaced(6, None)),
    ("activation_stats", "silu_mul", "the input rounded twice", doubly_rounded),
    ("activation_apply", "gelu", "the cheaper approximation", replaced(1, "quick_gelu")),
    ("activation_apply", "silu_mul", "a scale a little off", scaled(2, 1.005)),
    ("activation_bwd", "gelu", "approximated", replaced(3, "gelu_tanh")),
    ("activation_bwd", "silu_mul", "a scale a little off", scaled(8, 1.005)),
    ("activation_bwd_stats", "gelu", "approximated", replaced(3, "gelu_tanh")),
    ("activation_once", "silu_mul", "the input rounded twice", doubly_rounded),
    ("activation_once", "gelu", "the cheaper approximation", replaced(1, "quick_gelu")),
    ("activation_bwd_stats", "silu_mul", "another output scale", scaled(4, 1.005)),
    ("head_norm", "grouped", "epsilon left out", replaced(4, 0.0)),
    ("head_norm", "equal", "the weight a little off", scaled(1, 1 + 1e-5)),
    ("head_norm_bwd", "grouped", "the other direction", scaled(4, -1)),
    ("head_norm_bwd", "equal", "the weight a little off", scaled(2, 1 + 1e-5)),
    ("low_rank_project", "e4m3-b", "the scale a little off", scaled(1, 1 + 1e-5)),
    ("low_rank_project", "e5m2-b", "other factors", replaced(4, [0.5, 2.0, 1.001])),
    (
        "low_rank_project",
        "e4m3-a",
        "matrices in another order",
        lambda a: (*a[:2], a[2][::-1], *a[3:]),
    ),
    ("low_rank_gradient", "e4m3-b", "tokens in another order", reversed_rows(0)),
    ("low_rank_gradient", "e5m2-a", "P a little off", scaled(2, 1 + 1e-5)),
    ("rope", "grouped", "cos a little off", scaled(1, 1 + 1e-5)),
    ("rope", "equal", "the other direction", lambda args: (args[0], args[1], -args[2], *args[3:])),
    ("rope_gradient", "equal", "the other direction", scaled(4, -1)),
    ("rope_gradient", "grouped", "the other format", replaced(5, "e4m3")),
    ("scaled_mm", "e4m3-bias", "bias left out", replaced(4, None)),
    ("scaled_mm", "e4m3", "one operand's scale left out", replaced(1, torch.ones(()))),
    ("cross_entropy_", "wide", "the targets in another order", reversed_rows(1)),
    ("cross_entropy_", "narrow", "a divisor a little off", scaled(2, 1 + 1e-5)),
    ("cross_entropy_", "narrow-losses", "logits a little off", scaled(0, 1 + 1e-5)),
    ("logit_gradient", "rows", "the targets in another order", reversed_rows(1)),
    ("logit_gradient", "transposed", "losses a little off", scaled(2, 1.005)),
    ("adamw_step", "plain", "the random numbers of another parameter", replaced(17, 1)),
    ("adamw_step", "plain", "bias correction of another step", replaced(13, 3)),
    ("adamw_step", "plain", "no weight decay", replaced(12, 0.0)),
    ("adamw_step", "plain", "1 - beta2 in FP32", replaced(10, float(torch.tensor(0.999)))),
]


@pytest.mark.parametrize(
    ("op", "variant", "mistake", "mutate"), MISTAKES, ids=[f"{m[0]}: {m[2]}" for m in MISTAKES]
)
def test_mistakes_in_the_arguments_are_caught(
    op: str, variant: str, mistake: str, mutate: Callable[[tuple[Any, ...]], tuple[Any, ...]]
):
    args = examples(op)[variant]
    expected = run_op(op, OPS[op].reference, args)
    with pytest.raises((AssertionError, ValueError), match=rf"{op}, result|zip"):
        assert_matches(op, run_op(op, OPS[op].reference, mutate(args)), expected)


def test_every_op_has_a_mistake():
    assert {op for op, *_ in MISTAKES} == set(OPS)


def truncated(x: Tensor, fmt: Format) -> Tensor:
    """Cast towards zero."""
    q = x.clamp(-fmt.max, fmt.max).to(fmt.dtype)
    too_far = q.float().abs() > x.abs()
    return (q.view(torch.uint8) - too_far.to(torch.uint8)).view(fmt.dtype)


def ties_away(x: Tensor, fmt: Format) -> Tensor:
    """Cast that rounds ties away from zero."""
    return (x * (1 + 2.0**-23)).clamp(-fmt.max, fmt.max).to(fmt.dtype)


def unsaturated(x: Tensor, fmt: Format) -> Tensor:
    """Cast without the clamp: in torch, E5M2 then overflows to infinity."""
    return x.to(fmt.dtype)


@pytest.mark.parametrize("wrong_cast", [truncated, ties_away, unsaturated])
@pytest.mark.parametrize("op", ["quantize_tensor", "quantize_group"])
def test_wrong_rounding_is_caught(
    op: str, wrong_cast: Callable[[Tensor, Format], Tensor], monkeypatch: pytest.MonkeyPatch
):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()  # has ties
    x[0, :2] = torch.tensor([448.0, 57344.0 * 1.5])
    args = ([x], torch.ones(()), "e5m2", True, True) if op == "quantize_tensor" else (x, 16, "e5m2")
    if op == "quantize_group" and wrong_cast is unsaturated:
        return  # a group's exponent leaves nothing to saturate
    expected = run_op(op, OPS[op].reference, args)
    monkeypatch.setattr("coat_kernels.reference.quantize.cast", wrong_cast)
    with pytest.raises(AssertionError, match="differ"):
        assert_matches(op, run_op(op, OPS[op].reference, args), expected)
