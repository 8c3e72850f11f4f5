"""Chooses the settings with which a recipe fits into a GPU's memory (the recipe's ``memory``)."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from coat_vlm.config import Fp8Config, Recipe, StageConfig, StageName
from coat_vlm.plan.stage import MARGIN, StagePlan, plan_recipe
from coat_vlm.train.model_setup import select_stages


def fit_recipe(recipe: Recipe, *, ranks: int) -> tuple[Recipe, str]:
    """Choose the keys in ``memory.choose``: the fastest settings whose planned peak fits.

    Prefers settings without recomputation, then the largest micro-batch. ``fp8.recompute_qkv:
    auto`` becomes ``true`` if nothing fits without it, or more stages would need checkpointing. A
    single process that has nothing to shard gets ``zero_stage: 0``, which needs no
    buckets. Returns the recipe and a sentence about the chosen values. Raises ValueError if
    nothing fits.
    """
    memory = recipe.memory
    assert memory is not None
    limit = memory.gpu_gb * 1e9 / MARGIN
    chosen = _without_shards(recipe, ranks)
    keys = [*(memory.choose or ()), *(["zero_stage"] if chosen is not recipe else [])]
    stages, peak = _fit_stages(chosen, ranks, limit)
    recomputing = _with_recomputed_qkv(chosen)
    checkpointed = _count_checkpointed(stages)
    chose_checkpointing = checkpointed > _count_checkpointed(recipe.stages)
    if recomputing is not None and (peak > limit or chose_checkpointing):
        others, other_peak = _fit_stages(recomputing, ranks, limit)
        fewer = _count_checkpointed(others) < checkpointed
        if other_peak <= limit and (peak > limit or fewer):
            chosen, stages, peak = recomputing, others, other_peak
            keys.append("fp8.recompute_qkv")
        elif peak > limit:
            peak = min(peak, other_peak)
    if peak > limit:
        shard = "raise zero_stage, " if ranks > 1 else ""
        raise ValueError(
            f"memory.gpu_gb: {memory.gpu_gb:g}: nothing fits on {ranks} GPU(s) of this size; the "
            f"smallest setting needs {math.ceil(MARGIN * peak / 1e9)} GB: use larger or more "
            f"GPUs, {shard}or freeze modules (coat-vlm plan shows what needs memory)"
        )
    fitted = dataclasses.replace(memory, choose=[])
    chosen = dataclasses.replace(chosen, stages=stages, memory=fitted)
    values = ", ".join(f"{key}={_read(chosen, key)}" for key in keys)
    return chosen, (
        f"memory: {memory.gpu_gb:g} GB: {values or 'nothing to choose'}; the planned peak is "
        f"{peak / 1e9:.1f} GB, with a margin of {MARGIN - 1:.0%} {MARGIN * peak / 1e9:.1f} GB"
    )


def _fit_stages(
    recipe: Recipe, ranks: int, limit: float
) -> tuple[dict[StageName, StageConfig], float]:
    """Return each stage with the first settings that fit, else unchanged, and the largest peak."""
    stages, peaks = dict(recipe.stages), []
    for name in select_stages(recipe, None):
        needed = []
        for plan in _plan_stage(recipe, name, ranks, limit):
            needed.append(plan.own_memory.peak)
            if needed[-1] <= limit:
                stages[name] = plan.stage
                break
        peaks.append(needed[-1] if needed[-1] <= limit else min(needed))
    return stages, max(peaks)


def _count_checkpointed(stages: Mapping[StageName, StageConfig]) -> int:
    return sum(stage.gradient_checkpointing for stage in stages.values())


def _with_recomputed_qkv(recipe: Recipe) -> Recipe | None:
    """Return the recipe with ``fp8.recompute_qkv: true`` if it is ``auto`` and has an effect."""
    if recipe.precision != "coat":
        return None
    fp8 = recipe.fp8 or Fp8Config()
    resolved = fp8.resolved(recipe.precision)
    if fp8.recompute_qkv != "auto" or "coat" not in (resolved.vision, resolved.language):
        return None
    return dataclasses.replace(recipe, fp8=dataclasses.replace(fp8, recompute_qkv=True))


def adopt_choices(recipe: Recipe, saved: Recipe, *, ranks: int) -> Recipe | None:
    """Return a recipe with the choices of the run that it continues, or None if they do not fit."""
    assert recipe.memory is not None
    keys = recipe.memory.choose or ()
    stages = dict(recipe.stages)
    for name, stage in recipe.stages.items():
        if name not in saved.stages:
            return None
        fields = [key.rpartition(".")[2] for key in keys if key.startswith(f"stages.{name}.")]
        values = {field: getattr(saved.stages[name], field) for field in fields}
        stages[name] = dataclasses.replace(stage, **values)
        if stage.batch_size % (stages[name].micro_batch_size * stage.count_replicas(ranks)):
            return None
    memory = dataclasses.replace(recipe.memory, choose=[])
    chosen = dataclasses.replace(_without_shards(recipe, ranks), stages=stages, memory=memory)
    if saved.fp8 is not None and saved.fp8.recompute_qkv is True:
        return _with_recomputed_qkv(chosen) or chosen
    return chosen


def _without_shards(recipe: Recipe, ranks: int) -> Recipe:
    if ranks > 1 or not recipe.zero_stage or not recipe.has_low_bits(gpu=True):
        return recipe
    return dataclasses.replace(recipe, zero_stage=0)


def _plan_stage(recipe: Recipe, name: StageName, ranks: int, limit: float) -> Iterator[StagePlan]:
    """Plan a stage with its settings that may fit by a linear estimate, fastest first."""
    assert recipe.memory is not None
    keys, stage = recipe.memory.choose or (), recipe.stages[name]
    checkpointing, sizes = [stage.gradient_checkpointing], [stage.micro_batch_size]
    graphs = recipe.fp8 is not None and recipe.fp8.cuda_graphs is True  # they exclude recomputation
    if f"stages.{name}.gradient_checkpointing" in keys:
        checkpointing = [False] if graphs else [False, True]
    if f"stages.{name}.micro_batch_size" in keys:
        own = max(1, stage.batch_size // stage.count_replicas(ranks))  # of too few, plan says so
        sizes = [size for size in range(own, 0, -1) if own % size == 0]
    images: int | None = None

    def plan(stage: StageConfig) -> StagePlan:
        stages = {**recipe.stages, name: stage}
        changed = dataclasses.replace(recipe, stages=stages)
        (found,) = plan_recipe(changed, ranks=ranks, gpu_bytes=0.0, images=images, only_stage=name)
        return found

    for recompute in checkpointing:
        smallest = dataclasses.replace(
            stage, gradient_checkpointing=recompute, micro_batch_size=sizes[-1]
        )
        estimated = plan(smallest)
        images = estimated.row.images
        for size in sizes[:-1]:
            peak = estimated.estimate_memory(recipe.zero_stage, size).peak
            if peak <= MARGIN * limit:
                yield plan(dataclasses.replace(smallest, micro_batch_size=size))
        yield estimated


def _read(recipe: Recipe, key: str) -> str:
    value: object = recipe
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return str(value).lower() if isinstance(value, bool) else str(value)
