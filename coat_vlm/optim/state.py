"""CoatAdamW's state of a parameter: keys, initial values, checks on loading, conversion.

Repartitioning a checkpoint splits and concatenates states by element. Moments have quantized data
per element, and amax and k per group of elements counted from the partition's start. A split
between groups needs no conversion. Any other split decodes the moments and encodes them in the
groups of the new partition, which changes a value by at most half the spacing of FP8 there.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from coat_kernels import GROUP, Moment, decode_moment, encode_moment, new_moment
from coat_kernels.formats import check_dtype

MOMENTS = ("exp_avg", "exp_avg_sq")
LOW_BITS = "master_low_bits"
_METADATA = ("_amax", "_k")  # suffixes of the keys of a moment's metadata

Read = Callable[[str, int, int], Tensor]
"""Reads the entries ``start`` to ``stop`` of a flat saved tensor: ``read(key, start, stop)``."""


def describe_parameter(group: dict[str, Any], number: int, position: int) -> str:
    """Return a parameter's position for errors, with its name if the optimizer has names."""
    names = group.get("param_names")
    name = f" ({names[position]})" if names else ""
    return f"parameter {position} of group {number}{name}"


def get_moments(state: dict[str, Any]) -> tuple[Moment, Moment]:
    """Return both moments of a state."""
    m, v = ((state[key], state[f"{key}_amax"], state[f"{key}_k"]) for key in MOMENTS)
    return m, v


def new_state(p: Tensor, name: str, master: str) -> dict[str, Tensor]:
    """Create the state of a parameter before its first step.

    Raises ValueError unless the parameter is FP32, BF16 or FP16 and contiguous.
    """
    check_dtype("CoatAdamW", name, p)
    if not p.is_contiguous():
        raise ValueError(
            f"CoatAdamW: {name} has shape {tuple(p.shape)} and strides {p.stride()}; it must be "
            "contiguous: call .contiguous() on its data"
        )
    state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
    for key in MOMENTS:
        state |= zip((key, f"{key}_amax", f"{key}_k"), new_moment(p), strict=True)
    if master == "bf16_low_bits" and p.dtype == torch.bfloat16:
        state[LOW_BITS] = torch.zeros_like(p, dtype=torch.int16)
    return state


def check_saved(saved: dict[str, Any], name: str, p: Tensor, master: str) -> None:
    """Raise ValueError unless a saved state fits a parameter."""
    expected = {
        key: (t.dtype, t.shape)
        for key, t in new_state(p.detach().to("meta"), name, master).items()
        if key != "step"
    }
    missing = sorted({"step", *expected} - saved.keys())
    if missing:
        raise ValueError(
            f"CoatAdamW: the saved state of {name} has {sorted(saved)} and lacks {missing}; it was "
            "written by another optimizer or with another master=: resume with the same settings, "
            "or start from the model's weights"
        )
    for key, (dtype, shape) in expected.items():
        if (saved[key].dtype, saved[key].shape) != (dtype, shape):
            raise ValueError(
                f"CoatAdamW: the saved {key} of {name} is {saved[key].dtype} of shape "
                f"{tuple(saved[key].shape)}, not {dtype} of shape {tuple(shape)}; resume with the "
                "model and the number of ranks that were saved"
            )


def copy_state(saved: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
    """Copy a saved state to the parameter's device, bit for bit."""
    step = torch.as_tensor(saved["step"], dtype=torch.float32, device=p.device).clone()
    tensors = {
        key: value.detach().clone().to(p.device) for key, value in saved.items() if key != "step"
    }
    return {"step": step, **tensors}


def by_element(state: Mapping[str, Tensor], size: int) -> set[str]:
    """Return the keys of a state that have one entry per element, of ``size`` elements."""
    metadata = {key for moment in MOMENTS for key in _metadata(moment, state)}
    return {
        key
        for key, tensor in state.items()
        if tensor.ndim and tensor.numel() == size and key not in metadata
    }


def decode(
    keys: Collection[str], elements: Collection[str], read: Read, start: int, stop: int
) -> dict[str, Tensor]:
    """Read the elements ``start`` to ``stop`` of a partition, with moments decoded to FP32.

    ``keys`` are all keys of the saved state, ``elements`` the keys of :func:`by_element`.
    """
    values: dict[str, Tensor] = {}
    for key in elements:
        metadata = _metadata(key, keys)
        if not metadata:
            values[key] = read(key, start, stop)
            continue
        first, last = start // GROUP, -(-stop // GROUP)
        amax, k = (read(name, first, last) for name in metadata)
        moment = (read(key, first * GROUP, stop), amax, k)
        values[key] = decode_moment(moment)[start - first * GROUP :]
    return values


def encode(values: Mapping[str, Tensor], keys: Collection[str]) -> dict[str, Tensor]:
    """Encode the values of :func:`decode` over a whole partition into its state.

    Moments with metadata in ``keys`` are quantized, rounded to nearest.
    """
    state: dict[str, Tensor] = {}
    for key, value in values.items():
        metadata = _metadata(key, keys)
        if not metadata:
            state[key] = value
            continue
        state.update(zip((key, *metadata), encode_moment(value), strict=True))
    return state


def _metadata(moment: str, keys: Collection[str]) -> tuple[str, ...]:
    if moment not in MOMENTS:
        return ()
    return tuple(moment + suffix for suffix in _METADATA if moment + suffix in keys)
