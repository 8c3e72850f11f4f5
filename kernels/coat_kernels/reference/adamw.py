"""AdamW with FP8 moments: numerics of ``adamw.py``.

The kernels use the GPU's special function unit (``device.py``) where this module uses the CPU's
functions: before rounding, quantized values differ by a relative error of some 2^-20.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from coat_kernels.formats import E4M3
from coat_kernels.master_weights import (
    MOMENT_SALT,
    join_master,
    random_words,
    round_stochastically,
    rounding_key,
    split_master,
)
from coat_kernels.moment_formats import (
    GROUP,
    K_MAX,
    LIMIT_BITS,
    LOG2_RANGE,
    OUTLIER,
    SMALLEST_RATIO,
    SMALLEST_V,
    Moment,
)

_BYTES = torch.arange(128, dtype=torch.uint8, device="cpu")
_LOG2_RATIO = (_BYTES.view(E4M3.dtype).float() * (1.0 / E4M3.max)).log2()
"""log2(q / max) of the 128 non-negative FP8 values, as a table."""


def _group(x: Tensor) -> Tensor:
    """Reshape to [groups, 128], the last group padded with zeros."""
    flat = x.reshape(-1)
    return pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def _round_stochastically(q32: Tensor, k: Tensor, key: int) -> Tensor:
    """Round q32 [groups, 128], 0 to 448 or NaN, so that the mean of the decoded values is right."""
    exponent = (q32.view(torch.int32) >> 23).clamp_min(121)  # subnormals have the spacing of 2^-6
    step = ((exponent - 3) << 23).view(torch.float32)
    steps = q32 * ((257 - exponent) << 23).view(torch.float32)
    low = steps.floor()
    part = steps - low
    curvature = (0.5 * (1.0 / k - 1.0)) / torch.where(steps > 1.0, steps, 1.0)
    probability = part - curvature * (part * (1.0 - part))
    uniform = (random_words(q32, key ^ MOMENT_SALT) >> 8).float() * 2.0**-24
    rounded = (low + (uniform < probability).float()) * step
    rounded = torch.where((q32 > 0.0) & (rounded == 0.0), E4M3.min_subnormal, rounded)
    return torch.where(rounded > E4M3.max, E4M3.max, rounded)


def encode_moment(values: Tensor, key: int | None = None) -> Moment:
    """Encode a moment from its values; non-negative ones are rounded stochastically with a key."""
    groups = _group(values.float())
    magnitudes = groups.abs()
    amax = magnitudes.amax(1)
    # Multiplying with a power of two, which is exact, makes amax 1 to 2: logarithms are small and
    # their rounding does not depend on the magnitude of the group.
    exponent = ((amax.view(torch.int32) >> 23) & 0xFF).clamp(1, 253)
    unit = ((254 - exponent) << 23).view(torch.float32)
    unit = torch.where(amax.isfinite(), unit, math.nan)
    top = amax * unit
    scaled = magnitudes.mul_(unit[:, None])
    log_top = torch.where(amax == 0, 0.0, top.log2())
    logs = scaled.log2_()
    least = logs.masked_fill(logs.isneginf(), math.inf).amin(1)
    spread = log_top - least.clamp_min(math.log2(SMALLEST_RATIO))
    limit = LOG2_RANGE / K_MAX
    k = (LOG2_RANGE / torch.where(spread > limit, spread, limit)).half()
    bias = math.log2(E4M3.max) - k.float() * log_top
    q32 = logs.mul_(k.float()[:, None]).add_(bias[:, None]).exp2_()
    if key is not None:
        is_largest = (groups * unit[:, None] == top[:, None]) & (groups > 0.0)
        q32.masked_fill_(is_largest, E4M3.max)
        q32 = _round_stochastically(q32, k.float()[:, None], key)
    q32 = torch.copysign(q32, groups)
    q = q32.to(E4M3.dtype).view(-1)[: values.numel()].view(values.shape)
    return q, amax, k


def decode_moment(moment: Moment) -> Tensor:
    """Decode a moment to FP32, in the shape of its FP8 data."""
    q, amax, k = moment
    bits = _group(q.view(torch.int8))
    index = (bits & 0x7F).view(-1).int()
    value = _LOG2_RATIO.to(q.device).index_select(0, index).view(bits.shape)
    value.mul_((1.0 / k.float())[:, None]).exp2_()  # log2 of zero is -inf
    # 0 * amax propagates a NaN or an infinity of the group to its zeros.
    value.mul_(amax[:, None])
    return torch.copysign(value, bits).view(-1)[: q.numel()].view(q.shape)


def _limit_gradient(g32: Tensor, v_amax: Tensor) -> Tensor:
    """Limit finite gradients, FP32; see ``moment_formats.py``."""
    if (g32.abs() <= OUTLIER).all():
        return g32
    groups = _group(g32)
    bits = (v_amax.clamp(min=SMALLEST_V).view(torch.int32) >> 1) + LIMIT_BITS
    limit = bits.view(torch.float32).clamp(max=OUTLIER)[:, None]
    limited = torch.copysign(limit, groups) + (groups - groups)  # NaN for an infinity and for NaN
    groups = torch.where(groups.abs() <= OUTLIER, groups, limited)
    return groups.view(-1)[: g32.numel()].view(g32.shape)


def adamw_step(
    p: Tensor, g: Tensor, m: Tensor, m_amax: Tensor, m_k: Tensor, v: Tensor, v_amax: Tensor,
    v_k: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    low_bits: Tensor | None, grad_scale: Tensor | None, seed: int | None, index: int,
) -> None:  # fmt: skip
    """Run one step in place; see :func:`coat_kernels.adamw.adamw_step`."""
    if grad_scale is not None and not grad_scale.isfinite():
        return
    moments = ((m, m_amax, m_k), (v, v_amax, v_k))
    g32 = g.float() if grad_scale is None else g.float() * grad_scale
    g32 = _limit_gradient(g32, v_amax)
    m32, v32 = (decode_moment(moment) for moment in moments)
    m32.add_((1.0 - beta1) * (g32 - m32))
    v32.mul_(beta2).add_((1.0 - beta2) * g32 * g32)
    key = rounding_key(seed or 0, step, index)
    p32 = p.float() if low_bits is None else join_master(p, low_bits)
    p32 = p32 - (lr * weight_decay) * p32
    denominator = v32.sqrt().div_((1.0 - beta2**step) ** 0.5).add_(eps)
    p32 -= (lr / (1.0 - beta1**step)) * m32 / denominator
    if low_bits is not None:
        rounded, rest = split_master(p32)
        p.copy_(rounded)
        low_bits.copy_(rest)
    else:
        if seed is not None and p.dtype == torch.bfloat16:
            p32 = round_stochastically(p32, key)
        p.copy_(p32)
    encoded = (encode_moment(m32), encode_moment(v32, key))
    for stored, moment in zip(moments, encoded, strict=True):
        for old, new in zip(stored, moment, strict=True):
            old.copy_(new)
