"""The device code of AdamW with FP8 moments: many tensors in one launch.

    m += (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2
    p -= lr wd p + lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

``adamw_scalars_kernel`` counts the steps of all tensors and computes what they need per tensor;
``adamw_kernel`` updates. Both find tensors through a table of addresses, one row of COLUMNS int64
per tensor (``adamw_table.py`` makes it). A program works on one chunk of a tensor, tile by tile; a
tile holds 16 bytes of parameters per thread, so that FP32 groups of 128 are one warp each. Nothing
but the table is known on the CPU: steps, rates, factors and whether to skip are read here.

Bytes per parameter, moments read and written: 4.19 + 12 with FP32 parameters and gradients, 4.19 +
6 with BF16. Numerics: ``reference_adamw.py``, ``masters.py``; moments: ``codecs.py``.
"""

import triton
import triton.language as tl

from coat_kernels.codecs import GROUP as _GROUP
from coat_kernels.codecs import K_MAX as _K_MAX
from coat_kernels.codecs import SMALLEST_RATIO as _SMALLEST_RATIO
from coat_kernels.formats import E4M3
from coat_kernels.masters import CODE_SALT as _CODE_SALT
from coat_kernels.masters import QUIET_NAN as _QUIET_NAN
from coat_kernels.special import exp2_fast, log2_fast, reciprocal_fast, sqrt_fast
from coat_kernels.tile import magnitude_bits

GROUP = tl.constexpr(_GROUP)
K_MAX = tl.constexpr(_K_MAX)
SMALLEST_RATIO = tl.constexpr(_SMALLEST_RATIO)
QUIET_NAN = tl.constexpr(_QUIET_NAN)
CODE_SALT = tl.constexpr(_CODE_SALT)
E4M3_MAX, E4M3_MIN = tl.constexpr(E4M3.max), tl.constexpr(E4M3.min_subnormal)

COLUMNS = 16
"""Of the table: addresses of p, g, m, m_amax, m_k, v, v_amax, v_k, remainder, step; then the number
of elements, the parameter group, the index of the tensor; the rest is unused."""

SCALARS = 8
"""Per tensor: lr wd, lr / (1 - beta1^t), 1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2^t), eps,
and the bits of the key of its rounding."""

P, G, M, M_AMAX, M_K, V, V_AMAX, V_K, REST, STEP, NUMEL, RATES, INDEX = map(tl.constexpr, range(13))
_COLUMNS, _SCALARS = tl.constexpr(COLUMNS), tl.constexpr(SCALARS)


