"""When results of two bodies of an op agree: tolerances and comparisons, for benchmarks and tests.

``assert_matches`` compares two bodies of an op: codes and scales that an op takes from its input
bit for bit, everything else by relative RMS error against :data:`TOLERANCE`. Nothing gets a speed
that fails here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coat_kernels import E4M3, E5M2

FP8 = (E4M3.dtype, E5M2.dtype)

TOLERANCE: dict[tuple[str, torch.dtype], float] = {
    # FP32 sums in another order, and the hardware's exp, rsqrt and division (about 2^-22).
    ("quantize_gradient", torch.float32): 3e-6,
    ("norm_stats", torch.float32): 1e-6,
    ("norm_bwd", torch.float32): 3e-6,
    ("activation_stats", torch.float32): 2e-6,
    ("activation_bwd", torch.float32): 3e-6,
    ("activation_bwd_stats", torch.float32): 3e-6,
    ("adamw_step", torch.float32): 3e-6,
    ("rope_gradient", torch.float32): 3e-6,
    ("cross_entropy_", torch.float32): 3e-6,
    # A product and a sum may be one instruction.
    ("rope", torch.float32): 1e-6,
    # Rounded to FP8: see its codes.
    ("rope_quantize", torch.float32): 1e-3,
    ("rope_quantize", torch.bfloat16): 1e-3,
    ("rope_quantize", torch.float16): 1e-3,
    ("rope_quantize", E4M3.dtype): 1e-3,
    # The same, then rounded to 16 bits: now and then a result falls on the other side of a tie.
    ("norm_bwd", torch.bfloat16): 2e-4,
    ("norm_bwd", torch.float16): 5e-5,
    ("rope", torch.bfloat16): 2e-4,
    ("rope", torch.float16): 5e-5,
    ("cross_entropy_", torch.bfloat16): 2e-4,
    ("cross_entropy_", torch.float16): 5e-5,
    ("adamw_step", torch.bfloat16): 2e-4,
    ("adamw_step", torch.float16): 5e-5,
    # Codes, decoded: one differing code of E4M3 is off by up to 1 / 8, one of E5M2 by 1 / 4.
    ("norm_apply", E4M3.dtype): 1e-3,
    ("norm_apply", E5M2.dtype): 2e-3,
    ("activation_apply", E4M3.dtype): 1e-3,
    ("activation_apply", E5M2.dtype): 2e-3,
    ("activation_bwd", E5M2.dtype): 2e-3,
    ("activation_bwd_stats", E4M3.dtype): 1e-3,
    ("rope_gradient", E4M3.dtype): 1e-3,
    ("rope_gradient", E5M2.dtype): 2e-3,
    # Tensor cores align the products of a step to the largest and keep about 14 bits of them
    # (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    ("scaled_mm", torch.float32): 1e-3,
    ("scaled_mm", torch.bfloat16): 2e-3,
    ("scaled_mm", torch.float16): 1e-3,
}
"""Largest relative RMS error by op and by dtype of the result. What is not here is exact."""

COPIES_OF_INPUT = {"norm_stats": 3, "activation_stats": 2, "quantize_gradient": 3}
"""How many results of an op, the first ones, are exact all the same: taken from its input."""

OFF_BY_ONE: dict[str, float] = {
    "norm_apply": 1e-3,
    "activation_apply": 1e-3,
    "activation_bwd": 1e-3,
    "activation_bwd_stats": 1e-3,
    "rope_quantize": 1e-3,
    "rope_gradient": 1e-3,
    "adamw_step": 0.05,
}
"""Largest share of computed codes that may differ, by one step each.

