"""Times GEMMs with a scale per group of K, in INT8 and FP8, for the study of forward GEMMs.

y [M, N] = x [M, K] W [N, K]^T in BF16, of the four GEMMs of Llama-2-7B's layer. Implementations:

    bf16          torch's GEMM
    tensor        torch's FP8 GEMM with one scale per tensor and fast accumulation, as in training
    block         torch's FP8 GEMM with a scale per 1 x 128 inputs and 128 x 128 weights
    int8, fp8     a Triton kernel with a scale per row of x, row of W and group of K: the sums of a
                  group are exact (INT8) or the tensor core's (FP8), sums over groups are FP32. The
                  fastest of several tiles is taken

Quantization is not timed. lab_finetune.py has what the formats cost in loss.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from tqdm import tqdm

import harness
from coat_kernels import quantize_tensor, scaled_mm
from coat_kernels.launch import cdiv
from harness import VersionedResult
from layer_shapes import find_shape

TILES = [
    (*tile, stages)
    for tile, stages in product([(128, 128, 4), (128, 256, 8), (256, 128, 8)], (3, 4))
]
"""Rows, columns, warps and stages that are tried."""
_BAND = tl.constexpr(8)
"""Rows of tiles that are computed together, so that x and W stay in the L2 cache."""


@triton.jit
def _grouped_scales_kernel(
    x_ptr, w_ptr, y_ptr,  # (M, K) and (N, K) in 8 bits, (M, N)
    x_scales_ptr, w_scales_ptr,  # (K / GROUP, M), (K / GROUP, N) FP32
    M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (_BAND * tiles_n) * _BAND
    rows = tl.minimum(tiles_m - band, _BAND)
    i_m = band + tl.program_id(0) % (_BAND * tiles_n) % rows
    i_n = tl.program_id(0) % (_BAND * tiles_n) // rows
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, GROUP)
    m_m, m_n = o_m < M, o_n < N
    x_ptrs = x_ptr + o_m[:, None] * K + o_k[None, :]
    w_ptrs = w_ptr + o_n[None, :] * K + o_k[:, None]
    y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(K // GROUP):
        x = tl.load(x_ptrs + group * GROUP, mask=m_m[:, None], other=0.0)
        w = tl.load(w_ptrs + group * GROUP, mask=m_n[None, :], other=0.0)
        x_scales = tl.load(x_scales_ptr + group * M + o_m, mask=m_m, other=0.0)
        w_scales = tl.load(w_scales_ptr + group * N + o_n, mask=m_n, other=0.0)
        total = tl.dot(x, w, out_dtype=SUM)
        y += total.to(tl.float32) * (x_scales[:, None] * w_scales[None, :])
    y_ptrs = y_ptr + o_m[:, None] * N + o_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def quantize_groups(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize [M, K] with a scale per row and group; returns data, and scales [K / group, M]."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    groups = x.float().unflatten(1, (-1, group))
    scales = groups.abs().amax(-1).clamp_min(1e-30) / largest
    q = groups / scales[..., None]
    q = q.round() if dtype == torch.int8 else q
    return q.flatten(1).to(dtype), scales.t().contiguous()


def multiply(
    x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], group: int, tile: tuple[int, int, int, int]
) -> Tensor:
    """Multiply results of :func:`quantize_groups` [M, K] and [N, K] to BF16 [M, N]."""
    (M, K), N = x[0].shape, len(w[0])
    rows, columns, warps, stages = tile
    y = torch.empty((M, N), dtype=torch.bfloat16, device=x[0].device)
    kernel: Any = cast(Any, _grouped_scales_kernel)
    kernel[(cdiv(M, rows) * cdiv(N, columns),)](
        x_ptr=x[0], w_ptr=w[0], y_ptr=y, x_scales_ptr=x[1], w_scales_ptr=w[1], M=M, N=N, K=K,
        GROUP=group, BLOCK_M=rows, BLOCK_N=columns,
        SUM=tl.int32 if x[0].dtype == torch.int8 else tl.float32,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


@dataclass(slots=True)
class GroupedResult(VersionedResult):
    """One GEMM; the columns of the CSV file."""

    M: int
    N: int
    K: int
    implementation: str
    group: int
    us: float
    tflops: float
    error: float
    """The relative RMS error of y."""
    note: str
    """The tile, or what went wrong."""


def _implementations(x: Tensor, w: Tensor) -> Iterator[tuple[str, int, str, Callable[[], Tensor]]]:
    yield "bf16", 0, "", lambda: F.linear(x, w)
    x8, w8 = quantize_tensor(x), quantize_tensor(w)
    yield "tensor", 0, "", lambda: scaled_mm(x8, w8, torch.bfloat16, fast=True)
    yield "block", 128, "", _torch_blocks(x, w)
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        for group in (64, 128):
            operands = quantize_groups(x, group, dtype), quantize_groups(w, group, dtype)
            for tile in TILES:
                note = "x".join(map(str, tile))
                yield name, group, note, partial(multiply, *operands, group, tile)


def _torch_blocks(x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    q, scales = quantize_groups(x, 128, torch.float8_e4m3fn)
    blocks = w.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    w_scales = blocks.abs().amax((1, 3)) / 448
    w8 = (blocks / w_scales[:, None, :, None]).flatten(2).flatten(0, 1).to(q.dtype)
    # torch takes the scales of weights as [K / 128 rounded up to a multiple of 4, N / 128].
    w_scales = F.pad(w_scales, (0, -w_scales.shape[1] % 4)).t()
    kinds: Any = F.ScalingType  # pyright: ignore[reportAttributeAccessIssue]

    def run() -> Tensor:
        return F.scaled_mm(
            q, w8.t(), scales.t(), kinds.BlockWise1x128, w_scales,
            kinds.BlockWise128x128, output_dtype=torch.bfloat16,
        )  # fmt: skip

    return run


def measure(shape: tuple[int, int, int]) -> list[GroupedResult]:
    """Time all implementations of a GEMM; of the tiles of one, the fastest."""
    M, N, K = shape
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (
        torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
        for size in ((M, K), (N, K))
    )
    exact = x[:256].float() @ w.float().t()
    best: dict[tuple[str, int], GroupedResult] = {}
    origin = harness.get_origin()
    for name, group, note, run in _implementations(x, w):
        try:
            error = harness.relative_rms(run()[:256], exact)
            us = harness.measure_median_us(run)
        except Exception as problem:
            us, error, note = float("inf"), float("nan"), harness.format_error(problem)
        result = GroupedResult(
            *origin, M, N, K, name, group, us, 2e-6 * M * N * K / us, error, note
        )
        if (name, group) not in best or us < best[name, group].us:
            best[name, group] = result
    return [*best.values()]


COLUMNS = {"M": "M", "N": "N", "K": "K", "implementation": "implementation", "group": "group",
           "us": "us:1", "TFLOP/s": "tflops:0", "error": "error:4", "note": "note"}  # fmt: skip
EXAMPLES = """\
  python scripts/bench/lab_block_scales.py --tokens 16384 --csv block_scales.csv
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    parser.add_argument("--tokens", type=int, default=16384, help="M; default 16384")
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print all GEMMs."""
    harness.require_gpu("the speed of a GEMM is")
    shape = find_shape("llama-2-7b")
    H, I = shape.hidden, shape.ffn
    results: list[GroupedResult] = []
    for n, k in tqdm([(3 * H, H), (H, H), (2 * I, H), (H, I)], disable=None):
        found = measure((args.tokens, n, k))
        harness.append_results(args.csv, found)
        results += found
    harness.say(harness.format_results(results, COLUMNS))


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
