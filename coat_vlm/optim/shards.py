"""Lets an optimizer of plain tensors work on sharded ones: on FSDP2's ``DTensor`` parameters.

``fully_shard`` gives the optimizer parameters of which each rank holds a part. Nothing in AdamW
mixes elements but the groups that share a scale, so every rank updates its part alone, and its
groups and states are those of its part. Another number of ranks cuts the groups elsewhere: a saved
state belongs to the number of ranks that wrote it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a ``DTensor``, sharing its memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()


@contextmanager
def local_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer's sharded parameters, gradients and states' keys are local tensors.

    A rank's part may be empty; it then has no gradient, and is passed over.

    Args:
        optimizer: restored at the end, with the states that were made inside.
    """
    swapped: list[tuple[list[Any], int, DTensor, Tensor]] = []
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if not isinstance(parameter, DTensor):
                continue
            part = local(parameter)
            if parameter.grad is not None and part.numel():
                part.grad = local(parameter.grad)
            if parameter in optimizer.state:
                optimizer.state[part] = optimizer.state.pop(parameter)
            group["params"][index] = part
            swapped.append((group["params"], index, parameter, part))
    try:
        yield
    finally:
        for parameters, index, parameter, part in swapped:
            parameters[index] = parameter
            if part in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(part)


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter is a ``DTensor``."""
    groups = optimizer.param_groups
    return any(isinstance(p, DTensor) for group in groups for p in group["params"])
