"""contents.json: what a checkpoint holds, compared before anything is loaded."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coat_vlm.moment_config import rounding_of

_NAME = "contents.json"
FORMAT = 2
"""1 was DeepSpeed's own layout, which could not be read at another number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParameter:
    """A parameter of the model."""

    shape: tuple[int, ...]
    dtype: str
    """Of the weights in training, ``bfloat16``; master weights may be FP32."""
    group: int | None
    """The parameter group that trains it; None where it is frozen."""


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
                    f"{where}: {name} is {_place(saved)} in the checkpoint and {_place(ours)} in "
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
            if saved["codec"] != ours["codec"]:
                first = next(n for n, p in model.parameters.items() if p.group == number)
                rounding = rounding_of(saved["codec"])
                if rounding and rounding_of(ours["codec"]) not in (None, rounding):
                    remedy = f"resume with fp8.second_moment={rounding}, as this stage began"
                raise ValueError(
                    f"{where}: the optimizer states of {first} and its parameter group are "
                    f"{saved['codec']}'s, this run has {ours['codec']}; {remedy}"
                )


def _place(parameter: SavedParameter) -> str:
    return "frozen" if parameter.group is None else f"in parameter group {parameter.group}"


def write_contents(checkpoint: Path, contents: Contents) -> None:
    """Write contents.json."""
    text = json.dumps({"format": FORMAT, **asdict(contents)}, indent=1)
    (checkpoint / _NAME).write_text(text, encoding="utf-8")


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
    values = json.loads(path.read_text(encoding="utf-8"))
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
