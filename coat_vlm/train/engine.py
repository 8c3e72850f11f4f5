"""Builds what a stage trains: trainable parts, optimizer, DeepSpeed engine; its faster BF16 step.

Two methods of DeepSpeed's optimizers are replaced, both for the time of a BF16 step:

- ZeRO stages 1 and 2 look at the gradients twice: first at every parameter for infinities and NaNs,
  with nine kernels each, then at their norm, which is not finite exactly if one of them is not, or
  their squares overflow. Either way the step is skipped. The first look is left away here. In a
  step of a VLM of 0.9B parameters it launched 6,400 of 16,000 kernels, for which the GPU waited
  (``coat-vlm bench step --size 1b --optimizer own --zero 1 --batch 4 --profile``, commit 03afbd2).
  Stage 3 looks first in FP16 alone, and stages 1 and 2 do not in FP32.
- Stage 0 (``runtime/fp16/unfused_optimizer.py``) goes through the parameters one by one: it looks
  for infinities and waits for the GPU, takes the norm, makes an FP32 gradient, scales it, and
  copies the master weight into the weight. These were 4,000 of the 6,200 launches of a BF16 step
  of ``real_photos``, whose model has 20M parameters in 211 tensors, and the GPU was idle for more
  than half of the step (commit 1fac6ce). :func:`_foreach_step` does the same arithmetic with
  torch's ``_foreach`` functions: a few launches for all parameters, and one wait, for the norm.

Both rest on private parts of DeepSpeed, and on that a step is skipped for its norm, which DeepSpeed
does since 0.19.8: before, a step with NaNs would go through. So they are used with the versions
:data:`TESTED_DEEPSPEED` alone; any other keeps its own step, and a warning says what that costs.
"""

import math
import warnings
from types import MethodType
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from packaging.specifiers import SpecifierSet

from coat_vlm.config import Recipe, StageConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import Arithmetic, ConversionReport, fp8_blocks, graph_blocks
from coat_vlm.model.lora import add_adapters
from coat_vlm.model.packing import PACKED
from coat_vlm.model.vlm import CoatVlm, module_parameters
from coat_vlm.optim import CoatAdamW, param_groups

TESTED_DEEPSPEED = ">=0.19.8,<0.20"
"""Versions whose private parts were tested; pyproject.toml asks for the same."""

_UNFUSED_PARTS = (
    "fp16_groups",
    "fp32_groups",
    "unscale_and_clip_grads",
    "_global_grad_norm",
    "_skip_invalid_grad_norm",
    "_update_scale",
)
_NEVER = 10**9


def speed_up_step(engine: DeepSpeedEngine) -> None:
    """Replace the slow parts of an engine's optimizer step where its version of DeepSpeed is known.

    Warns, and changes nothing, with another version, or where a private part is missing. A single
    rank at stage 0 has nothing to reduce, either; DeepSpeed would still copy every gradient into a
    buffer and back.

    Args:
        engine: of any ZeRO stage; those of stage 3, and all in FP32, have no slow part.

    Raises:
        ValueError: it takes no norm, so that nothing would find gradients that are not finite.
    """
    optimizer: Any = engine.optimizer
    unfused = isinstance(optimizer, FP16_UnfusedOptimizer)
    if not (unfused or getattr(optimizer, "check_grad_overflow", False)):
        return
    parts = _UNFUSED_PARTS if unfused else ("has_overflow", "compute_grad_norm")
    missing = [name for name in parts if not hasattr(optimizer, name)]
    found = deepspeed.__version__
    if missing or not SpecifierSet(TESTED_DEEPSPEED).contains(found, prereleases=True):
        warnings.warn(
            f"DeepSpeed {found}{f' (without {missing[0]})' if missing else ''} is not one of the "
            f"tested versions, {TESTED_DEEPSPEED}, so its own optimizer step is used, which looks "
            "for infinities in one parameter after the other and is slower",
            stacklevel=2,
        )
    elif unfused:
        optimizer.step = MethodType(_foreach_step, optimizer)
        if engine.world_size == 1:
            engine.enable_backward_allreduce = False
    elif not optimizer.compute_grad_norm:
        raise ValueError(
            "zero_optimization.compute_grad_norm is false: without their norm nothing finds "
            "gradients that are not finite; leave that key out of DeepSpeed's configuration"
        )
    else:
        optimizer.has_overflow = lambda partition_gradients=True: False  # noqa: ARG005 - its own


