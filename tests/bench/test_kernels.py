"""The kernel benchmark: cases, bytes, refusals; on a GPU, a run of each command."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_bench import kernels
from coat_bench.cases import Case, Draw, build_cases, shrink_shape
from coat_bench.kernels import (
    KernelRow,
    bench_kernels,
    count_bytes,
    find_disagreement,
    format_rows,
)
from coat_bench.rows import append_rows
from coat_bench.shapes import SHAPES, LayerShape
from coat_cli.main import main
from coat_kernels import OPS

CPU = torch.device("cpu")
SMALL = {
    # 21 tokens and 304 MLP channels need padding; heads are grouped in one, equal in the others.
    "llama": LayerShape("small", "llama", 64, 304, 4, 4, 3, 7),
    "qwen2": LayerShape("small", "qwen2", 64, 304, 4, 2, 3, 7),
    "siglip": LayerShape("small", "siglip", 64, 304, 4, 4, 3, 7),
}
CASES = [
    pytest.param(case, id=f"{family}-{case.op}-{case.variant}".replace(" ", "_"))
    for family, shape in SMALL.items()
    for case in build_cases(shape)
]

T, H, F, L = 21, 64, 304, 7
TP = 32
"""Tokens, padded for a GEMM over them."""
COPY = T * H + T * H // 16
"""Of a residual stream, group-scaled: a byte per element, and one per group."""
BYTES = {
    # Read 2 bytes per element, write the scale; read these, write 1 per element and layout.
    ("llama", "tensor_scale", "attention output"): 2 * T * H + 4,
    ("llama", "quantize_tensor", "attention output, rows"): 3 * T * H + 4,
    ("llama", "quantize_tensor", "weights of gate, up, both"): 4 * 2 * F * H + 4,
    # Read 2 bytes per element twice; write 1 per element and layout, the scale and, in FP32, sums.
    ("siglip", "quantize_gradient", "of the block's output"): (5 * T + TP) * H + 4 + 4 * H,
    ("llama", "transpose_quantized", "attention output"): (T + TP) * H,
    ("llama", "quantize_group", "residual stream"): 2 * T * H + COPY,
    # Read x and the vectors; write x's copy, mean and rstd, and the scale.
    ("siglip", "norm_stats", "of x"): 2 * T * H + 2 * 2 * H + COPY + 2 * 4 * T + 4,
    # Read dy, the copy, the weight, rstd and the residual's gradient; write dx, dw in FP32.
    ("llama", "norm_bwd", "with a residual"): 6 * T * H + COPY + 2 * H + 4 * T + 4 * H,
    # Read q, k, v of all tokens, cos and sin of one sequence; write q, k, v.
    ("qwen2", "rope", "q, k, v"): 2 * (2 * T * 128) + 2 * (2 * L * 16),
    # Read q, the weight, cos and sin; write q.
    ("qwen2", "head_norm", "q"): 2 * (2 * T * 64) + 2 * 16 + 2 * (2 * L * 16),
    # Read dy, q, the weight, cos and sin; write dx and, in FP32, the weight's gradient.
    ("qwen2", "head_norm_bwd", "q"): 2 * (3 * T * 64) + (2 + 4) * 16 + 2 * (2 * L * 16),
    # Read dq, dk, dv, cos and sin twice; write both layouts, the scale and, in FP32, the bias's.
    ("qwen2", "rope_gradient", "q, k, v, both"): (
        (5 * T + TP) * 128 + 2 * 2 * (2 * L * 16) + 4 + 4 * 128
    ),
    # Read x once, its scale and A; write P. Read the gradient, its scale and both B; write 2 P.
    ("llama", "low_rank_project", "A of down"): T * F + 4 + 2 * 64 * F + 2 * T * 64,
    ("llama", "low_rank_project", "B of gate, up"): 2 * T * F + 4 + 2 * 2 * 64 * (F + T),
    # Read the gradient, its scale and P; write the gradients of both B.
    ("llama", "low_rank_gradient", "B of gate, up"): 2 * T * F + 4 + 2 * 2 * 64 * (T + F),
    # Read the logits, targets and divisor; write the gradient, and a loss per token.
    ("llama", "cross_entropy_", "losses and gradient"): 4 * T * 32000 + (8 + 4) * T + 4,
    # Read the logits, targets and losses; write the gradient in FP8 in both layouts.
    ("llama", "logit_gradient", "both"): (2 * T + T + TP) * 32000 + (8 + 4) * T,
    # Read p, g and both moments; write p and both: amax in FP32 and k in FP16 per 128 elements.
    ("llama", "adamw_step", "FP32 weights"): (4 + 4 + 2 + 4 + 2) * F * H + 2 * 2 * 6 * F * H // 128,
}
"""Family, op, variant -> what its call has to read and write, counted by hand."""


def test_every_op_has_a_case_or_is_a_gemm():
    measured = {case.op for shape in SMALL.values() for case in build_cases(shape)}
    assert measured | {"scaled_mm"} == set(OPS)


@pytest.mark.parametrize("key", BYTES)
def test_bytes_are_those_counted_by_hand(key: tuple[str, str, str]):
    family, op, variant = key
    (case,) = (c for c in build_cases(SMALL[family]) if (c.op, c.variant) == (op, variant))
    assert count_bytes(op, case.arguments(Draw(CPU))) == BYTES[key]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_sample_has_the_same_cases(shape: LayerShape):
    whole, sample = build_cases(shape), build_cases(shrink_shape(shape))
    names = [(case.op, case.variant) for case in whole]
    assert names == [(case.op, case.variant) for case in sample]
    assert len(set(names)) == len(names)


def test_arguments_are_seeded():
    case = build_cases(SMALL["llama"])[0]
    (first,), _ = case.arguments(Draw(CPU))
    (second,), _ = case.arguments(Draw(CPU))
    assert torch.equal(first, second)


def one_bit_off(result: Any) -> Any:
    """The same results with one bit in the middle of the largest changed."""
    tensors = [result.clone()] if isinstance(result, Tensor) else [x.clone() for x in result]
    wrong = max(tensors, key=lambda tensor: tensor.nbytes)
    raw = wrong.reshape(-1).view(torch.uint8)
    raw[raw.numel() // 2 :: 64] ^= 64
    return tensors[0] if isinstance(result, Tensor) else tuple(tensors)


@pytest.mark.parametrize("case", CASES)
def test_wrong_kernels_are_refused(case: Case, monkeypatch: pytest.MonkeyPatch):
    op, args = OPS[case.op], case.arguments(Draw(CPU))
    assert find_disagreement(case.op, args) == ""

    def wrong(*args: Any) -> Any:
        result = op.reference(*args)
        if case.op == "adamw_step":
            args[0].mul_(1.01)
            return None
        return one_bit_off(result)

    monkeypatch.setitem(OPS, case.op, dataclasses.replace(op, dispatch=wrong))
    assert find_disagreement(case.op, args).startswith(f"not correct: {case.op}, result ")


def test_a_missing_result_is_refused(monkeypatch: pytest.MonkeyPatch):
    case = next(case for case in build_cases(SMALL["llama"]) if case.op == "rope")
    op = OPS["rope"]
    monkeypatch.setitem(
        OPS, "rope", dataclasses.replace(op, dispatch=lambda *args: op.reference(*args)[:2])
    )
    assert find_disagreement("rope", case.arguments(Draw(CPU))).startswith("not correct: ")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that copies 1000 GB/s and takes 100 us for everything, on the CPU."""

    def hundred(run: Any) -> float:
        run()
        return 100.0

    monkeypatch.setattr(kernels, "get_origin", lambda: ("2026-01-31", "abc", "GPU", "2", "3"))
    monkeypatch.setattr(kernels, "require_gpu", lambda _: None)
    monkeypatch.setattr(kernels, "measure_median_us", hundred)
    monkeypatch.setattr(kernels, "measure_copy_bandwidth", lambda _: 1000.0)
    monkeypatch.setattr(kernels, "DEVICE", CPU)


