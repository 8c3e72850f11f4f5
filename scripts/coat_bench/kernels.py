"""``coat-vlm bench kernels``: the bandwidth of every element-wise op, relative to a device copy.

These ops are memory-bound, so their speed is compared with the bandwidth of a device copy in the
same process. The bytes of an op are its arguments, counted once (twice for gradients in FP8, which
take two passes), and its results. Partial sums and repeated reads from a cache are not counted. An
op that differs from its reference on a sample gets no speed. Times exclude launch costs of the CPU
(``clock.py``). ``gemm.py`` measures GEMMs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from triton.errors import TritonError

from coat_bench.cases import Arguments, Case, Draw, build_cases, shrink_shape
from coat_bench.check import assert_matches, map_tensors, run_op
from coat_bench.clock import measure_median_us
from coat_bench.rows import (
    Row,
    format_error,
    format_number,
    format_rows_as_table,
    get_origin,
    require_gpu,
)
from coat_bench.shapes import LayerShape
from coat_kernels import OPS

COPY_BYTES = 2**30
"""Size of the copied tensor."""

DEVICE = torch.device("cuda")
"""The device of the measurements: the first GPU."""

TARGET = 0.8
"""Fraction of the copy's bandwidth that an op should reach."""

PASSES = {"quantize_gradient": 2, "rope_gradient": 2}
"""Ops that read their arguments more than once -> how often."""


@dataclass(slots=True)
class KernelRow(Row):
    """One measurement; the columns of ``kernels.csv``."""

    shape: str
    op: str
    variant: str
    mib: float | None = None
    """MiB read and written."""
    us: float | None = None
    """Median on the GPU without launch costs of the CPU, caches flushed."""
    gbps: float | None = None
    """10^9 bytes per second."""
    copy_gbps: float | None = None
    """10^9 bytes per second of a device copy."""
    fraction: float | None = None
    """``gbps`` divided by ``copy_gbps``."""
    problem: str = ""
    """Why there is no speed."""


def bench_kernels(shape: LayerShape, ops: Sequence[str] = ()) -> list[KernelRow]:
    """Measure the ops as the block's training step calls them.

    Args:
        shape: the block.
        ops: names of ops; all if empty.

    Raises:
        ValueError: an op is unknown or has no case in this block, or there is no GPU.
    """
    pairs = select_cases(shape, ops)
    require_gpu("the speed of kernels is")
    where, copy_gbps = get_origin(), measure_copy_bandwidth(DEVICE)
    rows = []
    for case, sample in tqdm(pairs, desc=shape.name, unit="case"):
        row = KernelRow(*where, shape.name, case.op, case.variant, copy_gbps=copy_gbps)
        rows.append(row)
        try:
            row.problem = find_disagreement(case.op, sample.arguments(Draw(DEVICE)))
            if not row.problem:
                args = case.arguments(Draw(DEVICE))
                moved = count_bytes(case.op, args)
                row.mib = moved / 2**20
                row.us = measure_median_us(partial(OPS[case.op], *args))
                row.gbps = moved / row.us / 1e3
                row.fraction = row.gbps / copy_gbps
        except (RuntimeError, ValueError, TritonError) as error:  # others may run
            row.problem = format_error(error)
    return rows


def select_cases(shape: LayerShape, ops: Sequence[str]) -> list[tuple[Case, Case]]:
    """Return the cases of these ops (all if empty), each with its small sample.

    Raises:
        ValueError: an op is unknown or has no case in this block.
    """
    pairs = list(zip(build_cases(shape), build_cases(shrink_shape(shape)), strict=True))
    known = list(dict.fromkeys(case.op for case, _ in pairs))
    unknown = [name for name in ops if name not in known]
    if unknown:
        raise ValueError(
            f"{shape.name} has no case of {', '.join(unknown)}; use {', '.join(known)} "
            "(scaled_mm: coat-vlm bench gemm)"
        )
    return [pair for pair in pairs if not ops or pair[0].op in ops]


def find_disagreement(op: str, args: Arguments) -> str:
    """Compare an op on its device with the reference; returns the problem, empty if there is none.

    Args:
        op: its name in ``OPS``.
        args: its arguments; the reference gets copies of them on the CPU.
    """
    actual = run_op(op, OPS[op].dispatch, args)
    expected = run_op(op, OPS[op].reference, map_tensors(Tensor.cpu, args))
    try:
        assert_matches(op, [result.cpu() for result in actual], expected)
    except (AssertionError, ValueError) as error:  # ValueError: wrong number of results
        return f"not correct: {str(error).splitlines()[0]}"
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


def format_rows(rows: Sequence[KernelRow]) -> str:
    """Format rows as a Markdown table with one line per case."""

    def note(row: KernelRow) -> str:
        below = row.fraction is not None and row.fraction < TARGET
        return row.problem or (f"below {100 * TARGET:.0f}%" if below else "")

    return format_rows_as_table(
        rows,
        {
            "op": lambda row: row.op,
            "variant": lambda row: row.variant,
            "MiB moved": lambda row: format_number(row.mib, 1),
            "us": lambda row: format_number(row.us, 1),
            "GB/s": lambda row: format_number(row.gbps, 0),
            "% of a copy": lambda row: format_number(row.fraction and 100 * row.fraction, 0),
            "note": note,
        },
    )
