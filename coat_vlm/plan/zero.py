"""Bytes that one rank holds under each stage of DeepSpeed's ZeRO, and the two peaks of a step.

With P parameters, T of them trained, G those of the largest parameter group, N ranks, e bytes per
weight, K elements of DeepSpeed's reduction bucket and 4 or 0 bytes of FP32 master weights:

    stage   weights  masters, states   gradients between     in the backward pass   in the step
                                       micro-batches                                (beside these)
    0       e P      T                 e T                   e min(K, T) at its end 4 T
                                                             (not on one rank in BF16)
    1       e P      T / N             e T                   e K                    (e + 4) G / N
    2       e P      T / N             e T / N               e K + e T / N          (e + 4) G / N
    3       e P / N  T / N             e T / N, always       e K, always;           (e + 4) G / N
                                                             gathered weights

The last column is the gradient that the optimizer is handed: stages 1 and 2 flatten a group's
partition and convert it to FP32 (the 4 bytes are there in BF16 only), stage 3 a sub-group's, which
has at most 1e9 elements. Stage 0 without masters hands over the gradients as they are. Read in
deepspeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, runtime/fp16/unfused_optimizer.py) and
measured on its engines by ``tests/e2e/test_plan_zero.py``.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

from coat_vlm.config import StageConfig
from coat_vlm.model.vlm import CoatVlm, count_parameters
from coat_vlm.optim import param_groups
from coat_vlm.plan.activations import Activations

ZeroStage = Literal[0, 1, 2, 3]
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model that a stage trains; in elements unless said otherwise."""

    parameters: int
    """P: all."""
    trained: int
    """T."""
    largest_group: int
    """G: of the largest parameter group."""
    persistent: int
    """In parameters so small that stage 3 leaves them gathered."""
    weight_bytes: int
    """e: per weight and per gradient."""
    state_bytes: float
    """Of the optimizer's states, per trained parameter."""

    @property
    def master_bytes(self) -> int:
        """Per trained parameter: an FP32 copy of a BF16 weight."""
        return 4 if self.weight_bytes < 4 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank; the parts that stand in a table, and the peaks."""

    weights: float
    masters: float
    states: float
    gradients: float
    """What is there of them when a backward pass starts that is not the step's first."""
    buffers: float
    """Reduction bucket, and under stage 3 weights that are gathered at the same time."""
    activations: float
    """At the start of the backward pass."""
    backward_peak: float
    """Highest of all forward and backward passes."""
    step_peak: float
    """Highest of the optimizer's step."""

    @property
    def peak(self) -> float:
        """The larger one."""
        return max(self.backward_peak, self.step_peak)


def _settings(zero_stage: ZeroStage) -> Any:
    """DeepSpeed's own defaults."""
    settings: dict[str, Any] = {"stage": zero_stage}
    return DeepSpeedZeroConfig(**settings)


def sizes_of(model: CoatVlm, stage: StageConfig, state_bytes: float) -> Sizes:
    """Count a model's parameters.

    Args:
        model: with ``requires_grad`` set for the stage; on any device.
        stage: says which parameters are optimized together.
        state_bytes: of the optimizer's states, per parameter.
    """
    parameters = list(model.parameters())
    groups = param_groups(model, stage)
    threshold = _settings(0).param_persistence_threshold
    return Sizes(
        parameters=count_parameters(model),
        trained=count_parameters(model, trainable_only=True),
        largest_group=max(sum(p.numel() for p in group["params"]) for group in groups),
        persistent=sum(p.numel() for p in parameters if p.numel() <= threshold),
        weight_bytes=parameters[0].element_size(),
        state_bytes=state_bytes,
    )


def state_bytes_per_parameter(optimizer: type[torch.optim.Optimizer]) -> float:
    """What an optimizer keeps for an FP32 parameter, measured on a small one.

    Args:
        optimizer: :class:`torch.optim.AdamW` or :class:`coat_vlm.optim.CoatAdamW`.
    """
    parameter = nn.Parameter(torch.ones(1 << 12))
    parameter.grad = torch.ones_like(parameter)
    instance = optimizer([parameter])  # pyright: ignore[reportCallIssue] - both have defaults
    instance.step()
    tensors = [t for t in instance.state[parameter].values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in tensors if t.ndim) / parameter.numel()


