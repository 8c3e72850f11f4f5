"""Loads the newest complete checkpoint into an engine of any number of ranks and ZeRO stage.

With the same number of ranks and ZeRO stage a run continues bit for bit: a partition that was saved
with the same fragments is copied. Any other partition is assembled from the saved partitions that
overlap it: weights and FP32 states exactly, FP8 moments requantized in the groups of the new
partition. Saved weights are read as FP32 master weights; an optimizer with low bits splits them.
Both directions are exact, so ``master_weights`` may change. The order of samples is a function of
the seed and of the sampler state, which is saved and does not depend on the number of ranks.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from coat_kernels.master_weights import split_master
from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.checkpoint.manifest import read_manifest
from coat_vlm.checkpoint.metadata import (
    Progress,
    read_contents,
    read_progress,
    restore_random_state,
)
from coat_vlm.checkpoint.partitions import (
    Partition,
    describe_contents,
    finish_load,
    get_frozen_fragment,
    get_persistent_buffers,
    is_partitioned,
    list_partitions,
)
from coat_vlm.checkpoint.shards import WEIGHT, SavedPartition, Shards
from coat_vlm.checkpoint.verify import find_damage
from coat_vlm.distributed import ALONE, World
from coat_vlm.optim.state import LOW_BITS, decode, encode, new_state

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """The newest complete checkpoint of a stage, and what is wrong with newer ones."""

    path: Path | None = None
    """None if no checkpoint was saved yet."""
    damaged: tuple[str, ...] = ()
    """Names of the damaged checkpoints that are newer."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a stage, newest first; some may be damaged."""
    return sorted(filter(path_step, folder.glob("step-*")), key=path_step, reverse=True)


def path_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint; 0 if it is not a checkpoint's name."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else 0


def find_checkpoint(folder: Path, world: World = ALONE) -> FoundCheckpoint:
    """Find the newest complete checkpoint of a stage; damaged ones are skipped with a warning.

    The ranks share the reading and hashing of all files. Raises ValueError if all checkpoints are
    damaged, a rank does not see rank 0's files, or a checkpoint has another format version.
    """
    problems: dict[str, str] = {}
    for name in world.run_on_rank0(lambda: [path.name for path in list_checkpoints(folder)]):
        path = folder / name
        problem = find_damage(path, world)
        if problem is None:
            return FoundCheckpoint(path=path, damaged=tuple(problems))
        problems[name] = problem
        if world.is_main:
            logger.warning("checkpoint %s is not used: %s", path, problem)
    if problems:
        details = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ValueError(
            f"no checkpoint in {folder} is complete: {details}; restore complete copies, or delete "
            "the folder to start the stage again"
        )
    return FoundCheckpoint()


def load_checkpoint(
    checkpoint: Path, engine: DeepSpeedEngine, expected: Progress, world: World
) -> Progress:
    """Load weights, optimizer states and random generator states of a checkpoint.

    ``engine`` is built for the same stage; of ``expected`` only stage and precision are used.
    Raises ValueError if the checkpoint is of another stage, precision, model or optimizer.
    """
    contents = read_contents(checkpoint)
    progress = world.run_on_rank0(lambda: read_progress(checkpoint))
    for name in ("stage", "precision"):
        saved, needed = getattr(progress, name), getattr(expected, name)
        if saved != needed:
            raise ValueError(
                f"{checkpoint} was saved with {name}={saved}, this run has {name}={needed}; resume "
                f"with {name}={saved}, or start a new run with init_from"
            )
    contents.check(describe_contents(engine), str(checkpoint))
    load_engine_state(engine, Shards(checkpoint))
    optimizer: Any = engine.basic_optimizer
    for group, settings in zip(optimizer.param_groups, contents.groups, strict=True):
        group["lr"] = settings["lr"]
    random_state = f"random-{world.rank:05d}.json"
    if random_state in read_manifest(checkpoint):
        restore_random_state(read_json(checkpoint / random_state))
    else:  # more ranks than saved: dropout must not repeat the masks of the first steps
        torch.manual_seed(torch.initial_seed() + 1_000_003 * progress.step)
    return progress