What differs by 2^-22 before rounding is rarely on both sides of a tie. A moment's codes are rounded
from (|x| / amax)^k, where k hangs on the group's smallest element. This can be what remains of
(1 - beta1) g against beta1 m, and its relative error then moves all codes of the group.
"""


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference by RMS of ``expected``, in FP64; infinite if only one has NaN there."""
    a, e = actual.double(), expected.double()
    if not torch.equal(a.isfinite(), e.isfinite()):
        return float("inf")
    finite = e.isfinite()
    a, e = a[finite], e[finite]
    difference = (a - e).norm()
    return 0.0 if difference == 0 else float(difference / e.norm())


def assert_same_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """Equal shape, dtype and bits; any NaN equals any NaN, since its sign and payload mean nothing.

    Raises:
        AssertionError: it names the first elements that differ.
    """
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, expected {expected.shape}"
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integer = integers[actual.dtype.itemsize]
    same = actual.reshape(-1).view(integer) == expected.reshape(-1).view(integer)
    if actual.dtype.is_floating_point:
        same |= actual.float().isnan().reshape(-1) & expected.float().isnan().reshape(-1)
    wrong = (~same).nonzero().flatten()
    assert not wrong.numel(), (
        f"{name}: {wrong.numel()} of {same.numel()} differ, first at "
        + ", ".join(
            f"{i}: {float(actual.reshape(-1)[i])!r} for {float(expected.reshape(-1)[i])!r}"
            for i in wrong[:4].tolist()
        )
    )


def code_steps(actual: Tensor, expected: Tensor) -> Tensor:
    """How many representable values lie between two tensors of codes, elementwise; int32."""

    def ordered(q: Tensor) -> Tensor:
        # Sign and magnitude to an order in which the two zeros coincide.
        bits = q.view(torch.uint8).int()
        return torch.where(bits >= 128, 128 - bits, bits)

    return (ordered(actual) - ordered(expected)).abs()


def assert_matches(op: str, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Results of two bodies of an op, as :func:`results` returns them.

    Raises:
        AssertionError: it names the result and the error.
    """
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        name = f"{op}, result {i}"
        if i < COPIES_OF_INPUT.get(op, 0) or op not in {key[0] for key in TOLERANCE}:
            assert_same_bits(name, a, e)
            continue
        assert (a.dtype, a.shape) == (e.dtype, e.shape), f"{name}: {a.dtype} {tuple(a.shape)}"
        if e.dtype in FP8:
            _assert_close_codes(name, a, e, OFF_BY_ONE[op])
        if (op, e.dtype) in TOLERANCE:
            # k of a moment: see OFF_BY_ONE.
            tolerance = 1e-2 if op == "adamw_step" and i in {3, 6} else TOLERANCE[op, e.dtype]
            error = relative_rms(a, e)
            assert error <= tolerance, f"{name}: relative RMS error {error:.2e} > {tolerance:.0e}"


def _assert_close_codes(name: str, actual: Tensor, expected: Tensor, share: float) -> None:
    steps = code_steps(actual, expected)
    different = int((steps > 0).sum())
    assert not (steps > 1).any(), f"{name}: codes {int(steps.max())} steps apart"
    allowed = max(2, share * steps.numel())  # two, for the smallest examples
    assert different <= allowed, f"{name}: {different} of {steps.numel()} codes differ"


def mapped(change: Callable[[Tensor], Tensor], args: Sequence[Any]) -> list[Any]:
    """Arguments of an op with ``change`` applied to its tensors, those in lists too."""

    def one(arg: Any) -> Any:
        if isinstance(arg, list):
            return [change(tensor) for tensor in arg]
        return change(arg) if isinstance(arg, Tensor) else arg

    return [one(arg) for arg in args]


def results(op: str, body: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """Results of one body of an op, with the tensors that it changed.

    The arguments are copied first, so a body that changes them can be called again.
    """
    args = mapped(Tensor.clone, args)
    result = body(*args)
    if op == "adamw_step":
        p, _, *moments = args[:8]
        return [p, *moments, *([args[15]] if args[15] is not None else [])]
    if op == "cross_entropy_":
        return [result, args[0]]
    return [result] if isinstance(result, Tensor) else list(result)
