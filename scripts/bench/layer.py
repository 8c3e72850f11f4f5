"""Measures time, memory and error of one layer, for our precisions and the baselines.

All implementations have the same weights and the same input in one process. A layer whose error
against the BF16 original exceeds the limits is not timed. Memory is counted beyond the BF16
parameters. The time includes one quantization of the weights; "cached weights" is the time of a
further micro-batch, which reuses the quantized weights.
"""

import argparse
import contextlib
import copy
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import harness
from coat_cli.command import at_least
from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert, reused_weights, saved_bytes
from harness import VersionedResult, choose_precision, relative_rms
from layer_shapes import SHAPES, Forward, LayerShape, build_forward, build_layer, find_shape

LIMITS = (0.09, 0.13)
"""Largest relative errors of the output and of the input gradient."""

REFERENCE = "hf_eager"
"""The implementation that the others are compared with."""

_MIB = 2**20


@dataclass(slots=True)
class LayerResult(VersionedResult):
    """One measurement; the columns of ``layer.csv`` (kernels/benchmarks/README.md)."""

    shape: str
    tokens: int
    implementation: str
    attention: str
    fwd_ms: float | None = None
    fwdbwd_ms: float | None = None
    fwdbwd_cached_ms: float | None = None
    weight_cache_mib: float | None = None
    saved_mib: float | None = None
    peak_mib: float | None = None
    rel_err_out: float | None = None
    rel_err_grad: float | None = None
    length: int = 0
    problem: str = ""


class Pass(NamedTuple):
    """Output and input gradient of a block, each [batch, length, hidden] FP32 on the CPU."""

    output: Tensor
    input_gradient: Tensor


def _compile(layer: nn.Module) -> nn.Module:
    return torch.compile(layer)  # pyright: ignore[reportReturnType] - an OptimizedModule


def _apply_liger(layer: nn.Module) -> nn.Module:
    """Use Liger's norms, and in a decoder layer Liger's SwiGLU."""
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerLayerNorm,
        LigerRMSNorm,
        LigerSwiGLUMLP,
    )

    for name, module in list(layer.named_children()):
        parameter = next(module.parameters())
        if isinstance(module, nn.LayerNorm):
            made = LigerLayerNorm(module.normalized_shape[0], eps=module.eps, bias=True)
        elif hasattr(module, "variance_epsilon"):
            made = LigerRMSNorm(len(parameter), eps=module.variance_epsilon)
        elif hasattr(module, "gate_proj"):
            made = LigerSwiGLUMLP(module.config)
        else:
            continue
        made.to(parameter.device, parameter.dtype).load_state_dict(module.state_dict())
        setattr(layer, name, made)
    return layer


def convert_to_torchao(module: nn.Module) -> nn.Module:
    """Convert the linear layers of a module to torchao's tensorwise FP8, in place.

    LoRA adapters stay in BF16: FP8 does not pay for so few columns.
    """
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    return convert_to_float8_training(
        module, config=config, module_filter_fn=lambda _, name: "lora_" not in name
    )


def _convert_to(name: str) -> Callable[[nn.Module], nn.Module]:
    def prepare(layer: nn.Module) -> nn.Module:
        precision, fp8 = choose_precision(name)
        block = nn.ModuleList([layer])  # the block's own class is replaced
        convert(block, (fp8 or Fp8Config()).resolved(precision))  # pyright: ignore[reportArgumentType]
        return layer

    return prepare


IMPLEMENTATIONS: dict[str, tuple[str | None, Callable[[nn.Module], nn.Module]]] = {
    REFERENCE: (None, lambda layer: layer),
    "hf_compile": (None, _compile),
    "torchao_tensorwise_compile": ("torchao", lambda layer: _compile(convert_to_torchao(layer))),
    "liger": ("liger_kernel", _apply_liger),
    "coat_fp8_linear": (None, _convert_to("fp8_linear")),
    "coat_paper": (None, _convert_to("coat")),
    "coat_recompute_qkv": (None, _convert_to("recompute_qkv")),
}
"""Name -> (required package, function that converts a layer of transformers)."""


def list_available() -> list[str]:
    """List the implementations whose packages are installed."""
    return [
        name
        for name, (package, _) in IMPLEMENTATIONS.items()
        if package is None or find_spec(package) is not None
    ]


def bench_layer(shape: LayerShape, implementations: Sequence[str]) -> list[LayerResult]:
    """Measure implementations of one block, the reference first."""
    names = [REFERENCE, *(name for name in implementations if name != REFERENCE)]
    harness.require_gpu("speed and memory of a layer are")
    device, dtype = torch.device("cuda"), torch.bfloat16
    original = build_layer(shape, torch.device("cpu"), dtype)
    origin = harness.get_origin()
    results: list[LayerResult] = []
    exact: Pass | None = None
    with restore_attention():
        for name in names:
            torch.compiler.reset()
            result = LayerResult(
                *origin, shape.name, shape.tokens, name, "default", length=shape.length
            )
            results.append(result)
            try:
                layer = IMPLEMENTATIONS[name][1](copy.deepcopy(original).to(device))
                forward = build_forward(shape, layer, device)
                first = run_pass(layer, forward, *make_inputs(shape, device, dtype))
                exact = exact or first
                result.problem = find_disagreement(result, first, exact)
                if not result.problem:
                    measure(result, layer, forward, shape)
                    if name.startswith("coat_"):
                        # With FP8 weights from an earlier micro-batch of the step.
                        with reused_weights():
                            result.fwdbwd_cached_ms = measure_times_ms(layer, forward, shape)[1]
                            result.weight_cache_mib = saved_bytes() / _MIB
            except (RuntimeError, ValueError, ImportError) as error:  # others may run
                if name == REFERENCE:
                    raise
                result.problem = harness.format_error(error)
            layer = forward = None
    return results


