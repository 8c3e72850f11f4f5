"""Shared ``@triton.jit`` functions of all kernels: scales, casts and FP8 tiles, each written once.

All arithmetic is FP32. Casts to FP8 are the hardware's: they round to nearest even and saturate.
GPUs of compute capability 8.9 convert only from FP16, to which Triton rounds toward zero before: of
the values between two neighbors, 1 in 256 (E4M3) or 512 (E5M2) becomes the smaller one, not the
nearest.

Maxima of magnitudes compare the bits of ``|x|`` as integers: the integer order of non-negative
floats is their numeric order, and a NaN is larger than any number, so it is preserved (a float
maximum would drop it).

``log2_fast``, ``exp2_fast``, ``sqrt_fast`` and ``reciprocal_fast`` are one instruction of the GPU's
special function unit each, where libraries need many: Triton's ``tl.log2`` is a polynomial of
CUDA's libdevice, ``tl.exp2`` handles subnormals, ``/`` and ``tl.sqrt`` rescale. The fast functions
flush subnormal arguments and results to zero (PTX ISA, ``lg2.approx.ftz.f32`` and similar; relative
errors of 2^-22, absolute errors of log2 near 1). An SM of Hopper executes 16 of them per cycle, and
128 additions (CUDA C++ Programming Guide, arithmetic instructions). Triton's interpreter has no
assembler and uses NumPy's functions, with subnormal arguments flushed.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""Whether kernels are interpreted in this process: read once, as in ``triton.jit``."""

SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _flush(x):
    """Replace subnormals with zeros; a NaN stays."""
    return tl.where(tl.abs(x) < SMALLEST_NORMAL, 0.0, x)


@triton.jit
def _special(x, ASM: tl.constexpr):
    """Execute one instruction of the special function unit."""
    return tl.inline_asm_elementwise(
        ASM,  # pyright: ignore[reportArgumentType]
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def mix_bits(x):
    """Hash uint32 with lowbias32; see ``master_weights.py``."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def log2_fast(x):
    """Compute log2(x); -inf for zero."""
    if INTERPRETED:
        return tl.log2(_flush(x))
    else:
        return _special(x, "lg2.approx.ftz.f32 $0, $1;")


@triton.jit
def exp2_fast(x):
    """Compute 2^x."""
    if INTERPRETED:
        return _flush(tl.exp2(x))
    else:
        return _special(x, "ex2.approx.ftz.f32 $0, $1;")


@triton.jit
def sqrt_fast(x):
    """Compute the square root of x."""
    if INTERPRETED:
        return tl.sqrt(_flush(x))
    else:
        return _special(x, "sqrt.approx.ftz.f32 $0, $1;")


@triton.jit
def reciprocal_fast(x):
    """Compute 1 / x; an infinity for zero."""
    if INTERPRETED:
        return _flush(1.0 / _flush(x))
    else:
        return _special(x, "rcp.approx.ftz.f32 $0, $1;")


MAX_MANTISSA = tl.constexpr(0x600000)
"""Mantissa bits of 1.75, as in the largest E4M3 (448 = 1.75 * 2^8) and E5M2 (1.75 * 2^15) value."""


@triton.jit
def magnitude_bits(x):
    """Return the bits of ``|x|`` (FP32) as an ordered int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_amax_bits(x):
    """Return the largest magnitude of a [A, B] block as int32 bits."""
    return tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)


@triton.jit
def publish_scale(bits, scale_ptr, INVERSE_MAX: tl.constexpr):
    """Raise the scale that all programs of a launch share to the scale of the magnitude ``bits``.

    The scale starts as MIN_SCALE (``scale_pool.new_scale``). A scale increases with its magnitude,
    rounding included, and no bits are negative, so the largest bits belong to the scale of the
    largest magnitude, or to NaN. Nothing waits for the atomic, which returns no value.
    """
    scale = bits.to(tl.float32, bitcast=True) * INVERSE_MAX
    words = scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(words, magnitude_bits(scale), sem="relaxed")


