"""Master weights of BF16 parameters: the low 16 bits of FP32 values, or stochastic rounding.

    bf16_low_bits     p = bf16(b + 0x8000 >> 16), low_bits = b - (bits of p << 16), b the FP32 bits
    bf16_stochastic   p = bf16(b + r >> 16), r uniform in [0, 65536): p's mean is the FP32 value

With ``low_bits`` (int16) a parameter is the FP32 master weight rounded to nearest, ties away from
zero. Parameter and low bits together are the master weight bit for bit, for 2 extra bytes, not 4.

r is the low half of a hash of the element's index and a key, so a step is reproducible. The hash
is Chris Wellons's lowbias32 (github.com/skeeto/hash-prospector): each of the 32 bits depends on all
bits of the argument. The kernels compute the same hash, see ``adamw.py``.
"""

from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

MASTER_WEIGHTS = ("fp32", "bf16_low_bits", "bf16_stochastic")
"""``fp32``: the parameters are the master weights, rounded to nearest if they have 16 bits."""

QUIET_NAN = 0x7FC00000
"""Bits of every stored NaN: rounding other NaNs could carry into the sign bit."""

MOMENT_SALT = 0x85EBCA6B
"""XORed with the key: moments and parameters are rounded with different random words."""

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio: spreads small integers over all 32-bit words."""


def split_master(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split FP32 values into BF16 parameters and int16 low bits; exact except for NaN payloads."""
    bits = torch.where(values.isnan(), QUIET_NAN, values.view(torch.int32))
    high = (bits.long() + 0x8000) >> 16
    return _bf16(high), (bits.long() - (high << 16)).to(torch.int16)


def join_master(p: Tensor, low_bits: Tensor) -> Tensor:
    """Return the FP32 master weights of BF16 parameters and int16 low bits of the same shape."""
    bits = (p.view(torch.int16).long() << 16) + low_bits.long()
    return bits.to(torch.int32).view(torch.float32)


def round_stochastically(values: Tensor, key: int) -> Tensor:
    """Round FP32 values stochastically to BF16, with a 32-bit key from :func:`rounding_key`."""
    random = random_words(values, key)
    bits = torch.where(values.isnan(), QUIET_NAN, values.view(torch.int32))
    return _bf16((bits.long() + (random & 0xFFFF)) >> 16)


def random_words(values: Tensor, key: int) -> Tensor:
    """Return 32 random bits (int64) per element of ``values``, from its memory index and a key."""
    index = torch.arange(values.numel(), device=values.device).view(values.shape)
    return mix_bits((index & _WORD) ^ key ^ ((index >> 32) * _GOLDEN & _WORD))


def rounding_key(seed: int, step: int, index: int) -> int:
    """Return the key of a step and a parameter; ``index`` is its position in the optimizer."""
    return int(mix_bits(seed ^ mix_bits(step + mix_bits(index + _GOLDEN))) & _WORD)


def _bf16(bits: Tensor) -> Tensor:
    return (((bits + 0x8000) & 0xFFFF) - 0x8000).to(torch.int16).view(torch.bfloat16)


def mix_bits(x: Word) -> Word:
    """Hash a 32-bit word, or a tensor of 32-bit words (int64), with lowbias32."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
