"""``coat-vlm bench kernels``: the speed of every element-wise op, beside that of a plain copy.

These ops do little arithmetic, so the memory bounds them: the yardstick is the bandwidth of a
device copy, measured in the same process. The bytes of an op are those of its arguments, counted
once (twice for gradients in FP8, which take two passes), and of its results. Partial sums, and what
a cache serves again, are not counted. An op that does not agree with its reference on a sample gets
no speed. The clock leaves out launch costs of the CPU: ``clock.py``. GEMMs: ``gemm.py``.

``--sweep`` says how long an op takes with other tiles than its default. From such a table the
constants of ``coat_kernels`` are chosen; nothing is chosen while training.
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
from coat_bench.rows import Row, failure, number, origin, require_gpu, table, table_of
from coat_bench.shapes import LayerShape
from coat_kernels import OPS
from coat_kernels.launch import Tile, forced_tile

COPY_BYTES = 2**30
"""Size of the tensor whose copy is the yardstick."""

DEVICE = torch.device("cuda")
"""Where ops are measured: the first GPU."""

TARGET = 0.8
"""Fraction of the copy's bandwidth that an op should reach."""

PASSES = {"quantize_gradient": 2, "rope_gradient": 2}
"""How often an op reads its arguments, where it is not once."""

TILED = (
    *("quantize_tensor", "quantize_gradient", "quantize_rows", "quantize_group"),
    *("dequantize_group", "transpose_codes"),
    *("norm_apply", "activation_stats", "activation_apply"),
    *("activation_bwd_stats", "activation_bwd"),
)
"""Ops whose kernels work on any tile of a matrix."""

OF_ROWS = ("norm_stats", "norm_bwd")
"""Ops whose kernels walk over whole rows."""

TILES = tuple(
    Tile(rows, columns, warps)
    for rows, columns in ((32, 64), (64, 64), (32, 128), (64, 128), (128, 64), (32, 256))
    for warps in (4, 8)
)
"""What is tried for :data:`TILED`."""

ROWS = tuple(Tile(1, 0, warps) for warps in (2, 4, 8, 16))
"""What is tried for :data:`OF_ROWS`; their columns are the matrix's."""


@dataclass(slots=True)
class KernelRow(Row):
    """One measurement; the columns of ``kernels.csv``."""

    shape: str
    op: str
    variant: str
    mib: float | None = None
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
        row = KernelRow(*where, shape.name, case.op, case.variant, copy_gbps=copy_gbps)
        rows.append(row)
        try:
            row.problem = disagreement(case.op, sample.arguments(Draw(DEVICE)))
            if not row.problem:
                args = case.arguments(Draw(DEVICE))
                moved = moved_bytes(case.op, args)
                row.mib = moved / 2**20
                row.us = _microseconds(case.op, args)
                row.gbps = moved / row.us / 1e3
                row.fraction = row.gbps / copy_gbps
        except (RuntimeError, ValueError, TritonError) as error:  # others may run
            row.problem = failure(error)
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


def moved_bytes(op: str, args: Arguments) -> int:
    """Bytes that a call of an op has to read and write: see the module's docstring."""
    written = sum(result.nbytes for result in results(op, OPS[op].dispatch, args))
    parts = [part for value in args for part in (value if isinstance(value, list) else [value])]
    read = sum(part.nbytes for part in parts if isinstance(part, Tensor))
    return PASSES.get(op, 1) * read + written


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written by a device copy, 10^9 per second."""
    from triton.testing import do_bench

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not from a graph, where copy_ becomes a slower memcpy node. A launch of it costs the CPU far
    # less than the 500 us that it takes the GPU.
    copy_ms: Any = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * COPY_BYTES / copy_ms / 1e6


def _microseconds(op: str, args: Arguments) -> float:
    return median_us(lambda: OPS[op](*args))


def format_rows(rows: Sequence[KernelRow]) -> str:
    """Markdown: one line per case."""

    def note(row: KernelRow) -> str:
        below = row.fraction is not None and row.fraction < TARGET
        return row.problem or (f"below {100 * TARGET:.0f}%" if below else "")

    return table_of(
        rows,
        {
            "op": lambda row: row.op,
            "variant": lambda row: row.variant,
            "MiB moved": lambda row: number(row.mib, 1),
            "us": lambda row: number(row.us, 1),
            "GB/s": lambda row: number(row.gbps, 0),
            "% of a copy": lambda row: number(row.fraction and 100 * row.fraction, 0),
            "note": note,
        },
    )


def tiles_of(op: str) -> tuple[Tile, ...]:
    """What is tried for an op; nothing where it has no choice."""
    return TILES if op in TILED else ROWS if op in OF_ROWS else ()


def sweep(shape: LayerShape, ops: Sequence[str] = ()) -> dict[Tile | None, list[KernelRow]]:
    """Measure ops with every tile; a row of one that is wrong, or too large, has no time.

    Args:
        shape: the block.
        ops: names of ops; all with a choice of tiles when empty.

    Returns:
        Tile, None for the one that training uses -> the rows of the ops that it is tried for.

    Raises:
        ValueError: an op is unknown or has no choice of tiles, or there is no GPU.
    """
    fixed = [op for op in ops if op in OPS and not tiles_of(op)]
    if fixed:
        raise ValueError(
            f"{', '.join(fixed)}: no choice of tiles; sweep {', '.join((*TILED, *OF_ROWS))}"
        )
    here = {case.op for case in cases(shape)}
    chosen = ops or [op for op in (*TILED, *OF_ROWS) if op in here]
    found: dict[Tile | None, list[KernelRow]] = {None: bench_kernels(shape, chosen)}
    for tile in (*TILES, *ROWS):
        tried = [op for op in chosen if tile in tiles_of(op)]
        if tried:
            with forced_tile(tile):
                found[tile] = bench_kernels(shape, tried)
    return found


def format_sweep(found: dict[Tile | None, list[KernelRow]]) -> str:
    """Markdown: for each kind of op a table of microseconds, one column per tile."""
    us = {(row.op, row.variant, tile): row.us for tile, rows in found.items() for row in rows}
    tables = []
    for ops, tiles in ((TILED, TILES), (OF_ROWS, ROWS)):
        sizes = [f"{tile.rows} x {tile.columns}" if tile.columns else "a row" for tile in tiles]
        head = [f"{size}, {tile.warps} warps" for size, tile in zip(sizes, tiles, strict=True)]
        lines = [
            [op, variant, *(number(us.get((op, variant, tile)), 1) for tile in (None, *tiles))]
            for op, variant in dict.fromkeys((op, variant) for op, variant, _ in us)
            if op in ops
        ]
        if lines:
            tables.append(table(["op", "variant", "default us", *head], lines))
    return "\n\n".join(tables)
