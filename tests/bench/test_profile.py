"""The profile of a step: its arithmetic on events made by hand, and the whole path on a CPU."""

import csv
import importlib
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import coat_kernels
from coat_bench import profile as kinds
from coat_bench import step
from coat_bench.profile import (
    OURS,
    StepProfile,
    Total,
    classify_kernel,
    collect_profile,
    format_profile,
    profile_step,
)
from coat_cli.main import main
from coat_kernels import quantize_layouts
from coat_vlm.fp8 import weights

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
REAL_NAMES = {
    # cuBLASLt and CUTLASS on Hopper
    "nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT": kinds.FP8_GEMMS,
    "nvjet_sm90_qrtst_128x160_128x6_1x2_h_bz_TNT": kinds.FP8_GEMMS,
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1_bias_f16_"
    "execute_segment_k_off_kernel__5x_cublas": kinds.FP8_GEMMS,
    "sm89_xmma_gemm_e5m2bf16_e5m2f32_f32_tn_n_tilesize128x128x64_stage4_execute_kernel": (
        kinds.FP8_GEMMS
    ),
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel"
    "::GemmUniversal<cute::tuple<int, int, int>, cutlass::float_e4m3_t> > >": (kinds.FP8_GEMMS),
    "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN": kinds.OTHER_GEMMS,
    "nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_NNT": kinds.OTHER_GEMMS,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1_execute_"
    "segment_k_off_kernel__5x_cublas": kinds.OTHER_GEMMS,
    "cutlass_80_tensorop_s16816gemm_bf16_256x128_32x3_nn_align8": kinds.OTHER_GEMMS,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>": (
        kinds.OTHER_GEMMS
    ),
    "ampere_sgemm_128x64_tn": kinds.OTHER_GEMMS,
    # attention
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, "
    "false, false, cutlass::bfloat16_t> >": kinds.ATTENTION,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>": (
        kinds.ATTENTION
    ),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
    "": kinds.ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": (
        kinds.ATTENTION
    ),
    # the rest
    "liger_cross_entropy_kernel": kinds.LOSS,
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>": kinds.LOSS,
    "_rms_norm_forward_kernel": kinds.NORMS,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>": (
        kinds.NORMS
    ),
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, at::"
    "native::FusedAdamMathFunctor<float, 4> >": kinds.OPTIMIZER,
    "Memcpy HtoD (Pageable -> Device)": kinds.COPIES,
    "Memset (Device)": kinds.COPIES,
    ELEMENTWISE + "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>": kinds.COPIES,
    ELEMENTWISE + "FillFunctor<float>, std::array<char*, 1> >": kinds.COPIES,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<1>, 128, 1>": (
        kinds.COPIES
    ),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)": kinds.NCCL,
    ELEMENTWISE + "CUDAFunctor_add<c10::BFloat16> >": kinds.ELEMENTWISE,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >": (kinds.ELEMENTWISE),
    "triton_poi_fused__to_copy_mul_sum_3": kinds.ELEMENTWISE,
    "_swiglu_forward_kernel": kinds.ELEMENTWISE,
    "something_new": kinds.OTHER,
}


def event(name: str, start: float, end: float, stream: int = 7, **more: Any) -> FunctionEvent:
    return FunctionEvent(
        id=0,
        name=name,
        thread=0,
        start_us=start,
        end_us=end,
        **{"device_type": DeviceType.CUDA, "device_resource_id": stream, **more},
    )


def made(events: Sequence[FunctionEvent], operators: Sequence[Total] = ()) -> StepProfile:
    return collect_profile(10.0, events, operators)


@pytest.mark.parametrize("name", REAL_NAMES)
def test_kinds_of_real_names(name: str) -> None:
    assert classify_kernel(name) == REAL_NAMES[name]


def test_every_kernel_of_ours_has_a_kind() -> None:
    """Device functions are called by kernels and never launched: their names end otherwise."""
    kernels = set()
    for module in pkgutil.iter_modules(coat_kernels.__path__):
        members = vars(importlib.import_module(f"coat_kernels.{module.name}"))
        # The interpreter, under which these tests run, has a class of its own for them.
        jitted = {name for name, value in members.items() if hasattr(value, "fn")}
        kernels |= {name for name in jitted if name.endswith("_kernel")}
    assert "_norm_bwd_kernel" in kernels
    assert kernels == set(OURS), "give a new kernel its kind in coat_bench/profile.py"


def test_the_gpu_is_busy_while_anything_runs() -> None:
    found = made([
        event("a", 0, 100), event("b", 50, 80), event("a", 90, 150, stream=8),  # overlapping
        event("Memcpy DtoD (Device -> Device)", 400, 500),
        event("aten::add", 0, 9000, device_type=DeviceType.CPU),
        event("ProfilerStep", 0, 9000, is_user_annotation=True),
    ])  # fmt: skip
    assert found.busy_ms == pytest.approx(0.150 + 0.100)
    assert (found.launches, len(found.gpu)) == (3, 4)
    assert "| `a` | 2 | 0.160 |" in format_profile(found)
    assert made([]).busy_ms == 0


