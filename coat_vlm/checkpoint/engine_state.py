"""Engine to checkpoint and back, at any number of ranks and any ZeRO stage.

A partition that was saved with the same pieces gets its weights and states back bit for bit. Any
other is put together from the saved partitions that overlap it: weights and FP32 states exactly,
FP8 moments decoded and encoded again in the groups of the new partition.
"""

from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from coat_vlm.checkpoint.partitions import (
    Partition,
    Piece,
    after_reading,
    before_reading,
    frozen_piece,
    is_split,
    model_of,
    optimizer_of,
    partitions,
    persistent_buffers,
)
from coat_vlm.checkpoint.shards import WEIGHT, SavedPartition, Shards, ShardWriter
from coat_vlm.distributed import World
from coat_vlm.optim.state import decoded, encoded


def save_engine(engine: DeepSpeedEngine, writer: ShardWriter, world: World) -> None:
    """Hand this rank's share of weights and optimizer states to a writer.

    What all ranks have alike (all at stage 0, frozen parameters below stage 3) is shared out.

    Args:
        engine: the engine, between two steps.
        writer: where they go.
        world: the processes of the run.

    Raises:
        OSError: a file could not be written.
    """
    optimizer = optimizer_of(engine)
    alike = engine.zero_optimization_stage() == 0
    for number, partition in enumerate(partitions(engine)):
        if not alike or number % world.size == world.rank:
            # Not optimizer.state[...], which would leave an empty state behind.
            state = optimizer.state.get(partition.tensor)
            writer.add(partition.pieces, partition.tensor, state)
    for number, (name, parameter) in enumerate(model_of(engine).named_parameters()):
        if not parameter.requires_grad:
            part = frozen_piece(name, parameter, owner=number % world.size == world.rank)
            if part is not None:
                writer.add((part[1],), part[0])
    if world.is_main:
        for name, buffer in persistent_buffers(model_of(engine)).items():
            writer.add((Piece(name, 0, buffer.numel(), 0),), buffer)


@torch.no_grad()
def load_engine(engine: DeepSpeedEngine, shards: Shards) -> bool:
    """Load weights and optimizer states.

    Args:
        engine: built for the same model and the same parameter groups, before its first step.
        shards: the checkpoint's tensors.

    Returns:
        Whether all of this rank's states are bit for bit those that were saved.

    Raises:
        ValueError: elements are missing.
    """
    optimizer = optimizer_of(engine)
    before_reading(engine)
    exact = True
    for partition in partitions(engine):
        group = optimizer.param_groups[partition.group]
        saved = shards.same(partition.pieces, partition.tensor.numel())
        if saved is not None:
            state = _copied(partition, saved, group)
        else:
            state = _assembled(partition, shards, group)
            exact = False
        if state:
            optimizer.state[partition.tensor] = state
    for name, parameter in model_of(engine).named_parameters():
        if not parameter.requires_grad:
            _fill_frozen(name, parameter, shards)
    for name, buffer in persistent_buffers(model_of(engine)).items():
        buffer.copy_(shards.weight(name, tuple(buffer.shape)))
    after_reading(engine)
    return exact


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
