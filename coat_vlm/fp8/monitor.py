"""Counts how many values saturate or underflow when they become FP8, per kind of tensor.

Off except inside :func:`watching`, because the counts read every tensor again:

    with watching() as counts:
        loss = model(**batch).loss
        loss.backward()
    counts.rates()   # {"norm output": {"saturated": 0.0001, "underflowed": 0.002, ...}, ...}

*Saturated*: the code is the format's largest value. With a scale from the tensor's own amax one
code per scale is expected to be there, so the rate shows how much of a tensor sits at its maximum.
*Underflowed*: the value is not zero and its code is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coat_kernels import E4M3, E5M2, GroupScaled, NormSaved, TensorScaled
from coat_kernels.reference import activation_values, norm_values


@dataclass(slots=True)
class Counts:
    """Running sums per kind of tensor."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """Kind -> FP64 [3]: values, saturated, underflowed (on their device, so nothing waits)."""

    def add(self, kind: str, q: Tensor, x: Tensor) -> None:
        """Count codes ``q`` of values ``x``."""
        largest = E4M3.max if q.dtype == E4M3.dtype else E5M2.max
        codes = q.float().abs()
        row = torch.stack(
            [
                torch.full((), q.numel(), dtype=torch.float64, device=q.device),
                (codes == largest).sum().double(),
                ((codes == 0) & (x != 0)).sum().double(),
            ]
        )
        self.sums[kind] = self.sums[kind] + row if kind in self.sums else row

    def rates(self) -> dict[str, dict[str, float]]:
        """Per kind: number of values, and the shares that saturated and that underflowed."""
        rates = {}
        for kind, row in sorted(self.sums.items()):
            values, saturated, underflowed = row.tolist()
            rates[kind] = {
                "values": int(values),
                "saturated": saturated / max(values, 1.0),
                "underflowed": underflowed / max(values, 1.0),
            }
        return rates


_active: list[Counts] = []


@contextmanager
def watching() -> Iterator[Counts]:
    """Count in all FP8 blocks until the block ends."""
    counts = Counts()
    _active.append(counts)
    try:
        yield counts
    finally:
        _active.remove(counts)


def is_watching() -> bool:
    """Whether somebody counts."""
    return bool(_active)


def observe(kind: str, scaled: TensorScaled, x: Tensor) -> None:
    """Count a tensor quantized with one scale."""
    for counts in _active:
        counts.add(kind, scaled.q, x)


def observe_parts(kind: str, scaled: TensorScaled, parts: Sequence[Tensor]) -> None:
    """Count matrices that were quantized as one, one below the other."""
    if _active:
        observe(kind, scaled, torch.cat([part.detach() for part in parts]))


def observe_gradient(
    rows: TensorScaled, transposed: TensorScaled, values: Callable[[], Tensor]
) -> None:
    """Count a gradient [M, N] in the layout that was written; ``values`` may be dear to compute."""
    if _active and rows.q.numel():
        observe("gradient", rows, values())
    elif _active and transposed.q.numel():
        x = values()
        observe("gradient", TensorScaled(transposed.q[:, : len(x)].t(), transposed.scale), x)


def observe_group(kind: str, scaled: GroupScaled, x: Tensor) -> None:
    """Count a tensor quantized in groups."""
    for counts in _active:
        counts.add(kind, scaled.q, x)


def observe_copy(kind: str, scaled: GroupScaled, values: Callable[[], Tensor]) -> None:
    """Count a group-scaled copy whose values are laid out only when somebody watches."""
    if _active:
        observe_group(kind, scaled, values())


def observe_norm(
    kind: str,
    scaled: TensorScaled,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: NormSaved,
) -> None:
    """Count a norm's output, whose high-precision values exist nowhere else."""
    if _active:
        mean = saved.mean if saved.mean.numel() else None
        y = norm_values(x.float(), weight, bias, saved.rstd, mean)
        observe(kind, scaled, y)


def observe_activation(kind: str, scaled: TensorScaled, a: Tensor, activation: str) -> None:
    """Count an activation's output, likewise."""
    if _active:
        observe(kind, scaled, activation_values(a, activation))
