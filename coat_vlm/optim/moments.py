"""Optimizer states by element: what can be cut and joined when parameters are partitioned anew.

The one place of this package that knows how :class:`~coat_vlm.optim.CoatAdamW` stores a moment: FP8
codes by element, amax and k by group of elements counted from the partition's start. Cutting codes
anywhere but between groups means decoding them; putting values into another partition means
encoding them again, which moves each by at most half a step of its new group's codes.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from coat_kernels import reference_adamw
from coat_kernels.reference_adamw import GROUP

MOMENTS = ("exp_avg", "exp_avg_sq")
_METADATA = ("amax", "k")

Read = Callable[[str, int, int], Tensor]
"""Entries ``start`` to ``stop`` of a flat saved tensor: ``read(key, start, stop)``."""


def codec(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """The name of an optimizer and of how it stores a group's moments; checkpoints record it."""
    name = group.get("codec")
    return type(optimizer).__name__ + (f" {name}" if name else "")


def by_element(state: Mapping[str, Tensor], size: int) -> set[str]:
    """The keys of a state that have an entry for each of ``size`` elements, codes included."""
    metadata = {f"{moment}_{field}" for moment in MOMENTS for field in _METADATA}
    return {
        key
        for key, tensor in state.items()
        if tensor.ndim
        and tensor.numel() == size
        and not (key in metadata and _is_coded(key, state))
    }


def decoded(
    keys: Collection[str], elements: Collection[str], read: Read, start: int, stop: int
) -> dict[str, Tensor]:
    """Values of the elements ``start`` to ``stop`` of a partition.

    Args:
        keys: all keys of the saved state.
        elements: those with one entry per element, from :func:`by_element`.
        read: reads the saved tensors.
        start: first element.
        stop: behind the last element.

    Returns:
        By key one-dimensional tensors: moments that are codes as FP32, others as they are.
    """
    values: dict[str, Tensor] = {}
    for key in elements:
        if not _is_coded(f"{key}_amax", keys):
            values[key] = read(key, start, stop)
            continue
        first, last = start // GROUP, -(-stop // GROUP)
        codes = read(key, first * GROUP, stop)
        amax, k = (read(f"{key}_{field}", first, last) for field in _METADATA)
        values[key] = reference_adamw.decode(codes, amax, k)[start - first * GROUP :]
    return values


def encoded(
    values: Mapping[str, Tensor], keys: Collection[str], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state of a partition from the values of its elements.

    Args:
        values: by key one-dimensional tensors over all elements, as :func:`decoded` returns them.
        keys: all keys of the saved state, which say what is kept as codes.
        group: the optimizer's parameter group.
    """
    state: dict[str, Tensor] = {}
    for key, value in values.items():
        if not _is_coded(f"{key}_amax", keys):
            state[key] = value
            continue
        fields = reference_adamw.encode(value, bool(group.get("released", False)))
        for name, tensor in zip((key, *(f"{key}_{f}" for f in _METADATA)), fields, strict=True):
            state[name] = tensor
    return state


def _is_coded(metadata: str, keys: Collection[str]) -> bool:
    """Whether a key names the metadata of a moment that is there as codes."""
    moment = metadata.rpartition("_")[0]
    return metadata in keys and moment in keys and moment in MOMENTS
