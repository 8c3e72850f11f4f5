"""Storage formats of AdamW's 8-bit moments: groups, formats, dynamic range expansion, metadata.

Encoding and decoding are in ``adamw.py`` (``_store_moment``) and ``reference/adamw.py``.

A moment is cut into groups of 128, each with its largest magnitude amax. With amin its smallest
non-zero magnitude, R = amax / amin its dynamic range and R_fp8 that of the format:

    k = log(R_fp8) / log(R)                      the paper's equation 3 (arXiv 2410.19313)
    f(x) = sign(x) |x|^k                         equation 2: spreads the group over all of FP8
    code = f(x) / scale,  scale = f(amax) / max  hence  code = sign(x) max (|x| / amax)^k
    x = sign(code) amax (|code| / max)^(1 / k)

The right-hand forms are what is computed, from ratios: nothing overflows, the largest element is
exact, and a group of equal elements (R = 1, k infinite) needs only a bound on k. Zeros have code 0
and do not count for amin; smaller ratios than 2^-126 count as 2^-126 for amin and have code 0 or
the smallest one. A group of zeros is all zeros. A NaN or an infinity makes its whole group NaN.

Metadata of a group: amax in FP32, and k in FP16, whose rounding is harmless as codes are made with
the rounded k that decodes them. Two moments take 2 + 2 * 6 / 128 = 2.094 bytes per parameter.

===================  ==========  ========================  =======================================
codec                exp_avg     exp_avg_sq                k
===================  ==========  ========================  =======================================
``dre_e4m3``         E4M3        E4M3                      the paper's formula
``released``         E4M3        E4M3                      that of the released kernel
``dre_e4m3_chance``  E4M3        E4M3, stochastic          the paper's formula
===================  ==========  ========================  =======================================

``released``: R_fp8 = 448 * 448 / 2 and k rounded down to a multiple of 1/16 (NVlabs/COAT,
coat/optimizer/kernels, commit 80ec99f). It divides by sqrt(amax) sqrt(amin) first, which cancels in
exact arithmetic. Numerics: ``reference/adamw.py``; errors on real states: kernels/README.md.

``dre_e4m3_chance``: with beta2 near 1, v changes by less in a step than codes are apart, and to
nearest it cannot shrink. So its codes are rounded up or down by chance. With t the code in steps of
E4M3 and p what t has beyond its floor, up with the probability

    p - (1 / k - 1) / 2  p (1 - p) / max(t, 1)

which makes the mean of the decoded value right to first order (p alone, that of the code). The
largest element stays exact, a positive one never becomes zero: its update would be m / eps.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coat_kernels.formats import E4M3, Format

GROUP = 128
"""Elements per group (the paper's choice, section 3.2)."""

K_MAX = 64.0
"""Bound of k for groups of (nearly) equal magnitudes, whose k would be infinite: no element of a
group with this k is below max * 2^-17.8 (E5M2: 2^-31.8), so nothing underflows."""

SMALLEST_RATIO = 2.0**-126
"""FP32's smallest normal: what is below it, measured by the group's largest, has no range."""

Moment = tuple[Tensor, ...]
"""Codes of the parameter's shape; then per group amax, FP32 [groups], and, if the codec expands,
k, FP16 [groups]."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How both moments are stored.

    The kernels take those of :data:`CODECS`; ``encode_moment`` and ``decode_moment`` any, so that
    other formats can be studied.
    """

    name: str
    first: Format = E4M3
    """Of exp_avg."""
    second: Format = E4M3
    """Of exp_avg_sq."""
    expand: bool = True
    """Whether a group has a k."""
    floor_k: bool = False
    """Whether k is rounded down to a multiple of 1/16."""
    range_e4m3: float = E4M3.max / E4M3.min_subnormal
    """R_fp8 of E4M3."""
    second_by_chance: bool = False
    """Whether exp_avg_sq, in E4M3 and expanded, is rounded up or down by chance."""

    def __post_init__(self) -> None:
        if self.second_by_chance and (self.second != E4M3 or not self.expand):
            raise ValueError(f"codec {self.name!r}: codes by chance are E4M3 and expanded")

    def format(self, second: bool) -> Format:
        """Of one of the moments."""
        return self.second if second else self.first

    def log2_range(self, fmt: Format) -> float:
        """log2 of R_fp8."""
        return math.log2(self.range_e4m3 if fmt == E4M3 else fmt.max / fmt.min_subnormal)

    @property
    def fields(self) -> tuple[str, ...]:
        """What a moment consists of, as suffixes of its name in an optimizer's state."""
        return ("", "_amax", "_k") if self.expand else ("", "_amax")


CODECS = {
    codec.name: codec
    for codec in (
        Codec("dre_e4m3"),
        Codec("released", floor_k=True, range_e4m3=E4M3.max * E4M3.max / 2.0),
        Codec("dre_e4m3_chance", second_by_chance=True),
    )
}
"""By name."""

REMOVED_CODECS = ("e4m3", "dre_e4m3_e5m2")
"""Names that earlier versions trained with: without expansion, and with exp_avg_sq in E5M2."""


def codec_called(name: str) -> Codec:
    """The codec of this name.

    Raises:
        ValueError: there is none, or no longer.
    """
    if name in REMOVED_CODECS:
        raise ValueError(
            f"codec {name!r} of moments was removed from training: finish with the version that "
            f"used it, or start a new optimizer from the weights with {' or '.join(CODECS)}"
        )
    if name not in CODECS:
        raise ValueError(f"there is no codec {name!r} of moments; use one of {', '.join(CODECS)}")
    return CODECS[name]


def groups_of(numel: int) -> int:
    """Groups of a tensor; the last one may be shorter."""
    return -(-numel // GROUP)


def new_moment(p: Tensor, codec: str = "dre_e4m3", *, second: bool = False) -> Moment:
    """A zero moment of ``p``: codes like p, and per group of 128 amax (0) and k (1).

    Args:
        p: a parameter of any shape and dtype.
        codec: a name in :data:`CODECS`.
        second: the second moment.

    Raises:
        ValueError: there is no such codec.
    """
    how = codec_called(codec)
    q = torch.zeros_like(p, dtype=how.format(second).dtype, memory_format=torch.contiguous_format)
    amax = torch.zeros(groups_of(p.numel()), dtype=torch.float32, device=p.device)
    return (q, amax, torch.ones_like(amax, dtype=torch.float16)) if how.expand else (q, amax)
