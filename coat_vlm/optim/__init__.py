"""The optimizer with FP8 states, parameter groups and learning rate schedules."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coat_vlm.config import StageConfig
from coat_vlm.model.vlm import module_parameters
from coat_vlm.optim.adamw import CoatAdamW

__all__ = ["CoatAdamW", "clip_scale", "lr_factor", "param_groups", "stage_lr_factor"]


def param_groups(model: PreTrainedModel, stage: StageConfig) -> list[dict[str, Any]]:
    """Groups of trainable parameters: per module those with weight decay, matrices, and others.

    ``lr`` is 0: the loop sets it before every step, from ``peak_lr``.
    """
    groups: list[dict[str, Any]] = []
    for name, part in module_parameters(model).items():
        embeddings = {
            id(module.weight) for module in part.modules() if isinstance(module, nn.Embedding)
        }
        decayed, plain = [], []
        for parameter in part.parameters():
            if parameter.requires_grad:
                is_matrix = parameter.ndim > 1 and id(parameter) not in embeddings
                (decayed if is_matrix else plain).append(parameter)
        for parameters, decay in ((decayed, stage.weight_decay), (plain, 0.0)):
            if parameters:  # ZeRO 1 and 2 cannot partition empty groups
                groups.append(
                    {
                        "params": parameters,
                        "weight_decay": decay,
                        "lr": 0.0,
                        "peak_lr": stage.module(name).lr,
                        "module": name,
                    }
                )
    return groups


def clip_scale(norm: Tensor, limit: float) -> Tensor:
    """Return the FP32 factor [] that clips gradients of this norm; NaN if it is not finite.

    ``limit`` 0 does not clip.
    """
    divisor = torch.clamp((norm.double() + 1e-6) / (limit or math.inf), min=1.0)  # as DeepSpeed
    return torch.where(norm.isfinite(), 1.0 / divisor, math.nan).float()


def lr_factor(
    step: int,
    total_steps: int,
    warmup_steps: int,
    schedule: Literal["cosine", "linear", "constant"],
    min_lr_ratio: float = 0.0,
) -> float:
    """Factor on the peak learning rate in a step.

    Warmup rises as ``(step + 1) / warmup_steps``. After it, with ``p`` from 0 over the remaining
    steps (as in transformers it would be 1 one step after the last), cosine is ``min + (1 - min)
    (1 + cos(pi p)) / 2`` (Loshchilov and Hutter 2017, equation 5) and linear ``min + (1 - min)
    (1 - p)``. Steps count from 0.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return min_lr_ratio + (1 - min_lr_ratio) * shape


def stage_lr_factor(stage: StageConfig, step: int, total_steps: int) -> float:
    """:func:`lr_factor` with the schedule of a stage."""
    warmup_steps = round(stage.warmup_ratio * total_steps)
    schedule = stage.lr_scheduler_type
    return lr_factor(step, total_steps, warmup_steps, schedule, stage.min_lr_ratio)
