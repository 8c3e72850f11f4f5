"""The GEMM benchmark: which products, how many operations, and what is called wrong."""

from typing import Any

import pytest
import torch

import gemm
import harness
from gemm import IMPLEMENTATIONS, bench_gemm, check_product, list_gemms, list_linears
from layer_shapes import SHAPES, LayerShape, build_layer

CPU = torch.device("cpu")
SMALL = LayerShape("small", "qwen2", 64, 128, 4, 2, 2, 16)
ORIGIN = ("2026-01-31", "abc", "GPU", "2", "3")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_block_takes_six_operations_per_weight_and_token(shape: LayerShape) -> None:
    layer = build_layer(shape, torch.device("meta"), torch.bfloat16)
    weights = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    assert sum(n * k for n, k in list_linears(shape).values()) == weights
    assert sum(product.flops for product in list_gemms(shape)) == 6 * weights * shape.tokens


@pytest.mark.parametrize("product", list_gemms(SMALL)[:3], ids=lambda g: g.kind)
def test_operands_have_their_sizes_formats_and_layouts(product: gemm.Gemm) -> None:
    operands = gemm.make_operands(product, CPU)
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
        error, problem = check_product(name, y, operands)
        assert problem == ""
        assert error < (0.005 if name == "bf16" else 0.1)
        for wrong in (y * 1.05, y.flip(0), y.where(y < y.amax(), torch.nan)):
            assert check_product(name, wrong, operands)[1].startswith("not correct")


def test_every_product_is_measured_and_a_failure_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> torch.Tensor:
        raise RuntimeError("not on this GPU\nsecond line")

    monkeypatch.setattr(harness, "get_origin", lambda: ORIGIN)
    monkeypatch.setattr(harness, "require_gpu", lambda _: None)
    monkeypatch.setattr(harness, "measure_median_us", lambda _: 2.0)
    monkeypatch.setattr(gemm, "DEVICE", CPU)
    monkeypatch.setitem(IMPLEMENTATIONS, "fp8_fast", (broken, 1.0))
    results = bench_gemm(SMALL)
    assert len(results) == 3 * 12
    for r in results:
        if r.implementation == "fp8_fast":
            assert (r.us, r.tflops, r.problem) == (None, None, "RuntimeError: not on this GPU")
        else:
            assert r.problem == ""
            assert r.tflops == pytest.approx(2 * r.rows * r.columns * r.inner / 2e-6 / 1e12)
