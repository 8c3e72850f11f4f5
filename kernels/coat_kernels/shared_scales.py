"""Scales that several processes share, for matrices whose rows are divided among them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_reduce: Callable[[Tensor], None] | None = None
"""One for all threads: backward passes run in their own."""


@contextmanager
def share_scales(reduce: Callable[[Tensor], None]) -> Iterator[None]:
    """Give matrices that are quantized with one scale in this context the largest scale.

    All processes must quantize equally often, in the same order, except weights, which are equal in
    all processes. ``reduce`` raises a scale [], FP32, in place to the largest of all processes, NaN
    included: as bits, NaN is the largest.
    """
    global _reduce
    before, _reduce = _reduce, reduce
    try:
        yield
    finally:
        _reduce = before


def are_shared() -> bool:
    """Return whether a scope of :func:`share_scales` is open."""
    return _reduce is not None


def finish_scale(scale: Tensor) -> Tensor:
    """Return a scale [] that the values of this process determine, shared if that is asked for."""
    if _reduce is not None:
        _reduce(scale)
    return scale
