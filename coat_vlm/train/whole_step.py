"""A BF16 step without ZeRO, on all parameters at once.

At ZeRO stage 0 DeepSpeed (0.19, ``runtime/fp16/unfused_optimizer.py``) goes through the parameters
one by one: it looks for infinities and waits for the GPU, takes the norm, makes an FP32 gradient,
scales it, and copies the master into the weight. These were 4,000 of the 6,200 launches of a BF16
step of ``real_photos``, whose model has 20M parameters in 211 tensors, and the GPU was idle for
more than half of the step (commit 1fac6ce). The same arithmetic in torch's ``_foreach`` functions
is a few launches for all of them, and one wait, for the norm.

A single rank has nothing to reduce, either; DeepSpeed would still copy every gradient into a buffer
and back.
"""

import math
from types import MethodType
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer


def take_whole_steps(engine: DeepSpeedEngine) -> None:
    """Let an engine of ZeRO stage 0 in BF16 step on all its parameters at once.

    Its gradients are looked at once, by their norm, which is not finite exactly if one of them is
    not, or their squares overflow: then no weight is changed, as DeepSpeed does it.

    Args:
        engine: others than those of stage 0 in 16 bits stay as they are.
    """
    wrapper: Any = engine.optimizer
    if not isinstance(wrapper, FP16_UnfusedOptimizer):
        return
    wrapper.step = MethodType(_step, wrapper)
    if engine.world_size == 1:
        engine.enable_backward_allreduce = False


@torch.no_grad()
def _step(wrapper: Any, closure: None = None) -> bool:  # noqa: ARG001 - DeepSpeed's signature
    """One step; says whether it was left out."""
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
