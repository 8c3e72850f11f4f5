"""``coat-vlm bench gemm``: the GEMMs of one block, in BF16 and in FP8.

    forward          y = x W^T              x [M, K],       W [N, K]
    input gradient   grad_x = grad_y W      grad_y [M, N],  W [N, K]
    weight gradient  grad_W = grad_y^T x    grad_y [M, N],  x [M, K]

In FP8, x and W are E4M3 and grad_y is E5M2, with one scale per tensor. The transposed operands,
whose inner dimension Hopper needs contiguous, are made before the time is measured. Results are
BF16. A wrong product gets no speed, see :data:`IMPLEMENTATIONS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from coat_bench.cases import Draw
from coat_bench.check import TOLERANCE, relative_rms
from coat_bench.clock import measure_median_us
from coat_bench.kernels import DEVICE
from coat_bench.rows import Row, format_error, format_number, format_table, get_origin, require_gpu
from coat_bench.shapes import LayerShape
from coat_kernels import (
    E4M3,
    E5M2,
    Format,
    TensorScaled,
    quantize_layouts,
    reference,
    scaled_mm,
)

CHECKED_ROWS = 256
"""Number of rows of a product that are compared with FP32."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product [rows, inner] x [columns, inner]^T."""

    layer: str
    kind: str
    """``forward``, ``input gradient`` or ``weight gradient``."""
    rows: int
    columns: int
    inner: int

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.rows * self.columns * self.inner


@dataclass(slots=True)
class GemmRow(Row):
    """One measurement; the columns of ``gemm.csv``."""

    shape: str
    layer: str
    kind: str
    rows: int
    columns: int
    inner: int
    implementation: str
    us: float | None = None
    """Median on the GPU without launch costs of the CPU, caches flushed."""
    tflops: float | None = None
    """10^12 operations per second."""
    rel_err: float | None = None
    """Relative RMS error against FP32 on the BF16 operands."""
    problem: str = ""
    """Why there is no speed."""


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of a product."""

    a: Tensor
    """BF16 [rows, inner]; a transposed view if a training step has only the other layout."""
    b: Tensor
    """BF16 [columns, inner]; a transposed view if a training step has only the other layout."""
    a_fp8: TensorScaled
    """E4M3, or E5M2 for a gradient, [rows, inner] row-major."""
    b_fp8: TensorScaled
    """E4M3 [columns, inner] row-major."""


IMPLEMENTATIONS: dict[str, tuple[Callable[[Operands], Tensor], float]] = {
    # cuBLAS may round partial sums to BF16.
    "bf16": (lambda x: x.a @ x.b.t(), 5e-3),
    # Partial sums are promoted to FP32.
    "fp8": (
        lambda x: scaled_mm(x.a_fp8, x.b_fp8, torch.bfloat16),
        TOLERANCE["scaled_mm", torch.bfloat16],
    ),
    # The same kernel of cuBLASLt with fast accumulation, as in training. About
    # 14 bits of the sum over the whole inner dimension are kept (DeepSeek-V3, arXiv 2412.19437,
    # section 3.3.2, reports errors of 2% at K = 4096).
    "fp8_fast": (lambda x: scaled_mm(x.a_fp8, x.b_fp8, torch.bfloat16, fast=True), 2e-2),
}
"""Name -> the product, BF16 [rows, columns], and its largest relative RMS error against the FP32
product of the same operands."""


def list_linears(shape: LayerShape) -> dict[str, tuple[int, int]]:
    """List the linear layers of a block: name -> (out, in). Layers of the same input are fused."""
    h, f = shape.hidden, shape.ffn
    head = h // shape.heads
    attention = {"qkv": ((shape.heads + 2 * shape.key_value_heads) * head, h), "o": (h, h)}
    if shape.family == "siglip":
        return {**attention, "fc1": (f, h), "fc2": (h, f)}
    return {**attention, "gate_up": (2 * f, h), "down": (h, f)}


def list_gemms(shape: LayerShape) -> list[Gemm]:
    """List the GEMMs of a block's linear layers in a forward and backward pass."""
    return [
        gemm
        for layer, (n, k) in list_linears(shape).items()
        for gemm in (
            Gemm(layer, "forward", shape.tokens, n, k),
            Gemm(layer, "input gradient", shape.tokens, k, n),
            Gemm(layer, "weight gradient", n, k, shape.tokens),
        )
    ]


