"""Prints a plan."""

from collections.abc import Sequence

from coat_vlm.config import BlockPrecision
from coat_vlm.plan.activations import PARTS
from coat_vlm.plan.advice import GB, advice
from coat_vlm.plan.frames import BLOCK_PRECISIONS
from coat_vlm.plan.stage import USABLE, StagePlan
from coat_vlm.plan.zero import RankMemory

_LABEL, _CELL = 26, 12

_LINES = (
    ("weights", "weights"),
    ("FP32 master weights", "masters"),
    ("optimizer states", "states"),
    ("gradients", "gradients"),
    ("activations", "activations"),
    ("buckets, gathered weights", "buffers"),
    ("peak of the passes", "backward_peak"),
    ("peak of the step", "step_peak"),
)


def format_plan(plans: Sequence[StagePlan]) -> str:
    """The tables of all stages, each with its advice."""
    return "\n\n".join(_stage(plan) for plan in plans)


def _stage(plan: StagePlan) -> str:
    sizes, stage = plan.sizes, plan.stage
    micro_batches = stage.batch_size // (stage.micro_batch_size * plan.ranks)
    checkpointed = ", gradient checkpointing" if stage.gradient_checkpointing else ""
    lines = [
        f"stage {plan.name}: {sizes.parameters:,} parameters, {sizes.trained:,} trained; "
        f"{plan.precision}, {plan.optimizer}{checkpointed}",
        f"  {plan.ranks} GPU(s) of {plan.gpu_bytes / GB:.1f} GB, of which tensors may take "
        f"{USABLE:.0%} (the rest: CUDA, NCCL, gaps)",
        f"  a step: {stage.batch_size} rows = {plan.ranks} rank(s) x {micro_batches} "
        f"micro-batch(es) x {stage.micro_batch_size}",
        f"  a row: {plan.tokens:,} tokens, all filled; "
        + (
            f"{plan.images} image(s) of {plan.patches:,} patches ({plan.images_why})"
            if plan.patches
            else f"text alone ({plan.images_why})"
        ),
        "",
        _row("GB per rank", [f"ZeRO {zero}" for zero in plan.memory]),
    ]
    memories = list(plan.memory.values())
    lines += [
        _row(label, [_gb(getattr(memory, name)) for memory in memories]) for label, name in _LINES
    ]
    lines.append(_row("fits", [_fits(plan, memory) for memory in memories]))
    largest = [str(plan.largest_micro_batch(zero) or "none") for zero in plan.memory]
    lines += [_row("largest micro-batch", largest), "", *_activations(plan), ""]
    return "\n".join([*lines, advice(plan)])


def _activations(plan: StagePlan) -> list[str]:
    """What a micro-batch keeps, by precision."""
    found: list[BlockPrecision] = [p for p in BLOCK_PRECISIONS if (p, False) in plan.kept]
    lines = [_row("GB kept by a micro-batch", list(found))]
    for part in PARTS:
        cells = [_gb(plan.kept[name, False].kept[part]) for name in found]
        lines.append(_row(f"  {part}", cells))
    for label, checkpointing in (("all", False), ("all, with checkpointing", True)):
        cells = [_gb(plan.kept[name, checkpointing].total_kept) for name in found]
        lines.append(_row(f"  {label}", cells))
    tokens = plan.tokens * plan.stage.micro_batch_size
    cells = [f"{plan.kept[name, False].kept['language'] / tokens / 1e3:,.1f}" for name in found]
    lines.append(_row("kB per language token", cells))
    if plan.images:
        patches = plan.patches * plan.images * plan.stage.micro_batch_size
        cells = [f"{plan.kept[name, False].kept['vision'] / patches / 1e3:,.1f}" for name in found]
        lines.append(_row("kB per patch", cells))
    workspace = plan.activations.attention_workspace
    copies = plan.activations.weight_copies
    note = f"  in the peak: attention's backward workspace {_gb(workspace)} GB"
    return [*lines, note + (f", kept FP8 weights {_gb(copies)} GB" if copies else "")]


def _fits(plan: StagePlan, memory: RankMemory) -> str:
    return "yes" if memory.peak <= plan.usable_bytes else "no"


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<{_LABEL}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)


def _gb(size: float) -> str:
    return f"{size / GB:,.3f}" if size < 10 * GB else f"{size / GB:,.1f}"
