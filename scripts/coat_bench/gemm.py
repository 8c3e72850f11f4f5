"""``coat-vlm bench gemm``: the GEMMs of one block, in BF16 and in FP8.

    forward          y  = x W^T     x [M, K],   W [N, K]
    input gradient   dx = dy W      dy [M, N],  W [N, K]
    weight gradient  dW = dy^T x    dy [M, N],  x [M, K]

In FP8, x and W are E4M3 and dy is E5M2, with one scale per tensor or, ``fp8_rows``, per row of an
operand; the transposed operands, which Hopper wants with their inner dimension contiguous, are made
before the clock runs. Results are BF16. A product that is wrong gets no speed: see
:data:`IMPLEMENTATIONS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from coat_bench.cases import Draw
from coat_bench.check import TOLERANCE, relative_rms
from coat_bench.clock import median_us
from coat_bench.kernels import DEVICE
from coat_bench.rows import Row, failure, number, origin, require_gpu, table
from coat_bench.shapes import LayerShape
from coat_kernels import (
    E4M3,
    E5M2,
    GEMM_MULTIPLE,
    Format,
    RowScaled,
    TensorScaled,
    quantize_layouts,
    quantize_rows,
    reference,
    scaled_mm,
)

CHECKED_ROWS = 256
"""Rows of a product that are compared with FP32."""


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
        """Multiplications and additions."""
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
    """Both sides of a product."""

    a: Tensor
    """BF16 [rows, inner]; a transposed view where the step has only the other layout."""
    b: Tensor
    """BF16 [columns, inner], likewise."""
    a_codes: TensorScaled
    """E4M3, or E5M2 for a gradient, [rows, inner] row-major."""
    b_codes: TensorScaled
    """E4M3 [columns, inner] row-major."""
    a_rows: RowScaled
    """Likewise, with one scale per row."""
    b_rows: RowScaled
    """Likewise."""


IMPLEMENTATIONS: dict[str, tuple[Callable[[Operands], Tensor], float]] = {
    # cuBLAS may round partial sums to BF16.
    "bf16": (lambda x: x.a @ x.b.t(), 5e-3),
    # Partial sums are promoted to FP32.
    "fp8": (
        lambda x: scaled_mm(x.a_codes, x.b_codes, torch.bfloat16),
        TOLERANCE["scaled_mm", torch.bfloat16],
    ),
    "fp8_rows": (
        lambda x: scaled_mm(x.a_rows, x.b_rows, torch.bfloat16),
        TOLERANCE["scaled_mm", torch.bfloat16],
    ),
    # The same kernel of cuBLASLt with fast accumulation, as in the forward pass of training. About
    # 14 bits of the sum over the whole inner dimension are kept (DeepSeek-V3, arXiv 2412.19437,
    # section 3.3.2, reports errors of 2% at K = 4096).
    "fp8_fast": (lambda x: scaled_mm(x.a_codes, x.b_codes, torch.bfloat16, fast=True), 2e-2),
}
"""Name -> the product, BF16 [rows, columns], and its largest relative RMS error against the FP32
product of the same operands."""


def linears(shape: LayerShape) -> dict[str, tuple[int, int]]:
    """Linear layers of a block: name -> (out, in); those that read the same input are one."""
    h, f = shape.hidden, shape.ffn
    head = h // shape.heads
    attention = {"qkv": ((shape.heads + 2 * shape.key_value_heads) * head, h), "o": (h, h)}
    if shape.family == "siglip":
        return {**attention, "fc1": (f, h), "fc2": (h, f)}
    return {**attention, "gate_up": (2 * f, h), "down": (h, f)}


def gemms(shape: LayerShape) -> list[Gemm]:
    """All products of a block's linear layers in a forward and backward pass."""
    return [
        gemm
        for layer, (n, k) in linears(shape).items()
        for gemm in (
            Gemm(layer, "forward", shape.tokens, n, k),
            Gemm(layer, "input gradient", shape.tokens, k, n),
            Gemm(layer, "weight gradient", n, k, shape.tokens),
        )
    ]


