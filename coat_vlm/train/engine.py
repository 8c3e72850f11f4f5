"""Builds the optimizer and the DeepSpeed engine of a stage.

:func:`replace_slow_step` replaces two methods of DeepSpeed's optimizers to speed up BF16 steps:

- ZeRO stages 1 and 2 check the gradients twice: each parameter for infinities and NaNs, then the
  norm. The first check is removed: in a step of a VLM of 0.9B parameters it launched 6,400 of
  16,000 kernels (``scripts/bench/step.py --profile``).
- Stage 0 (``runtime/fp16/unfused_optimizer.py``) loops over the parameters. :func:`_foreach_step`
  does the same in a few launches for all parameters, and one wait, for the norm.

Both use private attributes of DeepSpeed 0.19, and rely on DeepSpeed skipping a step whose norm is
not finite, as it does since 0.19.8 (the lowest version that pyproject.toml allows).
"""

import math
import warnings
from types import MethodType
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from transformers import PreTrainedModel

from coat_vlm.config import Recipe, StageConfig
from coat_vlm.config.fp8 import CudaGraphs
from coat_vlm.distributed import World
from coat_vlm.fp8 import (
    Arithmetic,
    fp8_blocks,
    graph_blocks,
    store_frozen_weights,
    without_originals,
)
from coat_vlm.model.cudnn import set_cudnn_attention
from coat_vlm.optim import CoatAdamW, param_groups
from coat_vlm.train.gradient_sums import Sums
from coat_vlm.train.nf4 import quantize_frozen_weights


def replace_slow_step(engine: DeepSpeedEngine) -> None:
    """Speed up DeepSpeed's BF16 optimizers of ZeRO 0 to 2."""
    optimizer: Any = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        optimizer.step = MethodType(_foreach_step, optimizer)
        if engine.world_size == 1:  # DeepSpeed would copy every gradient into a buffer and back
            engine.enable_backward_allreduce = False
    elif getattr(optimizer, "check_grad_overflow", False):
        optimizer.has_overflow = lambda partition_gradients=True: False  # noqa: ARG005 - the name


@torch.no_grad()
def _foreach_step(wrapper: Any, closure: None = None) -> bool:  # noqa: ARG001 - the signature
    """Run one foreach (multi-tensor) optimizer step; return whether the step was skipped."""
    weights = [p for group in wrapper.fp16_groups for p in group]
    master_weights = [p for group in wrapper.fp32_groups for p in group]
    sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
    fp32 = any(total.dtype == torch.float32 for total in sums)
    for master_weight, total in zip(master_weights, sums, strict=True):
        master_weight.grad = total.float() if fp32 else torch.empty_like(master_weight)
    grads = [master_weight.grad for master_weight in master_weights]
    if not fp32:
        torch._foreach_copy_(grads, sums)  # pyright: ignore[reportPrivateImportUsage]
    norm = float(torch.nn.utils.get_total_norm(grads))
    if not math.isfinite(norm):
        return wrapper._skip_invalid_grad_norm()
    wrapper.overflow, wrapper._global_grad_norm = False, norm
    wrapper._update_scale(False)
    divisor = wrapper.unscale_and_clip_grads(norm, apply_scale=False)
    if divisor != 1:
        torch._foreach_mul_(grads, 1.0 / divisor)  # pyright: ignore[reportPrivateImportUsage]
    wrapper.optimizer.step()
    for master_weight in master_weights:
        master_weight.grad = None
    torch._foreach_copy_(weights, master_weights)  # pyright: ignore[reportPrivateImportUsage]
    return False


