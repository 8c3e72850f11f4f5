"""Checkpoint metadata: progress, what was trained and whether that fits, RNG state."""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine

from coat_kernels.moment_formats import REMOVED_CODECS
from coat_vlm.checkpoint.atomic_folder import read_json, write_json
from coat_vlm.checkpoint.partitions import full_shape, groups_by_name, persistent_buffers
from coat_vlm.config.fp8 import rounding_of
from coat_vlm.optim.state import codec

_NAME = "contents.json"
FORMAT = 2
"""1 was DeepSpeed's own layout, which could not be read at another number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a stage has got; trainer.json."""

    stage: str
    step: int
    world_size: int
    zero_stage: int
    precision: str
    bad_samples: int
    cursor: tuple[int, int]
    """How far the order of data is used: :class:`coat_data.mixture.sampler.Cursor`."""
    bf16_blocks: list[str] = field(default_factory=list)
    """FP8 blocks that the monitor sent back to BF16."""


def read_progress(checkpoint: Path) -> Progress:
    """trainer.json of a checkpoint."""
    return Progress(**read_json(checkpoint / "trainer.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParameter:
    """A parameter of the model."""

    shape: tuple[int, ...]
    dtype: str
    """Of the weights in training, ``bfloat16``; master weights may be FP32."""
    group: int | None
    """The parameter group that trains it; None where it is frozen."""

    def place(self) -> str:
        """Where it is, in words."""
        return "frozen" if self.group is None else f"in parameter group {self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Parameters and parameter groups of a checkpoint."""

    parameters: dict[str, SavedParameter]
    buffers: dict[str, tuple[int, ...]]
    """Shapes of the buffers that belong to the model's state."""
    groups: list[dict[str, Any]]
    """Per parameter group its ``lr`` and the ``codec`` of its states."""

    def check(self, model: "Contents", where: str) -> None:
        """Refuse a checkpoint that does not fit.

        Args:
            model: what the run has.
            where: the checkpoint, for the error.

        Raises:
            ValueError: it names the first parameter that differs.
        """
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
                raise ValueError(
                    f"{where}: {name} is {saved.place()} in the checkpoint and {ours.place()} in "
                    f"this run; {remedy}"
                )
        self._check_groups(model, where, remedy)

    def _check_groups(self, model: "Contents", where: str, remedy: str) -> None:
        if len(self.groups) != len(model.groups):
            raise ValueError(
                f"{where}: {len(self.groups)} parameter groups were saved, this run has "
                f"{len(model.groups)}; {remedy}"
            )
        for number, (saved, ours) in enumerate(zip(self.groups, model.groups, strict=True)):
            gone = set(REMOVED_CODECS) & set(saved["codec"].split())
            if gone:
                raise ValueError(
                    f"{where}: its optimizer states are {saved['codec']}'s, and codec "
                    f"{gone.pop()!r} was removed from training: finish the stage with the version "
                    "that wrote it, or start a stage from its weights"
                )
            if saved["codec"] != ours["codec"]:
                first = next(n for n, p in model.parameters.items() if p.group == number)
                rounding = rounding_of(saved["codec"])
                if rounding and rounding_of(ours["codec"]) not in (None, rounding):
                    remedy = f"resume with fp8.second_moment={rounding}, as this stage began"
                raise ValueError(
                    f"{where}: the optimizer states of {first} and its parameter group are "
                    f"{saved['codec']}'s, this run has {ours['codec']}; {remedy}"
                )


def write_contents(checkpoint: Path, contents: Contents) -> None:
    """Write contents.json."""
    write_json(checkpoint / _NAME, {"format": FORMAT, **asdict(contents)})


def read_contents(checkpoint: Path) -> Contents:
    """contents.json of a checkpoint.

    Raises:
        ValueError: it is no checkpoint of this layout.
    """
    path = checkpoint / _NAME
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} is no checkpoint that this version reads: it has no {_NAME}; finish its "
            "stage with the version that wrote it, or start the stage again"
        )
    values = read_json(path)
    if values["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {values['format']}, this version reads {FORMAT}; finish the stage "
            "with the version that wrote it"
        )
    parameters = {
        name: SavedParameter(**{**entry, "shape": tuple(entry["shape"])})
        for name, entry in values["parameters"].items()
    }
    buffers = {name: tuple(shape) for name, shape in values["buffers"].items()}
    return Contents(parameters=parameters, buffers=buffers, groups=values["groups"])


def contents_of(engine: DeepSpeedEngine) -> Contents:
    """What a checkpoint of an engine holds."""
    model: Any = engine.module
    optimizer: Any = engine.basic_optimizer
    groups = groups_by_name(engine)
    parameters = {
        name: SavedParameter(
            shape=full_shape(parameter),
            dtype=str(parameter.dtype).removeprefix("torch."),
            group=groups.get(name),
        )
        for name, parameter in model.named_parameters()
    }
    buffers = persistent_buffers(model)
    return Contents(
        parameters=parameters,
        buffers={name: tuple(buffer.shape) for name, buffer in buffers.items()},
        groups=[
            {"codec": codec(optimizer, group), "lr": float(group["lr"])}
            for group in optimizer.param_groups
        ],
    )


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
