"""Which elements of which parameters this rank's optimizer updates, at every ZeRO stage.

What DeepSpeed (0.19) lets the optimizer see: at stage 0 the parameters or, in BF16, an FP32 copy of
each; at stages 1 and 2 one flat tensor per parameter group, this rank's part of all its parameters
in a row, which cuts them anywhere; at stage 3 one flat tensor per sub-group, with this rank's part
of each parameter in turn. All become lists of :class:`Piece`, which say the same in one way: a run
of elements of one parameter, and where it lies in a flat tensor.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn


class Piece(NamedTuple):
    """Elements ``start`` to ``start + size`` of a flattened parameter."""

    name: str
    """The parameter's."""
    start: int
    """First element, counted in the parameter."""
    size: int
    """Number of elements."""
    offset: int
    """Where they begin in the tensor that holds them."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A tensor that the optimizer updates."""

    tensor: Tensor
    """Master weights; the key of the optimizer's state."""
    group: int
    """Index of its parameter group."""
    pieces: tuple[Piece, ...]
    """Which elements of which parameters it holds; gaps and the end are padding."""


def partitions(engine: DeepSpeedEngine) -> list[Partition]:
    """This rank's master weights.

    Raises:
        ValueError: DeepSpeed wraps the optimizer in a way that is not known here.
    """
    names = _names(engine)
    optimizer: Any = engine.optimizer
    found: list[Partition] = []
    for number, (group, weights) in enumerate(_weights_by_group(engine)):
        pieces: list[Piece] = []
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            flat, offset = optimizer.fp32_partitioned_groups_flat[number], 0
            for parameter in weights:
                start, size = _own_part(parameter)
                if size:
                    pieces.append(Piece(names[id(parameter)], start, size, offset))
                offset += parameter.partition_numel()
            found.append(Partition(flat, group, tuple(pieces)))
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            flat = optimizer.single_partition_of_fp32_groups[number]
            for parameter in weights:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    part, place = mapping.lp_fragment_address, mapping.hp_fragment_address
                    pieces.append(Piece(names[id(parameter)], part.start, part.numel, place.start))
            found.append(Partition(flat, group, tuple(pieces)))
        else:
            unfused = isinstance(optimizer, FP16_UnfusedOptimizer)
            masters = optimizer.fp32_groups[number] if unfused else weights
            for weight, master in zip(weights, masters, strict=True):
                whole = Piece(names[id(weight)], 0, weight.numel(), 0)
                found.append(Partition(master, group, (whole,)))
    return found


def groups_by_name(engine: DeepSpeedEngine) -> dict[str, int]:
    """The parameter group of each parameter that trains."""
    names = _names(engine)
    return {names[id(p)]: group for group, weights in _weights_by_group(engine) for p in weights}


def _weights_by_group(engine: DeepSpeedEngine) -> list[tuple[int, list[Any]]]:
    """Index of a parameter group, and the model's parameters in it; at stage 3 per sub-group."""
    optimizer: Any = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        groups = optimizer.sub_group_to_group_id
        return [(groups[number], part) for number, part in enumerate(optimizer.fp16_groups)]
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(enumerate(optimizer.bit16_groups))
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return list(enumerate(optimizer.fp16_groups))
    if optimizer is engine.basic_optimizer:
        return [(i, group["params"]) for i, group in enumerate(optimizer.param_groups)]
    raise ValueError(
        f"checkpoints: DeepSpeed made a {type(optimizer).__name__}, whose master weights are not "
        "known here; use zero_stage 0 to 3 with the optimizers of a recipe"
    )


def _names(engine: DeepSpeedEngine) -> dict[int, str]:
    """The (first) name of each parameter by its id."""
    model: Any = engine.module
    return {id(parameter): name for name, parameter in model.named_parameters()}


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """A parameter's shape, also where stage 3 has split it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_split(parameter: Tensor) -> bool:
    """Whether stage 3 has split a parameter over the ranks."""
    return hasattr(parameter, "ds_tensor")


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {k: v for k, v in model.state_dict().items() if k not in parameters}


def frozen_piece(name: str, parameter: Any, owner: bool) -> tuple[Tensor, Piece] | None:
    """The part of a frozen parameter that this rank saves, flat, or None.

    Args:
        name: the parameter's name.
        parameter: the parameter, not gathered.
        owner: whether this rank saves it where all ranks have the whole.
    """
    if not is_split(parameter):
        whole = parameter.detach().reshape(-1)
        return (whole, Piece(name, 0, whole.numel(), 0)) if owner else None
    start, size = _own_part(parameter)
    if size == 0:
        return None
    return parameter.ds_tensor.detach().reshape(-1)[:size], Piece(name, start, size, 0)


def before_reading(engine: DeepSpeedEngine) -> None:
    """Let no gathered copy of a split parameter outlive new weights."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        engine.optimizer.checkpoint_event_prologue()


@torch.no_grad()
def after_reading(engine: DeepSpeedEngine) -> None:
    """Give the model the master weights, as DeepSpeed does after a step."""
    optimizer: Any = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for group, flat in enumerate(optimizer.fp16_partitioned_groups_flat):
            flat.data.copy_(optimizer.fp32_partitioned_groups_flat[group].data)
        optimizer.checkpoint_event_epilogue()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)


def _own_part(parameter: Any) -> tuple[int, int]:
    """First element and number of elements of this rank's part at stage 3, without padding."""
    length = parameter.partition_numel()
    start = length * torch.distributed.get_rank(parameter.ds_process_group)
    return start, max(0, min(length, parameter.ds_numel - start))
