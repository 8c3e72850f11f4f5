"""Expected signal to quantization noise ratios of known distributions, in closed form.

For a format with values v_i and the thresholds t_i between them, the mean squared error is a sum of
integrals over the cells of the format:

    E (Q(x) - x)^2 = 2 sum_i  I2(i) - 2 v_i I1(i) + v_i^2 I0(i),   In(i) = int_cell x^n p(x) dx

The integrals have closed forms for the normal distribution and for Student's t with an integer
number of degrees of freedom (its distribution function: Abramowitz and Stegun 26.7.3 and 26.7.4).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from coat_lab.number_formats import NumberFormat

OUTLIERS = (1e-3, 30.0)
"""``outliers``: share of the elements of a normal distribution that are larger, and how much."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution that is symmetric around 0."""

    name: str
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor]
    """Draws FP32 values of a shape."""
    moments: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None
    """Antiderivatives of p(x), x p(x) and x^2 p(x) at FP64 values; None: no closed form."""


def get_distribution(name: str) -> Distribution:
    """Return ``normal``, ``outliers`` (0.1% of normal values times 30) or ``tN`` (Student's t).

    Raises:
        ValueError: there is no such distribution, or it has no variance.
    """
    if name == "normal":
        return Distribution(name, _draw_normal, _normal_moments)
    if name == "outliers":
        return Distribution(name, _draw_outliers, None)
    found = re.fullmatch(r"t(\d+)", name)
    if found is None or int(found[1]) < 3:
        raise ValueError(
            f"distribution {name!r}: give normal, outliers, or tN for Student's t with N degrees "
            "of freedom, 3 at least, because it has no variance with fewer"
        )
    nu = int(found[1])
    return Distribution(name, partial(_draw_t, nu), partial(_t_moments, nu))


def expected_sqnr(
    fmt: NumberFormat, distribution: Distribution, scale: float, limit: float = math.inf
) -> float | None:
    """Return the SQNR in dB of values of a distribution; None without a closed form.

    Args:
        fmt: the format.
        distribution: the distribution.
        scale: the scale; values beyond ``fmt.max * scale`` saturate.
        limit: larger magnitudes do not occur. With the largest magnitude of a sample this is the
            SQNR of the sample, also where rare values of a heavy tail would change it.
    """
    if distribution.moments is None:
        return None
    values = fmt.values() * scale
    ends = torch.cat([(values[1:] + values[:-1]) / 2, values.new_tensor([math.inf])])
    ends = ends.clamp(max=limit)
    starts = torch.cat([values.new_zeros(1), ends[:-1]])
    integrals = zip(distribution.moments(ends), distribution.moments(starts), strict=True)
    zeroth, first, second = (end - start for end, start in integrals)
    error = (second - 2 * values * first + values.square() * zeroth).sum()
    return 10 * torch.log10(second.sum() / error).item()


def _draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _draw_outliers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    share, factor = OUTLIERS
    larger = torch.rand(shape, generator=generator) < share
    return torch.randn(shape, generator=generator) * torch.where(larger, factor, 1.0)


def _draw_t(nu: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw normal values over the root of a chi-squared mean of ``nu`` squares."""
    squares = sum(torch.randn(shape, generator=generator).square() for _ in range(nu))
    return torch.randn(shape, generator=generator) * (nu / torch.as_tensor(squares)).sqrt()


def _normal_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    density = (-0.5 * x.square()).exp() / math.sqrt(2 * math.pi)
    zeroth = torch.special.ndtr(x)
    return zeroth, -density, zeroth - torch.where(x.isinf(), 0.0, x) * density


def _t_moments(nu: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    spread = 1 + x.square() / nu
    first = -nu / (nu - 1) * math.exp(log_constant) * spread ** (-(nu - 1) / 2)
    # x^2 p(x) = nu ((1 + x^2 / nu) p(x) - p(x)); the first term is t with nu - 2, of another scale.
    zeroth, narrower = _t_cdf(nu, x), _t_cdf(nu - 2, x * math.sqrt((nu - 2) / nu))
    return zeroth, first, nu * ((nu - 1) / (nu - 2) * narrower - zeroth)


def _t_cdf(nu: int, x: Tensor) -> Tensor:
    """Distribution function of Student's t, FP64."""
    angle = (x / math.sqrt(nu)).atan()
    cos, sin = angle.cos(), angle.sin()
    term = cos.clone() if nu % 2 else torch.ones_like(cos)
    total = torch.zeros_like(cos)
    for k in range(2 + nu % 2, nu + 1, 2):
        total += term
        term = term * cos.square() * (k - 1) / k
    inside = 2 / math.pi * (angle + sin * total) if nu % 2 else sin * total
    return (1 + inside) / 2
