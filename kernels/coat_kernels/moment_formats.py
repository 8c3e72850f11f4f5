"""Storage formats of AdamW's 8-bit moments: groups, formats, dynamic range expansion, metadata.

Encoding and decoding are in ``adamw.py`` (``_store_moment``) and ``reference/adamw.py``.

A moment is split into groups of 128 elements. With amax and amin a group's largest and smallest
non-zero magnitude, R = amax / amin its dynamic range, R_fp8 the format's dynamic range, and q the
quantized value:

    k = log(R_fp8) / log(R)                      the paper's equation 3 (arXiv 2410.19313)
    f(x) = sign(x) |x|^k                         equation 2: spreads the group over all of FP8
    q = f(x) / scale,  scale = f(amax) / max  hence  q = sign(x) max (|x| / amax)^k
    x = sign(q) amax (|q| / max)^(1 / k)

The right-hand forms are computed, from ratios: nothing overflows, the largest element is exact, and
a group of equal elements (R = 1, k infinite) only needs a bound on k. Zeros have q = 0 and do not
count for amin. Ratios below 2^-126 count as 2^-126 for amin, and their q is 0 or the smallest FP8
value. A group of zeros is all zeros. A NaN or an infinity makes the whole group NaN.

Metadata of a group: amax in FP32 and k in FP16. Rounding k is harmless, because q is computed with
the rounded k that decodes it. Two moments take 2 + 2 * 6 / 128 = 2.094 bytes per parameter.

=======================  ==========  ====================  =======================================
codec                    exp_avg     exp_avg_sq            R_fp8
=======================  ==========  ====================  =======================================
``dre_e4m3``             E4M3        E4M3                  448 / 2^-9, the paper's
``released``             E4M3        E4M3                  448 * 448 / 2, the released kernel's
``dre_e4m3_stochastic``  E4M3        E4M3, stochastic      448 / 2^-7
=======================  ==========  ====================  =======================================

``released``: k is also rounded down to a multiple of 1/16 (NVlabs/COAT,
coat/optimizer/kernels, commit 80ec99f). It divides by sqrt(amax) sqrt(amin) first, which cancels in
exact arithmetic. Numerics: ``reference/adamw.py``; errors on real states: kernels/README.md.

``dre_e4m3_stochastic``: a step changes v by up to a share of 1 - beta2, which is less than the
spacing of E4M3, so v rounded to nearest cannot shrink. So q is rounded stochastically. With t = q
in units of the spacing of E4M3 and p the fractional part of t, q is rounded up with the probability

    p - (1 / k - 1) / 2  p (1 - p) / max(t, 1)

which makes the mean of the decoded value right to first order (p alone does so for q). The largest
element stays exact, and a positive one never becomes zero: its update would be m / eps. R_fp8 ends
at 2^-7 because E4M3 has four values alone up to 2^-7: with the paper's R_fp8 they represent most
elements of a group of which one is much larger than the others.

A gradient of 1e20, whose square overflows FP32, or of 1e15, which takes the range from all others,
is an error somewhere. So that it changes its own element alone, the update limits finite gradients
above OUTLIER to 4,096 times the root of the group's largest v, at most to OUTLIER.
m / sqrt(v) of the element stays as it is: both follow the gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coat_kernels.formats import E4M3, Format

GROUP = 128
"""Elements per group (the paper's choice, section 3.2)."""

K_MAX = 64.0
"""Bound on k for groups of (nearly) equal magnitudes, whose k would be infinite: no element of a
group with this k is below max * 2^-17.8 (E5M2: 2^-31.8), so nothing underflows."""

SMALLEST_RATIO = 2.0**-126
"""Smallest normal FP32: smaller magnitudes, relative to the group's largest, do not extend R."""

OUTLIER = 2.0**40
"""Smaller gradients are AdamW's; see above. Infinite ones make their group NaN, as NaN does."""

SMALLEST_V = 2.0**-12
"""Least v for the limit of an outlier, which becomes 64 in a new group."""

LIMIT_BITS = 0x25C00000
"""Half the bits of an FP32 v plus these are the bits of 4,096 sqrt(v), at most 6% too large: the
exponent is halved, and the mantissa is a straight line. Both versions of the step compute this."""

Moment = tuple[Tensor, ...]
"""Quantized data of the parameter's shape; then per group amax, FP32 [groups], and, if the codec
expands, k, FP16 [groups]."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How both moments are stored.

    The kernels support the codecs in :data:`CODECS`. ``encode_moment`` and ``decode_moment``
    support any codec, for studies of other formats.
    """

    name: str
    first: Format = E4M3
    """Format of exp_avg."""
    second: Format = E4M3
    """Format of exp_avg_sq."""
    expand: bool = True
    """Whether a group has a k."""
    floor_k: bool = False
    """Whether k is rounded down to a multiple of 1/16."""
    range_e4m3: float = E4M3.max / E4M3.min_subnormal
    """R_fp8 of E4M3."""
    second_stochastic: bool = False
    """Whether exp_avg_sq, in E4M3 and expanded, is rounded stochastically."""

    def __post_init__(self) -> None:
        if self.second_stochastic and (self.second != E4M3 or not self.expand):
            raise ValueError(f"codec {self.name!r}: stochastic rounding needs E4M3 with expansion")

    def format(self, second: bool) -> Format:
        """Return the format of exp_avg, or of exp_avg_sq if ``second``."""
        return self.second if second else self.first

    def log2_range(self, fmt: Format) -> float:
        """Return log2 of R_fp8."""
        return math.log2(self.range_e4m3 if fmt == E4M3 else fmt.max / fmt.min_subnormal)

    @property
    def fields(self) -> tuple[str, ...]:
        """Suffixes of the names of a moment's tensors in an optimizer's state."""
        return ("", "_amax", "_k") if self.expand else ("", "_amax")


CODECS = {
    codec.name: codec
    for codec in (
        Codec("dre_e4m3"),
        Codec("released", floor_k=True, range_e4m3=E4M3.max * E4M3.max / 2.0),
        Codec("dre_e4m3_stochastic", range_e4m3=E4M3.max * 2.0**7, second_stochastic=True),
    )
}
"""Name -> codec."""

OLD_NAMES = {
    "dre_e4m3_chance": "dre_e4m3_stochastic",  # deprecated
    "bf16_remainder": "bf16_low_bits",
}
"""Deprecated names of codecs and of CoatAdamW's ``master`` -> their names now."""

REMOVED_CODECS = ("e4m3", "dre_e4m3_e5m2")
"""Codecs of earlier versions: without expansion, and with exp_avg_sq in E5M2."""


def get_codec(name: str) -> Codec:
    """Return the codec called ``name``, which may be a deprecated name.

    Raises:
        ValueError: the codec is unknown or was removed.
    """
    name = OLD_NAMES.get(name, name)
    if name in REMOVED_CODECS:
        raise ValueError(
            f"codec {name!r} of moments was removed from training: finish with the version that "
            f"used it, or start a new optimizer from the weights with {' or '.join(CODECS)}"
        )
    if name not in CODECS:
        raise ValueError(f"there is no codec {name!r} of moments; use one of {', '.join(CODECS)}")
    return CODECS[name]


def count_groups(numel: int) -> int:
    """Return the number of groups of a tensor; the last group may be shorter."""
    return -(-numel // GROUP)


def new_moment(p: Tensor, codec: str = "dre_e4m3", *, second: bool = False) -> Moment:
    """Create a zero moment of ``p``: zeros of p's shape, and per group of 128 amax (0) and k (1).

    Args:
        p: a parameter of any shape and dtype.
        codec: a name in :data:`CODECS`.
        second: create the second moment.

    Raises:
        ValueError: the codec is unknown.
    """
    how = get_codec(codec)
    q = torch.zeros_like(p, dtype=how.format(second).dtype, memory_format=torch.contiguous_format)
    amax = torch.zeros(count_groups(p.numel()), dtype=torch.float32, device=p.device)
    return (q, amax, torch.ones_like(amax, dtype=torch.float16)) if how.expand else (q, amax)
