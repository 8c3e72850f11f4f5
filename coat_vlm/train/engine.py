"""Builds the optimizer and the DeepSpeed engine of a stage."""

import warnings
from typing import Any

import deepspeed
import torch
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
from coat_vlm.train.zero import OPTIONS, GradientOrder, change_optimizer, lighter_stage3


def build_deepspeed_config(
    recipe: Recipe, stage: StageConfig, arithmetic: Arithmetic, world_size: int, sums: Sums = "bf16"
) -> dict[str, Any]:
    """Build DeepSpeed's configuration of one stage.

    DeepSpeed is not told about sequence parallelism: it averages gradients over all ranks, and
    :meth:`coat_vlm.train.passes.Passes.update` undoes the averaging.
    """
    per_micro_step = stage.micro_batch_size * stage.count_replicas(world_size)
    in_bf16, low_bits = arithmetic.dtype == torch.bfloat16, arithmetic.low_bits
    communication = "bf16" if low_bits else None
    if in_bf16 and sums == "fp32" and recipe.zero_stage < 2:
        communication = "fp32"  # once per step, of the sums
    in_fp32 = in_bf16 and sums == "fp32" and recipe.zero_stage >= 2
    bf16: dict[str, bool] = {"enabled": in_bf16}
    if low_bits:
        # At ZeRO 0 DeepSpeed is configured as for an FP32 model, which it does not wrap or copy.
        # The states that the second key is about are CoatAdamW's.
        zero = recipe.zero_stage > 0
        bf16 = {
            "enabled": zero,
            "bf16_master_weights_and_grads": zero,
            "bf16_optimizer_states": zero,
        }
    # With ZeRO 1 or 2, ranks that share sequences communicate inside the blocks without overlap.
    shares = stage.sequence_parallel > 1 and recipe.zero_stage < 3
    options = OPTIONS.get(recipe.zero_stage, {}) if world_size > 1 and not shares else {}
    return {
        "train_batch_size": stage.batch_size * stage.sequence_parallel,
        "train_micro_batch_size_per_gpu": stage.micro_batch_size,
        "gradient_accumulation_steps": stage.batch_size // per_micro_step,
        # Without a wrapper DeepSpeed does not report the norm: the training step clips.
        "gradient_clipping": 0.0
        if training_loop_clips(recipe, arithmetic)
        else stage.max_grad_norm,
        "zero_optimization": {"stage": recipe.zero_stage, **options},
        "zero_allow_untested_optimizer": True,
        "bf16": bf16,
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
    # DeepSpeed moves what is left to the GPU.
    with without_originals(model), lighter_stage3():
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
    if arithmetic.dtype == torch.bfloat16 and sums == "fp32" and recipe.zero_stage == 1:
        # For grad_accum_dtype DeepSpeed would build another optimizer, BF16_Optimizer.
        zero1: Any = engine.optimizer
        zero1.gradient_accumulation_dtype = torch.float32
        zero1.use_separate_grad_accum = zero1.use_grad_accum_attribute = True
    change_optimizer(engine)
    if recipe.zero_stage == 0 and arithmetic.low_bits and world.size == 1:
        engine.enable_backward_allreduce = False  # it would copy gradients into a buffer and back
    quantize_frozen_weights(model, stage.lora)
    # The weights have their final addresses only now. Also removes graphs of an earlier stage.
    graphs = graph_blocks(model, choose_graphs(recipe, stage, arithmetic))
    if graphs and world.size > 1 and (recipe.zero_stage == 2 or engine.zero_overlap_comm()):
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
