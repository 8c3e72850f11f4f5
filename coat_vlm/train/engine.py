"""DeepSpeed around the model: ZeRO, BF16 with FP32 masters, accumulation and clipping."""

from typing import Any

import deepspeed
import torch

from coat_vlm.config import MODULES, Recipe, StageConfig
from coat_vlm.model.vlm import CoatVlm, module_parameters
from coat_vlm.optim import param_groups
from coat_vlm.train.world import World

_NEVER = 10**9


def deepspeed_config(recipe: Recipe, stage: StageConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of one stage.

    Raises:
        ValueError: batch_size is not a multiple of micro_batch_size times the number of ranks.
    """
    unit = stage.micro_batch_size * world_size
    if stage.batch_size % unit:
        raise ValueError(
            f"batch_size={stage.batch_size} is not a multiple of micro_batch_size * ranks = "
            f"{stage.micro_batch_size} * {world_size}; change one of them"
        )
    bf16 = recipe.precision == "bf16"
    return {
        "train_batch_size": stage.batch_size,
        "train_micro_batch_size_per_gpu": stage.micro_batch_size,
        "gradient_accumulation_steps": stage.batch_size // unit,
        # Stage 0 in FP32 has no wrapper that reports the norm: there the loop clips.
        "gradient_clipping": 0.0 if clips_itself(recipe) else stage.grad_clip,
        "zero_optimization": {"stage": recipe.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "steps_per_print": _NEVER,
    }


def clips_itself(recipe: Recipe) -> bool:
    """Whether gradients are clipped by the loop, not by DeepSpeed."""
    return recipe.zero_stage == 0 and recipe.precision == "fp32"


def set_trainable(model: CoatVlm, stage: StageConfig) -> None:
    """Freeze and unfreeze the modules as the stage says."""
    parts = module_parameters(model)
    for name in MODULES:
        parts[name].requires_grad_(stage.module(name).train)
    if stage.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def set_train_mode(model: CoatVlm, stage: StageConfig) -> None:
    """Training mode, but evaluation mode (no dropout) for frozen modules."""
    model.train()
    parts = module_parameters(model)
    for name in MODULES:
        if not stage.module(name).train:
            parts[name].eval()


def build_engine(
    model: CoatVlm, recipe: Recipe, stage: StageConfig, world: World
) -> deepspeed.DeepSpeedEngine:
    """The DeepSpeed engine of one stage, with AdamW over the trainable parameters.

    Args:
        model: the model, with the stage's modules made trainable (:func:`set_trainable`).
        recipe: precision and ZeRO stage.
        stage: batch sizes, optimizer settings.
        world: the processes of the run.

    Raises:
        ValueError: the batch sizes do not divide.
    """
    optimizer = torch.optim.AdamW(
        param_groups(model, stage),
        lr=0.0,
        betas=stage.betas,
        eps=stage.eps,
        fused=world.device.type == "cuda",
    )
    # cuDNN attention (torch 2.11's first choice on Hopper) gave NaN gradients at a sane loss in
    # training with short sequences (docs/results.md); the flash backend did not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=deepspeed_config(recipe, stage, world.size),
        dist_init_required=False,
    )
    # At stage 0 in BF16 DeepSpeed takes a step on zero gradients to allocate the states. With lr 0
    # it moves nothing; forgetting the states it made undoes the rest (the step count).
    if recipe.zero_stage == 0:
        optimizer.state.clear()
    return engine