def test_the_yardstick_counts_what_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch):
    def half_a_millisecond(run: Any, return_mode: str) -> float:
        run()
        assert return_mode == "median"
        return 0.5

    monkeypatch.setattr("triton.testing.do_bench", half_a_millisecond)
    monkeypatch.setattr(kernels, "COPY_BYTES", 10**6)
    assert kernels.measure_copy_bandwidth(CPU) == pytest.approx(4.0)


def test_what_is_wrong_or_fails_gets_no_speed(clock: None, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("misaligned address\nsecond line")

    shape = SMALL["llama"]
    apply, bwd = OPS["norm_apply"], OPS["norm_bwd"]
    wrong = dataclasses.replace(apply, dispatch=lambda *a: one_bit_off(apply.reference(*a)))
    monkeypatch.setitem(OPS, "norm_apply", wrong)
    monkeypatch.setitem(OPS, "norm_bwd", dataclasses.replace(bwd, dispatch=broken))
    rows = bench_kernels(shape, ["norm_bwd", "norm_apply", "rope"])
    assert [row.op for row in rows] == ["norm_apply", "norm_apply", "norm_bwd", "rope"]
    for row in rows[:3]:
        assert row.us is row.gbps is row.fraction is None
        assert row.copy_gbps == 1000.0
    assert rows[0].problem.startswith("not correct: norm_apply")
    assert rows[2].problem == "RuntimeError: misaligned address"
    rope = rows[3]
    moved = 2 * (2 * T * 3 * H) + 2 * (2 * L * 16)
    assert (rope.problem, rope.us, rope.mib) == ("", 100.0, moved / 2**20)
    assert rope.gbps == pytest.approx(moved / 1e-4 / 1e9)
    assert rope.fraction == pytest.approx(moved / 1e-4 / 1e12)


def test_what_cannot_be_timed_is_noted(clock: None, monkeypatch: pytest.MonkeyPatch):
    def refuses(_: Any) -> float:
        raise RuntimeError("cannot be captured in a CUDA graph: it waits\nsecond line")

    monkeypatch.setattr(kernels, "measure_median_us", refuses)
    (row,) = bench_kernels(SMALL["llama"], ["rope"])
    assert row.us is row.gbps is row.fraction is None
    assert row.problem == "RuntimeError: cannot be captured in a CUDA graph: it waits"


def test_all_cases_of_a_block_are_measured(clock: None, tmp_path: Path):
    rows = bench_kernels(SMALL["siglip"])
    assert [row.problem for row in rows] == [""] * len(build_cases(SMALL["siglip"]))
    append_rows(tmp_path / "kernels.csv", rows)
    header = (tmp_path / "kernels.csv").read_text().splitlines()[0]
    assert header == (
        "date,commit,gpu,torch,triton,shape,op,variant,mib,us,gbps,copy_gbps,fraction,problem"
    )


def test_the_table_says_what_is_below_the_target():
    where = ("2026-01-31", "abc", "GPU", "2", "3", "small")
    rows = [
        KernelRow(*where, "rope", "q, k, v", 384.0, 100.0, 4026.5, 4270.0, 0.943),
        KernelRow(*where, "norm_bwd", "with a residual", 10.0, 5.0, 2097.2, 4270.0, 0.491),
        KernelRow(*where, "adamw_step", "FP32 weights", 1.0, copy_gbps=4270.0, problem="wrong"),
    ]
    _, _, good, slow, red = format_rows(rows).splitlines()
    assert good == "| rope | q, k, v | 384.0 | 100.0 | 4026 | 94 |  |"
    assert slow.endswith("| 49 | below 80% |")
    assert red == "| adamw_step | FP32 weights | 1.0 | - | - | - | wrong |"


def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no case of fast; use tensor_scale, .*bench gemm"):
        bench_kernels(SMALL["llama"], ["rope", "fast"])
    with pytest.raises(ValueError, match="siglip-so400m has no case of rope"):
        bench_kernels(SHAPES["siglip-so400m"], ["rope"])
    for job in ("kernels", "gemm"):
        assert main(["bench", job]) == 2
        assert "there is no GPU; the speed of" in capsys.readouterr().err
        assert main(["bench", job, "--shape", "gpt-2"]) == 2
        assert "use one of llama-2-7b" in capsys.readouterr().err


@pytest.mark.parametrize("job", ["kernels", "gemm"])
def test_help_shows_examples(job: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["bench", job, "--help"])
    assert f"coat-vlm bench {job} --shape" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("job", ["kernels", "gemm"])
@pytest.mark.parametrize("family", ["llama", "siglip"])
def test_on_a_gpu_each_command_measures_something(
    job: str, family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(SHAPES, "small", SMALL[family])
    path = tmp_path / "rows.csv"
    assert main(["bench", job, "--shape", "small", "--csv", str(path)]) == 0
    rows = path.read_text().splitlines()[1:]
    assert rows
    assert all(row.endswith(",") for row in rows), "a problem"
