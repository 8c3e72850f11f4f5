"""Functions of the GPU's special function unit: one instruction each, where libraries take many.

Triton's ``tl.log2`` is a polynomial of CUDA's libdevice, its ``tl.exp2`` handles subnormals, its
``/`` and ``tl.sqrt`` rescale. These do not: subnormal arguments count as zeros and subnormal
results are zeros (PTX ISA, ``lg2.approx.ftz.f32`` and its like; relative errors of 2^-22, of log2
absolute ones near 1). An SM of Hopper takes 16 of them a cycle, of additions 128 (CUDA C++
Programming Guide, arithmetic instructions). In Triton's interpreter, which has no assembler, they
are NumPy's with the same treatment of subnormal arguments.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""Whether kernels are interpreted in this process: read once, as ``triton.jit`` itself does."""

SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _flushed(x):
    """``x`` with zeros for subnormals; a NaN stays."""
    return tl.where(tl.abs(x) < SMALLEST_NORMAL, 0.0, x)


@triton.jit
def log2_fast(x):
    """log2(x), -inf for zero."""
    if INTERPRETED:
        return tl.log2(_flushed(x))
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def exp2_fast(x):
    """2^x."""
    if INTERPRETED:
        return _flushed(tl.exp2(x))
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def sqrt_fast(x):
    """The square root of x."""
    if INTERPRETED:
        return tl.sqrt(_flushed(x))
    else:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal_fast(x):
    """1 / x, an infinity for zero."""
    if INTERPRETED:
        return _flushed(1.0 / _flushed(x))
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
