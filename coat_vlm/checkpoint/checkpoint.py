"""Checkpoints of a stage: everything that a continuation needs, at any number of ranks.

``RUN/<stage>/checkpoints/step-00000100/`` holds

- ``trainer.json``: how far the stage had got (:class:`Progress`);
- ``contents.json``: names, shapes and dtypes of all parameters, settings of the parameter groups;
- ``rank-*.json`` and ``rank-*.safetensors``: weights and optimizer states (:mod:`.shards`);
- ``random-*.json``: each rank's random generators;
- ``model/``: configuration, tokenizer and processor, for ``coat-vlm export``;
- ``manifest.json``: the size and SHA-256 of each of these files.

At the same number of ranks and ZeRO stage a run continues bit for bit. Of the order of data only
the cursor is saved; it follows from the seed and holds for any number of ranks.

contents.json: what a checkpoint holds, compared before anything is loaded.

The random generators of a process, as plain data.
"""

import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine

from coat_kernels.codecs import REMOVED_CODECS
from coat_vlm.checkpoint.engine_state import load_engine, save_engine
from coat_vlm.checkpoint.folder import problem_inside, remove_folder, write_folder
from coat_vlm.checkpoint.partitions import (
    full_shape,
    groups_by_name,
    model_of,
    optimizer_of,
    persistent_buffers,
)
from coat_vlm.checkpoint.shards import Shards, ShardWriter
from coat_vlm.config.fp8 import rounding_of
from coat_vlm.distributed import ALONE, World
from coat_vlm.optim.moments import codec

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


logger = logging.getLogger(__name__)


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


def save_checkpoint(
    folder: Path,
    engine: DeepSpeedEngine,
    progress: Progress,
    world: World,
    keep: int,
    describe: Callable[[Path], None] | None = None,
) -> Path:
    """Save a checkpoint, then delete the oldest ones beyond ``keep``.

    Later steps are deleted, too: this run was continued from before them because they are damaged.

    Args:
        folder: the stage's checkpoints folder.
        engine: model and optimizer, between two steps.
        progress: written as trainer.json.
        world: the processes of the run.
        keep: complete checkpoints to keep.
        describe: writes configuration, tokenizer and processor into a folder; for the main process.

    Raises:
        OSError: the checkpoint could not be written; earlier ones are untouched.
    """
    target = folder / f"step-{progress.step:08d}"

    def write(temporary: Path) -> None:
        writer = ShardWriter(temporary, world.rank)
        save_engine(engine, writer, world)
        writer.close()
        _write_json(temporary / f"random-{world.rank:05d}.json", random_state())
        if world.is_main:
            write_contents(temporary, _contents(engine))
            _write_json(temporary / "trainer.json", asdict(progress))
            if describe is not None:
                (temporary / "model").mkdir()
                describe(temporary / "model")

    write_folder(target, world, write)
    if world.is_main:
        steps = checkpoints_in(folder)
        place = steps.index(target)
        for path in [*steps[:place], *steps[place + keep :]]:
            remove_folder(path)
    return target


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a stage, newest first; some may be damaged."""
    return sorted(folder.glob("step-*"), reverse=True)


def latest_checkpoint(folder: Path, world: World = ALONE) -> Path | None:
    """The newest whole checkpoint of a stage; damaged ones are passed over with a warning.

    Every file of it is read and compared with its SHA-256.

    Args:
        folder: the stage's checkpoints folder.
        world: the processes that share the reading; all must call this.

    Returns:
        None where no checkpoint was saved yet.

    Raises:
        ValueError: there are checkpoints, but all are damaged.
    """
    problems = []
    for path in checkpoints_in(folder):
        problem = problem_inside(path, world)
        if problem is None:
            return path
        problems.append(f"{path.name}: {problem}")
        if world.is_main:
            logger.warning(
                "checkpoint %s is not used: %s; it is deleted when the next one is saved",
                path,
                problem,
            )
    if problems:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(problems)}; put whole copies there, "
            "or delete the folder to start the stage again"
        )
    return None


def read_progress(checkpoint: Path) -> Progress:
    """trainer.json of a checkpoint."""
    return Progress(**json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8")))


def load_checkpoint(
    checkpoint: Path, engine: DeepSpeedEngine, expected: Progress, world: World
) -> Progress:
    """Put engine and random generators into the checkpoint's state.

    The number of ranks and the ZeRO stage may be others than those that saved: then FP8 moments are
    rounded once more, to the groups of the new partitions; weights and FP32 moments stay exact.

    Args:
        checkpoint: a whole checkpoint.
        engine: built for the same stage of the same recipe, before its first step.
        expected: what this run is; only stage and precision are compared.
        world: the processes of the run.

    Returns:
        How far the stage had got.

    Raises:
        ValueError: the checkpoint is of another stage, precision, model or optimizer.
    """
    contents = read_contents(checkpoint)  # first: it says so if an earlier version wrote this
    progress = read_progress(checkpoint)
    for name in ("stage", "precision"):
        saved, wanted = getattr(progress, name), getattr(expected, name)
        if saved != wanted:
            raise ValueError(
                f"{checkpoint} was saved with {name}={saved}, this run has {name}={wanted}; resume "
                f"with {name}={saved}, or start a new run with init_from"
            )
    contents.check(_contents(engine), str(checkpoint))
    load_engine(engine, Shards(checkpoint))
    for group, settings in zip(_groups(engine), contents.groups, strict=True):
        _set_lr(group, settings["lr"])
    path = checkpoint / f"random-{world.rank:05d}.json"
    if path.is_file():
        set_random_state(json.loads(path.read_text(encoding="utf-8")))
    else:  # more ranks than saved: dropout must not repeat what it drew in the first steps
        torch.manual_seed(torch.initial_seed() + 1_000_003 * progress.step)
    return progress


def _contents(engine: DeepSpeedEngine) -> Contents:
    groups = groups_by_name(engine)
    parameters = {
        name: SavedParameter(
            shape=full_shape(parameter),
            dtype=str(parameter.dtype).removeprefix("torch."),
            group=groups.get(name),
        )
        for name, parameter in model_of(engine).named_parameters()
    }
    settings = [
        {"codec": codec(optimizer_of(engine), group), "lr": float(group["lr"])}
        for group in _groups(engine)
    ]
    buffers = {
        name: tuple(buffer.shape) for name, buffer in persistent_buffers(model_of(engine)).items()
    }
    return Contents(parameters=parameters, buffers=buffers, groups=settings)


def _groups(engine: DeepSpeedEngine) -> list[dict[str, Any]]:
    return optimizer_of(engine).param_groups


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)  # an optimizer that is captured in a CUDA graph keeps its tensor
    else:
        group["lr"] = lr


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
