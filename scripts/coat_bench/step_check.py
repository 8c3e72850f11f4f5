"""What a step must compute before it gets a speed: the losses of BF16, and gradients of its size.

The reference is this project's BF16 model at the same weights on the same samples. At random
weights every loss is near the logarithm of the vocabulary, so a loss alone says little; the norm of
all gradients tells a lost scale, and an optimizer must lower the loss of the batch it repeats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coat_bench.vlm_shapes import Inputs, VlmShape
from coat_vlm.model import CoatVlm

LOSS_TOLERANCE = 0.01
"""Largest difference to BF16's loss at the same weights, as a share of it."""

NORM_FACTOR = 1.5
"""The gradients' norm may be so many times BF16's, or its inverse. FP8's rounding adds to it in
every block; a scale that is lost once is a factor of two at least."""

STEP_TOLERANCE = 0.05
"""Largest difference to the losses of BF16's run in the same steps, as a share of them."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What BF16 computes at the first weights."""

    losses: tuple[float, ...]
    """Of this rank's samples, one by one."""
    grad_norm: float
    """Of all parameters, on the first sample."""

    def batch_loss(self, count: int) -> float:
        """Mean loss of the first samples; all have as many trained tokens."""
        return sum(self.losses[:count]) / count


def measure_reference(model: CoatVlm, shape: VlmShape, first: int, count: int) -> Reference:
    """Run BF16 on samples.

    Args:
        model: BF16, in training mode.
        shape: its samples.
        first: number of the first sample.
        count: how many.
    """
    device = next(model.parameters()).device
    loss, norm = _pass(model, shape.sample(first, device))
    losses = [loss]
    with torch.no_grad():
        for number in range(1, count):
            losses.append(model(**shape.sample(first + number, device)).loss.item())
    return Reference(tuple(losses), norm)


def _pass(model: CoatVlm, inputs: Inputs) -> tuple[float, float]:
    """Loss and norm of all gradients; leaves none behind."""
    loss = model(**inputs).loss
    loss.backward()
    norm = _gradient_norm(model)
    model.zero_grad(set_to_none=True)
    return loss.item(), norm


def _gradient_norm(model: nn.Module) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)).item()


def disagreement(model: CoatVlm, inputs: Inputs, reference: Reference) -> str:
    """What a pass over the first sample does otherwise than BF16; empty when it is right.

    Args:
        model: converted, not trained yet.
        inputs: the first sample.
        reference: BF16's.
    """
    loss, norm = _pass(model, inputs)
    problem = loss_problem([loss], reference.losses[0])
    if problem:
        return problem
    factor = norm / reference.grad_norm
    if not 1 / NORM_FACTOR <= factor <= NORM_FACTOR:  # also NaN
        return (
            f"not correct: the gradients' norm is {norm:.4g}, BF16's {reference.grad_norm:.4g}; "
            f"a factor of {NORM_FACTOR} is allowed"
        )
    return ""


def loss_problem(losses: Sequence[float], exact: float) -> str:
    """Which loss is not BF16's; empty when all are."""
    for loss in losses:
        if not abs(loss - exact) <= LOSS_TOLERANCE * abs(exact):  # also NaN
            return (
                f"not correct: the loss is {loss:.4f}, BF16's {exact:.4f}; "
                f"{LOSS_TOLERANCE:.0%} is allowed"
            )
    return ""


def training_problem(losses: Sequence[float], exact: Sequence[float] | None) -> str:
    """What is wrong with the losses of steps on one repeated batch; empty when nothing is.

    Args:
        losses: of each step.
        exact: those of BF16's run, if there was one.
    """
    if not all(math.isfinite(loss) for loss in losses):
        return f"not correct: losses {_listed(losses)}"
    if losses[-1] >= losses[0]:
        return f"not correct: training does not lower the loss of its batch: {_listed(losses)}"
    for number, (loss, other) in enumerate(zip(losses, exact or (), strict=False)):
        if abs(loss - other) > STEP_TOLERANCE * abs(other):
            return (
                f"not correct: the loss of step {number + 1} is {loss:.4f}, BF16's {other:.4f}; "
                f"{STEP_TOLERANCE:.0%} is allowed"
            )
    return ""


def _listed(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def values(losses: Sequence[Tensor]) -> list[float]:
    """Scalars on a device as numbers."""
    return torch.stack([loss.float() for loss in losses]).tolist()
