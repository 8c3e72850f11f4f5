"""Tolerances and comparisons of op results.

``assert_matches`` compares two implementations of an op. Quantized values and scales of the op's
input must be bit-identical; the relative RMS error of all other results is limited by
:data:`TOLERANCE`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coat_kernels import E4M3, E5M2, OPS
from op_cases import run_op

Run = Callable[[str, Sequence[Any]], list[Tensor]]
"""Runs an op, given its name and arguments."""

QUANTIZED = (E4M3.dtype, E5M2.dtype)

_SUMS = {  # FP32 sums in another order, and the hardware's exp, rsqrt and division (about 2^-22).
    3e-6: (
        *("quantize_gradient", "rope_gradient", "cross_entropy_", "adamw_step"),
        *("norm_bwd", "head_norm_bwd", "activation_bwd", "activation_bwd_stats"),
        "expert_gradient",
    ),
    2e-6: ("activation_stats", "activation_once", "activation_bwd_once"),
    # In rope a product and a sum may be one instruction.
    1e-6: ("norm_fwd", "head_norm", "low_rank_project", "low_rank_gradient", "rope"),
}
_ROUNDED = (  # then to 16 bits: some results lie on different sides of a tie
    *("norm_bwd", "head_norm", "head_norm_bwd", "low_rank_gradient"),
    *("rope", "cross_entropy_", "adamw_step", "expert_gradient"),
)
_NORMS = ("norm_fwd", "norm_recompute")
_ONCE = ("activation_once", "activation_bwd_once")
_E4M3 = (*_NORMS, "activation_apply", "activation_bwd_stats", *_ONCE)
_E5M2 = (*_NORMS, "activation_apply", "activation_bwd", *_ONCE, "logit_gradient")

TOLERANCE: dict[tuple[str, torch.dtype], float] = {
    **{(op, torch.float32): error for error, ops in _SUMS.items() for op in ops},
    **{(op, torch.bfloat16): 2e-4 for op in _ROUNDED},
    **{(op, torch.float16): 5e-5 for op in _ROUNDED},
    # Dequantized FP8 values: neighbors in E4M3 differ by up to 1 / 8, in E5M2 by 1 / 4.
    **{(op, E4M3.dtype): 1e-3 for op in (*_E4M3, "rope_gradient", "expert_gradient")},
    **{(op, E5M2.dtype): 2e-3 for op in (*_E5M2, "rope_gradient")},
    # Tensor cores align the products of a step to the largest and keep about 14 bits of them
    # (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    ("scaled_mm", torch.float32): 1e-3,
    ("scaled_mm", torch.bfloat16): 2e-3,
    ("scaled_mm", torch.float16): 1e-3,
    # The same sums, and the rounding: RMS of up to eps / (2 sqrt(3)).
    ("low_rank_project", torch.bfloat16): 3e-3,
    ("low_rank_project", torch.float16): 1.3e-3,
}
"""(op, dtype of the result) -> largest relative RMS error. All other results are exact."""

COPIES_OF_INPUT = {
    "norm_fwd": 3,
    "activation_stats": 2,
    "activation_once": 2,
    "quantize_gradient": 3,
}
"""Op -> how many of its first results are quantized input, and therefore exact."""

OFF_BY_ONE: dict[str, float] = {
    "norm_fwd": 1e-3,
    "norm_recompute": 1e-3,
    "activation_apply": 1e-3,
    "activation_bwd": 1e-3,
    "activation_bwd_stats": 1e-3,
    "activation_once": 1e-3,
    "activation_bwd_once": 1e-3,
    "rope_gradient": 1e-3,
    "expert_gradient": 1e-3,
    "logit_gradient": 1e-3,
    "adamw_step": 0.05,
}
"""Op -> largest share of quantized results that may differ, by one step each.