@triton.jit
def _mix(x):
    """lowbias32 of uint32; see ``masters.py``."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _random_words(first, i, key, BLOCK_G: tl.constexpr):
    """32 random bits for every element of tile i of the chunk that starts at ``first``."""
    return _mix((first.to(tl.uint32) + _elements(i, BLOCK_G).to(tl.uint32)) ^ key)


@triton.jit(do_not_specialize=("tensors", "seed"))
def adamw_scalars_kernel(
    table_ptr,  # (tensors, COLUMNS) int64
    rates_ptr,  # (parameter groups, 5) fp64: lr, beta1, beta2, eps, weight decay
    skip_ptr,  # () fp32, not zero: no step is made; or None
    scalars_ptr,  # (tensors, SCALARS) fp32
    tensors, seed, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count a step of all tensors and compute the scalars of their updates."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tensors
    row = table_ptr + i * _COLUMNS
    step_ptr = tl.load(row + STEP, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    rates = rates_ptr + tl.load(row + RATES, mask=mask, other=0) * 5
    step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
    if skip_ptr is not None:
        counted = tl.where(tl.load(skip_ptr) == 0.0, step, step - 1.0)
        tl.store(step_ptr, counted, mask=mask)
    else:
        tl.store(step_ptr, step, mask=mask)
    # In double precision: FP32's 1 - 0.999 is off by 1e-5.
    t = step.to(tl.float64)
    lr = tl.load(rates, mask=mask, other=0.0)
    beta1 = tl.load(rates + 1, mask=mask, other=0.0)
    beta2 = tl.load(rates + 2, mask=mask, other=0.0)
    correction1 = 1.0 - tl.exp2(t * tl.log2(beta1))
    correction2 = 1.0 - tl.exp2(t * tl.log2(beta2))
    decay = lr * tl.load(rates + 4, mask=mask, other=0.0)
    index = tl.load(row + INDEX, mask=mask, other=0).to(tl.uint32)
    key = _mix(seed.to(tl.uint32) ^ _mix(step.to(tl.uint32) + _mix(index + 0x9E3779B9)))
    out = scalars_ptr + i * _SCALARS
    tl.store(out, decay.to(tl.float32), mask=mask)
    tl.store(out + 1, (lr / correction1).to(tl.float32), mask=mask)
    tl.store(out + 2, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(out + 3, beta2.to(tl.float32), mask=mask)
    tl.store(out + 4, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(out + 5, (1.0 / tl.sqrt(correction2)).to(tl.float32), mask=mask)
    tl.store(out + 6, tl.load(rates + 3, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(out + 7, key.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def _decode(q, amax, k, EXPAND: tl.constexpr, SIGNED: tl.constexpr, MAX: tl.constexpr):
    """Moment values [groups, 128] of codes q, FP32. log2 of zero is -inf and 2^-inf zero."""
    q = q.to(tl.float32)
    ratio = q * (1.0 / MAX)
    if EXPAND:
        inverse_k = reciprocal_fast(k.to(tl.float32))[:, None]
        power = exp2_fast(log2_fast(tl.abs(ratio)) * inverse_k)
        # 0 * amax keeps a NaN or an infinity of the group visible in its zeros.
        value = power * amax[:, None]
        return _with_sign(value, q) if SIGNED else value
    else:
        return ratio * amax[:, None]


@triton.jit
def _with_sign(value, x):
    """A non-negative value with the sign of x."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _round_by_chance(code, k, random):
    """As the reference's: E4M3 neighbours of codes [groups, 128] by k [groups] and 32 bits each.

    Written so that a NaN stays, which ``tl.minimum`` need not keep.
    """
    exponent = code.to(tl.int32, bitcast=True) >> 23
    exponent = tl.where(exponent < 121, 121, exponent)  # subnormals have the step of 2^-6
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    steps = code * ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    low = tl.floor(steps)
    part = steps - low
    bend = 0.5 * (reciprocal_fast(k) - 1.0)
    curvature = bend[:, None] * reciprocal_fast(tl.where(steps > 1.0, steps, 1.0))
    chance = part - curvature * (part * (1.0 - part))
    uniform = (random >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
    rounded = tl.where(uniform < chance, low + 1.0, low) * step
    rounded = tl.where((code > 0.0) & (rounded == 0.0), E4M3_MIN, rounded)
    return tl.where(rounded > E4M3_MAX, E4M3_MAX, rounded)


@triton.jit
def _encode(
    x, random, EXPAND: tl.constexpr, SIGNED: tl.constexpr, FLOOR_K: tl.constexpr,
    MAX: tl.constexpr, LOG2_MAX: tl.constexpr, LOG2_RANGE: tl.constexpr,
):  # fmt: skip
    """Codes of x [groups, 128] in FP32, and amax and k [groups]; outside the tensor x is zero.

    With 32 random bits per element the codes are E4M3 already, rounded by chance.
    """
    bits = magnitude_bits(x)
    top_bits = tl.max(bits, axis=1)
    amax = top_bits.to(tl.float32, bitcast=True)
    exponent = top_bits >> 23
    exponent = tl.where(exponent < 1, 1, tl.where(exponent > 253, 253, exponent))
    unit_bits = tl.where(top_bits >= 0x7F800000, 0x7FC00000, (254 - exponent) << 23)
    unit = unit_bits.to(tl.float32, bitcast=True)
    top = amax * unit
    if EXPAND:
        # A zero minus one is the largest unsigned number: it does not count.
        least_bits = tl.min((bits - 1).to(tl.uint32, bitcast=True), axis=1) + 1
        least = least_bits.to(tl.float32, bitcast=True) * unit
        least = tl.where(least < SMALLEST_RATIO, SMALLEST_RATIO, least)
        log_top = tl.where(amax == 0.0, 0.0, log2_fast(top))
        spread = log_top - log2_fast(least)
        LIMIT: tl.constexpr = LOG2_RANGE / K_MAX
        k = LOG2_RANGE * reciprocal_fast(tl.where(spread > LIMIT, spread, LIMIT))
        if FLOOR_K:
            k = tl.floor(k * 16.0) * (1.0 / 16.0)
        stored_k = k.to(tl.float16)
        k = stored_k.to(tl.float32)
        bias = LOG2_MAX - k * log_top
        scaled = x * unit[:, None]
        code = exp2_fast(log2_fast(tl.abs(scaled)) * k[:, None] + bias[:, None])
        if random is not None:
            code = tl.where((scaled == top[:, None]) & (code > 0.0), MAX, code)
            code = _round_by_chance(code, k, random)
        return _with_sign(code, x) if SIGNED else code, amax, stored_k
    else:
        inverse = MAX * reciprocal_fast(tl.where(amax == 0.0, 1.0, top))
        return (x * unit[:, None]) * inverse[:, None], amax, amax


@triton.jit
def _at(row, column, i, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Element ``i`` of a tensor of the table."""
    pointer = tl.load(row + column).to(tl.pointer_type(dtype))  # pyright: ignore[reportArgumentType]
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + i


@triton.jit
def _load_moment(
    q_ptr, amax_ptr, k_ptr, i, left, EXPAND: tl.constexpr, SIGNED: tl.constexpr,
    MAX: tl.constexpr, WHOLE: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Values of tile i of a moment, FP32; zeros outside the tensor."""
    o_g = i * BLOCK_G + tl.arange(0, BLOCK_G)
    if WHOLE:
        m_g, other = None, None
    else:
        m_g, other = o_g * GROUP < left, 0.0
    amax = tl.load(amax_ptr + o_g, mask=m_g, other=other)
    k = tl.load(k_ptr + o_g, mask=m_g, other=other) if EXPAND else amax
    return _decode(_load(q_ptr, i, left, WHOLE, BLOCK_G), amax, k, EXPAND, SIGNED, MAX)


@triton.jit
def _load(ptr, i, left, WHOLE: tl.constexpr, BLOCK_G: tl.constexpr):
    """Tile i of a tensor [groups, 128]; zeros outside the tensor."""
    o = _elements(i, BLOCK_G)
    if WHOLE:
        return tl.load(ptr + o)
    else:
        return tl.load(ptr + o, mask=o < left, other=0.0)


@triton.jit
def _elements(i, BLOCK_G: tl.constexpr):
    """Places of the elements of tile i, counted from the chunk's first."""
    o_g = i * BLOCK_G + tl.arange(0, BLOCK_G)
    return o_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _store_moment(
    x, random, q_ptr, amax_ptr, k_ptr, i, left, EXPAND: tl.constexpr, SIGNED: tl.constexpr,
    FLOOR_K: tl.constexpr, MAX: tl.constexpr, LOG2_MAX: tl.constexpr, LOG2_RANGE: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Encode tile i of a moment and store it; to nearest if ``random`` is None."""
    code, amax, k = _encode(  # pyright: ignore[reportGeneralTypeIssues]
        x, random, EXPAND, SIGNED, FLOOR_K, MAX, LOG2_MAX, LOG2_RANGE
    )
    _store(q_ptr, code.to(q_ptr.dtype.element_ty), i, left, WHOLE, BLOCK_G)
    o_g = i * BLOCK_G + tl.arange(0, BLOCK_G)
    m_g = None if WHOLE else o_g * GROUP < left
    tl.store(amax_ptr + o_g, amax, mask=m_g)
    if EXPAND:
        tl.store(k_ptr + o_g, k, mask=m_g)


@triton.jit
def _store(ptr, x, i, left, WHOLE: tl.constexpr, BLOCK_G: tl.constexpr):
    """Tile i of a tensor [groups, 128]."""
    o = _elements(i, BLOCK_G)
    tl.store(ptr + o, x, mask=None if WHOLE else o < left)


@triton.jit
def adamw_kernel(
    table_ptr,  # (tensors, COLUMNS) int64
    work_ptr,  # (programs, 2) int32: tensor, chunk
    scalars_ptr,  # (tensors, SCALARS) fp32
    grad_scale_ptr,  # () fp32, or None
    skip_ptr,  # () fp32, or None
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    EXPAND: tl.constexpr, FLOOR_K: tl.constexpr, M_MAX: tl.constexpr, M_LOG2_MAX: tl.constexpr,
    M_LOG2_RANGE: tl.constexpr, V_MAX: tl.constexpr, V_LOG2_MAX: tl.constexpr,
    V_LOG2_RANGE: tl.constexpr, V_CHANCE: tl.constexpr, REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr,  # chunks without an end of their tensor, whose addresses are aligned
    BLOCK_G: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Update one chunk of a tensor."""
    tiles = TILES
    if skip_ptr is not None:
        tiles = tl.where(tl.load(skip_ptr) == 0.0, TILES, 0)
    work = work_ptr + tl.program_id(0).to(tl.int64) * 2
    tensor = tl.load(work).to(tl.int64)
    first_g = tl.load(work + 1).to(tl.int64) * (BLOCK_G * TILES)
    row = table_ptr + tensor * _COLUMNS
    first = first_g * GROUP
    left = tl.load(row + NUMEL) - first
    p_ptr, g_ptr = _at(row, P, first, P_TYPE, WHOLE), _at(row, G, first, G_TYPE, WHOLE)
    m_ptr, v_ptr = _at(row, M, first, M_TYPE, WHOLE), _at(row, V, first, V_TYPE, WHOLE)
    m_amax_ptr = _at(row, M_AMAX, first_g, tl.float32, False)
    v_amax_ptr = _at(row, V_AMAX, first_g, tl.float32, False)
    m_k_ptr = _at(row, M_K, first_g, tl.float16, False)
    v_k_ptr = _at(row, V_K, first_g, tl.float16, False)
    rest_ptr = _at(row, REST, first, tl.int16, WHOLE)
    scalars = scalars_ptr + tensor * _SCALARS
    decay, step_size = tl.load(scalars), tl.load(scalars + 1)
    rate1, beta2, rate2 = tl.load(scalars + 2), tl.load(scalars + 3), tl.load(scalars + 4)
    inverse_root, eps = tl.load(scalars + 5), tl.load(scalars + 6)
    key = tl.load(scalars + 7).to(tl.uint32, bitcast=True)
    key ^= (first >> 32).to(tl.uint32) * 0x9E3779B9
    grad_scale = 1.0
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr)

    for i in range(tiles):
        p = _load(p_ptr, i, left, WHOLE, BLOCK_G)
        g32 = _load(g_ptr, i, left, WHOLE, BLOCK_G).to(tl.float32) * grad_scale
        m32 = _load_moment(m_ptr, m_amax_ptr, m_k_ptr, i, left, EXPAND, True, M_MAX, WHOLE, BLOCK_G)
        v32 = _load_moment(
            v_ptr, v_amax_ptr, v_k_ptr, i, left, EXPAND, False, V_MAX, WHOLE, BLOCK_G
        )
        if REMAINDER:
            rest = _load(rest_ptr, i, left, WHOLE, BLOCK_G).to(tl.int32)
            high = p.to(tl.int16, bitcast=True).to(tl.int32) << 16
            p32 = (high + rest).to(tl.float32, bitcast=True)
        else:
            p32 = p.to(tl.float32)
        m32 += rate1 * (g32 - m32)
        v32 = v32 * beta2 + rate2 * g32 * g32
        p32 -= decay * p32
        p32 -= step_size * m32 * reciprocal_fast(sqrt_fast(v32) * inverse_root + eps)
        if REMAINDER or STOCHASTIC:
            bits = tl.where(p32 == p32, p32.to(tl.int32, bitcast=True), QUIET_NAN)
            if STOCHASTIC:
                bits += (_random_words(first, i, key, BLOCK_G) & 0xFFFF).to(tl.int32)
            else:
                bits += 0x8000
                rest = ((bits & 0xFFFF) - 0x8000).to(tl.int16)
                _store(rest_ptr, rest, i, left, WHOLE, BLOCK_G)
            new = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            new = p32.to(P_TYPE)
        _store(p_ptr, new, i, left, WHOLE, BLOCK_G)
        _store_moment(
            m32, None, m_ptr, m_amax_ptr, m_k_ptr, i, left, EXPAND, True, FLOOR_K, M_MAX,
            M_LOG2_MAX, M_LOG2_RANGE, WHOLE, BLOCK_G,
        )  # fmt: skip
        _store_moment(
            v32, _random_words(first, i, key ^ CODE_SALT, BLOCK_G) if V_CHANCE else None, v_ptr,
            v_amax_ptr, v_k_ptr, i, left, EXPAND, False, FLOOR_K, V_MAX, V_LOG2_MAX, V_LOG2_RANGE,
            WHOLE, BLOCK_G,
        )  # fmt: skip
