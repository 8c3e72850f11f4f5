"""Sums the gradients of micro-batches: in BF16, in FP32, or in BF16 with stochastic rounding.

BF16 has 8 significant bits. Rounded to nearest, a sum does not grow by terms below 2^-9 of it: the
sum of 1,024 equal gradients is 0.37 times as long as it should be.

    sums        micro-batches  bytes per trained parameter between them
    bf16        up to 8        2
    fp32        more           4; an optimizer that reads FP32 gradients needs no other copy
    stochastic  more           2: low-bits training whose FP32 sums would take too much of the GPU

FP32 sums are DeepSpeed's under ZeRO 1 to 3 (``grad_accum_dtype``); at ZeRO 0 autograd adds BF16
gradients to an FP32 ``.grad``. Stochastic sums are equal on all devices and after a resume.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coat_kernels import add_stochastic, rounding_key
from coat_vlm.config import Recipe, StageConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import Arithmetic

Sums = Literal["bf16", "fp32", "stochastic"]

MAX_BF16 = 8
"""Maximum number of micro-batches of a step whose gradients are added in BF16."""

FP32_SHARE = 0.25
"""Largest share of a GPU's memory that FP32 sums may take in low-bits training. With
8B parameters they take 0.38 of an 80 GB GPU (85e9 bytes) and 0.21 of an H200 (150e9 bytes)."""


def choose_sums(
    micro_batches: int, trained: int, gpu_bytes: float, *, bf16: bool, low_bits: bool
) -> Sums:
    """Choose the sums of a step with ``trained`` parameters, of BF16 or FP32 weights.

    ``low_bits``: whether the optimizer has no FP32 copy of the gradients, at ZeRO 0.
    """
    if not bf16:
        return "fp32"
    if micro_batches <= MAX_BF16:
        return "bf16"
    return "stochastic" if low_bits and 4 * trained > FP32_SHARE * gpu_bytes else "fp32"


def describe_sums(sums: Sums, micro_batches: int) -> str:
    """Describe the sums of a step in a line."""
    how = "BF16 with stochastic rounding" if sums == "stochastic" else sums.upper()
    return f"the gradients of {micro_batches:,} micro-batches are summed in {how}"


@dataclass(slots=True, kw_only=True)
class GradientSums:
    """Adds the gradients of micro-batches; use :meth:`adding` around each backward pass."""

    sums: Sums
    world: World
    seed: int
    micro_batches: int
    parameters: Sequence[nn.Parameter]
    """Trained BF16 parameters at ZeRO 0; empty where autograd or DeepSpeed adds everything."""
    totals: dict[int, Tensor] = field(default_factory=dict)
    """Index of a parameter -> its stochastically rounded sum."""
    key: Tensor | None = None
    """Key of the roundings of a micro-batch, int64 [1]; None: autograd adds its gradients."""
    hooked: bool = False

    @classmethod
    def of(
        cls, model: nn.Module, recipe: Recipe, stage: StageConfig, fp8: Arithmetic, world: World
    ) -> "GradientSums":
        """Choose the sums of a stage, the same on all ranks, before the engine is built."""
        per_pass = stage.micro_batch_size * stage.count_replicas(world.size)
        micro_batches = stage.batch_size // per_pass
        trained = [p for p in model.parameters() if p.requires_grad]
        size, bf16 = sum(p.numel() for p in trained), fp8.dtype == torch.bfloat16
        gpu_bytes = float("inf")
        if world.device.type == "cuda":
            gpu_bytes = torch.cuda.get_device_properties(world.device).total_memory
        gpu_bytes = min(world.gather(gpu_bytes))
        low_bits = fp8.low_bits and recipe.zero_stage == 0
        sums = choose_sums(micro_batches, size, gpu_bytes, bf16=bf16, low_bits=low_bits)
        own = bf16 and sums != "bf16" and not recipe.zero_stage
        return cls(
            sums=sums,
            world=world,
            seed=recipe.seed,
            micro_batches=micro_batches,
            parameters=trained if own else (),
        )

    def adopt(self, saved: Sums) -> None:
        """Continue with a checkpoint's stochastic sums, also where the memory allows others."""
        if self.parameters and saved == "stochastic":
            self.sums = saved

    @contextmanager
    def adding(self, step: int, number: int) -> Iterator[None]:
        """Add the gradients of a backward pass: micro-batch ``number``, from 1, of a step.

        After the last one, ``.grad`` are the sums.
        """
        last = number == self.micro_batches
        if self.sums == "stochastic":
            self._start_rounding(step, number, last)
        elif last and self.world.size > 1:
            # DeepSpeed adds BF16 zeros on ranks without a gradient; the dtypes must be equal.
            for p in self.parameters:
                if p.grad is None:
                    _set_grad(p, torch.zeros_like(p, dtype=torch.float32))
        yield
        if self.sums == "fp32":
            for p in self.parameters:  # autograd adds the next gradients in this dtype
                if p.grad is not None and p.grad.dtype != torch.float32:
                    _set_grad(p, p.grad.float())

    def _start_rounding(self, step: int, number: int, last: bool) -> None:
        if not self.hooked:
            for index, p in enumerate(self.parameters):
                p.register_post_accumulate_grad_hook(partial(self._add, index))
            self.hooked = True
        if last:  # rounded to nearest, also for parameters that get no gradient
            self.key = None
            for index, total in self.totals.items():
                self.parameters[index].grad = total
            self.totals.clear()
        else:
            key = rounding_key(rounding_key(self.seed, step, number), self.world.rank, 0)
            self.key = torch.full((1,), key, dtype=torch.int64, device=self.world.device)

    def _add(self, index: int, p: Any) -> None:
        if self.key is not None:
            total, grad, p.grad = self.totals.setdefault(index, p.grad), p.grad, None
            if total is not grad:
                add_stochastic(total, grad, self.key, index)


def _set_grad(p: Any, grad: Tensor) -> None:
    p.grad = p.grad_dtype = None  # without a dtype, the gradient may have another than p
    p.grad = grad