Values that differ by 2^-22 before rounding rarely lie on different sides of a tie. Moments are
quantized from (|x| / amax)^k, where k depends on the group's smallest element. This element can be
the small difference of (1 - beta1) g and beta1 m, whose relative error changes the whole group.
"""


def run_reference(op: str, args: Sequence[Any]) -> list[Tensor]:
    """Results of an op's reference."""
    return run_op(op, OPS[op].reference, args)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Return RMS(actual - expected) / RMS(expected) in FP64; infinite if only one is finite."""
    a, e = actual.double(), expected.double()
    if not torch.equal(a.isfinite(), e.isfinite()):
        return float("inf")
    finite = e.isfinite()
    a, e = a[finite], e[finite]
    difference = (a - e).norm()
    return 0.0 if difference == 0 else float(difference / e.norm())


def casts_through_fp16() -> bool:
    """Whether this machine's GPU casts FP32 to FP8 through FP16, rounded toward zero."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (8, 9)


def multiplies_in_tf32() -> bool:
    """Whether this machine's GPU rounds FP32 tiles to TF32 (``low_rank._dot``)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def assert_same_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """Assert equal shape, dtype and bits; all NaNs are equal, whatever their sign and payload.

    FP8 values may be a step closer to zero on GPUs that cast through FP16.

    Raises:
        AssertionError: with the first elements that differ.
    """
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, expected {expected.shape}"
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integer = integers[actual.dtype.itemsize]
    same = actual.reshape(-1).view(integer) == expected.reshape(-1).view(integer)
    if actual.dtype.is_floating_point:
        same |= actual.float().isnan().reshape(-1) & expected.float().isnan().reshape(-1)
    if actual.dtype in QUANTIZED and casts_through_fp16():
        a, e = (x.reshape(-1).view(torch.uint8).int() for x in (actual, expected))
        same |= (e - a == 1) & (a ^ e < 128)  # of the same sign
    wrong = (~same).nonzero().flatten()
    assert not wrong.numel(), (
        f"{name}: {wrong.numel()} of {same.numel()} differ, first at "
        + ", ".join(
            f"{i}: {float(actual.reshape(-1)[i])!r} for {float(expected.reshape(-1)[i])!r}"
            for i in wrong[:4].tolist()
        )
    )


def count_steps_between(actual: Tensor, expected: Tensor) -> Tensor:
    """Count the representable values between two FP8 tensors, elementwise; int32."""

    def ordered(q: Tensor) -> Tensor:
        # From sign and magnitude to an integer order in which both zeros are 0.
        bits = q.view(torch.uint8).int()
        return torch.where(bits >= 128, 128 - bits, bits)

    return (ordered(actual) - ordered(expected)).abs()


def assert_matches(op: str, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Assert that the results of two implementations of an op, from :func:`run_op`, agree.

    Raises:
        AssertionError: with the result's number and its error.
    """
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        name = f"{op}, result {i}"
        if i < COPIES_OF_INPUT.get(op, 0) or op not in {key[0] for key in TOLERANCE}:
            assert_same_bits(name, a, e)
            continue
        assert (a.dtype, a.shape) == (e.dtype, e.shape), f"{name}: {a.dtype} {tuple(a.shape)}"
        if e.dtype in QUANTIZED:
            steps = count_steps_between(a, e)
            different = int((steps > 0).sum())
            assert not (steps > 1).any(), f"{name}: values {int(steps.max())} steps apart"
            share = OFF_BY_ONE[op] + 0.01 * casts_through_fp16()
            allowed = max(2, share * steps.numel())  # two, for the smallest examples
            assert different <= allowed, f"{name}: {different} of {steps.numel()} values differ"
        if (op, e.dtype) in TOLERANCE:
            # k of a moment: see OFF_BY_ONE.
            tolerance = 1e-2 if op == "adamw_step" and i in {3, 6} else TOLERANCE[op, e.dtype]
            if e.dtype in QUANTIZED and casts_through_fp16():
                tolerance = 1e-2  # 1 of 256 values is off by up to 1 / 8 in E4M3
            if op == "low_rank_project" and multiplies_in_tf32():
                tolerance = max(tolerance, 2.0**-11)
            error = relative_rms(a, e)
            assert error <= tolerance, f"{name}: relative RMS error {error:.2e} > {tolerance:.0e}"
