"""AdamW with FP8 moments in plain PyTorch: what runs on a CPU. Formulas: ``adamw.py``."""

import math

import torch
from torch import Tensor

from coat_kernels.formats import E4M3

GROUP = 128
"""Elements per group (the paper's choice, section 3.2)."""

K_MAX = 64.0
"""Bound of k for groups of (nearly) equal magnitudes, whose k would be infinite: no element of a
group with this k is below 448 * 2^-17.8, so nothing underflows."""

SMALLEST_RATIO = 2.0**-126
"""Smaller elements of a group, measured by its largest, count as zeros: FP32's smallest normal."""

_CODES = torch.arange(128, dtype=torch.uint8, device="cpu").view(E4M3.dtype).float()
_LOG2_RATIO = (_CODES * (1.0 / E4M3.max)).log2()
"""log2(code / 448) of the 128 non-negative codes: looked up, as there are so few."""


def expansion(released: bool) -> tuple[float, bool]:
    """log2 of FP8's dynamic range, and whether k is rounded down to a multiple of 1/16."""
    if released:
        return math.log2(E4M3.max * E4M3.max / 2.0), True
    return math.log2(E4M3.max / E4M3.min_subnormal), False


def _grouped(x: Tensor) -> Tensor:
    """[groups, 128] FP32, the last group padded with zeros."""
    flat = x.reshape(-1).float()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def encode(x: Tensor, released: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of x (its shape), and per group amax and k, FP32 [groups]."""
    log2_range, floor_k = expansion(released)
    groups = _grouped(x)
    amax = groups.abs().amax(1)
    ratio = groups.abs().div_(torch.where(amax == 0, 1.0, amax)[:, None])
    zero = ratio < SMALLEST_RATIO
    logs = ratio.log2_()  # at most 0
    spread = (-logs.masked_fill(zero, 0.0).amin(1)).clamp_min(log2_range / K_MAX)
    k = torch.where(spread.isnan(), K_MAX, log2_range / spread)
    if floor_k:
        k = (k * 16.0).floor() / 16.0
    code = logs.masked_fill_(zero, -math.inf).mul_(k[:, None]).exp2_().mul_(E4M3.max)
    q = torch.copysign(code, groups).to(E4M3.dtype).view(-1)[: x.numel()].view(x.shape)
    return q, amax, k


def decode(q: Tensor, amax: Tensor, k: Tensor) -> Tensor:
    """Values of a moment, FP32 of q's shape."""
    codes = torch.nn.functional.pad(q.reshape(-1).view(torch.int8), (0, -q.numel() % GROUP))
    codes = codes.view(-1, GROUP)
    index = (codes & 0x7F).view(-1).int()
    logs = _LOG2_RATIO.to(q.device).index_select(0, index).view(codes.shape)
    # A zero's logarithm is -inf; 0 * amax keeps a NaN or an infinity of the group visible in it.
    value = logs.div_(k[:, None]).exp2_().mul_(amax[:, None])
    return torch.copysign(value, codes).view(-1)[: q.numel()].view(q.shape)


def adamw_step(
    p: Tensor, g: Tensor, m: Tensor, m_amax: Tensor, m_k: Tensor, v: Tensor, v_amax: Tensor,
    v_k: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    released: bool,
) -> None:  # fmt: skip
    """One step in place; see :func:`coat_kernels.adamw.adamw_step`."""
    g32 = g.float()
    m32, v32 = decode(m, m_amax, m_k), decode(v, v_amax, v_k)
    m32.add_((1.0 - beta1) * (g32 - m32))
    v32.mul_(beta2).add_((1.0 - beta2) * g32 * g32)
    p32 = p.float()
    p32 = p32 - (lr * weight_decay) * p32
    denominator = v32.sqrt().div_((1.0 - beta2**step) ** 0.5).add_(eps)
    p.copy_(p32 - (lr / (1.0 - beta1**step)) * m32 / denominator)
    for stored, values in (((m, m_amax, m_k), m32), ((v, v_amax, v_k), v32)):
        for old, new in zip(stored, encode(values, released), strict=True):
            old.copy_(new)
