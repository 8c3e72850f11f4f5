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
the rounded k that decodes it. Two moments take 2 + 2 * 6 / 128 = 2.094 bytes per parameter. Errors
on real states: kernels/README.md.

Both moments are E4M3. R_fp8 is 448 / 2^-7, not the paper's 448 / 2^-9, because E4M3 has only four
values up to 2^-7, which would represent most elements of a group with one large element.

The first moment is rounded to nearest. A step can shrink the second moment v by at most a factor
of beta2. This is less than the spacing of E4M3, so v rounded to nearest cannot shrink: its q is
rounded stochastically. With t = q in units of the spacing of E4M3 and p the fractional part of t, q
is rounded up with the probability

    p - (1 / k - 1) / 2  p (1 - p) / max(t, 1)

which makes the mean of the decoded value right to first order (just p does so for q). The largest
element stays exact, and a positive one never becomes zero: its update would be m / eps.

A gradient of 1e20, whose square overflows FP32, or of 1e15, which takes the range from all others,
is an error somewhere. To confine it to its own element, the update limits finite gradients
above OUTLIER to 4,096 times the root of the group's largest v, at most to OUTLIER.
m / sqrt(v) of the element stays as it is: both follow the gradient.
"""

import math

import torch
from torch import Tensor

from coat_kernels.formats import E4M3

GROUP = 128
"""Elements per group (the paper's choice, section 3.2)."""

LOG2_RANGE = math.log2(E4M3.max * 2.0**7)
"""log2 of R_fp8."""

K_MAX = 64.0
"""Bound on k for groups of (nearly) equal magnitudes, whose k would be infinite: no element of a
group with this k is below max * 2^-17.8, so nothing underflows."""

SMALLEST_RATIO = 2.0**-126
"""Smallest normal FP32: smaller magnitudes, relative to the group's largest, do not extend R."""

OUTLIER = 2.0**40
"""Smaller gradients are AdamW's; see above. Infinite ones make their group NaN, as NaN does."""

SMALLEST_V = 2.0**-12
"""Least v for the limit of an outlier, which becomes 64 in a new group."""

LIMIT_BITS = 0x25C00000
"""Half the bits of an FP32 v plus these are the bits of 4,096 sqrt(v), at most 6% too large: the
exponent is halved, and the mantissa is a straight line. Both versions of the step compute this."""

Moment = tuple[Tensor, Tensor, Tensor]
"""Quantized data, E4M3 of the parameter's shape; per group amax, FP32 [groups], and k, FP16
[groups]."""


def count_groups(numel: int) -> int:
    """Return the number of groups of a tensor; the last group may be shorter."""
    return -(-numel // GROUP)


def new_moment(p: Tensor) -> Moment:
    """Create a zero moment of a parameter of any shape and dtype; k is 1."""
    q = torch.zeros_like(p, dtype=E4M3.dtype, memory_format=torch.contiguous_format)
    amax = torch.zeros(count_groups(p.numel()), dtype=torch.float32, device=p.device)
    return q, amax, torch.ones_like(amax, dtype=torch.float16)