def rank_memory(
    zero_stage: ZeroStage,
    sizes: Sizes,
    ranks: int,
    activations: Activations,
    *,
    accumulates: bool,
    bucket: int | None = None,
) -> RankMemory:
    """What a rank holds.

    Args:
        zero_stage: of DeepSpeed.
        sizes: of the model.
        ranks: N.
        activations: of one micro-batch.
        accumulates: whether a step has several micro-batches.
        bucket: K, elements of the reduction bucket; DeepSpeed's default when absent.
    """
    e = sizes.weight_bytes
    settings = _settings(zero_stage)
    share = 1.0 if zero_stage == 0 else 1 / ranks
    all_gradients = e * sizes.trained
    gradients = all_gradients * (share if zero_stage >= 2 else 1.0)
    # Under ZeRO 1 to 3 an FP32 run has masters as well: the flat copy that is partitioned.
    masters = (4 if zero_stage else sizes.master_bytes) * sizes.trained * share
    weights = e * sizes.parameters * (share if zero_stage == 3 else 1.0)
    states = sizes.state_bytes * sizes.trained * share
    base = weights + masters + states
    filled = float(e * (settings.reduce_bucket_size if bucket is None else bucket))
    group = sizes.largest_group * share
    if zero_stage == 0:
        # coat_vlm/train/engine.py spares a single rank in BF16 the reduction.
        averages = ranks > 1 or not sizes.master_bytes
        backward, buffers = _stage_0(activations, all_gradients, e, accumulates, averages), 0.0
        step = base + gradients + sizes.master_bytes * sizes.trained
    elif zero_stage == 3:
        several = ranks > 1
        gathered = e * min(sizes.parameters, settings.max_live_parameters) if several else 0
        persistent = e * sizes.persistent if several else 0
        gathered = max(gathered, persistent)
        backward = _stage_3(activations, all_gradients, e, filled, gathered, persistent)
        backward += gradients
        buffers = filled + gathered
        group = min(group, settings.sub_group_size)
        step = base + gradients + filled + (e + sizes.master_bytes) * group
    else:
        first = zero_stage == 1
        backward = _stage_1_or_2(activations, all_gradients, e, filled, ranks, accumulates, first)
        buffers = filled
        step = base + all_gradients * share + (e + sizes.master_bytes) * group
    return RankMemory(
        weights=weights,
        masters=masters,
        states=states,
        gradients=gradients if accumulates or zero_stage == 3 else 0.0,
        buffers=buffers,
        activations=activations.total_kept,
        backward_peak=base + activations.weight_copies + backward,
        step_peak=step,
    )


# Peaks of the backward pass besides weights, masters and states; ``gradients`` is e T in bytes.


def _stage_0(
    activations: Activations, gradients: float, element: int, accumulates: bool, averages: bool
) -> float:
    """DeepSpeed averages gradients in flat copies of up to 500M, after the backward pass."""
    before = gradients if accumulates else 0.0
    peak = activations.peak(0 if accumulates else element)
    flat = min(gradients, element * MEMORY_OPT_ALLREDUCE_SIZE)
    return max(before + peak, gradients + (flat if averages else 0.0))


def _stage_1_or_2(
    activations: Activations,
    gradients: float,
    element: int,
    bucket: float,
    ranks: int,
    accumulates: bool,
    first: bool,
) -> float:
    """Gradients go through the bucket, whose first flush makes room for those of this rank.

    Stage 1 (``first``) fills it in the last micro-batch only, and keeps all gradients until then.
    """
    partition = gradients / ranks
    flat = min(bucket, gradients) if ranks > 1 else 0.0
    overflows = gradients > bucket
    at_end = flat + partition if overflows else max(flat, partition)
    before = 0.0
    if accumulates:
        before = gradients if first else partition
    if first:
        at_end += max(0.0, gradients - bucket) - before  # those in the bucket are nowhere else
    seen = []
    for elements, live in activations.backward:
        finished = element * elements
        more = 0.0
        if overflows and finished >= bucket:
            more = flat + (0.0 if first else partition)  # stage 1: at the end only
        if first and not accumulates:
            more += max(0.0, finished - bucket)
        seen.append(live + more)
    forward = activations.forward_peak + (bucket if first and accumulates else 0.0)
    return before + max(forward, bucket + max(*seen, at_end))


def _stage_3(
    activations: Activations,
    gradients: float,
    element: int,
    bucket: float,
    gathered: float,
    persistent: float,
) -> float:
    """A flush of the bucket takes two copies of what is in it.

    ``gathered`` are whole weights that exist at the same time, ``persistent`` those that stay.
    """
    seen = [live + min(2 * bucket, element * elements) for elements, live in activations.backward]
    at_end = persistent + 2 * min(bucket, gradients)
    return bucket + max(gathered + max(activations.forward_peak, *seen), at_end)
