"""The benchmark of element-wise ops: cases, bytes, refusals; on a GPU, a run of each script."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
import ops
from coat_kernels import OPS
from layer_shapes import SHAPES, LayerShape
from op_cases import Draw, build_cases, shrink_shape
from ops import bench_ops, count_bytes

CPU = torch.device("cpu")
SMALL = {
    # 21 tokens and 304 MLP channels need padding; heads are grouped in one, equal in the others.
    "llama": LayerShape("small", "llama", 64, 304, 4, 4, 3, 7),
    "qwen2": LayerShape("small", "qwen2", 64, 304, 4, 2, 3, 7),
    "siglip": LayerShape("small", "siglip", 64, 304, 4, 4, 3, 7),
}
T, H, F, L = 21, 64, 304, 7
TP = 32
"""Tokens, padded for a GEMM over them."""
COPY = T * H + T * H // 16
"""Of a residual stream, group-scaled: a byte per element, and one per group."""
BYTES = {
    # Read 2 bytes per element, write the scale; read these, write 1 per element and layout.
    ("llama", "tensor_scale", "attention output"): 2 * T * H + 4,
    ("llama", "quantize_tensor", "weights of gate, up, both"): 4 * 2 * F * H + 4,
    # Read 2 bytes per element twice; write 1 per element and layout, the scale and, in FP32, sums.
    ("siglip", "quantize_gradient", "of the block's output"): (5 * T + TP) * H + 4 + 4 * H,
    ("llama", "transpose_quantized", "attention output"): (T + TP) * H,
    ("llama", "quantize_group", "residual stream"): 2 * T * H + COPY,
    # Read x and the vectors; write x's copy, mean and rstd, y in FP8, and the scale.
    ("siglip", "norm_fwd", "of x"): 3 * T * H + 2 * 2 * H + COPY + 2 * 4 * T + 4,
    # Read dy, the copy, the weight, rstd and the residual's gradient; write dx, dw in FP32.
    ("llama", "norm_bwd", "with a residual"): 6 * T * H + COPY + 2 * H + 4 * T + 4 * H,
    # Read q, k, v of all tokens, cos and sin of one sequence; write q, k, v.
    ("qwen2", "rope", "q, k, v"): 2 * (2 * T * 128) + 2 * (2 * L * 16),
    # Read dq, dk, dv, cos and sin twice; write both layouts, the scale and, in FP32, the bias's.
    ("qwen2", "rope_gradient", "q, k, v, both"): (
        (5 * T + TP) * 128 + 2 * 2 * (2 * L * 16) + 4 + 4 * 128
    ),
    # Read x once, its scale and A; write P.
    ("llama", "low_rank_project", "A of down"): T * F + 4 + 2 * 64 * F + 2 * T * 64,
    # Read the logits, targets and losses; write the gradient in FP8 in both layouts.
    ("llama", "logit_gradient", "both"): (2 * T + T + TP) * 32000 + (8 + 4) * T,
}
"""Family, op, variant -> what its call has to read and write, counted by hand."""


@pytest.mark.parametrize("key", BYTES)
def test_bytes_are_those_counted_by_hand(key: tuple[str, str, str]) -> None:
    family, op, variant = key
    (case,) = (c for c in build_cases(SMALL[family]) if (c.op, c.variant) == (op, variant))
    assert count_bytes(op, case.arguments(Draw(CPU))) == BYTES[key]


def test_every_op_has_a_case_except_the_gemm() -> None:
    measured = {case.op for shape in SMALL.values() for case in build_cases(shape)}
    assert measured | {"scaled_mm"} == set(OPS)
    for shape in SHAPES.values():
        names = [(case.op, case.variant) for case in build_cases(shape)]
        assert names == [(case.op, case.variant) for case in build_cases(shrink_shape(shape))]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("family", SMALL)
def test_right_kernels_are_timed_and_wrong_ones_are_not(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "get_origin", lambda: ("2026-01-31", "abc", "GPU", "2", "3"))
    monkeypatch.setattr(harness, "require_gpu", lambda _: None)
    monkeypatch.setattr(harness, "measure_median_us", lambda run: (run(), 100.0)[1])
    monkeypatch.setattr(ops, "measure_copy_bandwidth", lambda _: 1000.0)
    monkeypatch.setattr(ops, "DEVICE", CPU)
    results = bench_ops(SMALL[family])
    assert [r.problem for r in results] == [""] * len(build_cases(SMALL[family]))
    for result in results:
        assert result.mib is not None
        assert result.fraction == pytest.approx(result.mib * 2**20 / 1e-4 / 1e12)

    def broken(*_: Any) -> None:
        raise RuntimeError("misaligned address\nsecond line")

    def off(*args: Any) -> Any:
        outputs = OPS["norm_recompute"].reference(*args)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        return [(x.float() * 1.1).to(x.dtype) for x in outputs]

    for name, dispatch in (("norm_recompute", off), ("norm_bwd", broken)):
        monkeypatch.setitem(OPS, name, dataclasses.replace(OPS[name], dispatch=dispatch))
    results = bench_ops(SMALL[family], ["norm_recompute", "norm_bwd"])
    assert [r.us for r in results] == [None] * len(results)
    assert results[0].problem.startswith("not correct: result 0: relative RMS error")
    assert results[-1].problem == "RuntimeError: misaligned address"


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(ValueError, match=r"small has no case of fast; use tensor_scale, "):
        bench_ops(SMALL["llama"], ["rope", "fast"])


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "siglip"])
def test_on_a_gpu_all_ops_are_measured(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL[family])
    path = tmp_path / "results.csv"
    words = ["--shape", "small", "--csv", str(path)]
    assert harness.run_script(ops.build_parser(), ops.main, words) == 0
    lines = path.read_text().splitlines()[1:]
    assert lines
    assert all(line.endswith(",") for line in lines), "a problem"