def test_weights_are_told_from_gradients_by_where_they_are_quantized() -> None:
    found = made([
        event(weights.QUANTIZATION, 100, 200, is_user_annotation=True),
        event("_amax_kernel", 100, 120), event("quantize_tensor_kernel", 120, 200),
        event("_amax_kernel", 200, 230), event("quantize_tensor_kernel", 230, 240),  # a gradient
        event("_norm_bwd_kernel", 300, 301), event("adamw_kernel", 301, 401),
        event("quantize_tensor_kernel", 150, 160, stream=8),  # of another stream
    ])  # fmt: skip
    assert {total.name: (total.calls, total.ms) for total in found.sum_by_kind()} == {
        kinds.WEIGHTS: (2, pytest.approx(0.100)),
        kinds.OPTIMIZER: (1, pytest.approx(0.100)),
        "FP8: quantize, amax": (1, pytest.approx(0.030)),
        "FP8: quantize, quantize_tensor": (2, pytest.approx(0.020)),
        "FP8: norm, norm_bwd": (1, pytest.approx(0.001)),
    }


def test_the_tables_tell_what_there_is() -> None:
    operators = [Total("cudaStreamSynchronize", 2, 3.0), Total("aten::mm", 5, 1.0)]
    text = format_profile(made([event("nvjet_tst_1", 0, 2500)], operators), median_ms=4.0)
    assert "10.0 ms a step, 4.0 ms without the profiler" in text
    assert "GPU: 2.5 ms busy, 7.5 ms idle (without the profiler 1.5 ms)" in text
    assert "1 kernels, 0 copies and memsets launched" in text
    assert "waited for the GPU 2 times (at the end, too), 3.0 ms" in text
    assert "| GEMMs in BF16, FP16 or FP32 | 1 | 2.500 | 100.0% |" in text
    assert "| `nvjet_tst_1` | 1 | 2.500 | 100.0% |" in text
    assert "| `aten::mm` | 5 | 1.000 |" in text
    many = [event(f"kernel {i}", i, i + 1) for i in range(40)]
    assert len(re.findall("`kernel", format_profile(made(many)))) == 25
    assert "the GPU ran nothing" in format_profile(made([], operators))


def test_weights_name_themselves_to_the_profiler() -> None:
    part = torch.randn(32, 16)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        codes = weights.quantize_weight((1,), [part])
        again = weights.quantize_weight_transposed((1,), [part], codes.scale)
        with weights.reused_weights():
            kept = weights.quantize_weight((1,), [part])
            weights.quantize_weight_transposed((1,), [part], kept.scale)
    events = recorded.events()
    assert events is not None
    named = [event for event in events if event.name == weights.QUANTIZATION]
    assert len(named) == 3  # forward, backward, once for both
    assert all(event.is_user_annotation for event in named)
    rows, transposed = quantize_layouts([part], rows=True, transposed=True)
    assert torch.equal(codes.q.view(torch.uint8), rows.q.view(torch.uint8))
    assert torch.equal(again.q.view(torch.uint8), transposed.q.view(torch.uint8))


def test_a_step_on_a_cpu_has_operators() -> None:
    x = torch.randn(64, 64)
    found = profile_step(lambda: [x @ x for _ in range(3)], torch.device("cpu"))
    assert not found.gpu
    assert found.wall_ms > 0
    assert next(total.calls for total in found.operators if total.name == "aten::mm") == 3
    times = [total.ms for total in found.operators]
    assert times == sorted(times, reverse=True)


def test_the_command_profiles_one_more_step(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "step", "--precisions", "coat_lean", "--steps", "1", "--warmup", "1"]
    assert main([*command, "--profile"]) == 0
    out = capsys.readouterr().out
    assert "coat_lean, none, batch 1: " in out
    assert "the GPU ran nothing" in out
    assert "_NormMlpBackward" in out


def test_a_profile_that_fails_is_told_beside_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, "profile_step", full)
    path = tmp_path / "step.csv"
    command = ["bench", "step", "--precisions", "coat_lean", "--steps", "1", "--warmup", "1"]
    assert main([*command, "--batch", "1", "2", "--profile", "--csv", str(path)]) == 0
    capsys.readouterr()
    rows = list(csv.DictReader(path.open()))
    assert [(row["batch"], row["problem"]) for row in rows] == [("1", ""), ("2", "")]
    assert all(float(row["ms"]) > 0 for row in rows)
    assert all("no profile: OSError: [Errno 28] No space left" in row["note"] for row in rows)
