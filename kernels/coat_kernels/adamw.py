"""AdamW whose moments are FP8 with Dynamic Range Expansion (arXiv 2410.19313, section 3).

    m += (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2
    p -= lr wd p + lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The update is torch.optim.AdamW's (decoupled weight decay, bias correction, eps outside the root).
Storage of moments: ``moment_formats.py``; master weights of BF16 parameters:
``master_weights.py``. Bytes read and written per parameter: moments 4.19, and 12 with FP32
parameters and gradients or 6 with BF16. Reference: ``reference.adamw_step``.

A step is a foreach (multi-tensor) step. ``adamw_scalars_kernel`` counts the steps of all tensors
and computes scalars per tensor; ``adamw_kernel`` updates. Both read addresses of tensors from a
table, one row of COLUMNS int64 per tensor. A program updates a chunk of CHUNK elements of a tensor,
tile by tile; a tile holds 16 bytes of parameters per thread, so an FP32 group of 128 is one warp.

The table is copied to the GPU when an address, a size or a rate changes. Nothing is read back, so a
step can be captured in a CUDA graph once its table is on the GPU. Full chunks with 16-byte aligned
addresses are one launch; ends of tensors and other addresses, which need a mask, are another; both
per combination of dtypes.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import master_weights, moment_formats
from coat_kernels.device import (
    INTERPRETED,
    exp2_fast,
    log2_fast,
    magnitude_bits,
    mix_bits,
    reciprocal_fast,
    sqrt_fast,
)
from coat_kernels.formats import E4M3, check_dtype
from coat_kernels.launch import cdiv, launch
from coat_kernels.moment_formats import Moment, count_groups
from coat_kernels.registry import register

GROUP = tl.constexpr(moment_formats.GROUP)
K_MAX = tl.constexpr(moment_formats.K_MAX)
SMALLEST_RATIO = tl.constexpr(moment_formats.SMALLEST_RATIO)
LIMIT_BITS = tl.constexpr(moment_formats.LIMIT_BITS)
SMALLEST_V = tl.constexpr(moment_formats.SMALLEST_V)
OUTLIER = tl.constexpr(moment_formats.OUTLIER)
QUIET_NAN = tl.constexpr(master_weights.QUIET_NAN)
MOMENT_SALT = tl.constexpr(master_weights.MOMENT_SALT)
E4M3_MAX, E4M3_MIN = tl.constexpr(E4M3.max), tl.constexpr(E4M3.min_subnormal)
LOG2_MAX = tl.constexpr(math.log2(E4M3.max))
LOG2_RANGE = tl.constexpr(moment_formats.LOG2_RANGE)

COLUMNS = 16
"""Columns of the table: addresses of p, g, m, m_amax, m_k, v, v_amax, v_k, low_bits, step; then the
number of elements, the parameter group, the index of the tensor; other columns are unused."""

SCALARS = 8
"""Scalars per tensor: lr wd, lr / (1 - beta1^t), 1 - beta1, beta2, 1 - beta2,
1 / sqrt(1 - beta2^t), eps, and the bits of the key of stochastic rounding."""

P, G, M, M_AMAX, M_K, V, V_AMAX, V_K, LOW, STEP, NUMEL, RATES, INDEX = map(tl.constexpr, range(13))
_COLUMNS, _SCALARS = tl.constexpr(COLUMNS), tl.constexpr(SCALARS)


@triton.jit
def _random_words(first, i, key, BLOCK_G: tl.constexpr):
    """Return 32 random bits per element of tile i of the chunk that starts at ``first``."""
    return mix_bits((first.to(tl.uint32) + _elements(i, BLOCK_G).to(tl.uint32)) ^ key)


@triton.jit
def _is_finite(x):
    """Return whether x is a number: the difference of infinities and of NaNs is NaN."""
    return x - x == 0.0


@triton.jit(do_not_specialize=("tensors", "seed"))
def adamw_scalars_kernel(
    table_ptr,  # (tensors, COLUMNS) int64
    rates_ptr,  # (parameter groups, 5) fp64: lr, beta1, beta2, eps, weight decay
    scalars_ptr,  # (tensors, SCALARS) fp32
    grad_scale_ptr,  # () fp32, or None
    tensors, seed, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count a step of all tensors and compute the scalars of their updates."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad_scale = 1.0 if grad_scale_ptr is None else tl.load(grad_scale_ptr)
    if not _is_finite(grad_scale):
        return
    mask = i < tensors
    row = table_ptr + i * _COLUMNS
    step_ptr = tl.load(row + STEP, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    rates = rates_ptr + tl.load(row + RATES, mask=mask, other=0) * 5
    step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
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
    key = mix_bits(seed.to(tl.uint32) ^ mix_bits(step.to(tl.uint32) + mix_bits(index + 0x9E3779B9)))
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
def _copy_sign(value, x):
    """Copy the sign of x to a non-negative value."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _round_stochastically(q32, k, random):
    """Round q32 [groups, 128] to E4M3 neighbors, given k [groups] and 32 random bits per element.

    Like the reference. A NaN stays, which ``tl.minimum`` does not guarantee.
    """
    exponent = q32.to(tl.int32, bitcast=True) >> 23
    exponent = tl.where(exponent < 121, 121, exponent)  # subnormals have the spacing of 2^-6
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    steps = q32 * ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    low = tl.floor(steps)
    part = steps - low
    bend = 0.5 * (reciprocal_fast(k) - 1.0)
    curvature = bend[:, None] * reciprocal_fast(tl.where(steps > 1.0, steps, 1.0))
    probability = part - curvature * (part * (1.0 - part))
    uniform = (random >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
    rounded = tl.where(uniform < probability, low + 1.0, low) * step
    rounded = tl.where((q32 > 0.0) & (rounded == 0.0), E4M3_MIN, rounded)
    return tl.where(rounded > E4M3_MAX, E4M3_MAX, rounded)


@triton.jit
def _pointer(row, column, i, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to element ``i`` of a tensor of the table."""
    pointer = tl.load(row + column).to(tl.pointer_type(dtype))  # pyright: ignore[reportArgumentType]
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + i


@triton.jit
def _load_moment(
    q_ptr, amax_ptr, k_ptr, i, left, SIGNED: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Decode tile i of a moment to FP32 [groups, 128]; zeros outside the tensor."""
    o_g = i * BLOCK_G + tl.arange(0, BLOCK_G)
    if WHOLE:
        m_g, other = None, None
    else:
        m_g, other = o_g * GROUP < left, 0.0
    amax = tl.load(amax_ptr + o_g, mask=m_g, other=other)
    k = tl.load(k_ptr + o_g, mask=m_g, other=other)
    q = _load(q_ptr, i, left, WHOLE, BLOCK_G).to(tl.float32)
    ratio = q * (1.0 / E4M3_MAX)
    inverse_k = reciprocal_fast(k.to(tl.float32))[:, None]
    power = exp2_fast(log2_fast(tl.abs(ratio)) * inverse_k)  # 2^-inf for zero
    # 0 * amax propagates a NaN or an infinity of the group to its zeros.
    value = power * amax[:, None]
    return _copy_sign(value, q) if SIGNED else value


@triton.jit
def _limit_gradient(g, v_amax_ptr, i, left, WHOLE: tl.constexpr, BLOCK_G: tl.constexpr):
    """Limit finite gradients of tile i, g [groups, 128]; see ``moment_formats.py``."""
    o_g = i * BLOCK_G + tl.arange(0, BLOCK_G)
    v = tl.load(v_amax_ptr + o_g, mask=None if WHOLE else o_g * GROUP < left)
    bits = tl.where(v < SMALLEST_V, SMALLEST_V, v).to(tl.int32, bitcast=True)
    limit = ((bits >> 1) + LIMIT_BITS).to(tl.float32, bitcast=True)
    limit = tl.where(limit < OUTLIER, limit, OUTLIER)[:, None]
    # g - g is NaN for an infinity and for NaN.
    return tl.where(tl.abs(g) <= OUTLIER, g, _copy_sign(limit, g) + (g - g))


@triton.jit
def _load(ptr, i, left, WHOLE: tl.constexpr, BLOCK_G: tl.constexpr):
    """Load tile i of a tensor [groups, 128]; zeros outside the tensor."""
    o = _elements(i, BLOCK_G)
    if WHOLE:
        return tl.load(ptr + o)
    else:
        return tl.load(ptr + o, mask=o < left, other=0.0)


@triton.jit
def _elements(i, BLOCK_G: tl.constexpr):
    """Return the offsets of the elements of tile i within the chunk."""
    o_g = i * BLOCK_G + tl.arange(0, BLOCK_G)
    return o_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _store_moment(
    x, random, q_ptr, amax_ptr, k_ptr, i, left, SIGNED: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Encode tile i of a moment, x [groups, 128], zeros outside the tensor, and store it.

    Rounds to nearest if ``random`` is None, else stochastically with 32 random bits per element.
    """
    bits = magnitude_bits(x)
    top_bits = tl.max(bits, axis=1)
    amax = top_bits.to(tl.float32, bitcast=True)
    exponent = top_bits >> 23
    exponent = tl.where(exponent < 1, 1, tl.where(exponent > 253, 253, exponent))
    unit_bits = tl.where(top_bits >= 0x7F800000, 0x7FC00000, (254 - exponent) << 23)
    unit = unit_bits.to(tl.float32, bitcast=True)
    top = amax * unit
    # Zero minus one is the largest unsigned integer, so zeros are ignored.
    least_bits = tl.min((bits - 1).to(tl.uint32, bitcast=True), axis=1) + 1
    least = least_bits.to(tl.float32, bitcast=True) * unit
    least = tl.where(least < SMALLEST_RATIO, SMALLEST_RATIO, least)
    log_top = tl.where(amax == 0.0, 0.0, log2_fast(top))
    spread = log_top - log2_fast(least)
    LIMIT: tl.constexpr = LOG2_RANGE / K_MAX
    k = LOG2_RANGE * reciprocal_fast(tl.where(spread > LIMIT, spread, LIMIT))
    stored_k = k.to(tl.float16)
    k = stored_k.to(tl.float32)
    bias = LOG2_MAX - k * log_top
    scaled = x * unit[:, None]
    q32 = exp2_fast(log2_fast(tl.abs(scaled)) * k[:, None] + bias[:, None])
    if random is not None:
        q32 = tl.where((scaled == top[:, None]) & (q32 > 0.0), E4M3_MAX, q32)
        q32 = _round_stochastically(q32, k, random)
    q32 = _copy_sign(q32, x) if SIGNED else q32
    _store(q_ptr, q32.to(q_ptr.dtype.element_ty), i, left, WHOLE, BLOCK_G)
    o_g = i * BLOCK_G + tl.arange(0, BLOCK_G)
    m_g = None if WHOLE else o_g * GROUP < left
    tl.store(amax_ptr + o_g, amax, mask=m_g)
    tl.store(k_ptr + o_g, stored_k, mask=m_g)


@triton.jit
def _store(ptr, x, i, left, WHOLE: tl.constexpr, BLOCK_G: tl.constexpr):
    """Store tile i of a tensor [groups, 128]."""
    o = _elements(i, BLOCK_G)
    tl.store(ptr + o, x, mask=None if WHOLE else o < left)


@triton.jit
def adamw_kernel(
    table_ptr,  # (tensors, COLUMNS) int64
    work_ptr,  # (programs, 2) int32: tensor, chunk
    scalars_ptr,  # (tensors, SCALARS) fp32
    grad_scale_ptr,  # () fp32, or None
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr,
    LOW_BITS: tl.constexpr, STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr,  # full chunks with aligned addresses
    BLOCK_G: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Update one chunk of a tensor."""
    work = work_ptr + tl.program_id(0).to(tl.int64) * 2
    tensor = tl.load(work).to(tl.int64)
    first_g = tl.load(work + 1).to(tl.int64) * (BLOCK_G * TILES)
    row = table_ptr + tensor * _COLUMNS
    first = first_g * GROUP
    left = tl.load(row + NUMEL) - first
    p_ptr, g_ptr = _pointer(row, P, first, P_TYPE, WHOLE), _pointer(row, G, first, G_TYPE, WHOLE)
    m_ptr = _pointer(row, M, first, tl.float8e4nv, WHOLE)
    v_ptr = _pointer(row, V, first, tl.float8e4nv, WHOLE)
    m_amax_ptr = _pointer(row, M_AMAX, first_g, tl.float32, False)
    v_amax_ptr = _pointer(row, V_AMAX, first_g, tl.float32, False)
    m_k_ptr = _pointer(row, M_K, first_g, tl.float16, False)
    v_k_ptr = _pointer(row, V_K, first_g, tl.float16, False)
    low_ptr = _pointer(row, LOW, first, tl.int16, WHOLE)
    scalars = scalars_ptr + tensor * _SCALARS
    decay, step_size = tl.load(scalars), tl.load(scalars + 1)
    rate1, beta2, rate2 = tl.load(scalars + 2), tl.load(scalars + 3), tl.load(scalars + 4)
    inverse_root, eps = tl.load(scalars + 5), tl.load(scalars + 6)
    key = tl.load(scalars + 7).to(tl.uint32, bitcast=True)
    key ^= (first >> 32).to(tl.uint32) * 0x9E3779B9
    grad_scale = 1.0 if grad_scale_ptr is None else tl.load(grad_scale_ptr)
    if not _is_finite(grad_scale):
        return

    for i in range(TILES):
        p = _load(p_ptr, i, left, WHOLE, BLOCK_G)
        g32 = _load(g_ptr, i, left, WHOLE, BLOCK_G).to(tl.float32) * grad_scale
        m32 = _load_moment(m_ptr, m_amax_ptr, m_k_ptr, i, left, True, WHOLE, BLOCK_G)
        v32 = _load_moment(v_ptr, v_amax_ptr, v_k_ptr, i, left, False, WHOLE, BLOCK_G)
        g32 = _limit_gradient(g32, v_amax_ptr, i, left, WHOLE, BLOCK_G)
        if LOW_BITS:
            low = _load(low_ptr, i, left, WHOLE, BLOCK_G).to(tl.int32)
            high = p.to(tl.int16, bitcast=True).to(tl.int32) << 16
            p32 = (high + low).to(tl.float32, bitcast=True)
        else:
            p32 = p.to(tl.float32)
        m32 += rate1 * (g32 - m32)
        v32 = v32 * beta2 + rate2 * g32 * g32
        p32 -= decay * p32
        p32 -= step_size * m32 * reciprocal_fast(sqrt_fast(v32) * inverse_root + eps)
        if LOW_BITS or STOCHASTIC:
            bits = tl.where(p32 == p32, p32.to(tl.int32, bitcast=True), QUIET_NAN)
            if STOCHASTIC:
                bits += (_random_words(first, i, key, BLOCK_G) & 0xFFFF).to(tl.int32)
            else:
                bits += 0x8000
                low = ((bits & 0xFFFF) - 0x8000).to(tl.int16)
                _store(low_ptr, low, i, left, WHOLE, BLOCK_G)
            new = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            new = p32.to(P_TYPE)
        _store(p_ptr, new, i, left, WHOLE, BLOCK_G)
        _store_moment(m32, None, m_ptr, m_amax_ptr, m_k_ptr, i, left, True, WHOLE, BLOCK_G)
        random = _random_words(first, i, key ^ MOMENT_SALT, BLOCK_G)
        _store_moment(v32, random, v_ptr, v_amax_ptr, v_k_ptr, i, left, False, WHOLE, BLOCK_G)


CHUNK = 4096
"""Elements per program: 2^23 programs cover 2^35 elements, and a grid has up to 2^31."""

_TILE_BYTES = 512
"""Bytes of parameters in a tile: 16 per thread of a warp."""

_TENSORS = 128
"""Tensors per program of the kernel that counts steps."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Rates = tuple[float | Tensor, float, float, float, float]
"""lr, beta1, beta2, eps and weight decay of a parameter group; lr may be a tensor ()."""


@dataclass(frozen=True, slots=True)
class AdamwItem:
    """A parameter, its gradient and its state: contiguous tensors on one device."""

    p: Tensor
    g: Tensor
    m: Moment
    v: Moment
    step: Tensor
    """Number of steps, FP32 (); counted on the device."""
    low_bits: Tensor | None = None
    """Low 16 bits of the master weights of a BF16 parameter, int16 of its shape."""
    group: int = 0
    """Index of the rates."""
    index: int = 0
    """Position of the parameter in the optimizer, which selects its random numbers."""

    def row(self) -> tuple[int, ...]:
        """Return this tensor's row of the table."""
        low_bits = self.p if self.low_bits is None else self.low_bits
        tensors = (self.p, self.g, *self.m, *self.v, low_bits, self.step)
        return (*(t.data_ptr() for t in tensors), self.p.numel(), self.group, self.index)

    def launch_key(self) -> tuple[Any, ...]:
        """Return dtypes, whether there are low bits, elements, and whether addresses are aligned.

        Addresses of tensors that are read 16 bytes at a time must be multiples of 16.
        """
        tensors = (self.p, self.g, self.m[0], self.v[0], self.low_bits)
        aligned = all(t.data_ptr() % 16 == 0 for t in tensors if t is not None)
        has_low_bits = self.low_bits is not None
        return self.p.dtype, self.g.dtype, has_low_bits, self.p.numel(), aligned


def _split_work(shapes: Sequence[tuple[Any, ...]]) -> list[tuple[Any, Tensor]]:
    """Group chunks by launch: pairs of a tensor's and a chunk's index, int32 [chunks, 2].

    Keys are the dtypes, whether there are low bits, and whether chunks are whole.
    """
    work: dict[Any, list[Tensor]] = {}
    for i, (*kind, elements, aligned) in enumerate(shapes):
        chunks = cdiv(elements, CHUNK)
        whole = elements // CHUNK if aligned else 0
        for is_whole, start, end in ((True, 0, whole), (False, whole, chunks)):
            chunk = torch.arange(start, end, dtype=torch.int32, device="cpu")
            pairs = torch.stack([torch.full_like(chunk, i), chunk], 1)
            work.setdefault((*kind, is_whole), []).append(pairs)
    launches = {kind: torch.cat(parts) for kind, parts in work.items()}
    return [(kind, pairs) for kind, pairs in launches.items() if len(pairs)]


class AdamwTable:
    """Runs foreach (multi-tensor) steps of AdamW on tensors of one device.

    BF16 parameters without low bits are rounded stochastically with ``seed``, 31 bits. If it is
    None, they are rounded to nearest, and second moments are rounded with seed 0.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._device, self._seed = device, seed
        self._key: Any = None
        self._shapes: list[tuple[Any, ...]] = []
        self._table = self._scalars = torch.empty(0)
        self._work: list[tuple[torch.dtype, torch.dtype, bool, bool, Tensor]] = []
        self._rates: tuple[Any, Tensor] = (None, torch.empty(0))
        self._captured: list[Tensor] = []

    def step(
        self,
        items: Sequence[AdamwItem],
        rates: Sequence[Rates],
        grad_scale: Tensor | None = None,
    ) -> None:
        """Run one step of all items (at least one) without synchronizing with the GPU.

        ``rates`` of the items' parameter groups, by index. ``grad_scale``, FP32 (), is
        multiplied with the gradients; if it is not finite, the step changes nothing. Raises
        ValueError if the table has changed while a CUDA graph is captured.
        """
        with torch.cuda.device_of(items[0].p):  # Triton launches on the current device
            self._prepare([item for item in items if item.p.numel()])
            rates_tensor = self._upload_rates(rates)
            tensors = len(self._table)
            launch(
                adamw_scalars_kernel, (cdiv(tensors, _TENSORS),), num_warps=_TENSORS // 32,
                table_ptr=self._table, rates_ptr=rates_tensor,
                scalars_ptr=self._scalars, grad_scale_ptr=grad_scale, tensors=tensors,
                seed=self._seed or 0, BLOCK=_TENSORS,
            )  # fmt: skip
            for p_type, g_type, low_bits, whole, work in self._work:
                # The interpreter's time depends on the number of tiles, not on their size.
                elements = CHUNK if INTERPRETED else _TILE_BYTES // p_type.itemsize
                block = elements // moment_formats.GROUP
                stochastic = self._seed is not None and p_type == torch.bfloat16 and not low_bits
                launch(
                    adamw_kernel, (len(work),), num_warps=1,
                    table_ptr=self._table, work_ptr=work, scalars_ptr=self._scalars,
                    grad_scale_ptr=grad_scale, P_TYPE=_TYPES[p_type],
                    G_TYPE=_TYPES[g_type], LOW_BITS=low_bits, STOCHASTIC=stochastic, WHOLE=whole,
                    BLOCK_G=block, TILES=CHUNK // moment_formats.GROUP // block,
                )  # fmt: skip

    def _prepare(self, items: list[AdamwItem]) -> None:
        """Update the table and the work if an address has changed since the last step."""
        rows = [item.row() for item in items]
        key = [
            (row, item.p.dtype, item.g.dtype, item.low_bits is None)
            for row, item in zip(rows, items, strict=True)
        ]
        if key == self._key:
            return
        self._refuse_capture("a parameter, gradient or state has moved")
        padding = (0,) * (COLUMNS - len(rows[0])) if rows else ()
        self._table = self._to_device(
            torch.tensor([(*row, *padding) for row in rows], dtype=torch.int64)
        )
        shapes = [item.launch_key() for item in items]
        if shapes != self._shapes:  # only gradients may move in every step
            self._scalars = torch.empty(
                (len(rows), SCALARS), dtype=torch.float32, device=self._device
            )
            self._work = [(*kind, self._to_device(pairs)) for kind, pairs in _split_work(shapes)]
            self._shapes = shapes
        self._key = key

    def _upload_rates(self, rates: Sequence[Rates]) -> Tensor:
        """Return the rates, FP64 [groups, 5] on the device; upload numbers that have changed."""
        known = [(-1.0 if isinstance(lr, Tensor) else lr, *rest) for lr, *rest in rates]
        if known != self._rates[0]:
            self._refuse_capture("a learning rate has changed; use a tensor lr on the GPU")
            tensor = self._to_device(torch.tensor(known, dtype=torch.float64))
            self._rates = (known, tensor)
        for i, (lr, *_) in enumerate(rates):
            if isinstance(lr, Tensor):
                self._rates[1][i, 0].copy_(lr)
        if self._is_capturing():
            # Every replay of the graph reads them, also after other tables have replaced them.
            self._captured += [self._table, self._scalars, self._rates[1]]
            self._captured += [work for *_, work in self._work]
        return self._rates[1]

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _refuse_capture(self, what: str) -> None:
        if self._is_capturing():
            raise ValueError(
                f"AdamW in a CUDA graph: {what} since the step before the capture; run one step "
                "on the same tensors first, and keep gradients at their addresses "
                "(zero_grad(set_to_none=False))"
            )


@functools.lru_cache(maxsize=8)
def _table(device: torch.device, seed: int | None) -> tuple[AdamwTable, Tensor]:
    """Return a table for steps of single tensors, and its step counter."""
    return AdamwTable(device, seed), torch.zeros((), dtype=torch.float32, device=device)


@register(
    fake=lambda *_: None,
    mutates=("p", "m", "m_amax", "m_k", "v", "v_amax", "v_k", "low_bits"),
)
def _adamw_step(
    p: Tensor, g: Tensor, m: Tensor, m_amax: Tensor, m_k: Tensor, v: Tensor, v_amax: Tensor,
    v_k: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    low_bits: Tensor | None, grad_scale: Tensor | None, seed: int | None, index: int,
) -> None:  # fmt: skip
    table, count = _table(p.device, seed)
    count.fill_(step - 1)
    item = AdamwItem(p, g, (m, m_amax, m_k), (v, v_amax, v_k), count, low_bits, index=index)
    table.step([item], [(lr, beta1, beta2, eps, weight_decay)], grad_scale)


def adamw_step(
    p: Tensor,
    g: Tensor,
    m: Moment,
    v: Moment,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    low_bits: Tensor | None = None,
    grad_scale: Tensor | None = None,
    seed: int | None = None,
    index: int = 0,
) -> None:
    """Run one AdamW step on one tensor; changes p, m, v and low_bits in place.

    p and g are FP32, BF16 or FP16, contiguous, of any shape; m and v are from :func:`new_moment`;
    ``step`` counts from 1. For the others see :class:`AdamwItem` and :class:`AdamwTable`.
    """
    if p.shape != g.shape or not (p.is_contiguous() and g.is_contiguous()):
        raise ValueError(
            f"adamw_step: p is {tuple(p.shape)} with strides {p.stride()}, g is {tuple(g.shape)} "
            f"with strides {g.stride()}; both must be contiguous and of one shape"
        )
    check_dtype("adamw_step", "p", p)
    check_dtype("adamw_step", "g", g)
    _check_moment("m", m, p)
    _check_moment("v", v, p)
    if low_bits is not None and p.dtype != torch.bfloat16:
        raise ValueError(f"adamw_step: p is {p.dtype}; low_bits are for bfloat16")
    if low_bits is not None and (low_bits.shape, low_bits.dtype) != (p.shape, torch.int16):
        raise ValueError(
            f"adamw_step: low_bits is {low_bits.dtype} of shape {tuple(low_bits.shape)}; "
            f"it must be int16 of p's shape {tuple(p.shape)}"
        )
    if step < 1:
        raise ValueError(f"adamw_step: step is {step}; steps count from 1")
    if p.numel():
        _adamw_step(
            p, g, *m, *v, lr, *betas, eps, weight_decay, step, low_bits, grad_scale, seed, index
        )  # fmt: skip


def _check_moment(name: str, moment: Moment, p: Tensor) -> None:
    groups = (count_groups(p.numel()),)
    dtypes = (E4M3.dtype, torch.float32, torch.float16)
    expected = list(zip(dtypes, (tuple(p.shape), groups, groups), strict=True))
    given = [(t.dtype, tuple(t.shape)) for t in moment]
    if given != expected or not all(t.is_contiguous() for t in moment):
        raise ValueError(
            f"adamw_step: {name} is {given}; for p of shape {tuple(p.shape)} it must be contiguous "
            f"{expected}: create it with new_moment(p)"
        )
