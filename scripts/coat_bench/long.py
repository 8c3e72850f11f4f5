"""``coat-vlm bench long``: long rows, the longest row that fits, and rows of many lengths.

Three measurements of a stage of a recipe, with random weights and data (:mod:`coat_bench.recipe`):

- the training step on full rows, also of ranks that share their tokens (``sequence_parallel``),
- the training step on samples of many lengths (:mod:`coat_bench.lengths`), packed into rows, padded
  in random order, or padded after sorting by length,
- the longest row of which one GPU runs a forward and a backward pass.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from coat_bench.lengths import Layout, arrange, draw_samples
from coat_bench.memory import free_memory
from coat_bench.recipe import (
    RecipeBench,
    RecipeRow,
    RowShape,
    StageCase,
    bench_recipe,
    build_stage_model,
    list_stage_cases,
    make_batch,
)
from coat_bench.rows import (
    Measurement,
    format_number,
    format_rows_as_table,
    get_origin,
    is_out_of_memory,
)
from coat_bench.step import NAMES, Passes
from coat_vlm.config.stage import PackingConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import SpareMemory, arithmetic_of_recipe, store_frozen_weights
from coat_vlm.model import count_parameters
from coat_vlm.model.flops import count_flops
from coat_vlm.train.model_setup import set_train_mode
from coat_vlm.train.throughput import PeakMemory

FILLED = 0.99
"""Part of a GPU's free memory that the search expects tensors to fill."""

_GROWTH = 4
"""Largest ratio of an attempt to the longest row that fitted: short rows tell little."""

_CREEP = 0.02
"""Least growth of attempts until one does not fit."""


@dataclass(slots=True)
class LongRow(Measurement):
    """One measurement; the columns of ``long.csv``."""

    gpus: int
    zero: int
    """ZeRO stage; 0 also without an optimizer."""
    sequence_parallel: int
    model: str
    """Name of the recipe, and the number of parameters."""
    implementation: str
    """Name of ``step.csv``, then recomputation, and the layout of samples of many lengths."""
    tokens: int
    """Tokens of a step on all GPUs with those of images, without padding."""
    frames: int
    """Frames and tiles of images of a step on all GPUs."""
    ms: float | None = None
    """Median time of a step on the slowest GPU."""
    tok_s: float | None = None
    """Tokens per second of all GPUs together."""
    peak_gb: float | None = None
    """Most memory allocated on one GPU, in 10^9 bytes; None on a CPU."""
    note: str = ""
    """What was measured; OOM if there is no speed for this reason."""


OnRow = Callable[[LongRow], None]
"""Called with each row as soon as it is measured."""


def bench_steps(
    bench: RecipeBench, layouts: Sequence[Layout], count: int, world: World, on_row: OnRow
) -> list[LongRow]:
    """Measure the training step of a stage on full rows, or on samples of many lengths.

    Args:
        bench: the recipe and its only measured stage. For samples of many lengths,
            ``model.max_length`` is their largest length, and the layouts replace
            ``micro_batch_size`` and ``packing``.
        layouts: the layouts, measured one after the other; none for full rows.
        count: samples of many lengths in a step on all GPUs.
        world: the processes of the run; all must call this.
        on_row: called on the main process.

    Raises:
        ValueError: the settings do not fit the recipe, the samples or this machine, or one of
            several processes ran out of memory.
    """
    if not layouts:
        (case,) = list_stage_cases(bench, world)
        return [_measure(bench, case, [case.row] * case.stage.batch_size, (), world, on_row)]
    return [_measure_layout(bench, layout, count, world, on_row) for layout in layouts]


def _measure_layout(
    bench: RecipeBench, layout: Layout, count: int, world: World, on_row: OnRow
) -> LongRow:
    bench = replace(bench, images=0)
    (case,) = list_stage_cases(bench, world)
    recipe, packing = bench.recipe, None
    if layout.kind == "packed":
        packing = PackingConfig(tokens=layout.size)
        packing.row_tokens(recipe.model.max_length)  # raises if the longest sample does not fit
    per_image = case.frame.config.tokens_per_image
    drawn = draw_samples(count, per_image, recipe.model.max_length, recipe.seed)
    steps = arrange(drawn, layout, world.size, count_flops(case.frame).estimate)
    stage = replace(
        recipe.stages[case.name],
        micro_batch_size=1 if packing else layout.size,
        packing=packing,
        balance=False,
    )
    bench = replace(
        bench,
        recipe=replace(recipe, stages={case.name: stage}),
        accumulation=len(steps),
        samples=[ranks[world.rank] for ranks in steps],
    )
    used = [shape for ranks in steps for samples in ranks for shape in samples]
    return _measure(bench, case, used, (str(layout),), world, on_row)


def _measure(
    bench: RecipeBench,
    case: StageCase,
    shapes: Sequence[RowShape],
    words: Sequence[str],
    world: World,
    on_row: OnRow,
) -> LongRow:
    """Measure a step of samples of these shapes, on all GPUs."""
    row = _start_row(case, world, words)
    row.zero = case.recipe.zero_stage
    row.tokens, row.frames = (sum(s.tokens for s in shapes), sum(s.images for s in shapes))

    def keep(found: RecipeRow) -> None:
        row.ms, row.peak_gb = found.ms, found.peak_gb
        row.tok_s = None if row.ms is None else row.tokens / (row.ms / 1e3)
        told = f"{len(shapes)} samples, {bench.accumulation} micro-batches per GPU"
        measured = found.note.partition("; ")[2]  # after the source of the number of images
        row.note = f"{found.problem or 'training step'}: {told}; {measured}"
        on_row(row)

    bench_recipe(bench, world, keep)
    return row


