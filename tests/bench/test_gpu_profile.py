"""The profile of a step: its arithmetic on events made by hand, and the whole path on a CPU."""

import importlib
import pkgutil
import re
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import coat_kernels
from coat_vlm.fp8 import weights
from gpu_profile import classify_kernel, collect_profile, format_profile, profile_step

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
REAL_NAMES = {
    "FP8 GEMMs": (
        "nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT",
        "nvjet_sm90_qrtst_128x160_128x6_1x2_h_bz_TNT",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_kernel__5x_cublas",
        "void cutlass::device_kernel<cutlass::gemm::GemmUniversal<cutlass::float_e4m3_t> >",
    ),
    "GEMMs in BF16, FP16 or FP32": (
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_kernel__5x_cublas",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    ),
    "loss": ("liger_cross_entropy_kernel", "void at::native::cunn_SoftMaxForward<4, float>"),
    "other norms": ("_rms_norm_forward_kernel",),
    "optimizer and clipping": ("multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>",),
    "copies and memsets": (
        "Memcpy HtoD (Pageable -> Device)",
        ELEMENTWISE + "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>",
    ),
    "NCCL": ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)",),
    "other element-wise ops and sums": (
        ELEMENTWISE + "CUDAFunctor_add<c10::BFloat16> >",
        "triton_poi_fused__to_copy_mul_sum_3",
        "_swiglu_forward_kernel",
    ),
    "unknown": ("something_new",),
}


def event(name: str, start: float, end: float, stream: int = 7, **more: Any) -> FunctionEvent:
    given = {"device_type": DeviceType.CUDA, "device_resource_id": stream, **more}
    return FunctionEvent(id=0, name=name, thread=0, start_us=start, end_us=end, **given)


@pytest.mark.parametrize("kind", REAL_NAMES)
def test_kinds_of_real_names(kind: str) -> None:
    assert {classify_kernel(name) for name in REAL_NAMES[kind]} == {kind}


def test_every_kernel_of_ours_has_a_kind() -> None:
    """Device functions are called by kernels and never launched: their names end otherwise."""
    kernels = set()
    for module in pkgutil.iter_modules(coat_kernels.__path__):
        members = vars(importlib.import_module(f"coat_kernels.{module.name}"))
        # The interpreter, under which these tests run, has a class of its own for them.
        jitted = {name for name, value in members.items() if hasattr(value, "fn")}
        kernels |= {name for name in jitted if name.endswith("_kernel")}
    assert "_norm_bwd_kernel" in kernels
    others = {kind for kind in REAL_NAMES if kind not in ("loss", "optimizer and clipping")}
    assert not [name for name in kernels if classify_kernel(name) in others]


def test_the_gpu_is_busy_while_anything_runs() -> None:
    found = collect_profile(10.0, [
        event("a", 0, 100), event("b", 50, 80), event("a", 90, 150, stream=8),  # overlapping
        event("Memcpy DtoD (Device -> Device)", 400, 500),
        event("aten::add", 0, 9000, device_type=DeviceType.CPU),
        event("ProfilerStep", 0, 9000, is_user_annotation=True),
    ], "operators")  # fmt: skip
    assert found.busy_ms == pytest.approx(0.150 + 0.100)
    text = format_profile(found, median_ms=4.0)
    assert "10.0 ms a step, 4.0 ms without the profiler" in text
    assert "GPU: 0.2 ms busy, 9.8 ms idle (without the profiler 3.8 ms); 4 kernels" in text
    assert "| `a` | 2 | 0.160 | 55.2% |" in text
    assert "| copies and memsets | 1 | 0.100 | 34.5% |" in text
    assert text.endswith("\noperators")
    many = collect_profile(1.0, [event(f"kernel {i}", i, i + 1) for i in range(40)])
    assert len(re.findall("`kernel", format_profile(many, 1.0))) == 25


def test_weights_are_distinguished_from_gradients_by_where_they_are_quantized() -> None:
    found = collect_profile(1.0, [
        event(weights.QUANTIZATION, 100, 200, is_user_annotation=True),
        event("quantize_tensor_kernel", 120, 200),
        event("quantize_tensor_kernel", 230, 240),  # a gradient
        event("quantize_tensor_kernel", 150, 160, stream=8),  # of another stream
        event("_norm_bwd_kernel", 300, 301),
    ])  # fmt: skip
    kinds = [found.classify(interval) for interval in found.gpu]
    quantized = "FP8: quantize, quantize_tensor"
    assert kinds == ["quantization of weights", quantized, quantized, "FP8: norm, norm_bwd"]


def test_weights_name_themselves_to_the_profiler() -> None:
    part = torch.randn(32, 16)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        codes = weights.quantize_weight((1,), [part])
        weights.quantize_weight_transposed((1,), [part], codes.scale)
    named = [e for e in recorded.events() or () if e.name == weights.QUANTIZATION]
    assert len(named) == 2  # forward, backward
    assert all(event.is_user_annotation for event in named)


def test_a_step_on_a_cpu_has_operators() -> None:
    x = torch.randn(64, 64)
    found = profile_step(lambda: [x @ x for _ in range(3)], torch.device("cpu"))
    assert not found.gpu
    assert "aten::mm" in format_profile(found, 1.0)
