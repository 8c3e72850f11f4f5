"""What a stage trains and reads: the tables before training, and the first entry of its metrics."""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from coat_data.load.collate import MAX_PADDING
from coat_vlm.config import Recipe, StageConfig
from coat_vlm.distributed import World
from coat_vlm.model.lora import describe
from coat_vlm.model.vlm import count_parameters, module_parameters
from coat_vlm.train.data import StageData
from coat_vlm.train.tracking import print_on_main


def describe_stage(
    recipe: Recipe, name: str, model: PreTrainedModel, world: World
) -> dict[str, Any]:
    """Return the entries of metrics.jsonl at a stage's start: modules, machine, versions."""
    parts = module_parameters(model)
    gpu = world.device.type == "cuda"
    return {
        "stage": name,
        "trainable": {n: count_parameters(part, trainable_only=True) for n, part in parts.items()},
        "total": {name: count_parameters(part) for name, part in parts.items()},
        "world_size": world.size,
        "device": torch.cuda.get_device_name(world.device) if gpu else "cpu",
        "zero_stage": recipe.zero_stage,
        "precision": recipe.precision,
        "versions": {
            package: version(package) for package in ("torch", "transformers", "deepspeed")
        },
    }


def describe_sources(data: StageData) -> list[dict[str, Any]]:
    """Return rows, samples and passes per epoch, and mean tokens of a sample, of each source."""
    return [
        {**asdict(share), "passes": share.passes, "tokens": tokens}
        for share, tokens in zip(data.shares, data.tokens, strict=True)
    ]


def print_tables(
    world: World,
    stage: StageConfig,
    name: str,
    model: PreTrainedModel,
    data: StageData,
    total_steps: int,
) -> None:
    """Print the modules of a stage, and the rows, epochs and tokens of each source."""
    samples = total_steps * data.samples_per_step(stage)
    rows = "samples" if data.packing is None else f"rows of {data.row_tokens:,} tokens"
    rows = rows if stage.dpo is None else "preference pairs"
    lines = [f"\nstage {name}: {total_steps} steps of {stage.batch_size} {rows}"]
    if data.packing is not None:
        lines.append(
            f"  packed: {data.packing.samples_per_row:.1f} samples and "
            f"{data.packing.images_per_row:.1f} images in a row, {data.packing.fill:.1%} full"
        )
    if data.unpadded:
        lines.append(f"  micro-batches with over {MAX_PADDING:.0%} of padding are packed instead")
    if stage.sequence_parallel > 1:
        lines.append(f"  {stage.sequence_parallel} ranks share the tokens of each micro-batch")
    lines += [f"  WARNING {warning}" for warning in data.warnings]
    lines.append(f"  label masks verified on {data.verified_rows} rows")
    lines += [f"  {line}" for line in data.shown_row]
    lines.append(f"  {'module':<12}{'parameters':>14}  {'trains':<8}peak lr")
    for part, module in module_parameters(model).items():
        training = stage.module(part)
        lr = f"{training.lr:g}" if training.lr is not None else "-"
        trains = "yes" if training.train else "frozen"
        trains = "LoRA" if stage.lora is not None and part in stage.lora.modules else trains
        lines.append(f"  {part:<12}{count_parameters(module):>14,}  {trains:<8}{lr}")
    if stage.lora is not None:
        lines.append(f"  {describe(model)}")
    width = max(20, *(len(share.name) + 2 for share in data.shares))
    measured = any(data.tokens)
    header = f"  {'source':<{width}}{'rows':>10}{'per epoch':>12}{'epochs':>10}"
    lines.append(header + (f"{'tokens':>10}{'of all':>9}" if measured else ""))
    means = [mean or 0.0 for mean in data.tokens]
    total = sum(mean * share.samples for share, mean in zip(data.shares, means, strict=True))
    for share, mean in zip(data.shares, means, strict=True):
        passes = samples / data.epoch_size * share.passes
        line = f"  {share.name:<{width}}{share.rows:>10,}{share.samples:>12,}{passes:>10.2f}"
        of_all = f"{mean * share.samples / max(1.0, total):.1%}"
        lines.append(line + (f"{mean:>10,.0f}{of_all:>9}" if measured else ""))
    print_on_main(world, "\n".join(lines))
