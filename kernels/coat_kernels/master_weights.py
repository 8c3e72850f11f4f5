"""Master weights beside BF16 parameters: 16 more bits that make them FP32, or stochastic rounding.

    bf16_remainder    p = bf16(b + 0x8000 >> 16), remainder = b - (bits of p << 16), b the FP32 bits
    bf16_stochastic   p = bf16(b + r >> 16), r uniform in [0, 65536): p's mean is the FP32 value

With a remainder (int16) a parameter is the FP32 master rounded to nearest, ties away from zero, and
both together are the master bit for bit. It saves no master: 2 bytes instead of 4.

r is the low half of a hash of the element's index and a key, so a step can be repeated. The hash
is Chris Wellons's lowbias32 (github.com/skeeto/hash-prospector): 32 bits that each hang on all bits
of the argument. The kernels compute the same, see ``adamw.py``.
"""

from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

MASTERS = ("fp32", "bf16_remainder", "bf16_stochastic")
"""``fp32``: the parameters themselves, rounded to nearest if they have 16 bits."""

QUIET_NAN = 0x7FC00000
"""Bits of the NaN that is stored: others could carry over into the sign."""

CODE_SALT = 0x85EBCA6B
"""Makes the words that round codes by chance others than those that round parameters."""

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio: spreads small numbers over the words."""


def split_master(values: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 values as BF16 parameters and int16 remainders, exact together but for NaN's payload."""
    bits = torch.where(values.isnan(), QUIET_NAN, values.view(torch.int32))
    high = (bits.long() + 0x8000) >> 16
    return _bf16(high), (bits.long() - (high << 16)).to(torch.int16)


def join_master(p: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 values of BF16 parameters and their int16 remainders, of one shape."""
    bits = (p.view(torch.int16).long() << 16) + remainder.long()
    return bits.to(torch.int32).view(torch.float32)


def round_stochastically(values: Tensor, key: int) -> Tensor:
    """FP32 values in BF16, rounded up or down with the probability of their nearness.

    Args:
        values: FP32, any shape; elements are counted in memory order.
        key: 32 bits, from :func:`rounding_key`.
    """
    random = random_words(values, key)
    bits = torch.where(values.isnan(), QUIET_NAN, values.view(torch.int32))
    return _bf16((bits.long() + (random & 0xFFFF)) >> 16)


def random_words(values: Tensor, key: int) -> Tensor:
    """32 random bits (int64) per element of ``values``, counted in memory order, by a key."""
    index = torch.arange(values.numel(), device=values.device).view(values.shape)
    return _mix((index & _WORD) ^ key ^ ((index >> 32) * _GOLDEN & _WORD))


def rounding_key(seed: int, step: int, index: int) -> int:
    """The key of a parameter in a step; ``index`` is its place in the optimizer."""
    return int(_mix(seed ^ _mix(step + _mix(index + _GOLDEN))) & _WORD)


def _bf16(bits: Tensor) -> Tensor:
    return (((bits + 0x8000) & 0xFFFF) - 0x8000).to(torch.int16).view(torch.bfloat16)


def _mix(x: Word) -> Word:
    """lowbias32, of a 32-bit word or of a tensor of them (int64)."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
