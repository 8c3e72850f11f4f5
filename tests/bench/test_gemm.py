"""The GEMM benchmark: which products, how many operations, and what is called wrong."""

from typing import Any

import pytest
import torch

from coat_bench import gemm
from coat_bench.gemm import (
    IMPLEMENTATIONS,
    GemmRow,
    bench_gemm,
    check_product,
    format_rows,
    list_gemms,
    list_linears,
    make_operands,
)
from coat_bench.shapes import SHAPES, LayerShape, build_layer

CPU = torch.device("cpu")
SMALL = LayerShape("small", "qwen2", 64, 128, 4, 2, 2, 16)
WHERE = ("2026-01-31", "abc", "GPU", "2", "3")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_block_takes_six_operations_per_weight_and_token(shape: LayerShape):
    layer = build_layer(shape, torch.device("meta"), torch.bfloat16)
    weights = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    assert sum(n * k for n, k in list_linears(shape).values()) == weights
    assert sum(product.flops for product in list_gemms(shape)) == 6 * weights * shape.tokens
    assert len(list_gemms(shape)) == 3 * len(list_linears(shape))


@pytest.mark.parametrize("product", list_gemms(SMALL), ids=lambda g: f"{g.layer}-{g.kind}")
def test_operands_have_their_sizes_formats_and_layouts(product: gemm.Gemm):
    operands = make_operands(product, CPU)
    assert operands.a.shape == operands.a_fp8.q.shape == (product.rows, product.inner)
    assert operands.b.shape == operands.b_fp8.q.shape == (product.columns, product.inner)
    gradient = product.kind != "forward"
    assert operands.a_fp8.q.dtype == (torch.float8_e5m2 if gradient else torch.float8_e4m3fn)
    assert operands.b_fp8.q.dtype == torch.float8_e4m3fn
    assert operands.a_fp8.q.is_contiguous()
    assert operands.b_fp8.q.is_contiguous()
    assert operands.a.is_contiguous() == (product.kind != "weight gradient")
    assert operands.b.is_contiguous() == (product.kind == "forward")
    for name in ("bf16", "fp8"):
        y = IMPLEMENTATIONS[name][0](operands)
        assert (y.shape, y.dtype) == ((product.rows, product.columns), torch.bfloat16)
        error, problem = check_product(name, y, operands)
        assert problem == ""
        assert error < (0.005 if name == "bf16" else 0.1)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_wrong_products_are_refused(name: str):
    operands = make_operands(list_gemms(SMALL)[0], CPU)
    right = IMPLEMENTATIONS["fp8" if name == "fp8_fast" else name][0](operands)
    assert check_product(name, right, operands)[1] == ""
    for wrong in (right * 1.05, right.flip(0), right.where(right < right.amax(), torch.nan)):
        assert check_product(name, wrong, operands)[1].startswith("not correct: relative RMS error")


def test_every_product_is_measured_and_a_failure_is_noted(monkeypatch: pytest.MonkeyPatch):
    def broken(_: Any) -> torch.Tensor:
        raise RuntimeError("not on this GPU\nsecond line")

    monkeypatch.setattr(gemm, "get_origin", lambda: WHERE)
    monkeypatch.setattr(gemm, "require_gpu", lambda _: None)
    monkeypatch.setattr(gemm, "DEVICE", CPU)
    monkeypatch.setattr(gemm, "measure_median_us", lambda _: 2.0)
    monkeypatch.setitem(IMPLEMENTATIONS, "fp8_fast", (broken, 1.0))
    rows = bench_gemm(SMALL)
    assert len(rows) == 3 * 12
    for row in rows:
        if row.implementation == "fp8_fast":
            assert (row.us, row.tflops) == (None, None)
            assert row.problem == "RuntimeError: not on this GPU"
        else:
            assert row.problem == ""
            assert row.tflops == pytest.approx(2 * row.rows * row.columns * row.inner / 2e-6 / 1e12)


def test_the_table_ends_with_the_block():
    def row(kind: str, name: str, us: float | None, problem: str = "") -> GemmRow:
        size = (1000, 1000, 1000)
        tflops = None if us is None else 2e9 / us / 1e6
        return GemmRow(*WHERE, "small", "o", kind, *size, name, us, tflops, 0.03, problem)

    rows = [
        *(
            row("forward", name, us)
            for name, us in (("bf16", 4.0), ("fp8", 2.0), ("fp8_fast", 1.0))
        ),
        *(row("input gradient", name, 8.0) for name in ("bf16", "fp8")),
        row("input gradient", "fp8_fast", None, "wrong"),
    ]
    _, _, forward, backward, block = format_rows(rows).splitlines()
    assert forward.startswith("| o, forward | 1000 x 1000 x 1000 | 500 | 1000 | 2000 | 0.0300 |")
    assert backward.endswith("| fp8_fast: wrong |")
    assert block.startswith("| block |  | 333 | 400 | - |")  # 4e9 operations in 12, 10 us
