"""Formats a plan: advice in one sentence, the assumptions, and a table of the ZeRO stages.

The advice states whether the plan fits, and the smallest change that makes it fit.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.stage import MARGIN, StagePlan, add_graphs, trace_variant
from coat_vlm.plan.zero import ZERO_STAGES, ZeroStage, measure_state_bytes
from coat_vlm.train.gradient_sums import describe_sums

GB = 1e9


@dataclass(frozen=True, slots=True)
class _Change:
    """Settings that differ from the recipe's."""

    zero_stage: ZeroStage
    micro_batch: int
    recompute_qkv: bool
    checkpointing: bool
    low_bits: bool

    def overrides(self, plan: StagePlan) -> list[str]:
        """Return the command-line overrides of the recipe."""
        stage, recipe = f"stages.{plan.name}", plan.recipe
        words = {
            f"zero_stage={self.zero_stage}": self.zero_stage != recipe.zero_stage,
            "master_weights=low_bits": recipe.master_weights == "fp32" and self.low_bits,
            "precision=coat": self.recompute_qkv and recipe.precision != "coat",
            "fp8.recompute_qkv=true": self.recompute_qkv,
            f"{stage}.micro_batch_size={self.micro_batch}": (
                self.micro_batch != plan.stage.micro_batch_size
            ),
            f"{stage}.gradient_checkpointing=true": self.checkpointing,
        }
        return [word for word, differs in words.items() if differs]

    def peak(self, plan: StagePlan) -> float:
        """Return the planned peak in bytes; infinite if the model does not support the change."""
        sizes = dataclasses.replace(plan.sizes, low_bits=self.low_bits)
        activations = None
        if self.recompute_qkv:
            sizes = dataclasses.replace(sizes, state_bytes=measure_state_bytes(CoatAdamW))
        if self.recompute_qkv or self.checkpointing:
            of_recipe = trace_variant(
                plan,
                recompute_qkv=self.recompute_qkv or _recomputes_qkv(plan),
                checkpointing=self.checkpointing or plan.stage.gradient_checkpointing,
            )
            if of_recipe is None:
                return float("inf")
            activations = of_recipe.scale(self.micro_batch / plan.stage.micro_batch_size)
        return plan.estimate_memory(self.zero_stage, self.micro_batch, sizes, activations).peak


def advice(plan: StagePlan) -> str:
    """State whether the stage fits with the recipe's settings, and what to change."""
    needed, usable = plan.own_memory.peak, plan.usable_bytes
    zero_stage = plan.recipe.zero_stage
    written = f"ZeRO {zero_stage}, micro_batch_size {plan.stage.micro_batch_size}"
    numbers = f"{needed / GB:.1f} GB of the {usable / GB:.1f} GB that tensors may use"
    if needed <= usable:
        largest = plan.largest_micro_batch(zero_stage)
        per_rank = plan.stage.batch_size // plan.replicas
        best = max((n for n in range(1, largest + 1) if per_rank % n == 0), default=1)
        more = f"; the largest micro-batch that fits is {largest}"
        if best > plan.stage.micro_batch_size:
            more += f" (stages.{plan.name}.micro_batch_size={best} divides the batch)"
        return f"It fits as written ({written}): {numbers}{more}."
    options = [(change.peak(plan), change.overrides(plan)) for change in _changes(plan)]
    start = f"It does not fit as written ({written}): {numbers}."
    if fitting := [option for option in options if option[0] <= usable]:
        peak, overrides = min(fitting, key=lambda option: len(option[1]))
        return f"{start} About {peak / GB:.1f} GB with: {' '.join(overrides)}"
    smallest = min(peak for peak, _ in options)
    return (
        f"{start} No ZeRO stage, precision, micro-batch or checkpointing makes it fit on "
        f"{plan.ranks} GPU(s) (at least {smallest / GB:.1f} GB): use more (--gpus) or larger GPUs, "
        "or freeze modules."
    )


def _recomputes_qkv(plan: StagePlan) -> bool:
    return plan.fp8 is not None and plan.fp8.recompute_qkv is True


