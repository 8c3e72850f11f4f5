"""What CoatAdamW saves for a parameter: names, first values, what may be loaded, values by element.

A checkpoint is cut and joined by element when parameters are partitioned anew. FP8 codes are saved
by element, amax and k by group of elements counted from the partition's start. Cutting codes
anywhere but between groups means decoding them; putting values into another partition means
encoding them again, which moves each by at most half a step of its new group's codes.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from coat_kernels import (
    CODECS,
    GROUP,
    Moment,
    codec_called,
    decode_moment,
    encode_moment,
    groups_of,
    new_moment,
)
from coat_kernels.formats import check_dtype

MOMENTS = ("exp_avg", "exp_avg_sq")
REMAINDER = "master_remainder"

Read = Callable[[str, int, int], Tensor]
"""Entries ``start`` to ``stop`` of a flat saved tensor: ``read(key, start, stop)``."""


def name_of(group: dict[str, Any], number: int, place: int) -> str:
    """What to call a parameter in an error: its name, if the optimizer was given names."""
    names = group.get("param_names")
    name = f" ({names[place]})" if names else ""
    return f"parameter {place} of group {number}{name}"


def keys_of(codec: str) -> list[tuple[str, ...]]:
    """Names of what a state has of each moment."""
    fields = codec_called(codec).fields
    return [tuple(f"{moment}{field}" for field in fields) for moment in MOMENTS]


def moments_of(state: dict[str, Any], codec: str) -> tuple[Moment, Moment]:
    """Both moments of a state."""
    m, v = (tuple(state[key] for key in keys) for keys in keys_of(codec))
    return m, v


def new_state(p: Tensor, name: str, codec: str, master: str) -> dict[str, Tensor]:
    """The state of a parameter before its first step.

    Raises:
        ValueError: the parameter has another dtype than FP32, BF16 or FP16, or has gaps.
    """
    check_dtype("CoatAdamW", name, p)
    if not p.is_contiguous():
        raise ValueError(
            f"CoatAdamW: {name} has shape {tuple(p.shape)} and strides {p.stride()}; it must be "
            "contiguous: call .contiguous() on its data"
        )
    state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
    for second, keys in enumerate(keys_of(codec)):
        state |= zip(keys, new_moment(p, codec, second=bool(second)), strict=True)
    if master == "bf16_remainder" and p.dtype == torch.bfloat16:
        state[REMAINDER] = torch.zeros_like(p, dtype=torch.int16)
    return state


def check_saved(saved: dict[str, Any], name: str, p: Tensor, codec: str, master: str) -> None:
    """Refuse a saved state that is not one of this parameter in this codec.

    Raises:
        ValueError: it says which parameter, what was found and what to do.
    """
    wanted = {"step"}.union(*keys_of(codec))
    if master == "bf16_remainder" and p.dtype == torch.bfloat16:
        wanted.add(REMAINDER)
    missing = sorted(wanted - saved.keys())
    if "exp_avg_amax" in saved and _layout(saved) != _like(codec):
        raise ValueError(
            f"CoatAdamW: the saved state of {name} is not in codec {codec!r}; it has "
            f"{_dtypes(saved)}: make the optimizer with codec= "
            f"{' or '.join(_with(_layout(saved))) or 'that of the version that wrote it'}"
        )
    if missing:
        raise ValueError(
            f"CoatAdamW: the saved state of {name} has {sorted(saved)} and lacks {missing}; it was "
            "written by another optimizer or with another master=: resume with that one, or start "
            "from the model's weights"
        )
    if saved["exp_avg"].shape != p.shape:
        raise ValueError(
            f"CoatAdamW: a saved moment of {name} has shape {tuple(saved['exp_avg'].shape)}, its "
            f"parameter {tuple(p.shape)}; resume with the model and world size that were saved"
        )
    groups = groups_of(p.numel())
    for key in sorted(wanted - {"step", REMAINDER, *MOMENTS}):
        if saved[key].shape != (groups,):
            raise ValueError(
                f"CoatAdamW: {key} of {name} has shape {tuple(saved[key].shape)}; groups of "
                f"{GROUP} elements are {groups} for {p.numel()}: decode it with the version that "
                "wrote it and encode it with coat_kernels.encode_moment"
            )


Layout = tuple[torch.dtype | None, ...]


def _layout(saved: dict[str, Any]) -> Layout:
    """Dtypes of a saved state's moments; None for what is not there."""
    fields = ("", "_amax", "_k")
    tensors = (saved.get(f"{moment}{field}") for moment in MOMENTS for field in fields)
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def _like(codec: str) -> Layout:
    """The same of a codec."""
    how = codec_called(codec)
    k = torch.float16 if how.expand else None
    return (how.first.dtype, torch.float32, k, how.second.dtype, torch.float32, k)


def _with(layout: Layout) -> list[str]:
    return [name for name in CODECS if _like(name) == layout]


def _dtypes(saved: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value.dtype}"
        for key, value in saved.items()
        if key != "step" and isinstance(value, Tensor)
    )


def loaded_state(saved: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
    """A copy of a saved state on the parameter's device, bit for bit."""
    step = torch.as_tensor(saved["step"], dtype=torch.float32, device=p.device).clone()
    tensors = {
        key: value.detach().clone().to(p.device) for key, value in saved.items() if key != "step"
    }
    return {"step": step, **tensors}


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

    Codes are rounded to nearest, those of a codec with stochastic rounding, too.
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
    return tuple(moment + suffix for suffix in ("_amax", "_k") if moment + suffix in keys)
