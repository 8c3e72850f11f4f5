"""``coat-vlm bench kernels``: the speed of every element-wise op, beside that of a plain copy.

These ops do little arithmetic, so the memory bounds them: the yardstick is the bandwidth of a
device copy, measured in the same process. An op that does not agree with its reference on a sample
gets no speed. The clock leaves out launch costs of the CPU: ``clock.py``. GEMMs: ``gemm.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from triton.errors import TritonError

from coat_bench.cases import Arguments, Case, Draw, cases, sample_of
from coat_bench.check import assert_matches, mapped, results
from coat_bench.clock import median_us
from coat_bench.rows import Row, number, origin, require_gpu, table
from coat_bench.shapes import LayerShape
from coat_kernels import OPS

COPY_BYTES = 2**30
"""Size of the tensor whose copy is the yardstick."""

DEVICE = torch.device("cuda")
"""Where ops are measured: the first GPU."""

TARGET = 0.8
"""Fraction of the copy's bandwidth that an op should reach."""


@dataclass(slots=True)
class KernelRow(Row):
    """One measurement; the columns of ``kernels.csv``."""

    shape: str
    op: str
    variant: str
    mib: float
    """Read and written, in MiB."""
    us: float | None = None
    """Median on the GPU without launch costs of the CPU, caches flushed."""
    gbps: float | None = None
    """10^9 bytes per second."""
    copy_gbps: float | None = None
    """Those of a device copy."""
    fraction: float | None = None
    """The former by the latter."""
    problem: str = ""
    """Why there is no speed."""


def bench_kernels(shape: LayerShape, ops: Sequence[str] = ()) -> list[KernelRow]:
    """Measure the ops as the block's training step calls them.

    Args:
        shape: the block.
        ops: names of ops; all when empty.

    Raises:
        ValueError: an op is unknown or has no case in this block, or there is no GPU.
    """
    pairs = chosen_cases(shape, ops)
    require_gpu("the speed of kernels is")
    where, copy_gbps = origin(), copy_bandwidth(DEVICE)
    rows = []
    for case, sample in tqdm(pairs, desc=shape.name, unit="case"):
        row = KernelRow(*where, shape.name, case.op, case.variant, case.bytes / 2**20)
        row.copy_gbps = copy_gbps
        rows.append(row)
        try:
            row.problem = disagreement(case.op, sample.arguments(Draw(DEVICE)))
            if not row.problem:
                row.us = _microseconds(case)
                row.gbps = case.bytes / row.us / 1e3
                row.fraction = row.gbps / copy_gbps
        except (
            RuntimeError,
            ValueError,
            TritonError,
        ) as error:  # others may run
            row.problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return rows


def chosen_cases(shape: LayerShape, ops: Sequence[str]) -> list[tuple[Case, Case]]:
    """The cases of these ops, of all when empty, each with its sample.

    Raises:
        ValueError: an op is unknown or has no case in this block.
    """
    pairs = list(zip(cases(shape), cases(sample_of(shape)), strict=True))
    known = list(dict.fromkeys(case.op for case, _ in pairs))
    unknown = [name for name in ops if name not in known]
    if unknown:
        raise ValueError(
            f"{shape.name} has no case of {', '.join(unknown)}; use {', '.join(known)} "
            "(scaled_mm: coat-vlm bench gemm)"
        )
    return [pair for pair in pairs if not ops or pair[0].op in ops]


def disagreement(op: str, args: Arguments) -> str:
    """What is wrong with the results of an op on its device; empty when they are right.

    Args:
        op: its name in ``OPS``.
        args: its arguments; the reference gets copies of them on the CPU.
    """
    actual = results(op, OPS[op].dispatch, args)
    expected = results(op, OPS[op].reference, mapped(Tensor.cpu, args))
    try:
        assert_matches(op, [result.cpu() for result in actual], expected)
    except (AssertionError, ValueError) as error:  # ValueError: another number of results
        return f"not correct: {str(error).splitlines()[0]}"
    return ""


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written by a device copy, 10^9 per second."""
    from triton.testing import do_bench

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not from a graph, where copy_ becomes a slower memcpy node. A launch of it costs the CPU far
    # less than the 500 us that it takes the GPU.
    copy_ms: Any = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * COPY_BYTES / copy_ms / 1e6


def _microseconds(case: Case) -> float:
    op, args = OPS[case.op], case.arguments(Draw(DEVICE))
    return median_us(lambda: op(*args))


def format_rows(rows: Sequence[KernelRow]) -> str:
    """Markdown: one line per case."""
    head = ["op", "variant", "MiB moved", "us", "GB/s", "% of a copy", "note"]
    lines = []
    for row in rows:
        percent = None if row.fraction is None else 100 * row.fraction
        below = percent is not None and percent < 100 * TARGET
        note = row.problem or (f"below {100 * TARGET:.0f}%" if below else "")
        numbers = [number(row.us, 1), number(row.gbps, 0), number(percent, 0)]
        lines.append([row.op, row.variant, number(row.mib, 1), *numbers, note])
    return table(head, lines)