def make_operands(gemm: Gemm, device: torch.device) -> Operands:
    """Make seeded operands in the layouts of a training step."""
    draw = Draw(device)
    forward, of_weight = gemm.kind == "forward", gemm.kind == "weight gradient"
    # The matrices in their layout in memory.
    left = draw.matrix(gemm.inner, gemm.rows) if of_weight else draw.matrix(gemm.rows, gemm.inner)
    right = (
        draw.matrix(gemm.columns, gemm.inner) if forward else draw.matrix(gemm.inner, gemm.columns)
    )
    a, a_fp8 = _make_operand(left, of_weight, E4M3 if forward else E5M2)
    b, b_fp8 = _make_operand(right, not forward, E4M3)
    return Operands(a, b, a_fp8, b_fp8)


def _make_operand(x: Tensor, transposed: bool, fmt: Format) -> tuple[Tensor, TensorScaled]:
    rows, columns = quantize_layouts([x], fmt, rows=not transposed, transposed=transposed)
    return (x.t(), columns) if transposed else (x, rows)


def bench_gemm(shape: LayerShape) -> list[GemmRow]:
    """Measure every GEMM of a block in every implementation.

    Raises:
        ValueError: there is no GPU.
    """
    require_gpu("the speed of GEMMs is")
    where, rows = get_origin(), []
    for gemm in tqdm(list_gemms(shape), desc=shape.name, unit="gemm"):
        operands = make_operands(gemm, DEVICE)
        size = (gemm.rows, gemm.columns, gemm.inner)
        for name, (implementation, _) in IMPLEMENTATIONS.items():
            row = GemmRow(*where, shape.name, gemm.layer, gemm.kind, *size, name)
            rows.append(row)
            try:
                row.rel_err, row.problem = check_product(name, implementation(operands), operands)
                if not row.problem:
                    row.us = measure_median_us(lambda run=implementation, at=operands: run(at))
                    row.tflops = gemm.flops / row.us / 1e6
            except (RuntimeError, ValueError) as error:  # the GPU may not support one
                row.problem = format_error(error)
    return rows


def check_product(implementation: str, product: Tensor, operands: Operands) -> tuple[float, str]:
    """Compare the first rows of a product with FP32.

    Args:
        implementation: a key of :data:`IMPLEMENTATIONS`.
        product: its result.
        operands: its operands.

    Returns:
        The relative RMS error against the product of the BF16 operands; the problem, empty if there
        is none.
    """
    first = product[:CHECKED_ROWS]
    exact = operands.a[:CHECKED_ROWS].float() @ operands.b.float().t()
    own = exact.bfloat16()
    if implementation != "bf16":
        a, b = operands.a_fp8, operands.b_fp8
        own = reference.scaled_mm(a.q[:CHECKED_ROWS], a.scale, b.q, b.scale, None, torch.bfloat16)
    difference, allowed = relative_rms(first, own), IMPLEMENTATIONS[implementation][1]
    problem = ""
    if not difference <= allowed:
        problem = f"not correct: relative RMS error {difference:.1e} > {allowed:.0e}"
    return relative_rms(first, exact), problem


def format_rows(rows: Sequence[GemmRow]) -> str:
    """Format rows as a Markdown table with one line per GEMM and columns per implementation.

    The last line is the whole block: the sum of all operations divided by the sum of all times.
    """
    names = list(IMPLEMENTATIONS)
    head = ["GEMM", "M x N x K", *(f"{name} TFLOP/s" for name in names)]
    head += [*(f"{name} error" for name in names), "note"]
    by_gemm: dict[str, dict[str, GemmRow]] = {}
    for row in rows:
        by_gemm.setdefault(f"{row.layer}, {row.kind}", {})[row.implementation] = row
    lines = [
        [
            title,
            "{0.rows} x {0.columns} x {0.inner}".format(found[names[0]]),
            *(format_number(found[name].tflops, 0) for name in names),
            *(format_number(found[name].rel_err, 4) for name in names),
            "; ".join(f"{name}: {row.problem}" for name, row in found.items() if row.problem),
        ]
        for title, found in by_gemm.items()
    ]
    whole = []
    for name in names:
        own = [row for row in rows if row.implementation == name]
        operations = sum(2 * row.rows * row.columns * row.inner for row in own)
        times = [row.us for row in own if row.us is not None]
        complete = times and len(times) == len(own)
        whole.append(format_number(operations / sum(times) / 1e6 if complete else None, 0))
    return format_table(head, [*lines, ["block", "", *whole, *([""] * len(names)), ""]])