class GradientOrder:
    """Passes gradients to ZeRO-2 in the order of the first backward pass, on all ranks.

    Stage 2 of DeepSpeed copies gradients into a bucket in the order in which they are computed, and
    adds the buckets of all ranks element by element (deepspeed 0.19.8,
    runtime/zero/stage_1_and_2.py, ``reduce_independent_p_g_buckets_and_remove_grads``). Ranks whose
    orders differ would add the gradients of different parameters, without an error. A block that
    replays a CUDA graph returns all its gradients at once, in another order than an eager pass, and
    with micro-batches of different shapes one rank may replay while another does not.

    The first passes are eager on all ranks (``cuda_graphs.EAGER_PASSES``), and so have the same
    order. A gradient waits only for others of its block; if one never arrives, those after it wait
    until the end of the pass. Two methods of DeepSpeed's optimizer of stage 2 are replaced.
    """

    def __init__(self, optimizer: Any) -> None:
        self._reduce = optimizer.reduce_ready_partitions_and_remove_grads
        self._finish = optimizer.independent_gradient_partition_epilogue
        optimizer.reduce_ready_partitions_and_remove_grads = self._take
        optimizer.independent_gradient_partition_epilogue = self._end_pass
        self._order: list[Any] = []  # parameters in the order of the first pass
        self._known = False
        self._waiting: dict[int, tuple[Any, int]] = {}  # id -> parameter, number of its group
        self._next = 0  # index in the order of the next gradient to pass on

    def _take(self, parameter: Any, group: int) -> None:
        if not self._known:
            self._order.append(parameter)
            self._reduce(parameter, group)
            return
        self._waiting[id(parameter)] = (parameter, group)
        while self._next < len(self._order) and id(self._order[self._next]) in self._waiting:
            self._reduce(*self._waiting.pop(id(self._order[self._next])))
            self._next += 1

    def _end_pass(self) -> None:
        self._known = self._known or bool(self._order)
        for parameter in self._order[self._next :]:
            if id(parameter) in self._waiting:
                self._reduce(*self._waiting.pop(id(parameter)))
        for parameter, group in self._waiting.values():  # without a gradient in the first pass
            self._order.append(parameter)
            self._reduce(parameter, group)
        self._waiting.clear()
        self._next = 0
        self._finish()


def build_deepspeed_config(
    recipe: Recipe, stage: StageConfig, arithmetic: Arithmetic, world_size: int, sums: Sums = "bf16"
) -> dict[str, Any]:
    """Build DeepSpeed's configuration of one stage.

    DeepSpeed is not told about sequence parallelism: it averages gradients over all ranks, and
    :meth:`coat_vlm.train.passes.Passes.update` undoes the averaging.
    """
    per_micro_step = stage.micro_batch_size * stage.count_replicas(world_size)
    communication = "bf16" if arithmetic.low_bits else None
    if arithmetic.dtype == torch.bfloat16 and sums == "fp32" and recipe.zero_stage < 2:
        communication = "fp32"  # once per step, of the sums
    in_fp32 = arithmetic.fp32_copy and sums == "fp32" and recipe.zero_stage >= 2
    return {
        "train_batch_size": stage.batch_size * stage.sequence_parallel,
        "train_micro_batch_size_per_gpu": stage.micro_batch_size,
        "gradient_accumulation_steps": stage.batch_size // per_micro_step,
        # Without a wrapper DeepSpeed does not report the norm: the training step clips.
        "gradient_clipping": 0.0
        if training_loop_clips(recipe, arithmetic)
        else stage.max_grad_norm,
        "zero_optimization": {"stage": recipe.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": arithmetic.fp32_copy},
        # For low bits DeepSpeed is configured as for an FP32 model, which it does not wrap or copy.
        **({"communication_data_type": communication} if communication else {}),
        **({"data_types": {"grad_accum_dtype": "fp32"}} if in_fp32 else {}),
        "steps_per_print": 10**9,  # never
        # By default DeepSpeed times every forward pass and step, for which it waits for the GPU.
        "timers": {"throughput": {"enabled": False}},
    }


def training_loop_clips(recipe: Recipe, arithmetic: Arithmetic) -> bool:
    """Whether the training step clips gradients, instead of DeepSpeed."""
    return recipe.zero_stage == 0 and not arithmetic.fp32_copy


def steps_overlap(recipe: Recipe, stage: StageConfig, arithmetic: Arithmetic, world: World) -> bool:
    """Whether the results of a step may be read while the next step runs.

    CoatAdamW must skip non-finite gradients by itself. They do not overlap on a CPU, where nothing
    is gained, with several ranks, whose sum of tokens waits for the GPU, or in ``dpo``.
    """
    skips = recipe.optimizer == "coat" and training_loop_clips(recipe, arithmetic)
    waits = world.size > 1 or stage.dpo is not None
    return skips and world.device.type == "cuda" and not waits


def build_optimizer(
    model: PreTrainedModel, stage: StageConfig, arithmetic: Arithmetic, world: World
) -> torch.optim.Optimizer:
    """Build AdamW for the trainable parameters, with FP8 moments under ``precision: coat``."""
    groups = param_groups(model, stage)
    fp8 = arithmetic.fp8
    if fp8 is not None and fp8.optimizer == "coat":
        master = "bf16_low_bits" if arithmetic.low_bits else "fp32"
        return CoatAdamW(groups, lr=0.0, betas=stage.betas, eps=stage.eps, master=master)
    fused = world.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=0.0, betas=stage.betas, eps=stage.eps, fused=fused)


