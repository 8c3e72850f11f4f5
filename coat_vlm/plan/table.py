"""Formats a plan as tables, and gives advice in one sentence.

The advice states whether the plan fits, and the smallest change that makes it fit.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import PARTS
from coat_vlm.plan.graphs import add_graphs
from coat_vlm.plan.stage import COLUMNS, MARGIN, RECOMPUTE_QKV, StagePlan
from coat_vlm.plan.zero import (
    ZERO_STAGES,
    ZeroStage,
    measure_state_bytes,
)

GB = 1e9


@dataclass(frozen=True, slots=True)
class _Change:
    """Settings that differ from the recipe's."""

    zero_stage: ZeroStage
    micro_batch: int
    recompute_qkv: bool = False
    checkpointing: bool = False
    low_bits: bool = False

    def overrides(self, plan: StagePlan) -> list[str]:
        """Return the command-line overrides of the recipe."""
        stage = f"stages.{plan.name}"
        words = {
            f"zero_stage={self.zero_stage}": self.zero_stage != plan.recipe_zero,
            "master_weights=auto": plan.master_weights == "low_bits" and not self.low_bits,
            "master_weights=low_bits": plan.master_weights == "fp32" and self.low_bits,
            "precision=coat": self.recompute_qkv and plan.precision != "coat",
            "fp8.recompute_qkv=true": self.recompute_qkv,
            f"{stage}.micro_batch_size={self.micro_batch}": (
                self.micro_batch != plan.stage.micro_batch_size
            ),
            f"{stage}.gradient_checkpointing=true": self.checkpointing,
        }
        return [word for word, differs in words.items() if differs]


def advice(plan: StagePlan) -> str:
    """State whether the stage fits with the recipe's settings, and what to change."""
    needed, usable = plan.memory[plan.recipe_zero].peak, plan.usable_bytes
    written = f"ZeRO {plan.recipe_zero}, micro_batch_size {plan.stage.micro_batch_size}"
    numbers = f"{needed / GB:.1f} GB of the {usable / GB:.1f} GB that tensors may use"
    if needed <= usable:
        largest = plan.largest_micro_batch(plan.recipe_zero)
        per_rank = plan.stage.batch_size // plan.replicas
        best = max((n for n in range(1, largest + 1) if per_rank % n == 0), default=1)
        more = f"; the largest micro-batch that fits is {largest}"
        if best > plan.stage.micro_batch_size:
            more += f" (stages.{plan.name}.micro_batch_size={best} divides the batch)"
        return f"It fits as written ({written}): {numbers}{more}."
    options = [(_peak(plan, change), change.overrides(plan)) for change in _changes(plan)]
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


def _changes(plan: StagePlan) -> Iterator[_Change]:
    """Yield changes in the order of their cost: none, communication, accuracy, time."""
    graphs = plan.graphs.mode is True  # which a recipe refuses with ZeRO-3 and checkpointing
    micro_batches = dict.fromkeys((plan.stage.micro_batch_size, 1))
    qkv = plan.precision != "fp32" and not plan.recompute_qkv
    recompute = not plan.stage.gradient_checkpointing and not graphs
    # One process has nothing to shard.
    least = 0 if plan.ranks == 1 else plan.recipe_zero
    for checkpointing in dict.fromkeys((False, recompute)):
        for recompute_qkv in dict.fromkeys((False, qkv)):
            if recompute_qkv and (RECOMPUTE_QKV, checkpointing) not in plan.saved:
                continue
            coat = recompute_qkv or plan.optimizer == CoatAdamW.__name__
            for micro_batch in micro_batches:
                if coat and least == 0:
                    yield _Change(0, micro_batch, recompute_qkv, checkpointing, low_bits=True)
                for zero_stage in ZERO_STAGES:
                    if zero_stage == 0 and coat and plan.master_weights != "fp32":
                        continue  # low bits, as written
                    if zero_stage >= least and not (graphs and zero_stage == 3):
                        yield _Change(zero_stage, micro_batch, recompute_qkv, checkpointing)


def _peak(plan: StagePlan, change: _Change) -> float:
    sizes = dataclasses.replace(plan.sizes, low_bits=change.low_bits)
    activations, rows = None, change.micro_batch
    if change.recompute_qkv:
        sizes = dataclasses.replace(sizes, state_bytes=measure_state_bytes(CoatAdamW))
    if change.recompute_qkv or change.checkpointing:
        checkpointing = change.checkpointing or plan.stage.gradient_checkpointing
        recompute_qkv = change.recompute_qkv or plan.recompute_qkv
        column = RECOMPUTE_QKV if recompute_qkv else plan.precision
        of_recipe = plan.saved.get((column, checkpointing))
        if of_recipe is None:
            return float("inf")
        activations = of_recipe.scale(rows / plan.stage.micro_batch_size)
    return plan.estimate_memory(change.zero_stage, rows, sizes, activations).peak


_LABEL, _CELL = 26, 14

_LINES = (
    ("weights", "weights"),
    ("master weights", "master_weights"),
    ("optimizer states", "states"),
    ("gradients", "gradients"),
    ("activations", "activations"),
    ("buckets, gathered weights", "buffers"),
    ("peak, forward/backward", "backward_peak"),
    ("peak, optimizer step", "step_peak"),
)


