"""CoatAdamW's state of a parameter: keys, initial values, checks on loading, conversion.

Repartitioning a checkpoint splits and concatenates states by element. Moments have quantized data
per element, and amax and k per group of elements counted from the partition's start. A split
between groups needs no conversion. Any other split decodes the moments and encodes them in the
groups of the new partition, which changes a value by at most half the spacing of FP8 there.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from coat_kernels import (
    CODECS,
    GROUP,
    Moment,
    count_groups,
    decode_moment,
    encode_moment,
    get_codec,
    new_moment,
)
from coat_kernels.formats import check_dtype

MOMENTS = ("exp_avg", "exp_avg_sq")
LOW_BITS = "master_low_bits"

Read = Callable[[str, int, int], Tensor]
"""Reads the entries ``start`` to ``stop`` of a flat saved tensor: ``read(key, start, stop)``."""


def describe_parameter(group: dict[str, Any], number: int, place: int) -> str:
    """Return a parameter's position for errors, with its name if the optimizer has names."""
    names = group.get("param_names")
    name = f" ({names[place]})" if names else ""
    return f"parameter {place} of group {number}{name}"


@cache
def moment_keys(codec: str) -> tuple[tuple[str, ...], ...]:
    """Return the keys of each moment's tensors in a state."""
    fields = get_codec(codec).fields
    return tuple(tuple(f"{moment}{field}" for field in fields) for moment in MOMENTS)


def get_moments(state: dict[str, Any], codec: str) -> tuple[Moment, Moment]:
    """Return both moments of a state."""
    m, v = (tuple(state[key] for key in keys) for keys in moment_keys(codec))
    return m, v


def new_state(p: Tensor, name: str, codec: str, master: str) -> dict[str, Tensor]:
    """Create the state of a parameter before its first step.

    Raises:
        ValueError: the parameter is not FP32, BF16 or FP16, or is not contiguous.
    """
    check_dtype("CoatAdamW", name, p)
    if not p.is_contiguous():
        raise ValueError(
            f"CoatAdamW: {name} has shape {tuple(p.shape)} and strides {p.stride()}; it must be "
            "contiguous: call .contiguous() on its data"
        )
    state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
    for second, keys in enumerate(moment_keys(codec)):
        state |= zip(keys, new_moment(p, codec, second=bool(second)), strict=True)
    if master == "bf16_low_bits" and p.dtype == torch.bfloat16:
        state[LOW_BITS] = torch.zeros_like(p, dtype=torch.int16)
    return state


def check_saved(saved: dict[str, Any], name: str, p: Tensor, codec: str, master: str) -> None:
    """Check that a saved state fits a parameter and a codec.

    Raises:
        ValueError: it does not; the message names the parameter, the problem and a remedy.
    """
    wanted = {"step"}.union(*moment_keys(codec))
    if master == "bf16_low_bits" and p.dtype == torch.bfloat16:
        wanted.add(LOW_BITS)
    tensors = [(key, t) for key, t in saved.items() if key != "step" and isinstance(t, Tensor)]
    found = ", ".join(f"{key} {t.dtype}" for key, t in tensors)
    missing = sorted(wanted - saved.keys())
    fitting = [known for known in CODECS if _codec_layout(known) == _layout(saved)]
    if "exp_avg_amax" in saved and _layout(saved) != _codec_layout(codec):
        raise ValueError(
            f"CoatAdamW: the saved state of {name} is not in codec {codec!r}; it has "
            f"{found}: create the optimizer with codec= "
            f"{' or '.join(fitting) or 'that of the version that wrote it'}"
        )
    if missing:
        raise ValueError(
            f"CoatAdamW: the saved state of {name} has {sorted(saved)} and lacks {missing}; it was "
            "written by another optimizer or with another master=: resume with the same settings, "
            "or start from the model's weights"
        )
    if saved["exp_avg"].shape != p.shape:
        raise ValueError(
            f"CoatAdamW: a saved moment of {name} has shape {tuple(saved['exp_avg'].shape)}, its "
            f"parameter {tuple(p.shape)}; resume with the model and world size that were saved"
        )
    groups = count_groups(p.numel())
    for key in sorted(wanted - {"step", LOW_BITS, *MOMENTS}):
        if saved[key].shape != (groups,):
            raise ValueError(
                f"CoatAdamW: {key} of {name} has shape {tuple(saved[key].shape)}; {p.numel()} "
                f"elements have {groups} groups of {GROUP}: decode the moment with the version "
                "that wrote it and encode it with coat_kernels.encode_moment"
            )


Layout = tuple[torch.dtype | None, ...]


def _layout(saved: dict[str, Any]) -> Layout:
    """Return the dtypes of a saved state's moment tensors; None for a missing tensor."""
    fields = ("", "_amax", "_k")
    tensors = (saved.get(f"{moment}{field}") for moment in MOMENTS for field in fields)
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def _codec_layout(codec: str) -> Layout:
    """Return the dtypes of a codec's moment tensors."""
    how = get_codec(codec)
    k = torch.float16 if how.expand else None
    return (how.first.dtype, torch.float32, k, how.second.dtype, torch.float32, k)


def copy_state(saved: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
    """Copy a saved state to the parameter's device, bit for bit."""
    step = torch.as_tensor(saved["step"], dtype=torch.float32, device=p.device).clone()
    tensors = {
        key: value.detach().clone().to(p.device) for key, value in saved.items() if key != "step"
    }
    return {"step": step, **tensors}


def codec(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return the names of an optimizer and of the storage of a group's states, for checkpoints."""
    settings = [str(group[key]) for key in ("codec", "master") if group.get(key)]
    return " ".join([type(optimizer).__name__, *settings])


def by_element(state: Mapping[str, Tensor], size: int) -> set[str]:
    """Return the keys of a state that have one entry per element, of ``size`` elements."""
    metadata = {key for moment in MOMENTS for key in _metadata(moment, state)}
    return {
        key
        for key, tensor in state.items()
        if tensor.ndim and tensor.numel() == size and key not in metadata
    }


def decode(
    keys: Collection[str],
    elements: Collection[str],
    read: Read,
    start: int,
    stop: int,
    group: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Read the elements ``start`` to ``stop`` of a partition and decode moments.

    Args:
        keys: all keys of the saved state.
        elements: the keys with one entry per element, from :func:`by_element`.
        read: reads the saved tensors.
        start: first element.
        stop: behind the last element.
        group: the optimizer's parameter group, with the codec of the saved state.

    Returns:
        Key -> one-dimensional tensor: quantized moments decoded to FP32, other tensors unchanged.
    """
    values: dict[str, Tensor] = {}
    for key in elements:
        metadata = _metadata(key, keys)
        if not metadata:
            values[key] = read(key, start, stop)
            continue
        first, last = start // GROUP, -(-stop // GROUP)
        q = read(key, first * GROUP, stop)
        fields = [read(name, first, last) for name in metadata]
        values[key] = decode_moment((q, *fields), group["codec"])[start - first * GROUP :]
    return values


def encode(
    values: Mapping[str, Tensor], keys: Collection[str], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Encode the values of a partition's elements into its state.

    Moments are rounded to nearest, also those of a codec with stochastic rounding.

    Args:
        values: key -> one-dimensional tensor over all elements, as :func:`decode` returns them.
        keys: all keys of the saved state: a moment with metadata is quantized.
        group: the optimizer's parameter group.
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
    """Return the keys of a moment's metadata; none if the moment is not quantized."""
    if moment not in MOMENTS:
        return ()
    return tuple(moment + suffix for suffix in ("_amax", "_k") if moment + suffix in keys)
