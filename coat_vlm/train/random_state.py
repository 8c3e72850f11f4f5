"""The random generators of a process, as plain data."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, ready for JSON."""
    version, keys, gauss = random.getstate()
    numpy_state: Mapping[str, Any] = np.random.get_state(legacy=False)
    state = numpy_state["state"]
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "python": [version, list(keys), gauss],
        "numpy": [state["key"].tolist(), int(state["pos"])],
        "torch": _hex(torch.get_rng_state()),
        "cuda": None if cuda is None else _hex(cuda),
    }


def set_random_state(saved: Mapping[str, Any]) -> None:
    """Put the generators into a state from :func:`random_state`."""
    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    keys, position = saved["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    torch.set_rng_state(_bytes(saved["torch"]))
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(saved["cuda"]))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
