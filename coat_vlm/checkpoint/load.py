"""Loading: the newest whole checkpoint, into an engine of any number of ranks and ZeRO stage.

At the same number of ranks and ZeRO stage a run continues bit for bit: a partition that was saved
with the same pieces gets its weights and states back as they were. Any other is put together from
the saved partitions that overlap it: weights and FP32 states exactly, FP8 moments decoded and
encoded again in the groups of the new partition. Of the order of data only the cursor is saved; it
follows from the seed and holds for any number of ranks.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from coat_vlm.checkpoint.atomic_folder import problem_inside, read_json
from coat_vlm.checkpoint.metadata import (
    Progress,
    contents_of,
    read_contents,
    read_progress,
    set_random_state,
)
from coat_vlm.checkpoint.partitions import (
    Partition,
    after_reading,
    before_reading,
    frozen_piece,
    is_split,
    partitions,
    persistent_buffers,
)
from coat_vlm.checkpoint.shards import WEIGHT, SavedPartition, Shards
from coat_vlm.distributed import ALONE, World
from coat_vlm.optim.state import decoded, encoded

logger = logging.getLogger(__name__)


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
    contents.check(contents_of(engine), str(checkpoint))
    load_engine(engine, Shards(checkpoint))
    optimizer: Any = engine.basic_optimizer
    for group, settings in zip(optimizer.param_groups, contents.groups, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(settings["lr"])  # a CUDA graph of the optimizer keeps its tensor
        else:
            group["lr"] = settings["lr"]
    path = checkpoint / f"random-{world.rank:05d}.json"
    if path.is_file():
        set_random_state(read_json(path))
    else:  # more ranks than saved: dropout must not repeat what it drew in the first steps
        torch.manual_seed(torch.initial_seed() + 1_000_003 * progress.step)
    return progress


@torch.no_grad()
def load_engine(engine: DeepSpeedEngine, shards: Shards) -> None:
    """Load weights and optimizer states.

    Args:
        engine: built for the same model and the same parameter groups, before its first step.
        shards: the checkpoint's tensors.

    Raises:
        ValueError: elements are missing.
    """
    model: Any = engine.module
    optimizer: Any = engine.basic_optimizer
    before_reading(engine)
    for partition in partitions(engine):
        group = optimizer.param_groups[partition.group]
        saved = shards.same(partition.pieces, partition.tensor.numel())
        if saved is not None:
            state = _copied(partition, saved, group)
        else:
            state = _assembled(partition, shards, group)
        if state:
            optimizer.state[partition.tensor] = state
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            _fill_frozen(name, parameter, shards)
    for name, buffer in persistent_buffers(model).items():
        buffer.copy_(shards.weight(name, tuple(buffer.shape)))
    after_reading(engine)


def _copied(partition: Partition, saved: SavedPartition, group: dict[str, Any]) -> dict[str, Any]:
    """Fill the weights and return the state, as they were saved."""
    master = partition.tensor
    master.copy_(saved.tensor(WEIGHT).view(master.shape))
    state: dict[str, Any] = dict(saved.numbers)
    for key in saved.elements:
        state[key] = saved.tensor(key).view(master.shape).to(master.device)
    for key in saved.others:
        state[key] = _placed(saved.tensor(key), key in saved.on_cpu, master, group)
    return state


def _assembled(partition: Partition, shards: Shards, group: dict[str, Any]) -> dict[str, Any]:
    """Fill the weights and return the state, from all saved partitions that overlap."""
    master = partition.tensor
    weights = master.new_zeros(master.numel())  # padding is zero
    values: dict[str, Tensor] = {}
    sources: list[SavedPartition] = []
    for piece in partition.pieces:
        for saved, first, place, count in shards.overlaps(piece):
            here = slice(piece.offset + place, piece.offset + place + count)
            weights[here] = saved.read(WEIGHT, first, first + count).to(master.device)
            if not saved.keys:
                continue  # its parameters had no gradient yet: zeros
            sources.append(saved)
            read = partial(saved.read, device=master.device)  # a GPU decodes faster
            parts = decoded(saved.keys, saved.elements, read, first, first + count, group)
            for key, part in parts.items():
                if key not in values:
                    values[key] = torch.zeros(
                        master.numel(), dtype=part.dtype, device=master.device
                    )
                values[key][here] = part
    master.copy_(weights.view(master.shape))
    if not sources:
        return {}
    # Parameters that had no gradient at first may have counted fewer steps than others.
    state = {key: max(s.numbers[key] for s in sources) for key in sources[0].numbers}
    for key, value in encoded(values, sources[0].keys, group).items():
        state[key] = value.view(master.shape) if key in values else value
    for key in sources[0].others - state.keys():
        newest = torch.stack([s.tensor(key) for s in sources]).amax(0)
        state[key] = _placed(newest, key in sources[0].on_cpu, master, group)
    return state


def _placed(tensor: Tensor, on_cpu: bool, master: Tensor, group: dict[str, Any]) -> Tensor:
    """A state without an entry per element, where the optimizer wants it."""
    # CoatAdamW and torch's fused and capturable optimizers count steps on the device, others on the
    # CPU.
    counts_on_device = group.get("fused") or group.get("capturable") or group.get("codec")
    return tensor if on_cpu and not counts_on_device else tensor.to(master.device)


def _fill_frozen(name: str, parameter: Tensor, shards: Shards) -> None:
    part = frozen_piece(name, parameter, owner=True)
    if part is None:
        return
    held, wanted = part
    values = torch.empty_like(held)
    for saved, first, place, count in shards.overlaps(wanted):
        values[place : place + count] = saved.read(WEIGHT, first, first + count).to(held.device)
    if is_split(parameter):
        held.copy_(values)
    else:
        parameter.copy_(values.view(parameter.shape))  # also where it is not contiguous
