"""Describes which elements of which parameters this rank's optimizer updates, at any ZeRO stage.

DeepSpeed (0.19) passes to the optimizer: at stage 0 the parameters or, in BF16, FP32 master
weights; at stages 1 and 2 one flat tensor per parameter group, which is this rank's part of the
concatenated parameters and may begin and end inside a parameter; at stage 3 one flat tensor per
sub-group, with this rank's part of each parameter. This module describes each of these tensors by a
list of :class:`~coat_vlm.checkpoint.shards.Fragment`: a range of elements of one parameter and its
offset in the flat tensor.
"""

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from coat_vlm.checkpoint.metadata import Contents, SavedParameter
from coat_vlm.checkpoint.shards import Fragment


@dataclass(frozen=True, slots=True)
class Partition:
    """A tensor that the optimizer updates."""

    tensor: Tensor
    """Master weights; the key of the optimizer's state."""
    group: int
    fragments: tuple[Fragment, ...]
    """The elements of the tensor; elements outside of all fragments are padding."""


def list_partitions(engine: DeepSpeedEngine) -> list[Partition]:
    """Return the tensors that this rank's optimizer updates, with their fragments."""
    names = _names(engine)
    optimizer: Any = engine.optimizer
    found: list[Partition] = []
    for number, (group, weights) in enumerate(_weights_by_group(engine)):
        fragments: list[Fragment] = []
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            flat, offset = optimizer.fp32_partitioned_groups_flat[number], 0
            for parameter in weights:
                start, size = _own_part(parameter)
                if size:
                    fragments.append(Fragment(names[id(parameter)], start, size, offset))
                offset += parameter.partition_numel()
            found.append(Partition(flat, group, tuple(fragments)))
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            flat = optimizer.single_partition_of_fp32_groups[number]
            for parameter in weights:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    part, offset = mapping.lp_fragment_address, mapping.hp_fragment_address.start
                    name = names[id(parameter)]
                    fragments.append(Fragment(name, part.start, part.numel, offset))
            found.append(Partition(flat, group, tuple(fragments)))
        else:
            unfused = isinstance(optimizer, FP16_UnfusedOptimizer)
            master_weights = optimizer.fp32_groups[number] if unfused else weights
            for weight, master_weight in zip(weights, master_weights, strict=True):
                whole = Fragment(names[id(weight)], 0, weight.numel(), 0)
                found.append(Partition(master_weight, group, (whole,)))
    return found


def map_parameter_groups(engine: DeepSpeedEngine) -> dict[str, int]:
    """Map the name of each trainable parameter to the index of its parameter group."""
    names = _names(engine)
    return {names[id(p)]: group for group, weights in _weights_by_group(engine) for p in weights}


def _weights_by_group(engine: DeepSpeedEngine) -> list[tuple[int, list[Any]]]:
    """Return parameter group indices with the model's parameters; at stage 3 per sub-group."""
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
        f"checkpoints do not support DeepSpeed's {type(optimizer).__name__}; use zero_stage 0 to 3 "
        "with the optimizers of a recipe"
    )


def _names(engine: DeepSpeedEngine) -> dict[int, str]:
    model: Any = engine.module
    return {id(parameter): name for name, parameter in model.named_parameters()}


def is_partitioned(parameter: Tensor) -> bool:
    """Whether stage 3 has partitioned a parameter over the ranks."""
    return hasattr(parameter, "ds_tensor")


def get_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in the model's state dict."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {k: v for k, v in model.state_dict().items() if k not in parameters}


def get_frozen_fragment(name: str, parameter: Any, owner: bool) -> tuple[Tensor, Fragment] | None:
    """Return the flat part of a frozen, not gathered parameter that this rank saves, or None.

    ``owner``: whether this rank saves replicated parameters.
    """
    if not is_partitioned(parameter):
        whole = parameter.detach().reshape(-1)
        return (whole, Fragment(name, 0, whole.numel(), 0)) if owner else None
    start, size = _own_part(parameter)
    return (get_own_values(parameter), Fragment(name, start, size, 0)) if size else None


def get_own_values(parameter: Any) -> Tensor:
    """Return the flat elements of a parameter that this rank has, without stage 3's padding."""
    if not is_partitioned(parameter):
        return parameter.detach().flatten()
    return parameter.ds_tensor.detach().flatten()[: _own_part(parameter)[1]]


@torch.no_grad()
def finish_load(engine: DeepSpeedEngine) -> None:
    """Copy the master weights to the model's weights, as DeepSpeed does after a step."""
    optimizer: Any = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for group, flat in enumerate(optimizer.fp16_partitioned_groups_flat):
            flat.data.copy_(optimizer.fp32_partitioned_groups_flat[group].data)
        optimizer.checkpoint_event_epilogue()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for weights, master_weights in zip(
            optimizer.fp16_groups, optimizer.fp32_groups, strict=True
        ):
            for weight, master_weight in zip(weights, master_weights, strict=True):
                weight.data.copy_(master_weight.data)


def _own_part(parameter: Any) -> tuple[int, int]:
    """Return start and size of this rank's part of a parameter at stage 3, without padding."""
    length = parameter.partition_numel()
    start = length * torch.distributed.get_rank(parameter.ds_process_group)
    return start, max(0, min(length, parameter.ds_numel - start))


def describe_contents(engine: DeepSpeedEngine) -> Contents:
    """Describe the parameters and parameter groups of an engine."""
    model: Any = engine.module
    optimizer: Any = engine.basic_optimizer
    groups = map_parameter_groups(engine)
    parameters = {
        name: SavedParameter(
            shape=tuple(getattr(parameter, "ds_shape", parameter.shape)),  # stage 3: partitioned
            dtype=str(parameter.dtype).removeprefix("torch."),
            group=groups.get(name),
        )
        for name, parameter in model.named_parameters()
    }
    buffers = get_persistent_buffers(model)
    settings = []
    for group in optimizer.param_groups:
        states = " ".join(filter(None, [type(optimizer).__name__, group.get("master")]))
        settings.append({"states": states, "lr": float(group["lr"])})
    return Contents(
        parameters=parameters,
        buffers={name: tuple(buffer.shape) for name, buffer in buffers.items()},
        groups=settings,
    )