def format_plan(plans: Sequence[StagePlan], *, verbose: bool = False) -> str:
    """Format the advice and the assumptions of each stage; ``verbose`` adds the tables."""
    return "\n\n".join(_stage(plan, verbose=verbose) for plan in plans)


def _stage(plan: StagePlan, *, verbose: bool) -> str:
    sizes, stage = plan.sizes, plan.stage
    micro_batches = stage.batch_size // (stage.micro_batch_size * plan.replicas)
    shared = stage.sequence_parallel
    sharing = "rank(s)" if shared == 1 else f"group(s) of {shared} ranks, which share tokens,"
    assumed = [f"  assumed: {plan.assumed}"] if plan.assumed else []
    checkpointed = ", gradient checkpointing" if stage.gradient_checkpointing else ""
    if sizes.low_bits:
        checkpointed += ", low bits of master weights at ZeRO 0"
    lines = [
        f"stage {plan.name}: {advice(plan)}",
        *_frames(plan),
        f"  {sizes.parameters:,} parameters, {sizes.trained:,} trained; "
        f"{plan.precision}, {plan.optimizer}{checkpointed}",
        *assumed,
        f"  {plan.ranks} GPU(s) of {plan.gpu_bytes / GB:.1f} GB, of which tensors may use "
        f"{plan.usable_bytes / GB:.1f} (the margin of plans is {MARGIN - 1:.0%})",
        f"  a step: {stage.batch_size} rows = {plan.replicas} {sharing} x {micro_batches} "
        f"micro-batch(es) x {stage.micro_batch_size}",
        f"  a row: {plan.tokens:,} tokens, all filled; "
        + (
            f"{plan.images} image(s) of {plan.patches:,} patches ({plan.images_reason})"
            if plan.patches
            else f"only text ({plan.images_reason})"
        ),
    ]
    return "\n".join([*lines, *(_tables(plan) if verbose else _graphs(plan))])


def _tables(plan: StagePlan) -> list[str]:
    lines = ["", _row("GB per rank", [f"ZeRO {zero}" for zero in plan.memory])]
    memories = list(plan.memory.values())
    lines += [
        _row(label, [_gb(getattr(memory, name)) for memory in memories]) for label, name in _LINES
    ]
    fits = [memory.peak <= plan.usable_bytes for memory in memories]
    lines.append(_row("fits", ["yes" if fit else "no" for fit in fits]))
    largest = [str(plan.largest_micro_batch(zero) or "none") for zero in plan.memory]
    return [*lines, _row("largest micro-batch", largest), "", *_activations(plan), *_graphs(plan)]


def _frames(plan: StagePlan) -> list[str]:
    """State the largest number of frames in a row of the recipe's length."""
    frames = plan.frames
    if frames is None:
        return []
    most, groups = plan.largest_frames(), f"{frames.group_tokens} tokens"
    if frames.group_frames > 1:
        groups += f" per {frames.group_frames} frames"
    limit = "of the row's length" if most == frames.most else "of memory"
    return [
        f"  videos: at most {most:,} frames in a row of {plan.tokens:,} tokens (ZeRO "
        f"{plan.recipe_zero}, micro_batch_size {plan.stage.micro_batch_size}, {groups}), because "
        f"{limit}."
    ]


def _activations(plan: StagePlan) -> list[str]:
    """Format the bytes that a micro-batch saves for backward, by precision."""
    found = [column for column in COLUMNS if (column, False) in plan.saved]
    lines = [_row("GB saved per micro-batch", list(found))]
    for part in PARTS:
        cells = [_gb(plan.saved[name, False].saved[part]) for name in found]
        lines.append(_row(f"  {part}", cells))
    for label, checkpointing in (("all", False), ("all, with checkpointing", True)):
        cells = [_gb(plan.saved[name, checkpointing].total_saved) for name in found]
        lines.append(_row(f"  {label}", cells))
    workspace = plan.activations.attention_workspace
    copies = plan.activations.weight_copies
    note = f"  in the peak: attention's backward workspace {_gb(workspace)} GB"
    return [*lines, note + (f", cached FP8 weights {_gb(copies)} GB" if copies else "")]


def _graphs(plan: StagePlan) -> list[str]:
    """State the blocks that CUDA graphs launch, and their memory."""
    captured = plan.find_captured()
    if not captured:
        return []
    blocks = " and ".join(f"{load.blocks} blocks of {part}" for part, load in captured.items())
    memory = add_graphs(plan.memory[plan.recipe_zero], [*captured.values()])
    return [
        f"  CUDA graphs launch {blocks} (fp8.cuda_graphs): "
        + (
            "the peaks contain their memory"
            if plan.graphs.mode is True
            else f"they use memory that is left, for a peak of {_gb(memory.peak)} GB"
        )
    ]


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<{_LABEL}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)


def _gb(size: float) -> str:
    return f"{size / GB:,.3f}" if size < 10 * GB else f"{size / GB:,.1f}"
