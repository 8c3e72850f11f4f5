"""Counts how many values saturate or underflow when they become FP8, per kind of tensor.

Counting is off outside :func:`watching`, because it reads every tensor again:

    with watching() as counts:
        loss = model(**batch).loss
        loss.backward()
    counts.rates()   # {"norm output": {"saturated": 0.0001, "underflowed": 0.002, ...}, ...}

*Saturated*: the quantized value is the format's largest. With a scale from the tensor's own amax
one value per scale is expected to saturate, so the rate is the share of a tensor at its maximum.
*Underflowed*: the value is not zero and becomes zero.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coat_kernels import QuantizedGradient


@dataclass(slots=True)
class Counts:
    """Running sums per kind of tensor."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """Kind -> FP64 [3]: values, saturated, underflowed; on their device, without sync."""

    def add(self, name: str, q: Tensor, x: Tensor) -> None:
        """Count quantized data ``q`` of values ``x``."""
        largest = torch.finfo(q.dtype).max
        magnitudes = q.float().abs()
        values = torch.full((), q.numel(), dtype=torch.float64, device=q.device)
        saturated = (magnitudes == largest).sum().double()
        underflowed = ((magnitudes == 0) & (x != 0)).sum().double()
        sums = torch.stack([values, saturated, underflowed])
        self.sums[name] = self.sums[name] + sums if name in self.sums else sums

    def rates(self) -> dict[str, dict[str, float]]:
        """Return per kind the number of values, and the shares that saturated and underflowed."""
        rates = {}
        for name, sums in sorted(self.sums.items()):
            values, saturated, underflowed = sums.tolist()
            rates[name] = {
                "values": int(values),
                "saturated": saturated / max(values, 1.0),
                "underflowed": underflowed / max(values, 1.0),
            }
        return rates


_active: list[Counts] = []


@contextmanager
def watching() -> Iterator[Counts]:
    """Count in all FP8 blocks inside the context."""
    counts = Counts()
    _active.append(counts)
    try:
        yield counts
    finally:
        _active.remove(counts)


def is_watching() -> bool:
    """Return whether counting is on."""
    return bool(_active)


def observe(name: str, q: Tensor, values: Tensor | Callable[[], Tensor]) -> None:
    """Count a tensor; a function that returns its values is called only if counting is on."""
    if _active:
        x = values if isinstance(values, Tensor) else values()
        for counts in _active:
            counts.add(name, q, x)


def observe_gradient(quantized: QuantizedGradient, values: Callable[[], Tensor]) -> None:
    """Count a gradient [M, N] in one of its written layouts."""
    if not _active:
        return
    rows, transposed, _ = quantized
    if rows.q.numel():
        observe("gradient", rows.q, values)
    elif transposed.q.numel():
        x = values()
        observe("gradient", transposed.q[:, : len(x)].t(), x)
