"""One sentence about a plan: whether it fits, and the smallest change that makes it fit."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from coat_vlm.config import BlockPrecision
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import Activations
from coat_vlm.plan.stage import StagePlan
from coat_vlm.plan.zero import ZERO_STAGES, ZeroStage, rank_memory, state_bytes_per_parameter

GB = 1e9


@dataclass(frozen=True, slots=True)
class _Change:
    """Settings that differ from the recipe's."""

    zero_stage: ZeroStage
    micro_batch: int
    precision: BlockPrecision | None = None
    checkpointing: bool = False

    def overrides(self, plan: StagePlan) -> list[str]:
        """What to write behind the recipe's name."""
        stage = f"stages.{plan.name}"
        words = []
        if self.zero_stage != plan.recipe_zero:
            words.append(f"zero_stage={self.zero_stage}")
        if self.precision is not None:
            words.append(f"precision={self.precision}")
        if self.micro_batch != plan.stage.micro_batch_size:
            words.append(f"{stage}.micro_batch_size={self.micro_batch}")
        if self.checkpointing:
            words.append(f"{stage}.gradient_checkpointing=true")
        return words


def advice(plan: StagePlan) -> str:
    """Whether the stage fits as the recipe has it, and what to change."""
    needed, usable = plan.memory[plan.recipe_zero].peak, plan.usable_bytes
    written = f"ZeRO {plan.recipe_zero}, micro_batch_size {plan.stage.micro_batch_size}"
    numbers = f"{needed / GB:.1f} GB of the {usable / GB:.1f} GB that tensors may take"
    if needed <= usable:
        largest = plan.largest_micro_batch(plan.recipe_zero)
        best = _largest_divisor(plan, largest)
        more = f"; the largest micro-batch that fits is {largest}"
        if best > plan.stage.micro_batch_size:
            more += f" (stages.{plan.name}.micro_batch_size={best} divides the batch)"
        return f"It fits as written ({written}): {numbers}{more}."
    fitting = [change for change in _changes(plan) if _peak(plan, change) <= usable]
    start = f"It does not fit as written ({written}): {numbers}."
    if fitting:
        best = min(fitting, key=lambda change: len(change.overrides(plan)))
        peak = _peak(plan, best) / GB
        return f"{start} About {peak:.1f} GB with: {' '.join(best.overrides(plan))}"
    smallest = min(_peak(plan, change) for change in _changes(plan)) / GB
    return (
        f"{start} No ZeRO stage, precision, micro-batch or checkpointing makes it fit on "
        f"{plan.ranks} GPU(s) (at least {smallest:.1f} GB): take more GPUs (--gpus), larger ones, "
        "or freeze modules."
    )


def _largest_divisor(plan: StagePlan, at_most: int) -> int:
    per_rank = plan.stage.batch_size // plan.ranks
    return max((n for n in range(1, at_most + 1) if per_rank % n == 0), default=1)


def _changes(plan: StagePlan) -> Iterator[_Change]:
    """In the order of what they cost: nothing, communication, accuracy, time."""
    micro_batches = dict.fromkeys((plan.stage.micro_batch_size, 1))
    lean = "coat_lean" if plan.precision not in ("coat_lean", "fp32") else None
    for checkpointing in dict.fromkeys((False, not plan.stage.gradient_checkpointing)):
        for precision in dict.fromkeys((None, lean)):
            if precision is not None and (precision, checkpointing) not in plan.kept:
                continue
            for micro_batch in micro_batches:
                for zero_stage in ZERO_STAGES:
                    if zero_stage >= plan.recipe_zero:
                        yield _Change(zero_stage, micro_batch, precision, checkpointing)


def _peak(plan: StagePlan, change: _Change) -> float:
    sizes, precision = plan.sizes, change.precision or plan.precision
    checkpointing = change.checkpointing or plan.stage.gradient_checkpointing
    if change.precision is not None:
        states = state_bytes_per_parameter(CoatAdamW)
        sizes = dataclasses.replace(sizes, state_bytes=states)
    changed = change.precision is not None or change.checkpointing
    activations: Activations = plan.rows(change.micro_batch)
    if changed and (precision, checkpointing) in plan.kept:
        of_recipe = plan.kept[precision, checkpointing]  # pyright: ignore[reportArgumentType]
        activations = of_recipe.scaled(change.micro_batch / plan.stage.micro_batch_size)
    elif changed:
        return float("inf")
    accumulates = plan.stage.batch_size > change.micro_batch * plan.ranks
    return rank_memory(
        change.zero_stage, sizes, plan.ranks, activations, accumulates=accumulates
    ).peak