def _changes(plan: StagePlan) -> Iterator[_Change]:
    """Yield changes in the order of their cost: none, communication, accuracy, time."""
    graphs = plan.graphs is True  # which a recipe refuses with ZeRO-3 and checkpointing
    micro_batches = dict.fromkeys((plan.stage.micro_batch_size, 1))
    qkv = plan.recipe.precision != "fp32" and not _recomputes_qkv(plan)
    recompute = not plan.stage.gradient_checkpointing and not graphs
    # One process has nothing to shard.
    least = 0 if plan.ranks == 1 else plan.recipe.zero_stage
    for checkpointing in dict.fromkeys((False, recompute)):
        for recompute_qkv in dict.fromkeys((False, qkv)):
            coat = recompute_qkv or plan.optimizer is CoatAdamW
            for micro_batch in micro_batches:
                settings = micro_batch, recompute_qkv, checkpointing
                copies = plan.recipe.master_weights == "fp32" or not coat
                for zero_stage in ZERO_STAGES:
                    if zero_stage >= least and not (graphs and zero_stage == 3):
                        for low_bits in (True,) * coat + (False,) * copies:
                            yield _Change(zero_stage, *settings, low_bits)


_LINES = {
    "weights": "weights",
    "master weights": "master_weights",
    "optimizer states": "states",
    "gradients": "gradients",
    "activations": "activations",
    "buckets, gathered weights": "buffers",
    "peak, forward/backward": "backward_peak",
    "peak, optimizer step": "step_peak",
}


def format_plan(plans: Sequence[StagePlan], *, verbose: bool = False) -> str:
    """Format the advice and the assumptions of each stage; ``verbose`` adds the table."""
    return "\n\n".join(_format_stage(plan, verbose=verbose) for plan in plans)


def _format_stage(plan: StagePlan, *, verbose: bool) -> str:
    sizes, stage = plan.sizes, plan.stage
    sums = plan.choose_sums(plan.recipe.zero_stage, stage.micro_batch_size)
    micro_batches = stage.batch_size // (stage.micro_batch_size * plan.replicas)
    shared = stage.sequence_parallel
    sharing = "rank(s)" if shared == 1 else f"group(s) of {shared} ranks, which share tokens,"
    settings = f"{plan.recipe.precision}, {plan.optimizer.__name__}"
    settings += ", gradient checkpointing" * stage.gradient_checkpointing
    settings += ", low bits of master weights" * sizes.low_bits
    row, patches = plan.row, plan.row.count_patches(plan.model.config)
    pictures = f"{row.images} image(s) of {patches:,} patches" if patches else "only text"
    return "\n".join(
        [
            f"stage {plan.name}: {advice(plan)}",
            f"  {sizes.parameters:,} parameters, {sizes.trained:,} trained; {settings}",
            *([f"  assumed: {plan.assumed}"] if plan.assumed else []),
            f"  {plan.ranks} GPU(s) of {plan.gpu_bytes / GB:.1f} GB, of which tensors may use "
            f"{plan.usable_bytes / GB:.1f} (the margin of plans is {MARGIN - 1:.0%})",
            f"  a step: {stage.batch_size} sequences = {plan.replicas} {sharing} x {micro_batches} "
            f"micro-batch(es) x {stage.micro_batch_size}",
            *([f"  {describe_sums(sums, micro_batches)}"] if micro_batches > 1 else []),
            f"  a sequence: {row.tokens:,} tokens, all filled; {pictures} ({row.reason})",
            *_graphs(plan),
            *(_table(plan) if verbose else []),
        ]
    )


def _table(plan: StagePlan) -> list[str]:
    memory, saved = plan.memory, plan.activations.saved
    parts = ", ".join(f"{part} {_gb(size)}" for part, size in saved.items())
    return [
        _row("GB per rank", [f"ZeRO {zero}" for zero in memory]),
        *(
            _row(label, [_gb(getattr(of_zero, name)) for of_zero in memory.values()])
            for label, name in _LINES.items()
        ),
        _row("fits", ["yes" if m.peak <= plan.usable_bytes else "no" for m in memory.values()]),
        _row("largest micro-batch", [str(plan.largest_micro_batch(zero)) for zero in memory]),
        f"  activations by part, GB: {parts}",
    ]


def _graphs(plan: StagePlan) -> list[str]:
    """State the blocks that CUDA graphs launch, and their memory."""
    captured = plan.find_captured()
    if not captured:
        return []
    blocks = " and ".join(f"{load.blocks} blocks of {part}" for part, load in captured.items())
    memory = add_graphs(plan.own_memory, [*captured.values()])
    return [
        f"  CUDA graphs launch {blocks} (fp8.cuda_graphs): "
        + (
            "the peaks contain their memory"
            if plan.graphs is True
            else f"they use memory that is left, for a peak of {_gb(memory.peak)} GB"
        )
    ]


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<26}" + "".join(f"{cell:>14}" for cell in cells)


def _gb(size: float) -> str:
    return f"{size / GB:,.3f}" if size < 10 * GB else f"{size / GB:,.1f}"
