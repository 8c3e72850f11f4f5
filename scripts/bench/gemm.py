"""Measures the GEMMs of one block in BF16 and FP8.

    forward          y = x W^T              x [M, K],       W [N, K]
    input gradient   grad_x = grad_y W      grad_y [M, N],  W [N, K]
    weight gradient  grad_W = grad_y^T x    grad_y [M, N],  x [M, K]

In FP8, x and W are E4M3 and grad_y is E5M2, with one scale per tensor. The transposed operands,
whose inner dimension Hopper needs contiguous, are made before the time is measured. Results are
BF16. Training uses fp8_fast, which accumulates with fewer bits, for all three GEMMs; fp8 is there
for comparison. The error is relative to an FP32 GEMM of the BF16 operands; a GEMM that differs from
FP32 on its own operands is not timed. Times are medians on the GPU without CPU launch overhead,
with flushed caches. The last line is the whole block: all operations over the sum of the times.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import harness
from coat_kernels import E4M3, E5M2, Format, TensorScaled, quantize_layouts, reference, scaled_mm
from harness import VersionedResult
from layer_shapes import SHAPES, LayerShape
from op_cases import Draw

DEVICE = torch.device("cuda")
CHECKED_ROWS = 256
"""Number of rows of a product that are compared with FP32."""


class Gemm(NamedTuple):
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
class GemmResult(VersionedResult):
    """One measurement; the columns of ``gemm.csv`` (kernels/benchmarks/README.md)."""

    shape: str
    layer: str
    kind: str
    rows: int
    columns: int
    inner: int
    implementation: str
    us: float | None = None
    tflops: float | None = None
    rel_err: float | None = None
    problem: str = ""


class Operands(NamedTuple):
    """The operands of a product, [rows, inner] and [columns, inner].

    BF16 ones are transposed views as in a training step; FP8 ones are row-major, E5M2 for a
    gradient, else E4M3.
    """

    a: Tensor
    b: Tensor
    a_fp8: TensorScaled
    b_fp8: TensorScaled


IMPLEMENTATIONS: dict[str, tuple[Callable[[Operands], Tensor], float]] = {
    # cuBLAS may round partial sums to BF16.
    "bf16": (lambda x: x.a @ x.b.t(), 5e-3),
    # Partial sums are promoted to FP32.
    "fp8": (lambda x: scaled_mm(x.a_fp8, x.b_fp8, torch.bfloat16), 2e-3),
    # About 14 bits of the sum over the whole inner dimension are kept (DeepSeek-V3, arXiv
    # 2412.19437, section 3.3.2, reports errors of 2% at K = 4096).
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


def bench_gemm(shape: LayerShape) -> list[GemmResult]:
    """Measure every GEMM of a block in every implementation."""
    harness.require_gpu("the speed of GEMMs is")
    origin, results = harness.get_origin(), []
    for gemm in tqdm(list_gemms(shape), desc=shape.name, unit="gemm"):
        operands = make_operands(gemm, DEVICE)
        size = (gemm.rows, gemm.columns, gemm.inner)
        for name, (implementation, _) in IMPLEMENTATIONS.items():
            result = GemmResult(*origin, shape.name, gemm.layer, gemm.kind, *size, name)
            results.append(result)
            try:
                product = implementation(operands)
                result.rel_err, result.problem = check_product(name, product, operands)
                if not result.problem:
                    result.us = harness.measure_median_us(
                        lambda run=implementation, at=operands: run(at)
                    )
                    result.tflops = gemm.flops / result.us / 1e6
            except (RuntimeError, ValueError) as error:  # the GPU may not support one
                result.problem = harness.format_error(error)
    return results


def check_product(implementation: str, product: Tensor, operands: Operands) -> tuple[float, str]:
    """Compare the first rows of a product with FP32; returns the error and the problem, or "".

    The error is that against the product of the BF16 operands.
    """
    first = product[:CHECKED_ROWS]
    exact = operands.a[:CHECKED_ROWS].float() @ operands.b.float().t()
    own = exact.bfloat16()
    if implementation != "bf16":
        a, b = operands.a_fp8, operands.b_fp8
        own = reference.scaled_mm(a.q[:CHECKED_ROWS], a.scale, b.q, b.scale, None, torch.bfloat16)
    difference, allowed = harness.relative_rms(first, own), IMPLEMENTATIONS[implementation][1]
    problem = ""
    if not difference <= allowed:
        problem = f"not correct: relative RMS error {difference:.1e} > {allowed:.0e}"
    return harness.relative_rms(first, exact), problem


def format_gemms(results: Sequence[GemmResult]) -> str:
    """Format a Markdown table of the GEMMs, and a line with the speed of the whole block."""
    columns = {
        "GEMM": lambda r: f"{r.layer}, {r.kind}",
        "M x N x K": lambda r: f"{r.rows} x {r.columns} x {r.inner}",
        "implementation": "implementation",
        "TFLOP/s": "tflops:0",
        "error": "rel_err:4",
        "note": "problem",
    }
    block = []
    for name in IMPLEMENTATIONS:
        chosen = [result for result in results if result.implementation == name]
        operations = sum(2 * r.rows * r.columns * r.inner for r in chosen)
        times = [result.us for result in chosen if result.us is not None]
        if len(times) == len(chosen):
            block.append(f"{name} {operations / sum(times) / 1e6:,.0f} TFLOP/s")
    return f"{harness.format_results(results, columns)}\n\nblock: {', '.join(block)}"


EXAMPLES = """\
  python scripts/bench/gemm.py                                   # Llama-2-7B's block
  python scripts/bench/gemm.py --shape qwen2.5-7b siglip-so400m --csv gemm.csv
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=["llama-2-7b"], help="default llama-2-7b")
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print each shape."""
    for name in args.shape:
        results = bench_gemm(SHAPES[name])
        harness.say(f"\n{name}\n\n{format_gemms(results)}")
        harness.append_results(args.csv, results)


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
