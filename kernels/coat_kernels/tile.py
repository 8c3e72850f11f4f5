"""Device functions that all kernels share: scales, casts and FP8 tiles, each written once.

Everything is computed in FP32. Maxima of magnitudes are taken on the bits of ``|x|`` as integers:
for non-negative floats the integer order is the numeric order, and a NaN is larger than anything,
so it cannot be lost (a float maximum would drop it).
"""

import triton
import triton.language as tl

MAX_MANTISSA = tl.constexpr(0x600000)
"""Mantissa bits of 1.75, where E4M3 (448 = 1.75 * 2^8) and E5M2 (57344 = 1.75 * 2^15) end."""


@triton.jit
def magnitude_bits(x):
    """The bits of ``|x|`` (FP32) as an ordered int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_amax_bits(x):
    """Largest magnitude of a [A, B] block as int32 bits."""
    return tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)


@triton.jit
def group_exponents(x, MAX_EXPONENT: tl.constexpr):
    """E8M0 exponent (int32) of each group of x [A, B, G] -> [A, B].

    The smallest e from 1 on with amax <= 1.75 * 2^(MAX_EXPONENT + e - 127); 255 for NaN and Inf.
    """
    bits = tl.max(magnitude_bits(x), axis=2)
    biased = bits >> 23
    exponent = biased - MAX_EXPONENT + ((bits & 0x7FFFFF) > MAX_MANTISSA).to(tl.int32)
    exponent = tl.where(exponent < 1, 1, exponent)
    return tl.where(biased == 255, 255, exponent)


@triton.jit
def exponent_scale(exponent):
    """2^(exponent - 127) as FP32; NaN for 255."""
    bits = tl.where(exponent == 255, 0x7FC00000, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exponent_inverse(exponent):
    """2^(127 - exponent) as FP32, exact; NaN for 255. Exponents that occur are below 254."""
    bits = tl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_fp8(y, MAX: tl.constexpr, dtype: tl.constexpr):
    """Codes of scaled values: saturate, round to nearest even. NaN stays NaN."""
    y = tl.where(y > MAX, MAX, y)
    y = tl.where(y < -MAX, -MAX, y)
    return y.to(dtype)


@triton.jit
def row_offsets(i_m, BLOCK_M: tl.constexpr):
    """Rows of the i_m-th row of tiles, int64: a matrix can have more than 2^31 elements."""
    return i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def load_tile(x_ptr, o_m, o_n, m_mn, stride):
    """FP32 tile [BLOCK_M, BLOCK_N] of a row-major matrix; zero outside the mask."""
    return tl.load(x_ptr + o_m[:, None] * stride + o_n[None, :], mask=m_mn, other=0.0).to(
        tl.float32
    )


@triton.jit
def load_grouped(
    q_ptr, e_ptr, o_m, i_n, M, N, stride, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """FP32 tile [BLOCK_M, BLOCK_N] of a group-scaled matrix, columns from i_n; zero outside."""
    GROUPS: tl.constexpr = BLOCK_N // GROUP
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_g = i_n // GROUP + tl.arange(0, GROUPS)
    m_m = o_m[:, None] < M
    q = load_tile(q_ptr, o_m, o_n, m_m & (o_n[None, :] < N), stride)
    # Exponents are read once per group and spread by the reshape, not read once per element.
    e = tl.load(
        e_ptr + o_m[:, None] * (stride // GROUP) + o_g[None, :],
        mask=m_m & (o_g[None, :] < N // GROUP),
        other=127,
    )
    groups = tl.reshape(q, (BLOCK_M, GROUPS, GROUP)) * exponent_scale(e.to(tl.int32))[:, :, None]
    return tl.reshape(groups, (BLOCK_M, BLOCK_N))


@triton.jit
def store_grouped(
    x, q_ptr, e_ptr, o_m, i_n, M, N, stride, MAX: tl.constexpr, MAX_EXPONENT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize tile x [BLOCK_M, BLOCK_N], columns from i_n, per group; store codes, exponents."""
    GROUPS: tl.constexpr = BLOCK_N // GROUP
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_g = i_n // GROUP + tl.arange(0, GROUPS)
    m_m = o_m[:, None] < M
    groups = tl.reshape(x, (BLOCK_M, GROUPS, GROUP))
    e = group_exponents(groups, MAX_EXPONENT)
    q = to_fp8(groups * exponent_inverse(e)[:, :, None], MAX, q_ptr.dtype.element_ty)
    q = tl.reshape(q, (BLOCK_M, BLOCK_N))
    tl.store(q_ptr + o_m[:, None] * stride + o_n[None, :], q, mask=m_m & (o_n[None, :] < N))
    tl.store(
        e_ptr + o_m[:, None] * (stride // GROUP) + o_g[None, :],
        e.to(tl.uint8),
        mask=m_m & (o_g[None, :] < N // GROUP),
    )


@triton.jit
def store_codes(
    x, inverse, q_ptr, qt_ptr, o_m, o_n, m_n, M, M_END, stride, stride_t, MAX: tl.constexpr,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Per-tensor codes of tile x: row-major and/or transposed, there with zeros from M to M_END.

    ``m_n`` masks the columns; ``stride`` is that of a row of q, ``stride_t`` that of a row of qt.
    """
    if ROWS:
        q = to_fp8(x * inverse, MAX, q_ptr.dtype.element_ty)
        mask = (o_m[:, None] < M) & m_n[None, :]
        tl.store(q_ptr + o_m[:, None] * stride + o_n[None, :], q, mask=mask)
    if TRANSPOSED:
        # The padding is zero whatever x holds there (a norm's bias) and whatever the scale is: a
        # NaN in it would be spread by the GEMM to every output.
        y = tl.where(o_m[None, :] < M, tl.trans(x) * inverse, 0.0)
        qt = to_fp8(y, MAX, qt_ptr.dtype.element_ty)
        mask = m_n[:, None] & (o_m[None, :] < M_END)
        tl.store(qt_ptr + o_n[:, None].to(tl.int64) * stride_t + o_m[None, :], qt, mask=mask)
