"""Activations and their gradients, one tile at a time: for ``activation.py`` and ``experts.py``."""

import triton
import triton.language as tl

from coat_kernels.device import load_grouped, load_tile, sigmoid_base2

NUM_GATED = tl.constexpr(2)
"""Activations whose input is [gate | up]: the first ones of ACTIVATIONS."""


@triton.jit
def value_and_slope(a, KIND: tl.constexpr):
    """Compute an activation and its derivative; KIND is the index in ACTIVATIONS."""
    tl.static_assert(KIND >= 0 and KIND < 5, "an activation without a formula")
    if KIND == 2:
        cdf = 0.5 * (1.0 + tl.math.erf(a * 0.7071067811865476))
        return a * cdf, cdf + a * tl.exp(-0.5 * a * a) * 0.3989422804014327
    else:
        # a * s with s = sigmoid(inner): the derivative is s + h (1 - s) inner'. The constants
        # include log2(e) to save instructions, which bound these kernels as much as bytes.
        slope = 1.0
        if KIND == 1 or KIND == 3:
            squared = a * a
            s = sigmoid_base2(a * (-2.302208198144325 + -0.10294323460783883 * squared))
            slope = 1.5957691216057308 + 0.21406443847843341 * squared
        elif KIND == 4:
            s = sigmoid_base2(-2.4554669595930156 * a)
            slope = 1.702
        else:
            s = sigmoid_base2(-1.4426950408889634 * a)
        h = a * s
        return h, s + (h - h * s) * slope


@triton.jit
def gradients(
    dh_ptr, a_ptr, e_ptr, o_m, i_n, m_mn, M, F, W,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute FP32 tiles of da (gate and up of gated kinds, else the same tile twice) and of h."""
    dh = load_tile(dh_ptr, o_m, i_n + tl.arange(0, BLOCK_N), m_mn, F)
    a = load_grouped(a_ptr, e_ptr, o_m, i_n, M, F, W, GROUP, BLOCK_M, BLOCK_N)
    h, slope = value_and_slope(a, KIND)
    da = dh * slope
    dup = da
    output = h
    if KIND < NUM_GATED:
        up = load_grouped(a_ptr + F, e_ptr + F // GROUP, o_m, i_n, M, F, W, GROUP, BLOCK_M, BLOCK_N)
        da = dh * up * slope
        dup = dh * h
        output = h * up
    return da, dup, output
