"""Computes the bytes of one rank under each stage of DeepSpeed's ZeRO, and the two peaks of a step.

P is the number of parameters, T of trained parameters, G of parameters in the largest parameter
group, N of ranks, e of bytes per weight (1 for frozen weights that are stored only in FP8, which
stage 3 does not do), K of elements in the reduction buckets: one of DeepSpeed's size, or two that
are filled and reduced in turn (stages 1 and 2 with several ranks). A BF16 weight has an FP32 master
weight of 4 bytes, an FP32 weight has none. With ``master_weights: low_bits`` it has 2 bytes, and
the optimizer reads BF16 gradients.

With more than 8 micro-batches (``train/gradient_sums.py``) the gradients of BF16 weights are summed
in FP32 between micro-batches: 4 bytes in the third column. The optimizer then reads the sums
themselves: the step needs 4 T (ZeRO 0), 4 T / N (1 and 2), or 4 (T + G) / N (3). Under ZeRO 1 to 3
with low bits it reads them in BF16, which needs 2 G / N more.

    stage   weights  master weights,  gradients between    in the backward pass   in the step
                     states           micro-batches                               (in addition)
    0       e P      T                 e T                   e min(K, T) at its end 4 T
                                                             (not on one rank in BF16)
    1       e P      T / N             e T                   e K                    (e + 4) G / N
    2       e P      T / N             e T / N               e K + e T / N          (e + 4) G / N
    3       e P / N  T / N             e T / N, always       e K, always;           (e + 4) G / N
                                                             gathered weights

The last column is the gradient that the optimizer reads. Stages 1 and 2 flatten the partition of a
group and convert it to FP32 (the 4 bytes exist in BF16 only). Stage 3 does the same with a
sub-group of at most 1e9 elements. Stage 0 without master weights passes the gradients unchanged.
Source: deepspeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py,
runtime/fp16/unfused_optimizer.py); ``tests/e2e/test_plan_zero.py`` measures its engines.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn
from transformers import PreTrainedModel

from coat_vlm.config import StageConfig
from coat_vlm.fp8.weights import list_stored
from coat_vlm.model.vlm import count_parameters
from coat_vlm.optim import param_groups
from coat_vlm.plan.activations import Activations
from coat_vlm.train.zero import OPTIONS

ZeroStage = Literal[0, 1, 2, 3]
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model in a stage, in elements unless stated otherwise."""

    parameters: int  # P
    trained: int  # T
    largest_group: int  # G
    largest: int  # of one trained parameter
    persistent: int  # elements of small parameters that stage 3 never partitions
    weight_bytes: int  # e
    state_bytes: float  # of the optimizer per trained parameter, without low bits
    low_bits: bool = False
    """Whether the states have the low 16 bits of the master weights."""
    stored: int = 0
    """Frozen parameters that are stored only in FP8, except under stage 3."""

    @property
    def fp32_bytes(self) -> int:
        """Bytes per trained parameter of an FP32 copy: master weights, or gradients."""
        return 4 if self.weight_bytes < 4 and not self.low_bits else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank: the rows of the table, and the peaks."""

    weights: float
    master_weights: float
    states: float
    gradients: float
    """Gradients at the start of a step's second or later backward pass."""
    buffers: float
    """Reduction bucket; under stage 3 also the weights that are gathered at the same time."""
    activations: float
    """Activations at the start of the backward pass."""
    backward_peak: float
    """Peak of all forward and backward passes."""
    step_peak: float

    @property
    def peak(self) -> float:
        """The larger of both peaks."""
        return max(self.backward_peak, self.step_peak)


_DEFAULTS = DeepSpeedZeroConfig.model_validate({})
"""DeepSpeed's defaults, which training does not change."""


def count_sizes(
    model: PreTrainedModel, stage: StageConfig, state_bytes: float, *, low_bits: bool = False
) -> Sizes:
    """Count the parameters of a model with ``requires_grad`` set for the stage, on any device."""
    parameters = list(model.parameters())
    groups = param_groups(model, stage)
    threshold = _DEFAULTS.param_persistence_threshold
    return Sizes(
        parameters=count_parameters(model),
        trained=count_parameters(model, trainable_only=True),
        largest_group=max(sum(p.numel() for p in group["params"]) for group in groups),
        largest=max(p.numel() for p in parameters if p.requires_grad),
        persistent=sum(p.numel() for p in parameters if p.numel() <= threshold),
        weight_bytes=parameters[0].element_size(),
        state_bytes=state_bytes,
        low_bits=low_bits,
        stored=sum(weight.q.numel() for weight in list_stored(model)),
    )


def measure_state_bytes(optimizer: type[torch.optim.Optimizer]) -> float:
    """Measure the bytes of AdamW's or CoatAdamW's states per FP32 parameter, on a small tensor."""
    parameter = nn.Parameter(torch.ones(1 << 12))
    parameter.grad = torch.ones_like(parameter)
    instance = optimizer([parameter])  # pyright: ignore[reportCallIssue] - both have defaults
    instance.step()
    tensors = [t for t in instance.state[parameter].values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in tensors if t.ndim) / parameter.numel()