def operands_of(gemm: Gemm, device: torch.device) -> Operands:
    """Seeded operands, in the layouts in which a training step has them."""
    draw = Draw(device)
    forward, of_weight = gemm.kind == "forward", gemm.kind == "weight gradient"
    # The matrices as they lie in memory before anything is transposed.
    left = draw.matrix(gemm.inner, gemm.rows) if of_weight else draw.matrix(gemm.rows, gemm.inner)
    right = (
        draw.matrix(gemm.columns, gemm.inner) if forward else draw.matrix(gemm.inner, gemm.columns)
    )
    a, a_codes, a_rows = _operand(left, of_weight, E4M3 if forward else E5M2)
    b, b_codes, b_rows = _operand(right, not forward, E4M3)
    return Operands(a, b, a_codes, b_codes, a_rows, b_rows)


def _operand(x: Tensor, transposed: bool, fmt: Format) -> tuple[Tensor, TensorScaled, RowScaled]:
    rows, columns = quantize_layouts([x], fmt, rows=not transposed, transposed=transposed)
    operand, codes = (x.t(), columns) if transposed else (x, rows)
    whole = F.pad(operand, (0, -operand.shape[1] % GEMM_MULTIPLE))  # zeros where tokens are missing
    return operand, codes, quantize_rows(whole.contiguous(), fmt)


def bench_gemm(shape: LayerShape) -> list[GemmRow]:
    """Measure every product of a block in every implementation.

    Raises:
        ValueError: there is no GPU.
    """
    require_gpu("the speed of GEMMs is")
    where, rows = origin(), []
    for gemm in tqdm(gemms(shape), desc=shape.name, unit="gemm"):
        operands = operands_of(gemm, DEVICE)
        size = (gemm.rows, gemm.columns, gemm.inner)
        for name, (implementation, _) in IMPLEMENTATIONS.items():
            row = GemmRow(*where, shape.name, gemm.layer, gemm.kind, *size, name)
            rows.append(row)
            try:
                row.rel_err, row.problem = check(name, implementation(operands), operands)
                if not row.problem:
                    row.us = median_us(lambda run=implementation, at=operands: run(at))
                    row.tflops = gemm.flops / row.us / 1e6
            except (RuntimeError, ValueError) as error:  # a GPU may lack one of them
                row.problem = failure(error)
    return rows


def check(implementation: str, product: Tensor, operands: Operands) -> tuple[float, str]:
    """Compare the first rows of a product with FP32.

    Args:
        implementation: a key of :data:`IMPLEMENTATIONS`.
        product: its result.
        operands: what it multiplied.

    Returns:
        The relative RMS error against the BF16 operands' product; what is wrong, or nothing.
    """
    first = product[:CHECKED_ROWS]
    exact = operands.a[:CHECKED_ROWS].float() @ operands.b.float().t()
    own = exact.bfloat16()
    if implementation != "bf16":
        a, b, a_scale = operands.a_codes, operands.b_codes, operands.a_codes.scale
        if implementation == "fp8_rows":
            a, b = operands.a_rows, operands.b_rows
            a_scale = a.scale[:CHECKED_ROWS, None]
        own = reference.scaled_mm(a.q[:CHECKED_ROWS], a_scale, b.q, b.scale, None, torch.bfloat16)
    difference, allowed = relative_rms(first, own), IMPLEMENTATIONS[implementation][1]
    problem = ""
    if not difference <= allowed:
        problem = f"not correct: relative RMS error {difference:.1e} > {allowed:.0e}"
    return relative_rms(first, exact), problem


def format_rows(rows: Sequence[GemmRow]) -> str:
    """Markdown: one line per product, speeds and errors of the implementations side by side.

    The last line is the whole block: all operations by the sum of all times.
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
            *(number(found[name].tflops, 0) for name in names),
            *(number(found[name].rel_err, 4) for name in names),
            "; ".join(f"{name}: {row.problem}" for name, row in found.items() if row.problem),
        ]
        for title, found in by_gemm.items()
    ]
    whole = [number(_block_tflops(rows, name), 0) for name in names]
    return table(head, [*lines, ["block", "", *whole, *([""] * len(names)), ""]])


def _block_tflops(rows: Sequence[GemmRow], implementation: str) -> float | None:
    """All operations by the sum of all times; None where a time is missing."""
    operations, us = 0, 0.0
    for row in rows:
        if row.implementation == implementation:
            if row.us is None:
                return None
            operations += 2 * row.rows * row.columns * row.inner
            us += row.us
    return operations / us / 1e6 if us else None
