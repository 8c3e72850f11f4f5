"""Checkpoint metadata: progress, parameters and parameter groups, states of random generators.

It does not import DeepSpeed: models are read and recipes are checked without it.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import TypeAdapter

from coat_vlm.checkpoint.atomic_folder import read_json

CONTENTS = "contents.json"
TRAINER = "trainer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a stage; saved as trainer.json."""

    stage: str
    step: int
    world_size: int
    zero_stage: int
    precision: str
    bad_samples: int
    sampler_state: tuple[int, int]
    """A :class:`coat_data.mixture.sampler.SamplerState`."""
    gradient_sums: Literal["bf16", "fp32", "stochastic"] = "bf16"
    """How the gradients of micro-batches are summed (``train/gradient_sums.py``)."""
    spike: bool = False
    """Whether loss or gradient norm had diverged; such a checkpoint never replaces another."""


def read_progress(checkpoint: Path) -> Progress:
    """Read trainer.json of a checkpoint."""
    return Progress(**read_json(checkpoint / TRAINER))


def is_spike(checkpoint: Path) -> bool:
    """Return whether a checkpoint is marked; False if it cannot be read."""
    try:
        return bool(read_json(checkpoint / TRAINER).get("spike", False))
    except (OSError, ValueError, AttributeError):  # it is damaged, or of another process
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParameter:
    """A parameter of the model."""

    shape: tuple[int, ...]
    dtype: str
    """Dtype of the model's weight, such as ``bfloat16``; the master weight may be FP32."""
    group: int | None
    """Index of the parameter group; None if the parameter is frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Parameters and parameter groups of a checkpoint."""

    parameters: dict[str, SavedParameter]
    buffers: dict[str, tuple[int, ...]]
    """Shapes of the persistent buffers."""
    groups: list[dict[str, Any]]
    """For each parameter group ``lr`` and ``states``, how the optimizer states are stored."""

    def check(self, model: "Contents", where: str) -> None:
        """Raise ValueError, naming the first difference, if a run does not fit this checkpoint."""
        remedy = (
            "resume with the run's own recipe.yaml, or start a new run from exported weights "
            "(coat-vlm export, init_from)"
        )
        for name in sorted(self.parameters.keys() ^ model.parameters.keys()):
            place = "the checkpoint" if name in self.parameters else "the model"
            raise ValueError(f"{where}: only {place} has a parameter {name}; {remedy}")
        for name, ours in model.parameters.items():
            saved = self.parameters[name]
            if saved.shape != ours.shape:
                raise ValueError(
                    f"{where}: {name} has shape {saved.shape}, in this run {ours.shape}; {remedy}"
                )
            if saved.group != ours.group:
                before, now = (
                    "frozen" if group is None else f"in parameter group {group}"
                    for group in (saved.group, ours.group)
                )
                raise ValueError(
                    f"{where}: {name} is {before} in the checkpoint and {now} in this run; {remedy}"
                )
        if len(self.groups) != len(model.groups):
            raise ValueError(
                f"{where}: {len(self.groups)} parameter groups were saved, this run has "
                f"{len(model.groups)}; {remedy}"
            )
        for number, (saved, ours) in enumerate(zip(self.groups, model.groups, strict=True)):
            if _moments(saved["states"]) != _moments(ours["states"]):
                first = next(n for n, p in model.parameters.items() if p.group == number)
                raise ValueError(
                    f"{where}: the optimizer states of {first} and its parameter group were saved "
                    f"by {saved['states']}, this run has {ours['states']}; {remedy}"
                )


def _moments(states: str) -> str:
    """Return the optimizer: low bits and FP32 copies are converted into each other."""
    return states.replace(" bf16_low_bits", " fp32")


def read_contents(checkpoint: Path) -> Contents:
    """Read contents.json of a checkpoint."""
    return TypeAdapter(Contents).validate_python(read_json(checkpoint / CONTENTS))


def capture_random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's random generators, ready for JSON."""
    version, keys, gauss = random.getstate()
    numpy_state: Mapping[str, Any] = np.random.get_state(legacy=False)
    state = numpy_state["state"]
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "python": [version, list(keys), gauss],
        "numpy": [state["key"].tolist(), int(state["pos"])],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": None if cuda is None else cuda.numpy().tobytes().hex(),
    }


def restore_random_state(saved: Mapping[str, Any]) -> None:
    """Restore the states that :func:`capture_random_state` returned."""
    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    keys, position = saved["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    torch.set_rng_state(_bytes(saved["torch"]))
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(saved["cuda"]))


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
