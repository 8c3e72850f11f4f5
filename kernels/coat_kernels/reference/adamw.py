"""AdamW with FP8 moments: numerics of ``adamw.py``, and of every codec of moments.

What the kernels compute with the special function unit (``tile.py``) is computed here with the
CPU's functions: before its rounding a code differs by some 2^-20 of itself.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from coat_kernels.formats import E4M3, E5M2
from coat_kernels.master_weights import (
    CODE_SALT,
    join_master,
    random_words,
    round_stochastically,
    rounding_key,
    split_master,
)
from coat_kernels.moment_formats import GROUP, K_MAX, SMALLEST_RATIO, Codec, Moment, codec_called

_CODES = torch.arange(128, dtype=torch.uint8, device="cpu")
_RATIO = {fmt.dtype: _CODES.view(fmt.dtype).float() * (1.0 / fmt.max) for fmt in (E4M3, E5M2)}
"""code / max of the 128 non-negative codes: looked up, as there are so few."""
_LOG2_RATIO = {dtype: ratio.log2() for dtype, ratio in _RATIO.items()}


def _grouped(x: Tensor) -> Tensor:
    """[groups, 128], the last group padded with zeros."""
    flat = x.reshape(-1)
    return pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def _round_by_chance(code: Tensor, k: Tensor, key: int) -> Tensor:
    """E4M3 neighbours of codes, so that the mean of the decoded values is right.

    Args:
        code: FP32 [groups, 128], 0 to 448 before rounding; a NaN stays.
        k: FP32 [groups, 1].
        key: 32 bits, from ``rounding_key``.
    """
    exponent = (code.view(torch.int32) >> 23).clamp_min(121)  # subnormals have the step of 2^-6
    step = ((exponent - 3) << 23).view(torch.float32)
    steps = code * ((257 - exponent) << 23).view(torch.float32)
    low = steps.floor()
    part = steps - low
    curvature = (0.5 * (1.0 / k - 1.0)) / torch.where(steps > 1.0, steps, 1.0)
    chance = part - curvature * (part * (1.0 - part))
    uniform = (random_words(code, key ^ CODE_SALT) >> 8).float() * 2.0**-24
    rounded = (low + (uniform < chance).float()) * step
    rounded = torch.where((code > 0.0) & (rounded == 0.0), E4M3.min_subnormal, rounded)
    return torch.where(rounded > E4M3.max, E4M3.max, rounded)


def encode_moment(
    values: Tensor,
    codec: str | Codec = "dre_e4m3",
    *,
    second: bool = False,
    key: int | None = None,
) -> Moment:
    """A moment as it is stored, from its values.

    Args:
        values: FP32, BF16 or FP16, any shape; non-negative for a second moment.
        codec: a name in :data:`coat_kernels.CODECS`, or another codec.
        second: the second moment; a codec may store it otherwise than the first.
        key: 32 bits by which a second moment is rounded up or down where its codec rounds by
            chance; without one it is rounded to nearest. Nothing else hangs on it.

    Returns:
        Codes of the values' shape, then per group of 128 the codec's metadata.

    Raises:
        ValueError: there is no such codec.
    """
    how = codec if isinstance(codec, Codec) else codec_called(codec)
    fmt = how.format(second)
    groups = _grouped(values.float())
    magnitudes = groups.abs()
    amax = magnitudes.amax(1)
    # Multiplied with a power of two, which is exact, amax is between 1 and 2: logarithms are small
    # and their rounding does not hang on the size of the group.
    exponent = ((amax.view(torch.int32) >> 23) & 0xFF).clamp(1, 253)
    unit = ((254 - exponent) << 23).view(torch.float32)
    unit = torch.where(amax.isfinite(), unit, math.nan)
    top = amax * unit
    scaled = magnitudes.mul_(unit[:, None])
    if not how.expand:
        code = scaled.mul_((fmt.max / torch.where(amax == 0, 1.0, top))[:, None])
        k = None
    else:
        log_top = torch.where(amax == 0, 0.0, top.log2())
        logs = scaled.log2_()
        least = logs.masked_fill(logs.isneginf(), math.inf).amin(1)
        spread = log_top - least.clamp_min(math.log2(SMALLEST_RATIO))
        log2_range = how.log2_range(fmt)
        limit = log2_range / K_MAX
        k = log2_range / torch.where(spread > limit, spread, limit)
        if how.floor_k:
            k = (k * 16.0).floor() / 16.0
        k = k.half()
        bias = math.log2(fmt.max) - k.float() * log_top
        code = logs.mul_(k.float()[:, None]).add_(bias[:, None]).exp2_()
        if second and how.second_by_chance and key is not None:
            is_largest = (groups * unit[:, None] == top[:, None]) & (groups > 0.0)
            code.masked_fill_(is_largest, fmt.max)
            code = _round_by_chance(code, k.float()[:, None], key)
    if fmt == E5M2:  # casts of a GPU saturate, torch's to E5M2 do not
        code.clamp_(max=fmt.max)
    code = torch.copysign(code, groups)
    q = code.to(fmt.dtype).view(-1)[: values.numel()].view(values.shape)
    return (q, amax) if k is None else (q, amax, k)


def decode_moment(moment: Moment, codec: str | Codec = "dre_e4m3") -> Tensor:
    """Values of a stored moment, FP32 of its codes' shape.

    Args:
        moment: from :func:`encode_moment`, or of an optimizer's state: codes, then metadata.
        codec: a name in :data:`coat_kernels.CODECS`, or the codec that encoded it.

    Raises:
        ValueError: there is no such codec.
    """
    expand = (codec if isinstance(codec, Codec) else codec_called(codec)).expand
    q, amax = moment[:2]
    codes = _grouped(q.view(torch.int8))
    index = (codes & 0x7F).view(-1).int()
    table = (_LOG2_RATIO if expand else _RATIO)[q.dtype].to(q.device)
    value = table.index_select(0, index).view(codes.shape)
    if expand:
        value.mul_((1.0 / moment[2].float())[:, None]).exp2_()  # log2 of zero is -inf
    # 0 * amax keeps a NaN or an infinity of the group visible in its zeros.
    value.mul_(amax[:, None])
    return torch.copysign(value, codes).view(-1)[: q.numel()].view(q.shape)


def adamw_step(
    p: Tensor, g: Tensor, m: Tensor, m_amax: Tensor, m_k: Tensor, v: Tensor, v_amax: Tensor,
    v_k: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    codec: str, remainder: Tensor | None, grad_scale: Tensor | None, seed: int | None, index: int,
) -> None:  # fmt: skip
    """One step in place; see :func:`coat_kernels.adamw.adamw_step`."""
    moments = ((m, m_amax, m_k), (v, v_amax, v_k))
    g32 = g.float() if grad_scale is None else g.float() * grad_scale
    m32, v32 = (decode_moment(moment, codec) for moment in moments)
    m32.add_((1.0 - beta1) * (g32 - m32))
    v32.mul_(beta2).add_((1.0 - beta2) * g32 * g32)
    key = rounding_key(seed or 0, step, index)
    p32 = p.float() if remainder is None else join_master(p, remainder)
    p32 = p32 - (lr * weight_decay) * p32
    denominator = v32.sqrt().div_((1.0 - beta2**step) ** 0.5).add_(eps)
    p32 -= (lr / (1.0 - beta1**step)) * m32 / denominator
    if remainder is not None:
        rounded, rest = split_master(p32)
        p.copy_(rounded)
        remainder.copy_(rest)
    else:
        if seed is not None and p.dtype == torch.bfloat16:
            p32 = round_stochastically(p32, key)
        p.copy_(p32)
    for second, (stored, values) in enumerate(zip(moments, (m32, v32), strict=True)):
        encoded = encode_moment(values, codec, second=bool(second), key=key)
        for old, new in zip(stored, encoded, strict=True):
            old.copy_(new)