@torch.no_grad()
def load_engine_state(engine: DeepSpeedEngine, shards: Shards) -> None:
    """Load weights and optimizer states into an engine."""
    model: Any = engine.module
    optimizer: Any = engine.basic_optimizer
    if engine.zero_optimization_stage() == 3:  # discard gathered copies of parameters
        zero3: Any = engine.optimizer
        zero3.checkpoint_event_prologue()
    for partition in list_partitions(engine):
        group = optimizer.param_groups[partition.group]
        saved = shards.find_identical(partition.fragments, partition.tensor.numel())
        if saved is not None:
            state = _copy_state(partition, saved, group)
        else:
            state = _assemble_state(partition, shards, group)
        if state:
            optimizer.state[partition.tensor] = state
    for name, parameter in model.named_parameters():
        part = None if parameter.requires_grad else get_frozen_fragment(name, parameter, owner=True)
        if part is not None:
            own, fragment = part
            # The parameter itself may be non-contiguous, so that `own` is a copy.
            target = own if is_partitioned(parameter) else parameter
            target.copy_(shards.read_values(fragment).view(target.shape))
    for name, buffer in get_persistent_buffers(model).items():
        buffer.copy_(shards.read_parameter(name, tuple(buffer.shape)))
    finish_load(engine)


def _copy_state(
    partition: Partition, saved: SavedPartition, group: dict[str, Any]
) -> dict[str, Any]:
    master = partition.tensor
    state: dict[str, Any] = dict(saved.numbers)
    for key in saved.elements:
        state[key] = saved.tensor(key).view(master.shape).to(master.device)
    for key in saved.others:
        state[key] = _move_to_device(saved.tensor(key), key in saved.on_cpu, master, group)
    return _set_weights(master, saved.tensor(WEIGHT), state, group)


def _set_weights(
    master: Tensor, values: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> dict[str, Any]:
    """Copy flat weights into a partition; return its state, with their low bits if it has them."""
    values = values.view(master.shape)
    if group.get("master") != "bf16_low_bits" or master.dtype != torch.bfloat16:
        master.copy_(values)
        return state
    rounded, low_bits = split_master(values.float())
    master.copy_(rounded)
    if not state:  # no gradient yet
        state = new_state(master, "a saved partition", group["master"])
    return {**state, LOW_BITS: low_bits.to(master.device)}


def _assemble_state(partition: Partition, shards: Shards, group: dict[str, Any]) -> dict[str, Any]:
    master = partition.tensor
    weights = torch.zeros(master.numel(), device=master.device)  # FP32; padding is zero
    values: dict[str, Tensor] = {}
    sources: list[SavedPartition] = []
    for fragment in partition.fragments:
        for saved, first, position, count in shards.find_overlaps(fragment):
            here = slice(fragment.offset + position, fragment.offset + position + count)
            weights[here] = saved.read(WEIGHT, first, first + count).to(master.device)
            if not saved.keys:
                continue  # no gradient yet, so the state is zero
            sources.append(saved)
            read = partial(saved.read, device=master.device)  # dequantizing is faster on a GPU
            parts = decode(saved.keys, saved.elements, read, first, first + count)
            for key, part in parts.items():
                if key not in values:
                    values[key] = torch.zeros(
                        master.numel(), dtype=part.dtype, device=master.device
                    )
                values[key][here] = part
    if not sources:
        return _set_weights(master, weights, {}, group)
    # Step counts differ if some parameters had no gradient at first.
    state = {key: max(s.numbers[key] for s in sources) for key in sources[0].numbers}
    for key, value in encode(values, sources[0].keys).items():
        state[key] = value.view(master.shape) if key in values else value
    for key in sources[0].others - state.keys():
        newest = torch.stack([s.tensor(key) for s in sources]).amax(0)
        state[key] = _move_to_device(newest, key in sources[0].on_cpu, master, group)
    return _set_weights(master, weights, state, group)


def _move_to_device(tensor: Tensor, on_cpu: bool, master: Tensor, group: dict[str, Any]) -> Tensor:
    """Move a state that is not per element, such as a step count, to the optimizer's device."""
    # CoatAdamW and torch's fused AdamW count steps on the device, torch's other one on the CPU.
    counts_on_device = group.get("fused") or group.get("master")
    return tensor if on_cpu and not counts_on_device else tensor.to(master.device)
