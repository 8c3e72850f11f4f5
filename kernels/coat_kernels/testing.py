"""What tests of these kernels share: example inputs, tolerances, and an exact interpreter.

``examples`` gives every op its arguments once, for all kinds of tests (interpreter, GPU,
``opcheck``, compilation without a GPU). ``assert_matches`` compares two bodies of an op: codes and
scales that an op takes from its input bit for bit, everything else by relative RMS error against
:data:`TOLERANCE`. ``exact_interpreter`` makes Triton's CPU interpreter round as the hardware does.
Nothing outside of tests imports this module.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coat_kernels import reference, reference_adamw
from coat_kernels.adamw import new_moment
from coat_kernels.formats import E4M3, E5M2, FORMATS, GROUP_SIZES
from coat_kernels.registry import OPS

FP8 = (E4M3.dtype, E5M2.dtype)

TOLERANCE: dict[tuple[str, torch.dtype], float] = {
    # FP32 sums in another order, and the hardware's exp, rsqrt and division (about 2^-22).
    ("norm_stats", torch.float32): 1e-6,
    ("norm_bwd", torch.float32): 3e-6,
    ("activation_stats", torch.float32): 2e-6,
    ("activation_bwd", torch.float32): 3e-6,
    ("adamw_step", torch.float32): 3e-6,
    # A product and a sum may be one instruction.
    ("rope", torch.float32): 1e-6,
    ("rope_bwd", torch.float32): 1e-6,
    # The same, then rounded to 16 bits: now and then a result falls on the other side of a tie.
    ("norm_bwd", torch.bfloat16): 2e-4,
    ("norm_bwd", torch.float16): 5e-5,
    ("activation_bwd", torch.bfloat16): 2e-4,
    ("activation_bwd", torch.float16): 5e-5,
    ("rope", torch.bfloat16): 2e-4,
    ("rope", torch.float16): 5e-5,
    ("rope_bwd", torch.bfloat16): 2e-4,
    ("rope_bwd", torch.float16): 5e-5,
    ("adamw_step", torch.bfloat16): 2e-4,
    ("adamw_step", torch.float16): 5e-5,
    # Codes, decoded: one differing code of E4M3 is off by up to 1 / 8, one of E5M2 by 1 / 4.
    ("norm_apply", E4M3.dtype): 1e-3,
    ("norm_apply", E5M2.dtype): 2e-3,
    ("activation_apply", E4M3.dtype): 1e-3,
    ("activation_apply", E5M2.dtype): 2e-3,
    # Tensor cores align the products of a step to the largest and keep about 14 bits of them
    # (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    ("scaled_mm", torch.float32): 1e-3,
    ("scaled_mm", torch.bfloat16): 2e-3,
    ("scaled_mm", torch.float16): 1e-3,
}
"""Largest relative RMS error by op and by dtype of the result. What is not here is exact."""

OFF_BY_ONE: dict[str, float] = {"norm_apply": 1e-3, "activation_apply": 1e-3, "adamw_step": 0.05}
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
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.dtype.itemsize]
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
        copies_input = op in {"norm_stats", "activation_stats"} and i < 2
        if copies_input or op not in {key[0] for key in TOLERANCE}:
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


def results(op: str, body: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """Results of one body of an op; for ``adamw_step`` the tensors that it changed.

    The arguments are copied first, so a body that changes them can be called again.
    """
    args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    result = body(*args)
    if op == "adamw_step":
        p, _, *moments = args[:8]
        return [p, *moments]
    return [result] if isinstance(result, Tensor) else list(result)


class _Inputs:
    """Seeded tensors of one size."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype):
        self.rows, self.columns, self.dtype = rows, columns, dtype
        self.group = max(size for size in GROUP_SIZES if columns % size == 0)
        self._generator = torch.Generator().manual_seed(rows * 1000 + columns)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Gaussian, with channels of different size, as activations have."""
        size = torch.exp2(torch.randn(shape[-1], generator=self._generator))
        x = torch.randn(*shape, generator=self._generator) * size
        return x.to(dtype or self.dtype)

    def matrix(self) -> Tensor:
        x = self.normal(self.rows, self.columns)
        x[1::3] *= 2.0**-9  # rows whose variance an epsilon matters to
        return x


Examples = dict[str, tuple[Any, ...]]


def _tensor_scale(i: _Inputs) -> Examples:
    return {name: (i.matrix(), name) for name in FORMATS}


def _quantize_tensor(i: _Inputs) -> Examples:
    x = i.matrix()
    return {
        f"{fmt}-{layout}": (x, reference.tensor_scale(x, fmt), fmt, rows, transposed)
        for fmt in FORMATS
        for layout, rows, transposed in (
            ("rows", True, False),
            ("transposed", False, True),
            ("both", True, True),
        )
    }


def _quantize_group(i: _Inputs) -> Examples:
    sizes = [size for size in GROUP_SIZES if i.columns % size == 0]
    return {f"{fmt}-{size}": (i.matrix(), size, fmt) for fmt in FORMATS for size in sizes}


def _dequantize_group(i: _Inputs) -> Examples:
    return {
        name: (*reference.quantize_group(*args), i.dtype)
        for name, args in _quantize_group(i).items()
    }


def _norm_stats(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, centered, has_bias, fmt in (
        ("rms", False, False, "e4m3"),
        ("layer", True, True, "e4m3"),
        ("layer-without-bias", True, False, "e4m3"),
        ("rms-e5m2", False, False, "e5m2"),
    ):
        weight, bias = i.normal(i.columns), i.normal(i.columns) if has_bias else None
        examples[name] = (i.matrix(), weight, bias, 1e-5, centered, i.group, fmt)
    return examples


def _norm_apply(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, args in _norm_stats(i).items():
        x, weight, bias, *_, fmt = args
        q, exponents, rstd, mean, scale = reference.norm_stats(*args)
        common = (weight, bias, rstd, mean, scale, fmt)
        examples[f"{name}-both"] = (x, None, *common, True, True)
        examples[f"{name}-grouped"] = (q, exponents, *common, False, True)
    return examples


def _norm_bwd(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, args in _norm_stats(i).items():
        q, exponents, rstd, mean, _ = reference.norm_stats(*args)
        examples[name] = (i.matrix(), q, exponents, args[1], rstd, mean)
    return examples


def _activation_input(i: _Inputs, kind: str) -> Tensor:
    return i.normal(i.rows, 2 * i.columns if kind == "silu_mul" else i.columns)


def _activation_stats(i: _Inputs) -> Examples:
    examples: Examples = {
        kind: (_activation_input(i, kind), kind, i.group, "e4m3") for kind in reference.ACTIVATIONS
    }
    a, kind, group, _ = examples["silu_mul"]
    return examples | {"silu_mul-e5m2": (a, kind, group, "e5m2")}


def _activation_apply(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, args in _activation_stats(i).items():
        a, kind, _, fmt = args
        q, exponents, scale = reference.activation_stats(*args)
        examples[f"{name}-both"] = (a, None, kind, scale, fmt, True, True)
        examples[f"{name}-grouped"] = (q, exponents, kind, scale, fmt, False, True)
    return examples


def _activation_bwd(i: _Inputs) -> Examples:
    examples: Examples = {}
    for kind in reference.ACTIVATIONS:
        q, exponents = reference.quantize_group(_activation_input(i, kind), i.group, "e4m3")
        examples[kind] = (i.matrix(), q, exponents, kind, "e5m2")
    return examples


def _scaled_mm(i: _Inputs) -> Examples:
    b = i.normal(48, i.columns, dtype=torch.float32)
    b_scale = reference.tensor_scale(b, "e4m3")
    b_q, _ = reference.quantize_tensor(b, b_scale, "e4m3", True, False)
    examples: Examples = {}
    for fmt, bias in (("e4m3", None), ("e5m2", None), ("e4m3", i.normal(48))):
        a = i.matrix()
        scale = reference.tensor_scale(a, fmt)
        q, _ = reference.quantize_tensor(a, scale, fmt, True, False)
        name = fmt if bias is None else f"{fmt}-bias"
        examples[name] = (q, scale, b_q, b_scale, bias, i.dtype)
    return examples


def _adamw_step(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, released in (("paper", False), ("released", True)):
        p, g = i.matrix(), i.matrix()
        m, v = new_moment(p), new_moment(p)
        settings = (1e-3, 0.9, 0.999, 1e-8, 0.1)
        if p.numel():  # moments as the first step leaves them
            reference_adamw.adamw_step(p, i.matrix(), *m, *v, *settings, 1, released)
        examples[name] = (p, g, *m, *v, *settings, 2, released)
    return examples


def _rope(i: _Inputs) -> Examples:
    examples: Examples = {}
    shared = i.rows // 3 if i.rows and i.rows % 3 == 0 else max(1, i.rows)
    for name, heads, kv_heads, rows in (("grouped", 3, 1, shared), ("equal", 5, 5, max(1, i.rows))):
        cos, sin = i.normal(rows, i.columns), i.normal(rows, i.columns)
        qkv = i.normal(i.rows, (heads + 2 * kv_heads) * i.columns)
        examples[name] = (qkv, cos, sin, heads, kv_heads)
    return examples


def _rope_bwd(i: _Inputs) -> Examples:
    return {
        name: (*reference.rope(qkv, cos, sin, heads, kv_heads), cos, sin)
        for name, (qkv, cos, sin, heads, kv_heads) in _rope(i).items()
    }


_EXAMPLES: dict[str, Callable[[_Inputs], Examples]] = {
    "tensor_scale": _tensor_scale,
    "quantize_tensor": _quantize_tensor,
    "quantize_group": _quantize_group,
    "dequantize_group": _dequantize_group,
    "norm_stats": _norm_stats,
    "norm_apply": _norm_apply,
    "norm_bwd": _norm_bwd,
    "activation_stats": _activation_stats,
    "activation_apply": _activation_apply,
    "activation_bwd": _activation_bwd,
    "scaled_mm": _scaled_mm,
    "rope": _rope,
    "rope_bwd": _rope_bwd,
    "adamw_step": _adamw_step,
}


def examples(
    op: str, rows: int = 63, columns: int = 208, dtype: torch.dtype = torch.float32
) -> Examples:
    """Arguments of an op on the CPU, by name of the variant.

    Args:
        op: its name in ``OPS``.
        rows: M.
        columns: N, or F of an activation, or K of a GEMM; a multiple of 16.
        dtype: of everything that is neither FP8 nor a statistic.

    Raises:
        ValueError: the op has no examples.
    """
    if op not in _EXAMPLES:
        raise ValueError(f"op {op!r} has no examples; add them to {__name__} ({sorted(OPS)})")
    return _EXAMPLES[op](_Inputs(rows, columns, dtype))


_TORCH_DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@functools.cache
def exact_interpreter() -> None:
    """Make Triton's interpreter convert floats as the hardware does; a second call does nothing.

    Triton 3.7's own conversions lose carries, truncate to BF16, round ties away from zero and
    subnormals to zero, and do not saturate to FP8 (triton-lang/triton, issue 8322); its ``tl.dot``
    multiplies the bits of BF16 operands (issue 11584). Set TRITON_INTERPRET=1 before the kernels
    are imported, and call this before they are launched.
    """
    from triton.runtime import interpreter

    patched: Any = interpreter
    original = patched._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source.name not in _TORCH_DTYPES or target.name not in _TORCH_DTYPES:
            return original(data, source, target, rounding_mode)
        from_dtype, to_dtype = _TORCH_DTYPES[source.name], _TORCH_DTYPES[target.name]
        raw = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy())
        values = raw.view(from_dtype)
        if to_dtype in FP8 and from_dtype not in FP8:
            largest = torch.finfo(to_dtype).max  # cvt.rn.satfinite saturates, infinities too
            values = values.clamp(-largest, largest)
        raw = values.to(to_dtype).view(torch.uint8).numpy()
        return raw.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)

    def as_float(operand: Any) -> Any:
        dtype = operand.dtype.scalar
        if dtype.name not in {"bf16", "fp8e4nv", "fp8e5"}:
            return operand.data
        return convert(operand.data, dtype, patched.tl.float32, None).view(np.float32)

    def dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        product = np.matmul(as_float(a), as_float(b), dtype=d.data.dtype)
        return patched.TensorHandle(product + d.data, d.dtype.scalar)

    patched._convert_float = convert
    patched.InterpreterBuilder.create_dot = dot
