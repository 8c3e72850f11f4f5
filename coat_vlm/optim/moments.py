"""Optimizer states by element: what can be cut and joined when parameters are partitioned anew.

The one place of this package that knows how :class:`~coat_vlm.optim.CoatAdamW` stores a moment:
FP8 codes by element, amax and k by group of elements counted from the partition's start. Cutting
codes anywhere but between groups means decoding them; putting values into another partition means
encoding them again, which moves each by at most half a step of its new group's codes.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from coat_kernels import GROUP, decode_moment, encode_moment

MOMENTS = ("exp_avg", "exp_avg_sq")
_METADATA = ("_amax", "_k")
"""Suffixes of what a coded moment has per group."""

Read = Callable[[str, int, int], Tensor]
"""Entries ``start`` to ``stop`` of a flat saved tensor: ``read(key, start, stop)``."""


def codec(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """The name of an optimizer and of how it stores a group's states; checkpoints record it."""
    settings = [str(group[key]) for key in ("codec", "master") if group.get(key)]
    return " ".join([type(optimizer).__name__, *settings])


def by_element(state: Mapping[str, Tensor], size: int) -> set[str]:
    """The keys of a state that have an entry for each of ``size`` elements, codes included."""
    metadata = {key for moment in MOMENTS for key in _metadata(moment, state)}
    return {
        key
        for key, tensor in state.items()
        if tensor.ndim and tensor.numel() == size and key not in metadata
    }


def decoded(
    keys: Collection[str],
    elements: Collection[str],
    read: Read,
    start: int,
    stop: int,
    group: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Values of the elements ``start`` to ``stop`` of a partition.

    Args:
        keys: all keys of the saved state.
        elements: those with one entry per element, from :func:`by_element`.
        read: reads the saved tensors.
        start: first element.
        stop: behind the last element.
        group: the optimizer's parameter group, of the codec that was saved.

    Returns:
        By key one-dimensional tensors: moments that are codes as FP32, others as they are.
    """
    values: dict[str, Tensor] = {}
    for key in elements:
        metadata = _metadata(key, keys)
        if not metadata:
            values[key] = read(key, start, stop)
            continue
        first, last = start // GROUP, -(-stop // GROUP)
        codes = read(key, first * GROUP, stop)
        fields = [read(name, first, last) for name in metadata]
        values[key] = decode_moment((codes, *fields), group["codec"])[start - first * GROUP :]
    return values


def encoded(
    values: Mapping[str, Tensor], keys: Collection[str], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state of a partition from the values of its elements.

    Args:
        values: by key one-dimensional tensors over all elements, as :func:`decoded` returns them.
        keys: all keys of the saved state, which say what is kept as codes.
        group: the optimizer's parameter group.

    Codes are rounded to nearest, those of a codec by chance, too.
    """
    state: dict[str, Tensor] = {}
    for key, value in values.items():
        metadata = _metadata(key, keys)
        if not metadata:
            state[key] = value
            continue
        fields = encode_moment(value, group["codec"], second=key == "exp_avg_sq")
        state.update(zip((key, *metadata), fields, strict=True))
    return state


def _metadata(moment: str, keys: Collection[str]) -> tuple[str, ...]:
    """The keys of a moment's metadata; none where it is not stored as codes."""
    if moment not in MOMENTS:
        return ()
    return tuple(moment + suffix for suffix in _METADATA if moment + suffix in keys)
