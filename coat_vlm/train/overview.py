"""What a stage says of itself as it starts."""

from importlib.metadata import version
from typing import Any

import torch
from tqdm import tqdm

from coat_vlm.config import Recipe, StageName
from coat_vlm.distributed import World
from coat_vlm.model import CoatVlm, count_parameters, module_parameters
from coat_vlm.model.lora import describe
from coat_vlm.train.sources import StageData


def overview(recipe: Recipe, name: str, model: CoatVlm, world: World) -> dict[str, Any]:
    """What metrics.jsonl notes as a stage starts: its parts, the machine, versions."""
    parts = module_parameters(model)
    device = "cpu"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    return {
        "stage": name,
        "trainable": {n: count_parameters(part, trainable_only=True) for n, part in parts.items()},
        "total": {name: count_parameters(part) for name, part in parts.items()},
        "world_size": world.size,
        "device": device,
        "zero_stage": recipe.zero_stage,
        "precision": recipe.precision,
        "versions": {
            package: version(package) for package in ("torch", "transformers", "deepspeed")
        },
    }


def print_tables(
    world: World, recipe: Recipe, name: StageName, model: CoatVlm, data: StageData, total_steps: int
) -> None:
    """Print what a stage trains, and the rows, epochs and tokens of each source."""
    stage = recipe.stages[name]
    samples = total_steps * data.samples_per_step(stage)
    rows = "samples" if data.packing is None else f"rows of {data.row_tokens:,} tokens"
    say(world, f"\nstage {name}: {total_steps} steps of {stage.batch_size} {rows}")
    if data.packing is not None:
        say(
            world,
            f"  packed: {data.packing.samples_per_bin:.1f} samples and "
            f"{data.packing.images_per_bin:.1f} images in a row, {data.packing.fill:.1%} full",
        )
    for warning in data.warnings:
        say(world, f"  WARNING {warning}")
    say(world, f"  label masks verified on {data.verified_rows} rows")
    say(world, f"  {'module':<12}{'parameters':>14}  {'trains':<8}peak lr")
    for part, module in module_parameters(model).items():
        training = stage.module(part)
        lr = f"{training.lr:g}" if training.lr is not None else "-"
        trains = "yes" if training.train else "frozen"
        trains = "LoRA" if part == "language" and stage.lora is not None else trains
        say(world, f"  {part:<12}{count_parameters(module):>14,}  {trains:<8}{lr}")
    if stage.lora is not None:
        say(world, f"  {describe(model)}")
    about = "tokens" if data.packing is not None else "~tokens"
    width = max(20, *(len(share.name) + 2 for share in data.shares))
    say(
        world,
        f"  {'source':<{width}}{'rows':>10}{'per epoch':>12}{'epochs':>10}{about:>10}{'of all':>9}",
    )
    tokens = [
        (mean or 0.0) * share.samples for mean, share in zip(data.tokens, data.shares, strict=True)
    ]
    for share, mean, own in zip(data.shares, data.tokens, tokens, strict=True):
        passes = samples / data.epoch_size * share.passes
        each = "-" if mean is None else f"{mean:,.0f}"
        of_all = f"{own / max(1.0, sum(tokens)):.1%}"
        say(
            world,
            f"  {share.name:<{width}}{share.rows:>10,}{share.samples:>12,}{passes:>10.2f}{each:>10}"
            f"{of_all:>9}",
        )


def say(world: World, text: str) -> None:
    """Print on the main process, above a progress bar."""
    if world.is_main:
        tqdm.write(text)