def find_disagreement(result: LayerResult, actual: Pass, exact: Pass) -> str:
    """Store the errors in the result; returns the problem if they exceed the limits, or ""."""
    result.rel_err_out = relative_rms(actual.output, exact.output)
    result.rel_err_grad = relative_rms(actual.input_gradient, exact.input_gradient)
    if result.rel_err_out <= LIMITS[0] and result.rel_err_grad <= LIMITS[1]:  # False if NaN
        return ""
    return f"not correct: errors above {LIMITS[0]} (output) or {LIMITS[1]} (gradient)"


@contextlib.contextmanager
def restore_attention() -> Iterator[None]:
    """Restore SDPA and its backends afterwards."""
    backends, sdpa = torch.backends.cuda, F.scaled_dot_product_attention
    before = (backends.flash_sdp_enabled(), backends.cudnn_sdp_enabled())
    try:
        yield
    finally:
        backends.enable_flash_sdp(before[0])
        backends.enable_cudnn_sdp(before[1])
        F.scaled_dot_product_attention = sdpa


def make_inputs(
    shape: LayerShape, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Make x and grad_output: [batch, length, hidden], N(0, 1), seed 1."""
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch, shape.length, shape.hidden)
    x, grad_output = (
        torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for _ in range(2)
    )
    return x.requires_grad_(), grad_output


def run_pass(layer: nn.Module, forward: Forward, x: Tensor, grad_output: Tensor) -> Pass:
    """Run one forward and backward pass; clears the gradients."""
    y = forward(x)
    y.backward(grad_output)
    assert x.grad is not None
    result = Pass(y.detach().float().cpu(), x.grad.float().cpu())
    _clear_gradients(layer, x)
    return result


def measure(result: LayerResult, layer: nn.Module, forward: Forward, shape: LayerShape) -> None:
    """Store time and memory of a layer on its GPU in the result."""
    x, grad_output = _inputs_of(layer, shape)
    for _ in range(2):  # compilation and warm-up
        forward(x).backward(grad_output)
        _clear_gradients(layer, x)
    del x, grad_output
    saved, peak = _measure_memory(layer, forward, shape)
    result.saved_mib, result.peak_mib = saved / _MIB, peak / _MIB
    result.fwd_ms, result.fwdbwd_ms = measure_times_ms(layer, forward, shape)


def measure_times_ms(layer: nn.Module, forward: Forward, shape: LayerShape) -> tuple[float, float]:
    """Return the median times of the forward pass and of both, each from no gradients."""
    from triton.testing import do_bench

    x, grad_output = _inputs_of(layer, shape)
    gradients = [x, *layer.parameters()]

    def both() -> None:
        forward(x).backward(grad_output)

    fwd: Any = do_bench(lambda: forward(x), warmup=100, rep=300, return_mode="median")
    fwdbwd: Any = do_bench(both, warmup=200, rep=600, grad_to_none=gradients, return_mode="median")
    _clear_gradients(layer, x)
    return fwd, fwdbwd


def _measure_memory(layer: nn.Module, forward: Forward, shape: LayerShape) -> tuple[int, int]:
    """Return the bytes saved between the passes, without input and output, and the peak memory.

    Both count from the state in which only the parameters are allocated.
    """
    gc.collect()
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    x, grad_output = _inputs_of(layer, shape)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = forward(x)
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    y.backward(grad_output)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - resident
    _clear_gradients(layer, x)
    return saved, peak


def _inputs_of(layer: nn.Module, shape: LayerShape) -> tuple[Tensor, Tensor]:
    parameter = next(layer.parameters())
    return make_inputs(shape, parameter.device, parameter.dtype)


def _clear_gradients(layer: nn.Module, x: Tensor) -> None:
    x.grad = None
    layer.zero_grad(set_to_none=True)


def format_layers(results: Sequence[LayerResult]) -> str:
    """Format a Markdown table; speeds are relative to the first implementation."""
    first = results[0].fwdbwd_ms

    def speed(result: LayerResult) -> str:
        ms = result.fwdbwd_ms
        return harness.format_number(first / ms if first and ms else None, 2, "x")

    columns = {"implementation": "implementation", "fwd ms": "fwd_ms:2"}
    columns |= {"fwd+bwd ms": "fwdbwd_ms:2", "speed": speed}
    columns |= {"cached weights ms": "fwdbwd_cached_ms:2", "saved MiB": "saved_mib:0"}
    columns |= {"peak MiB": "peak_mib:0", "cached weights MiB": "weight_cache_mib:0"}
    columns |= {"error: output": "rel_err_out:4", "input gradient": "rel_err_grad:4"}
    return harness.format_results(results, columns | {"note": "problem"})


EXAMPLES = """\
  python scripts/bench/layer.py                                  # Llama-2-7B's layer
  python scripts/bench/layer.py --shape siglip-so400m --csv layer.csv
  python scripts/bench/layer.py --shape qwen2.5-7b --batch 1 --length 8192
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=["llama-2-7b"], help="default llama-2-7b")
    add("--batch", type=at_least(1), help="sequences or images; default: the shape's")
    add("--length", type=at_least(1), help="tokens or patches of each; default: the shape's")
    add("--implementations", nargs="+", choices=IMPLEMENTATIONS, help="default: all installed")
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print each shape."""
    for name in args.shape:
        shape = find_shape(name, args.batch, args.length)
        implementations = args.implementations or list_available()
        results = bench_layer(shape, implementations)
        size = f"{shape.batch} x {shape.length:,} tokens"
        harness.say(f"\n{shape.name}, {size}\n\n{format_layers(results)}")
        harness.append_results(args.csv, results)


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