def build_engine(
    model: PreTrainedModel,
    recipe: Recipe,
    stage: StageConfig,
    arithmetic: Arithmetic,
    world: World,
    sums: Sums = "bf16",
) -> deepspeed.DeepSpeedEngine:
    """Build the DeepSpeed engine of one stage around a model from ``model_setup.prepare_model``."""
    optimizer = build_optimizer(model, stage, arithmetic, world)
    if recipe.zero_stage == 3:
        # An FP8 block reads the weights of its submodules, so ZeRO must gather a whole block.
        blocks = {type(block) for _, block in fp8_blocks(model)}
        if blocks:
            deepspeed.utils.set_z3_leaf_modules(model, list(blocks))
    set_cudnn_attention(recipe.cudnn_attention)
    # DeepSpeed 0.19.8 calls functions that torch 2.13 has renamed, which warn in every step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if recipe.zero_stage < 3:
        store_frozen_weights(model, world.device)
    with without_originals(model):  # DeepSpeed moves what is left to the GPU
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=build_deepspeed_config(recipe, stage, arithmetic, world.size, sums),
            dist_init_required=False,
        )
    # At stage 0 in BF16 DeepSpeed runs a step on zero gradients to allocate the states. With lr 0
    # the weights do not change; clearing the states also resets the step count.
    if recipe.zero_stage == 0:
        optimizer.state.clear()
    if arithmetic.fp32_copy and sums == "fp32" and recipe.zero_stage == 1:
        # For grad_accum_dtype DeepSpeed would build another optimizer, BF16_Optimizer.
        zero1: Any = engine.optimizer
        zero1.gradient_accumulation_dtype = torch.float32
        zero1.use_separate_grad_accum = zero1.use_grad_accum_attribute = True
    replace_slow_step(engine)
    if arithmetic.low_bits and world.size == 1:
        engine.enable_backward_allreduce = False  # it would copy gradients into a buffer and back
    quantize_frozen_weights(model, stage.lora)
    # The weights have their final addresses only now. Also removes graphs of an earlier stage.
    graphs = graph_blocks(model, choose_graphs(recipe, stage, arithmetic))
    if graphs and recipe.zero_stage == 2 and world.size > 1:
        GradientOrder(engine.optimizer)
    return engine


def choose_graphs(recipe: Recipe, stage: StageConfig, arithmetic: Arithmetic) -> CudaGraphs:
    """Return how FP8 blocks use CUDA graphs: ``auto`` is off where ``true`` is an error."""
    chosen = arithmetic.fp8 is not None and arithmetic.fp8.cuda_graphs
    unsupported = (
        recipe.zero_stage == 3
        or stage.sequence_parallel > 1
        or stage.dpo is not None
        or stage.gradient_checkpointing
    )
    return False if chosen == "auto" and unsupported else chosen
