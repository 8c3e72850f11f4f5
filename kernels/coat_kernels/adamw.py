"""AdamW whose moments are FP8 with Dynamic Range Expansion (arXiv 2410.19313, section 3).

A moment is stored in groups of 128. With amax and amin the largest and the smallest non-zero
magnitude of a group, R = amax / amin its dynamic range and R_fp8 = 448 / 2^-9 E4M3's:

    k = log(R_fp8) / log(R)                      the paper's equation 3
    f(x) = sign(x) |x|^k                         equation 2: spreads the group over all of FP8
    code = f(x) / scale,  scale = f(amax) / 448  hence  code = sign(x) 448 (|x| / amax)^k
    x = sign(code) amax (|code| / 448)^(1 / k)

The right-hand forms are what is computed, from the ratios |x| / amax: nothing overflows, the
largest element is exact, and a group of equal elements (R = 1, k infinite) needs only a bound on k.
Zeros (and ratios below 2^-126) have code 0 and do not count for amin; a group of zeros is all
zeros. A NaN or an infinity makes its whole group NaN.

``released`` uses the constants of the paper's released kernel instead of the paper's formula
(NVlabs/COAT, coat/optimizer/kernels, commit 80ec99f): R_fp8 = 448 * 448 / 2 and k rounded down to a
multiple of 1/16. It divides by sqrt(amax) sqrt(amin) first, which cancels in exact arithmetic.

Per parameter: 2 bytes of codes and 2 * 8 / 128 of FP32 metadata (amax, k): 2.125 bytes.
The update is torch.optim.AdamW's (decoupled weight decay, bias correction, eps outside the root).
Reference: ``reference_adamw.adamw_step``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference_adamw
from coat_kernels.formats import E4M3, check_dtype
from coat_kernels.launch import cdiv, launch
from coat_kernels.reference_adamw import GROUP, K_MAX, SMALLEST_RATIO
from coat_kernels.registry import register
from coat_kernels.tile import magnitude_bits

GROUPS_PER_PROGRAM = 16

CODECS = ("dre_e4m3", "released")
"""How moments can be stored."""

Moment = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _decode(q_ptr, amax_ptr, k_ptr, o, mask, o_g, m_g):
    """Moment values [groups, 128] in FP32."""
    q = tl.load(q_ptr + o, mask=mask, other=0.0).to(tl.float32)
    amax = tl.load(amax_ptr + o_g, mask=m_g, other=0.0)[:, None]
    k = tl.load(k_ptr + o_g, mask=m_g, other=1.0)[:, None]
    a = tl.abs(q)
    nonzero = a != 0.0  # true for NaN
    value = amax * tl.exp2(tl.log2(tl.where(nonzero, a, 1.0) * (1.0 / 448.0)) / k)
    # 0 * amax keeps a NaN or an infinity of the group visible in its zeros.
    value = tl.where(nonzero, value, 0.0 * amax)
    return tl.where(q < 0.0, -value, value)


@triton.jit
def _encode(
    x, q_ptr, amax_ptr, k_ptr, o, mask, o_g, m_g,
    LOG2_RANGE: tl.constexpr, FLOOR_K: tl.constexpr, K_MAX: tl.constexpr,
    SMALLEST_RATIO: tl.constexpr,
):  # fmt: skip
    """Store moment values x [groups, 128]; outside the mask they are zero, or all are NaN."""
    amax = tl.max(magnitude_bits(x), axis=1).to(tl.float32, bitcast=True)
    ratio = tl.math.div_rn(tl.abs(x), tl.where(amax == 0.0, 1.0, amax)[:, None])
    ratio = tl.where(ratio < SMALLEST_RATIO, 0.0, ratio)
    logs = tl.log2(tl.where(ratio > 0.0, ratio, 1.0))  # at most 0; zeros and NaN do not count
    k = LOG2_RANGE / tl.maximum(tl.max(-logs, axis=1), LOG2_RANGE / K_MAX)
    if FLOOR_K:
        k = tl.floor(k * 16.0) * (1.0 / 16.0)
    code = tl.where(ratio > 0.0, tl.exp2(k[:, None] * logs), ratio) * 448.0
    code = tl.where(x < 0.0, -code, code)
    tl.store(q_ptr + o, code.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(amax_ptr + o_g, amax, mask=m_g)
    tl.store(k_ptr + o_g, k, mask=m_g)


@triton.jit
def _adamw_kernel(
    p_ptr, g_ptr,  # (n,), (n,)
    m_ptr, m_amax_ptr, m_k_ptr, v_ptr, v_amax_ptr, v_k_ptr,  # (n,) FP8, (groups,), (groups,)
    n, groups,
    decay, step_size, rate1, beta2, rate2, correction2_root, eps,  # lr wd, lr / c1, 1 - beta, ...
    LOG2_RANGE: tl.constexpr, FLOOR_K: tl.constexpr, K_MAX: tl.constexpr,
    SMALLEST_RATIO: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    o_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    o = o_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask, m_g = o < n, o_g < groups
    p = tl.load(p_ptr + o, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + o, mask=mask, other=0.0).to(tl.float32)
    m = _decode(m_ptr, m_amax_ptr, m_k_ptr, o, mask, o_g, m_g)
    v = _decode(v_ptr, v_amax_ptr, v_k_ptr, o, mask, o_g, m_g)
    m += rate1 * (g - m)
    v = v * beta2 + rate2 * g * g
    p -= decay * p
    p -= step_size * m / (tl.sqrt_rn(v) / correction2_root + eps)
    tl.store(p_ptr + o, p.to(p_ptr.dtype.element_ty), mask=mask)
    _encode(
        m, m_ptr, m_amax_ptr, m_k_ptr, o, mask, o_g, m_g, LOG2_RANGE, FLOOR_K, K_MAX,
        SMALLEST_RATIO,
    )  # fmt: skip
    _encode(
        v, v_ptr, v_amax_ptr, v_k_ptr, o, mask, o_g, m_g, LOG2_RANGE, FLOOR_K, K_MAX,
        SMALLEST_RATIO,
    )  # fmt: skip


def _adamw_step_triton(
    p: Tensor, g: Tensor, m: Tensor, m_amax: Tensor, m_k: Tensor, v: Tensor, v_amax: Tensor,
    v_k: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    released: bool,
) -> None:  # fmt: skip
    log2_range, floor_k = reference_adamw.expansion(released)
    groups = m_amax.numel()
    # 1 - beta is taken here, in double precision: FP32's 1 - 0.999 is off by 1e-5.
    launch(
        _adamw_kernel, (cdiv(groups, GROUPS_PER_PROGRAM),),
        p_ptr=p, g_ptr=g, m_ptr=m, m_amax_ptr=m_amax, m_k_ptr=m_k, v_ptr=v, v_amax_ptr=v_amax,
        v_k_ptr=v_k, n=p.numel(), groups=groups, decay=lr * weight_decay,
        step_size=lr / (1.0 - beta1**step), rate1=1.0 - beta1, beta2=beta2, rate2=1.0 - beta2,
        correction2_root=(1.0 - beta2**step) ** 0.5, eps=eps, LOG2_RANGE=log2_range,
        FLOOR_K=floor_k, K_MAX=K_MAX, SMALLEST_RATIO=SMALLEST_RATIO, GROUP=GROUP,
        BLOCK_G=GROUPS_PER_PROGRAM,
    )  # fmt: skip


_adamw_step = register(
    "adamw_step",
    triton=_adamw_step_triton,
    reference=reference_adamw.adamw_step,
    fake=lambda *_: None,
    mutates=("p", "m", "m_amax", "m_k", "v", "v_amax", "v_k"),
)


def new_moment(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A zero moment of ``p``: codes like p, and per group of 128 amax (0) and k (1), FP32."""
    groups = -(-p.numel() // GROUP)
    q = torch.zeros_like(p, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    amax = torch.zeros(groups, dtype=torch.float32, device=p.device)
    return q, amax, torch.ones_like(amax)


def encode_moment(values: Tensor, codec: str = "dre_e4m3", *, second: bool = False) -> Moment:
    """A moment as it is stored, from its values.

    Args:
        values: FP32, BF16 or FP16, any shape; non-negative for a second moment.
        codec: a name in :data:`CODECS`.
        second: the second moment; codecs may store it otherwise than the first.

    Returns:
        Codes of the values' shape, then per group of 128 its metadata.

    Raises:
        ValueError: there is no such codec.
    """
    _check_codec(codec)
    return reference_adamw.encode(values, codec == "released")


def decode_moment(moment: Moment, codec: str = "dre_e4m3") -> Tensor:
    """Values of a stored moment, FP32 of its codes' shape.

    Args:
        moment: from :func:`encode_moment` or an optimizer's state, in this order: codes, metadata.
        codec: a name in :data:`CODECS`.

    Raises:
        ValueError: there is no such codec.
    """
    _check_codec(codec)
    return reference_adamw.decode(*moment)


def _check_codec(codec: str) -> None:
    if codec not in CODECS:
        raise ValueError(f"there is no codec {codec!r} of moments; use one of {', '.join(CODECS)}")


def adamw_step(
    p: Tensor,
    g: Tensor,
    m: tuple[Tensor, Tensor, Tensor],
    v: tuple[Tensor, Tensor, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    released: bool = False,
) -> None:
    """One AdamW step on one tensor; changes p, m and v in place.

    Args:
        p: parameter, FP32, BF16 or FP16, contiguous, any shape and size.
        g: gradient, of p's shape, contiguous.
        m: first moment: codes, amax, k, from :func:`new_moment`.
        v: second moment, likewise.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        step: number of this step, from 1.
        released: use the released kernel's constants.

    Raises:
        ValueError: a shape, dtype or layout does not fit, or the step is below 1.
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
    if step < 1:
        raise ValueError(f"adamw_step: step is {step}; steps count from 1")
    if p.numel():
        _adamw_step(p, g, *m, *v, lr, *betas, eps, weight_decay, step, released)


def _check_moment(name: str, moment: tuple[Tensor, Tensor, Tensor], p: Tensor) -> None:
    q, amax, k = moment
    groups = (-(-p.numel() // GROUP),)
    fits = q.shape == p.shape and q.dtype == E4M3.dtype and q.is_contiguous()
    for metadata in (amax, k):
        fits &= metadata.shape == groups and metadata.dtype == torch.float32
    if not fits:
        raise ValueError(
            f"adamw_step: {name} has codes {q.dtype} {tuple(q.shape)}, amax {amax.dtype} "
            f"{tuple(amax.shape)} and k {k.dtype} {tuple(k.shape)}; for p of shape "
            f"{tuple(p.shape)} it must have codes {E4M3.dtype} of that shape, contiguous, and "
            f"float32 amax and k of shape {groups}: make it with new_moment(p)"
        )