def estimate_rank_memory(
    zero_stage: ZeroStage,
    sizes: Sizes,
    ranks: int,
    activations: Activations,
    *,
    accumulates: bool,
    fp32_sums: bool = False,
    bucket: int | None = None,
) -> RankMemory:
    """Estimate the memory of one rank with the activations of one micro-batch.

    ``accumulates``: whether a step has several micro-batches. ``fp32_sums``: whether gradients of
    BF16 weights are summed in FP32. ``bucket``: K, else DeepSpeed's.
    """
    e = sizes.weight_bytes
    share = 1.0 if zero_stage == 0 else 1 / ranks
    all_gradients, sums = e * sizes.trained, (4 if fp32_sums else e) * sizes.trained
    gradients = sums * (share if zero_stage >= 2 else 1.0)
    # Under ZeRO 1 to 3 an FP32 run also has master weights: the flat partitioned copy.
    low_bits = 2 if sizes.low_bits else 0
    copies = 0 if sizes.low_bits else 4 if zero_stage else sizes.fp32_bytes
    master_weights = (copies + low_bits) * sizes.trained * share
    weights = e * sizes.parameters * (share if zero_stage == 3 else 1.0)
    if zero_stage < 3:
        weights -= (e - 1) * sizes.stored
    states = sizes.state_bytes * sizes.trained * share
    base = weights + master_weights + states
    loaded = e * sizes.parameters if zero_stage < 3 else 0  # before weights are stored in FP8
    options = OPTIONS.get(zero_stage, {}) if ranks > 1 else {}
    size = options.get("reduce_bucket_size", _DEFAULTS.reduce_bucket_size)
    filled = float(e * (size if bucket is None else bucket))
    buckets = 2 if zero_stage in (1, 2) and options.get("overlap_comm") else 1
    group = sizes.largest_group * share
    cast = 4 * sizes.largest if fp32_sums else 0  # of a gradient that DeepSpeed adds to its sum
    # The peak of the backward pass excludes weights, master weights and states.
    if zero_stage == 0:
        # After the backward pass, DeepSpeed averages gradients in flat copies of up to 500M.
        # coat_vlm/train/engine.py skips the reduction for a single rank in BF16.
        averages = ranks > 1 or e == 4
        averaged = min(sizes.trained, MEMORY_OPT_ALLREDUCE_SIZE) / sizes.trained
        flat = averaged * sums if averages else 0.0
        before = sums if accumulates else 0.0
        peak = activations.peak(0 if accumulates else e)
        backward, buffers = max(before + peak, sums + flat), 0.0
        step = base + gradients + (0 if fp32_sums else sizes.fp32_bytes * sizes.trained)
    elif zero_stage == 3:
        # Gathered weights that exist at the same time, and weights that are never partitioned.
        persistent = e * sizes.persistent if ranks > 1 else 0
        whole = e * min(sizes.parameters, _DEFAULTS.max_live_parameters) if ranks > 1 else 0
        gathered = max(whole, persistent)
        # A flush of the bucket allocates two copies of its content; with FP32 sums then a copy of
        # this rank's part in FP32 as well, which one rank notices.
        copies = 3 if fp32_sums and ranks == 1 else 2
        seen = [
            live + min(copies * filled, e * elements) for elements, live in activations.backward
        ]
        at_end = persistent + copies * min(filled, all_gradients)
        backward = (
            filled
            + max(gathered + max(activations.forward_peak, *seen), at_end)
            + gradients
            + (cast / ranks if ranks > 1 else 0)
        )
        buffers = filled + gathered
        group = min(group, _DEFAULTS.sub_group_size)
        read = 4 + low_bits if fp32_sums else e + sizes.fp32_bytes
        step = base + gradients + filled + read * group
    else:
        # Gradients pass through the bucket; its first flush allocates this rank's partition.
        # Stage 1 uses it in the last micro-batch only, and keeps all gradients until then; one
        # rank until the end of that pass.
        # FP32 sums are in the bucket of stage 1; in stage 2 they are this partition.
        first = zero_stage == 1
        filled, all_gradients = (
            (filled * sums / all_gradients, sums) if first else (filled, all_gradients)
        )
        partition = 0.0 if fp32_sums and not first else all_gradients / ranks
        flat = min(filled, all_gradients) if ranks > 1 or fp32_sums else 0.0
        overflows = all_gradients > filled
        before = (sums if first else sums / ranks) if accumulates else 0.0
        at_end = flat + partition if overflows or fp32_sums else max(flat, partition)
        late = first and buckets == 1  # it reduces at the end only
        if first:  # gradients in the bucket have no other copy
            at_end += max(0.0, all_gradients - filled) * late - before
        seen = []
        for elements, live in activations.backward:
            if overflows and e * elements >= filled:
                freed = e * elements if first and accumulates and not late else 0.0
                live += flat + (0.0 if late else partition) - freed
            if late and not accumulates:
                live += max(0.0, e * elements - filled)
            seen.append(live)
        filled *= buckets
        forward = activations.forward_peak + (filled if first and accumulates else 0.0)
        backward = before + max(forward, filled + max(*seen, at_end)) + (0 if first else cast)
        buffers = filled
        # With FP32 sums stage 1 keeps the buckets that it has filled.
        used = filled if overflows else filled / buckets
        kept = low_bits * group + used * (first and ranks > 1)
        step = base + sums * share + (kept if fp32_sums else (e + sizes.fp32_bytes) * group)
    return RankMemory(
        weights=weights,
        master_weights=master_weights,
        states=states,
        gradients=gradients if accumulates or zero_stage == 3 else 0.0,
        buffers=buffers,
        activations=activations.total_saved,
        backward_peak=max(base + backward, loaded),
        step_peak=step,
    )
