"""Learning rate schedules: linear warmup, then cosine, linear or constant."""

import math
from typing import Literal


def lr_factor(
    step: int,
    total_steps: int,
    warmup_steps: int,
    schedule: Literal["cosine", "linear", "constant"],
    min_lr_ratio: float = 0.0,
) -> float:
    """What the peak learning rate is multiplied with in a step.

    Warmup rises as ``(step + 1) / warmup_steps``. After it, with ``p`` from 0 to 1 over the
    remaining steps, cosine is ``min + (1 - min) (1 + cos(pi p)) / 2`` (Loshchilov and Hutter 2017,
    equation 5) and linear ``min + (1 - min) (1 - p)``.

    Args:
        step: 0 to ``total_steps - 1``.
        total_steps: optimizer steps of the stage.
        warmup_steps: steps of the warmup; 0 for none.
        schedule: the shape after the warmup.
        min_lr_ratio: final factor of cosine and linear.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return min_lr_ratio + (1 - min_lr_ratio) * shape
