"""Trains with one kind of sum of the gradients of a step's micro-batches, and compares with FP32.

The language model of a size of step.py, with random weights, trains on random text of frequent and
rare tokens. A row depends on its number only, so runs with the same rows per step can be compared.
In every tenth step and the last, norm and cosine of the sum that the optimizer reads are compared
with the FP32 sum of the same gradients.
"""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

import harness
from coat_cli.command import at_least
from coat_data.load.encode import EncodedSample
from coat_vlm.config import ModuleTraining
from coat_vlm.distributed import join_world
from coat_vlm.plan import measure
from harness import VersionedResult
from step_models import SIZES, make_recipe


@dataclass(slots=True)
class SumResult(VersionedResult):
    """One step; the columns of ``sums.csv`` (kernels/benchmarks/README.md)."""

    model: str
    sums: str
    micro_batches: int
    rows: int
    tokens: int
    step: int
    loss: float
    grad_norm: float
    s: float
    norm_error: float | None = None
    """Norm of the sum over the FP32 sum's, minus 1."""
    one_minus_cosine: float | None = None


def make_row(numbers: "count[int]", model: Any, shape: Any, _: torch.Generator) -> EncodedSample:
    """Make the row of the next number: token ids of a density that falls as id^(-3/4)."""
    row = measure.make_sample(model, shape, torch.Generator().manual_seed(next(numbers)))
    vocab = model.config.text_config.vocab_size
    ids = (row.input_ids / vocab).pow(4).mul(vocab - 1).long()  # the last id is the images'
    return replace(row, input_ids=ids, labels=ids.clone())


@contextlib.contextmanager
def compare(optimizer: Any, parameters: list[Any], result: dict[str, float]) -> Iterator[None]:
    """Compare the gradients of the optimizer's step within the context with their FP32 sums."""
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]

    def add(total: Tensor, grad: Tensor) -> None:
        total.add_(grad)

    def read(*_: Any) -> None:
        squares = torch.zeros(3, dtype=torch.float64, device=sums[0].device)
        for p, exact in zip(parameters, sums, strict=True):
            own = p.grad.float()
            pairs = ((own, own), (exact, exact), (own, exact))
            squares += torch.stack([(a * b).sum(dtype=torch.float64) for a, b in pairs])
        own, exact, both = squares.tolist()
        result["norm_error"] = math.sqrt(own / exact) - 1
        result["one_minus_cosine"] = 1 - both / math.sqrt(own * exact)

    hooks = [
        p.register_hook(partial(add, total)) for p, total in zip(parameters, sums, strict=True)
    ]
    hooks.append(optimizer.register_step_pre_hook(read))
    yield
    for hook in hooks:
        hook.remove()


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    command = "  python scripts/bench/sums.py --csv sums.csv --size 2b --sums"
    parser = harness.make_parser(
        __doc__, f"{command} fp32\n{command} bf16 --rows 8 --micro-batches 256"
    )
    add, positive = parser.add_argument, at_least(1)
    add("--size", choices=SIZES, default="tiny", metavar="SIZE", help="as in step.py; default tiny")
    add("--sums", choices=("bf16", "fp32", "stochastic"), required=True, help="kind of sums")
    add("--micro-batches", type=at_least(9), default=512, help="per step; default 512")
    add("--rows", type=positive, default=4, help="per micro-batch; default 4")
    add("--tokens", type=positive, default=256, help="per row; default 256")
    add("--steps", type=positive, default=20, help="default 20")
    add("--seconds", type=float, default=math.inf, help="start no step after so many seconds")
    return parser


def main(args: argparse.Namespace) -> None:
    """Train, and print a line per step."""
    ends = time.perf_counter() + args.seconds
    with join_world() as world:
        recipe = make_recipe(args.size, args.rows, "coat", master_weights="low_bits")
        frozen, train = ModuleTraining(train=False), ModuleTraining(train=True, lr=2e-5)
        stage = replace(recipe.stages["sft"], vision=frozen, projector=frozen, language=train)
        recipe = replace(recipe, stages={"sft": stage})
        shape = {"images": 0, "tokens": args.tokens, "accumulation": args.micro_batches}
        case = measure.open_case(recipe, "sft", world, **shape)
        model = measure.build_stage_model(case, world.device)
        step = measure.build_training_step(model, case, world, args.steps)
        step.passes.sums.sums = args.sums
        trained = [p for p in model.parameters() if p.requires_grad]
        entries: list[dict[str, Any]] = []
        step.on_entry, make = entries.append, partial(make_row, count())
        given = (SIZES[args.size].name, args.sums, args.micro_batches, args.rows, args.tokens)
        for number in range(1, args.steps + 1):
            batches = [
                measure.make_batch(model, [case.row] * args.rows, None, 0, make)
                for _ in range(args.micro_batches)
            ]
            if time.perf_counter() > ends:
                break
            found: dict[str, float] = {}
            due = number % 10 == 1 or number == args.steps
            optimizer = step.passes.engine.basic_optimizer
            with compare(optimizer, trained, found) if due else contextlib.nullcontext():
                step(batches, time.perf_counter(), wait=True)
            seen = (number, *(entries[-1][key] for key in ("loss", "grad_norm", "step_s")))
            harness.append_results(
                args.csv, [SumResult(*harness.get_origin(), *given, *seen, **found)]
            )
            harness.say(f"step {seen}: {found}")


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
