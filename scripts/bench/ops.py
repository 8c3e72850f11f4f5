"""Measures the bandwidth of every element-wise op, relative to a device copy.

Each op is first compared with its reference on a smaller input; an op that differs is not timed.
Times are medians on the GPU without CPU launch overhead (a CUDA graph of the op is replayed), with
flushed caches. The bytes of an op are its arguments, counted once (twice for gradients in FP8,
which take two passes), and its results; 100% is a copy of 1 GiB in the same process.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from triton.errors import TritonError

import harness
from coat_kernels import OPS
from harness import VersionedResult
from layer_shapes import SHAPES, LayerShape
from op_cases import Arguments, Case, Draw, build_cases, map_tensors, run_op, shrink_shape

COPY_BYTES = 2**30
DEVICE = torch.device("cuda")
TOLERANCE = 0.02
"""Largest relative RMS error. Only some FP8 values may differ, by one step; tests are stricter."""

TARGET = 0.8
"""Fraction of the copy's bandwidth that an op should reach."""

PASSES = {"quantize_gradient": 2, "rope_gradient": 2}
"""Ops that read their arguments more than once -> how often."""


@dataclass(slots=True)
class OpResult(VersionedResult):
    """One measurement; the columns of ``kernels.csv`` (kernels/benchmarks/README.md)."""

    shape: str
    op: str
    variant: str
    mib: float | None = None
    us: float | None = None
    gbps: float | None = None
    copy_gbps: float | None = None
    fraction: float | None = None
    problem: str = ""


def bench_ops(shape: LayerShape, ops: Sequence[str] = ()) -> list[OpResult]:
    """Measure ops as the block's training step calls them; all if none are named."""
    pairs = select_cases(shape, ops)
    harness.require_gpu("the speed of kernels is")
    origin, copy_gbps = harness.get_origin(), measure_copy_bandwidth(DEVICE)
    results = []
    for case, sample in tqdm(pairs, desc=shape.name, unit="case"):
        result = OpResult(*origin, shape.name, case.op, case.variant, copy_gbps=copy_gbps)
        results.append(result)
        try:
            result.problem = find_disagreement(case.op, sample.arguments(Draw(DEVICE)))
            if not result.problem:
                args = case.arguments(Draw(DEVICE))
                moved = count_bytes(case.op, args)
                result.mib = moved / 2**20
                result.us = harness.measure_median_us(partial(OPS[case.op], *args))
                result.gbps = moved / result.us / 1e3
                result.fraction = result.gbps / copy_gbps
        except (RuntimeError, ValueError, TritonError) as error:  # others may run
            result.problem = harness.format_error(error)
    return results


def select_cases(shape: LayerShape, ops: Sequence[str]) -> list[tuple[Case, Case]]:
    """Return the cases of these ops (all if empty), each with its small sample."""
    pairs = list(zip(build_cases(shape), build_cases(shrink_shape(shape)), strict=True))
    known = list(dict.fromkeys(case.op for case, _ in pairs))
    unknown = [name for name in ops if name not in known]
    if unknown:
        raise ValueError(
            f"{shape.name} has no case of {', '.join(unknown)}; use {', '.join(known)}"
        )
    return [pair for pair in pairs if not ops or pair[0].op in ops]


def find_disagreement(op: str, args: Arguments) -> str:
    """Compare an op with its reference, which gets copies on the CPU; the problem, or ""."""
    actual = run_op(op, OPS[op].dispatch, args)
    expected = run_op(op, OPS[op].reference, map_tensors(Tensor.cpu, args))
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = harness.relative_rms(a.cpu(), e)
        if not error <= TOLERANCE:
            return f"not correct: result {number}: relative RMS error {error:.2e} > {TOLERANCE}"
    return ""


def count_bytes(op: str, args: Arguments) -> int:
    """Count the bytes that an op has to read and write, as the module's docstring defines them."""
    written = sum(result.nbytes for result in run_op(op, OPS[op].dispatch, args))
    parts = [part for value in args for part in (value if isinstance(value, list) else [value])]
    read = sum(part.nbytes for part in parts if isinstance(part, Tensor))
    if op == "logit_gradient":
        read -= args[3].nbytes  # only written
    return PASSES.get(op, 1) * read + written


def measure_copy_bandwidth(device: torch.device) -> float:
    """Measure a device copy: 10^9 bytes read and written per second."""
    from triton.testing import do_bench

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Without a graph, in which copy_ becomes a slower memcpy node. The launch takes the CPU far
    # less than the 500 us of the GPU.
    copy_ms: Any = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * COPY_BYTES / copy_ms / 1e6


def format_ops(results: Sequence[OpResult]) -> str:
    """Format a Markdown table with one line per case."""

    def note(result: OpResult) -> str:
        below = result.fraction is not None and result.fraction < TARGET
        return result.problem or (f"below {100 * TARGET:.0f}%" if below else "")

    def percent(result: OpResult) -> str:
        return harness.format_number(result.fraction and 100 * result.fraction, 0)

    columns = {"op": "op", "variant": "variant", "MiB moved": "mib:1", "us": "us:1"}
    return harness.format_results(
        results, {**columns, "GB/s": "gbps:0", "% of a copy": percent, "note": note}
    )


EXAMPLES = """\
  python scripts/bench/ops.py                  # all ops, in the sizes of Llama-2-7B's block
  python scripts/bench/ops.py --shape siglip-so400m --op norm_fwd norm_bwd --csv kernels.csv
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=["llama-2-7b"], help="default llama-2-7b")
    add("--op", nargs="+", default=[], metavar="NAME", help="such as norm_fwd; default all")
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print each shape."""
    for name in args.shape:
        results = bench_ops(SHAPES[name], args.op)
        harness.say(f"\n{name}\n\n{format_ops(results)}")
        harness.append_results(args.csv, results)


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
