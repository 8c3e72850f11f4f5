"""Finds the longest row of a recipe's stage that fits a GPU.

Weights and data are random. Forward and backward passes run without an optimizer on one GPU, on a
row of --images images and text. Memory is nearly linear in the tokens: two short rows tell how it
grows, and longer ones are tried until a multiple of --step tokens fits and the next one does not.
Each try is one pass and one line of --csv. ``coat-vlm plan RECIPE --measure`` measures a training
step, also of long rows whose tokens several ranks share.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import harness
from coat_cli.command import at_least
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import SpareMemory, arithmetic_of_recipe, store_frozen_weights
from coat_vlm.model.vlm import count_parameters
from coat_vlm.plan.measure import (
    StageCase,
    build_stage_model,
    make_batch,
    open_case,
)
from coat_vlm.train.model_setup import refuse_unmeasured, select_stages, set_train_mode
from harness import Result
from step import NAMES, Passes

FILLED = 0.99
"""Part of a GPU's free memory that the search expects tensors to fill."""

_GROWTH = 4
"""Largest ratio of an attempt to the longest row that fitted: short rows tell little."""

_CREEP = 0.02
"""Least growth of attempts until one does not fit."""


@dataclass(slots=True)
class LongResult(Result):
    """One measurement; the columns of ``long.csv`` (kernels/benchmarks/README.md)."""

    gpus: int
    zero: int
    sequence_parallel: int
    model: str
    implementation: str
    tokens: int
    frames: int
    ms: float | None = None
    tok_s: float | None = None
    peak_gb: float | None = None
    note: str = ""


def bench_longest(
    case: StageCase, step: int, world: World, on_result: Callable[[LongResult], None]
) -> list[LongResult]:
    """Find the longest row, a multiple of ``step`` tokens, of which one GPU runs both passes.

    ``on_result`` is called with each tried row; the note of one that does not fit is OOM.

    Raises:
        ValueError: there are several processes, no GPU, or two steps of tokens do not fit.
    """
    if world.size > 1:
        raise ValueError(f"long.py is for one process, and there are {world.size}; start one")
    usable = measure_usable_gb(world.device)
    model = build_stage_model(case, world.device)
    set_train_mode(model, case.stage)
    store_frozen_weights(model)
    arithmetic = arithmetic_of_recipe(case.recipe, world.device)
    run = Passes(model, SpareMemory.of(model, arithmetic, world.device), world.device)
    results: list[LongResult] = []
    title = f"{case.recipe.name}, {count_parameters(case.meta_model) / 1e9:.3g}B"
    implementation = NAMES.get(case.recipe.precision, case.recipe.precision)
    implementation += ", recomputation" if case.stage.gradient_checkpointing else ""
    entry: dict[str, float] = {}
    run.on_entry = entry.update

    def attempt(tokens: int) -> float | None:
        result = LongResult(
            *harness.get_origin()[:3],
            1,
            0,
            1,
            title,
            implementation,
            tokens,
            case.row.images,
            note="OOM: forward and backward",
        )
        results.append(result)
        batch = make_batch(model, [replace(case.row, tokens=tokens)], None, case.recipe.seed)
        try:
            run.memory.reset()
            run([batch], time.perf_counter())
            result.ms, result.peak_gb = 1e3 * entry["step_s"], entry["peak_memory_mb"] / 1e3
            result.tok_s = tokens / entry["step_s"]
            result.note = f"forward and backward; loss {entry['loss']:.4f}"
        except RuntimeError as error:
            if not harness.is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
        model.zero_grad(set_to_none=True)
        harness.free_memory(world.device)
        on_result(result)
        return result.peak_gb

    search_longest(attempt, step, usable)
    return results


def measure_usable_gb(device: torch.device) -> float:
    """Return the memory that tensors may use on a GPU, in 10^9 bytes; ValueError on a CPU."""
    if device.type != "cuda":
        raise ValueError("there is no GPU; the longest row is found on a GPU")
    free, _ = torch.cuda.mem_get_info(device)
    return FILLED * (free + torch.cuda.memory_reserved(device)) / 1e9


def search_longest(attempt: Callable[[int], float | None], step: int, usable: float) -> int:
    """Find the largest multiple of ``step`` tokens that fits, with few attempts.

    ``attempt`` maps tokens to the peak memory, None if they do not fit; ``usable`` is expected to
    suffice, in the unit of the peaks. Raises ValueError if two steps do not fit.
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
                raise ValueError(f"--step {step}: {failed} tokens do not fit; lower it")
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


EXAMPLES = """\
  python scripts/bench/long.py my_recipe.yaml --stage sft --step 2048 --images 1 --csv long.csv
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a YAML file, or a built-in recipe's name")
    add("overrides", metavar="key=value", nargs="*", help="change a key of the recipe, dotted")
    add("--stage", help="default: the only stage of the recipe")
    add("--images", type=at_least(0), help="tiles and frames per row; default: counted")
    add("--step", type=at_least(1), default=1024, metavar="N", help="in multiples of N; 1024")
    return parser


def main(args: argparse.Namespace) -> None:
    """Try rows and print a table."""
    recipe = load_recipe(args.recipe, args.overrides, unset_variables=True)
    name, *others = select_stages(recipe, args.stage)
    if others:
        raise ValueError(f"--stage: give one of the stages, {' or '.join(recipe.stages)}")
    refuse_unmeasured(recipe, [name], "long.py")

    with join_world() as world:

        def keep(result: LongResult) -> None:
            harness.append_results(args.csv, [result])
            harness.say(f"{result.tokens:,} tokens, {result.note}")

        case = open_case(recipe, name, world, images=args.images, accumulation=1)
        results = bench_longest(case, args.step, world, keep)
        columns = {"implementation": "implementation", "tokens": "tokens:0", "frames": "frames:0"}
        columns |= {"ms": "ms:1", "tokens/s": "tok_s:0", "peak GB": "peak_gb:2", "note": "note"}
        table = harness.format_results(results, columns)
        harness.say(f"\n{results[0].model}, {results[0].gpu}\n\n{table}")


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