def _start_row(case: StageCase, world: World, words: Sequence[str] = ()) -> LongRow:
    """Make a row without measurements; ``words`` describe the implementation further."""
    recipe, stage = case.recipe, case.stage
    kind = [NAMES.get(recipe.precision, recipe.precision)]
    kind += ["recomputation"] if stage.gradient_checkpointing else []
    return LongRow(
        *get_origin()[:3],
        gpus=world.size,
        zero=0,
        sequence_parallel=stage.sequence_parallel,
        model=f"{recipe.name}, {count_parameters(case.frame) / 1e9:.3g}B",
        implementation=", ".join([*kind, *words]),
        tokens=0,
        frames=0,
    )


def bench_longest(bench: RecipeBench, step: int, world: World, on_row: OnRow) -> list[LongRow]:
    """Find the longest row of which one GPU runs a forward and a backward pass.

    Each tried row is measured: one pass with the gradients of all trained parameters, without an
    optimizer. The row has the recipe's images; its other tokens are text.

    Args:
        bench: the recipe and its only measured stage.
        step: the length is a multiple of this number of tokens.
        world: this process alone.
        on_row: called with each tried row; the note of one that does not fit is OOM.

    Raises:
        ValueError: there are several processes, or two steps of tokens do not fit.
    """
    if world.size > 1:
        raise ValueError(f"--longest is for one process, and there are {world.size}; start one")
    (case,) = list_stage_cases(bench, world)
    model = build_stage_model(case, world.device)
    set_train_mode(model, case.stage)
    store_frozen_weights(model)
    recipe, memory = case.recipe, PeakMemory(world.device)
    arithmetic = arithmetic_of_recipe(recipe, world.device)
    run = Passes(model, SpareMemory.of(model, arithmetic, world.device), world.device, memory)
    rows: list[LongRow] = []
    found: dict[str, Any] = {}
    run.on_row = lambda row, _: found.update(row)

    def attempt(tokens: int) -> float | None:
        row = _start_row(case, world)
        row.tokens, row.frames = tokens, case.row.images
        rows.append(row)
        row.note = "OOM: forward and backward"
        batch = make_batch(model, [replace(case.row, tokens=tokens)], None, recipe.seed)
        try:
            memory.reset()
            run([batch], time.perf_counter())
            row.ms, row.peak_gb = 1e3 * found["step_s"], found["peak_memory_mb"] / 1e3
            row.tok_s = tokens / found["step_s"]
            row.note = f"forward and backward; loss {found['loss']:.4f}"
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
        model.zero_grad(set_to_none=True)
        free_memory(world.device)
        on_row(row)
        return row.peak_gb

    search_longest(attempt, step, measure_usable_gb(world.device))
    return rows


def measure_usable_gb(device: torch.device) -> float:
    """Return the memory that tensors may use on a GPU, in 10^9 bytes.

    Raises:
        ValueError: the device is not a GPU.
    """
    if device.type != "cuda":
        raise ValueError("--longest: there is no GPU; the longest row is found on a GPU")
    free, _ = torch.cuda.mem_get_info(device)
    return FILLED * (free + torch.cuda.memory_reserved(device)) / 1e9


def search_longest(attempt: Callable[[int], float | None], step: int, usable: float) -> int:
    """Find the largest multiple of a number of tokens that fits, with few attempts.

    Memory is nearly linear in the tokens, so two short rows tell about where the limit is.

    Args:
        attempt: maps tokens to the peak memory; None if they do not fit.
        step: the number of tokens.
        usable: memory that is expected to suffice, in the unit of the peaks.

    Raises:
        ValueError: two steps of tokens do not fit.
    """
    peaks: dict[int, float] = {}
    failed: int | None = None
    tokens = step
    while True:
        peak = attempt(tokens)
        if peak is None:
            failed = tokens
        else:
            peaks[tokens] = peak
        if len(peaks) < 2:
            if failed is not None:
                raise ValueError(f"--longest {step}: {failed} tokens do not fit; lower it")
            tokens += step
            continue
        before, best = sorted(peaks)[-2:]
        if failed is not None and failed <= best + step:
            return best
        slope = (peaks[best] - peaks[before]) / (best - before)
        expected = best + (usable - peaks[best]) / max(slope, 1e-9)
        tokens = int(min(expected, _GROWTH * best) // step * step)
        if failed is None:
            tokens = max(tokens, best + max(1, int(_CREEP * best) // step) * step)
        elif not best < tokens < failed:
            tokens = (best + failed) // (2 * step) * step


def format_rows(rows: Sequence[LongRow]) -> str:
    """Format rows as a Markdown table."""
    return format_rows_as_table(
        rows,
        {
            "implementation": lambda row: row.implementation,
            "tokens": lambda row: f"{row.tokens:,}",
            "frames": lambda row: f"{row.frames:,}",
            "ms": lambda row: format_number(row.ms, 1),
            "tokens/s": lambda row: "-" if row.tok_s is None else f"{row.tok_s:,.0f}",
            "peak GB": lambda row: format_number(row.peak_gb, 2),
            "note": lambda row: row.note,
        },
    )