@triton.jit
def get_exponent(bits, MAX_EXPONENT: tl.constexpr):
    """Return the E8M0 exponent (int32) for the bits of a largest magnitude.

    The smallest e >= 1 with amax <= 1.75 * 2^(MAX_EXPONENT + e - 127); 255 for NaN and Inf.
    """
    biased = bits >> 23
    exponent = biased - MAX_EXPONENT + ((bits & 0x7FFFFF) > MAX_MANTISSA).to(tl.int32)
    exponent = tl.where(exponent < 1, 1, exponent)
    return tl.where(biased == 255, 255, exponent)


@triton.jit
def exponent_scale(exponent):
    """Compute 2^(exponent - 127) in FP32; NaN for 255."""
    bits = tl.where(exponent == 255, 0x7FC00000, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exponent_inverse(exponent):
    """Compute 2^(127 - exponent) in FP32, exact; NaN for 255. Other exponents are below 254."""
    bits = tl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def sigmoid_base2(x):
    """Compute 1 / (1 + 2^x) in FP32, with two instructions of the special function unit.

    The relative error is 2^-21 near x = 0 and 2^-20 at -20, where the rounding of the exponent
    shows. Results below 2^-126 are 0.
    """
    return reciprocal_fast(1.0 + exp2_fast(x))


@triton.jit
def row_offsets(i_m, BLOCK_M: tl.constexpr):
    """Return the rows of the i_m-th row of tiles, int64: a matrix can exceed 2^31 elements."""
    return i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def word_offsets(i_m, BLOCK_M: tl.constexpr):
    """Return the same rows in the order of :func:`store_quantized`: 0, 4, 8, ..., then 1, 5, ...

    A thread that holds every fourth row of a tile then holds four consecutive tokens, whose FP8
    values are one word of the transposed result.
    """
    i = tl.arange(0, BLOCK_M)
    return i_m.to(tl.int64) * BLOCK_M + i % (BLOCK_M // 4) * 4 + i // (BLOCK_M // 4)


@triton.jit
def load_tile(x_ptr, o_m, o_n, m_mn, stride):
    """Load an FP32 tile [BLOCK_M, BLOCK_N] of a row-major matrix; zero outside the mask."""
    return tl.load(x_ptr + o_m[:, None] * stride + o_n[None, :], mask=m_mn, other=0.0).to(
        tl.float32
    )


@triton.jit
def load_grouped(
    q_ptr, e_ptr, o_m, i_n, M, N, stride, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile [BLOCK_M, BLOCK_N] of a group-scaled matrix, columns from i_n, to FP32."""
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_m = o_m[:, None] < M
    q = load_tile(q_ptr, o_m, o_n, m_m & (o_n[None, :] < N), stride)
    # Exponents are read once per group and broadcast by the reshape, not read per element.
    o_g = i_n // GROUP + tl.arange(0, BLOCK_N // GROUP)
    e = tl.load(
        e_ptr + o_m[:, None] * (stride // GROUP) + o_g[None, :],
        mask=m_m & (o_g[None, :] < N // GROUP),
        other=127,
    )
    return spread_exponents(q, e, GROUP, BLOCK_M, BLOCK_N)


@triton.jit
def spread_exponents(q, e, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Dequantize q [BLOCK_M, BLOCK_N] (FP32) with e, one exponent per group."""
    groups = tl.reshape(q, (BLOCK_M, BLOCK_N // GROUP, GROUP))
    groups *= exponent_scale(e.to(tl.int32))[:, :, None]
    return tl.reshape(groups, (BLOCK_M, BLOCK_N))


@triton.jit
def store_grouped(
    x, q_ptr, e_ptr, o_m, i_n, M, N, stride, MAX_EXPONENT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize tile x [BLOCK_M, BLOCK_N], columns from i_n, per group; store data and exponents.

    Returns the exponents (int32); 255 where x is not finite.
    """
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_g = i_n // GROUP + tl.arange(0, BLOCK_N // GROUP)
    m_m = o_m[:, None] < M
    groups = tl.reshape(x, (BLOCK_M, BLOCK_N // GROUP, GROUP))
    e = get_exponent(tl.max(magnitude_bits(groups), axis=2), MAX_EXPONENT)
    q = tl.reshape(groups * exponent_inverse(e)[:, :, None], (BLOCK_M, BLOCK_N))
    q = q.to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + o_m[:, None] * stride + o_n[None, :], q, mask=m_m & (o_n[None, :] < N))
    tl.store(
        e_ptr + o_m[:, None] * (stride // GROUP) + o_g[None, :],
        e.to(tl.uint8),
        mask=m_m & (o_g[None, :] < N // GROUP),
    )
    return e


@triton.jit
def inverse_scale(scale_ptr):
    """Compute 1 / scale; 0 for NaN: the FP8 data is then 0 and dequantizes to NaN; padding is 0."""
    inverse = tl.math.div_rn(1.0, tl.load(scale_ptr))
    return tl.where(inverse == inverse, inverse, 0.0)


@triton.jit
def store_quantized(
    y, q_ptr, qt_ptr, o_m, i_m, o_n, m_n, M, M_END, stride, stride_t, ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Cast and store the i_m-th tile y [BLOCK_M, BLOCK_N], whose rows ``o_m`` are ``word_offsets``.

    Stores row-major at ``q_ptr`` and/or transposed at ``qt_ptr``, the latter for tokens up to
    M_END; y must be zero from M on. ``m_n`` masks the columns ``o_n``; strides are row strides.
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    if ROWS:
        mask = (o_m[:, None] < M) & m_n[None, :]
        tl.store(q_ptr + o_m[:, None] * stride + o_n[None, :], y.to(dtype), mask=mask)
    if TRANSPOSED:
        # Split and join make the four tokens of a word the last dimension in a thread's registers:
        # the cast packs them, and words, not bytes, go through shared memory.
        WORDS: tl.constexpr = BLOCK_M // 4
        words = tl.permute(tl.reshape(y, (2, 2, WORDS, BLOCK_N)), (3, 2, 0, 1))
        even, odd = tl.split(words)
        y0, y2 = tl.split(even)
        y1, y3 = tl.split(odd)
        words = tl.join(tl.join(y0, y2), tl.join(y1, y3)).to(dtype)
        o_t = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = m_n[:, None] & (o_t[None, :] < M_END)
        o = o_n[:, None].to(tl.int64) * stride_t + o_t[None, :]
        tl.store(qt_ptr + o, tl.reshape(words, (BLOCK_N, BLOCK_M)), mask=mask)


@triton.jit
def _half_mask(m_m, D, HALF: tl.constexpr):
    """Return the mask of the D / 2 channels of a half."""
    return m_m[:, None] & (tl.arange(0, HALF)[None, :] < D // 2)


@triton.jit
def load_halves(x_ptr, o_m, stride, m_m, D, HALF: tl.constexpr):
    """Load both halves [BLOCK_M, HALF] of a head's D channels in rows o_m, FP32, else zero."""
    o = o_m[:, None] * stride + tl.arange(0, HALF)[None, :]
    mask = _half_mask(m_m, D, HALF)
    x1 = tl.load(x_ptr + o, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + (o + D // 2), mask=mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def store_halves(x_ptr, o_m, stride, m_m, D, y1, y2, HALF: tl.constexpr):
    """Store both halves like :func:`load_halves`, rounded to the matrix's dtype."""
    o = o_m[:, None] * stride + tl.arange(0, HALF)[None, :]
    mask = _half_mask(m_m, D, HALF)
    tl.store(x_ptr + o, y1.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(x_ptr + (o + D // 2), y2.to(x_ptr.dtype.element_ty), mask=mask)