@torch.no_grad()
def _foreach_step(wrapper: Any, closure: None = None) -> bool:  # noqa: ARG001 - its signature
    """One step; returns whether it was skipped."""
    weights = [p for group in wrapper.fp16_groups for p in group]
    masters = [p for group in wrapper.fp32_groups for p in group]
    for master in masters:
        master.grad = torch.empty_like(master)
    gradients = [master.grad for master in masters]
    given = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
    torch._foreach_copy_(gradients, given)  # pyright: ignore[reportPrivateImportUsage]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if not math.isfinite(norm):
        return wrapper._skip_invalid_grad_norm()
    wrapper.overflow, wrapper._global_grad_norm = False, norm
    wrapper._update_scale(False)
    divisor = wrapper.unscale_and_clip_grads(norm, apply_scale=False)
    if divisor != 1:
        torch._foreach_mul_(gradients, 1.0 / divisor)  # pyright: ignore[reportPrivateImportUsage]
    wrapper.optimizer.step()
    for master in masters:
        master.grad = None
    torch._foreach_copy_(weights, masters)  # pyright: ignore[reportPrivateImportUsage]
    return False


def deepspeed_config(
    recipe: Recipe, stage: StageConfig, arithmetic: Arithmetic, world_size: int
) -> dict[str, Any]:
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
    return {
        "train_batch_size": stage.batch_size,
        "train_micro_batch_size_per_gpu": stage.micro_batch_size,
        "gradient_accumulation_steps": stage.batch_size // unit,
        # Stage 0 in FP32 has no wrapper that reports the norm: there the loop clips.
        "gradient_clipping": 0.0 if clips_itself(recipe, arithmetic) else stage.grad_clip,
        "zero_optimization": {"stage": recipe.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": arithmetic.bf16_weights},
        "steps_per_print": _NEVER,
    }


def clips_itself(recipe: Recipe, arithmetic: Arithmetic) -> bool:
    """Whether gradients are clipped by the loop, not by DeepSpeed."""
    return recipe.zero_stage == 0 and not arithmetic.bf16_weights


def set_trainable(model: CoatVlm, stage: StageConfig) -> None:
    """Freeze and unfreeze the modules as the stage says; once for a model.

    With ``lora`` the language model gets its adapters, and they alone of it train.

    Raises:
        ValueError: ``lora`` names a layer that is not there.
    """
    if stage.lora is not None:
        add_adapters(model, stage.lora)  # freezes all but the adapters
    for name, part in module_parameters(model).items():
        if name != "language" or stage.lora is None:
            part.requires_grad_(stage.module(name).train)
    if stage.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers made the embeddings' outputs want gradients, which only reentrant
        # checkpointing needs: a frozen tower would keep all its activations and run backward.
        model.disable_input_require_grads()


def set_train_mode(model: CoatVlm, stage: StageConfig) -> None:
    """Training mode, but evaluation mode (no dropout) for frozen modules."""
    model.train()
    for name, part in module_parameters(model).items():
        if not stage.module(name).train:
            part.eval()


def prepare_model(
    model: CoatVlm, recipe: Recipe, stage: StageConfig, arithmetic: Arithmetic
) -> ConversionReport | None:
    """Make a model what a stage trains: adapters, frozen parts, attention, precision.

    Args:
        model: as it was built or loaded; changed in place, once.
        recipe: attention.
        stage: what trains, and whether rows are packed.
        arithmetic: of the recipe's precision.

    Returns:
        What became FP8; None where nothing should.

    Raises:
        ValueError: ``lora`` names a layer that is not there, or the model does not fit FP8.
    """
    set_trainable(model, stage)
    if stage.packing is not None and recipe.model.attention == "sdpa":
        model.language_model.set_attn_implementation(PACKED)
    return arithmetic.apply(model)


def build_optimizer(
    model: CoatVlm, stage: StageConfig, arithmetic: Arithmetic, world: World
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters: with FP8 moments under ``precision: coat``."""
    groups = param_groups(model, stage)
    fp8 = arithmetic.fp8
    if fp8 is not None and fp8.optimizer == "coat":
        codec = fp8.codec(stage.betas[1])
        return CoatAdamW(groups, lr=0.0, betas=stage.betas, eps=stage.eps, codec=codec)
    fused = world.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=0.0, betas=stage.betas, eps=stage.eps, fused=fused)


def build_engine(
    model: CoatVlm,
    recipe: Recipe,
    stage: StageConfig,
    arithmetic: Arithmetic,
    world: World,
    optimizer: torch.optim.Optimizer | None = None,
) -> deepspeed.DeepSpeedEngine:
    """The DeepSpeed engine of one stage.

    Args:
        model: the model, with the stage's modules made trainable (:func:`set_trainable`) and its
            blocks converted.
        recipe: ZeRO stage.
        arithmetic: the recipe's precision on this device.
        stage: batch sizes, optimizer settings.
        world: the processes of the run.
        optimizer: over :func:`coat_vlm.optim.param_groups` of the model; by default
            :func:`build_optimizer`'s.

    Raises:
        ValueError: the batch sizes do not divide.
    """
    if optimizer is None:
        optimizer = build_optimizer(model, stage, arithmetic, world)
    if recipe.zero_stage == 3:
        # An FP8 block reads its submodules' weights itself, so ZeRO must gather a block as a whole.
        blocks = {type(block) for _, block in fp8_blocks(model)}
        if blocks:
            deepspeed.utils.set_z3_leaf_modules(model, list(blocks))
    # cuDNN attention (torch 2.11's first choice on Hopper) gave NaN gradients at a sane loss in
    # training with short sequences (docs/results.md); the flash backend did not.
    torch.backends.cuda.enable_cudnn_sdp(recipe.cudnn_attention)
    # DeepSpeed 0.19.8 calls what torch 2.13 has renamed, and would say so in every step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=deepspeed_config(recipe, stage, arithmetic, world.size),
        dist_init_required=False,
    )
    # At stage 0 in BF16 DeepSpeed takes a step on zero gradients to allocate the states. With lr 0
    # it moves nothing; forgetting the states it made undoes the rest (the step count).
    if recipe.zero_stage == 0:
        optimizer.state.clear()
    speed_up_step(engine)
    # Only now are the weights where they stay; an earlier stage's graphs go in any case.
    graph_blocks(model, arithmetic.fp8 is not None and arithmetic.fp8.cuda_graphs)
    check_optimizer(engine, optimizer)
    return engine


def check_optimizer(engine: deepspeed.DeepSpeedEngine, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an engine that would not step with this optimizer on this device.

    Raises:
        ValueError: DeepSpeed took another optimizer, or offloads states or weights.
    """
    offloads = engine.zero_offload_optimizer(), engine.zero_offload_param()
    offloaded = any(o is not None and o.device != "none" for o in offloads)
    if engine.basic_optimizer is not optimizer or offloaded:
        raise ValueError(
            f"DeepSpeed would step with {type(engine.basic_optimizer).__name__}"
            f"{' on the CPU (offload)' if offloaded else ''}, not with the kernel of "
            f"{type(optimizer).__name__}; leave offload_optimizer, offload_param and optimizer out "
            "of its configuration: FP8 states and a higher zero_stage save memory instead"
        )
