"""Measures one optimizer step on as many parameters as a model has.

29 tensors with 940,572,672 parameters: four decoder layers of Llama-2-7B's shape and an embedding.
``CoatAdamW`` is compared with torch's fused AdamW and, if installed, torchao's 8-bit optimizers. It
is timed only if two steps on a sample agree with ``coat_kernels.reference``. Times are measured on
a CUDA graph of ``step()``, or on the call if a step cannot be captured. Caches are not flushed: a
step moves gigabytes.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from triton.errors import TritonError

import harness
from coat_vlm.optim import CoatAdamW
from harness import VersionedResult, relative_rms

DEVICE = torch.device("cuda")
SIZES = (
    *((4096 * 4096, 4096 * 4096, 4096 * 4096, 4096 * 4096) * 4),
    *((4096 * 11008, 4096 * 11008, 4096 * 11008) * 4),
    32000 * 4096,
)
"""Elements of each tensor: 29 tensors."""

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SAMPLE = (3 * 4096 + 5, 4096, 127)
"""Elements of the tensors on which ``CoatAdamW`` is compared with the reference."""

Dtype = Literal["float32", "bfloat16"]
CODEC = "dre_e4m3_stochastic"
"""How ``CoatAdamW`` stores moments, in the results."""
BOTH: tuple[Dtype, ...] = ("float32", "bfloat16")


class Implementation(NamedTuple):
    """A measured optimizer."""

    name: str
    codec: str
    dtypes: tuple[Dtype, ...]
    """Dtypes of parameters and gradients."""
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(slots=True)
class AdamwResult(VersionedResult):
    """One measurement; the columns of ``adamw.csv`` (kernels/benchmarks/README.md)."""

    implementation: str
    codec: str
    param_dtype: str
    params: int
    ms: float | None = None
    ps_per_param: float | None = None
    state_bytes_per_param: float | None = None
    problem: str = ""


def list_implementations() -> list[Implementation]:
    """List ``CoatAdamW`` with each kind of master weights, and the baselines."""

    def ours(master: Any) -> Any:
        return lambda params: CoatAdamW(params, **SETTINGS, master=master)

    def torchao(name: str) -> Any:
        def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            from torchao import optim  # pyright: ignore[reportMissingImports]

            return getattr(optim, name)(params, **SETTINGS)

        return make

    fused = partial(torch.optim.AdamW, **SETTINGS, fused=True, capturable=True)
    found = [
        Implementation("coat", CODEC, BOTH, ours("fp32")),
        *(
            Implementation(f"coat {master}", CODEC, ("bfloat16",), ours(master))
            for master in ("bf16_low_bits", "bf16_stochastic")
        ),
        Implementation("torch fused", "none", BOTH, fused),
    ]
    if find_spec("torchao") is not None:
        names = ("AdamWFp8", "AdamW8bit")
        found += [Implementation("torchao", name, BOTH, torchao(name)) for name in names]
    return found


def bench_adamw(sizes: Sequence[int] = SIZES) -> list[AdamwResult]:
    """Measure all optimizers in FP32 and BF16 on tensors of these numbers of elements."""
    harness.require_gpu("the speed of a step is")
    origin, results = harness.get_origin(), []
    pairs: list[tuple[Implementation, Dtype]] = [
        (each, dtype) for each in list_implementations() for dtype in each.dtypes
    ]
    for implementation, dtype in tqdm(pairs, desc="adamw", unit="optimizer"):
        result = AdamwResult(*origin, implementation.name, implementation.codec, dtype, sum(sizes))
        results.append(result)
        try:
            if implementation.name.startswith("coat"):
                result.problem = find_disagreement(implementation, dtype)
            if not result.problem:
                params = make_parameters(sizes, dtype, DEVICE)
                for p in params:
                    p.grad = torch.randn_like(p) * 1e-2
                optimizer = implementation.make(params)
                optimizer.step()
                result.state_bytes_per_param = count_state_bytes(optimizer) / result.params
                result.ms = measure_step_ms(optimizer.step)
                result.ps_per_param = 1e9 * result.ms / result.params
        except (RuntimeError, ValueError, TypeError, TritonError) as error:  # others may run
            result.problem = harness.format_error(error)
        params = optimizer = None  # frees their memory
        torch.cuda.empty_cache()
    return results


def find_disagreement(implementation: Implementation, dtype: Dtype) -> str:
    """Compare two steps on a sample with the CPU; returns the problem, empty if there is none."""
    ends: list[list[Tensor]] = []
    for device in (DEVICE, torch.device("cpu")):
        params = make_parameters(SAMPLE, dtype, torch.device("cpu"))
        moved = [nn.Parameter(p.detach().to(device)) for p in params]
        optimizer = implementation.make(moved)
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            for p in moved:
                p.grad = torch.randn(p.numel(), generator=generator).to(device, p.dtype)
            optimizer.step()
        ends.append([p.detach().cpu() for p in moved])
    # A moment rounded to the other side of a tie changes its parameter by a few percent of a step.
    tolerance = 1e-5 if dtype == "float32" else 1e-3
    for i, (found, expected) in enumerate(zip(*ends, strict=True)):
        error = relative_rms(found, expected)
        if not error <= tolerance:
            return f"not correct: tensor {i}: relative RMS error {error:.2e} > {tolerance:.0e}"
    return ""


def make_parameters(sizes: Sequence[int], dtype: Dtype, device: torch.device) -> list[nn.Parameter]:
    """Make parameters N(0, 1) with seed 0."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        nn.Parameter(
            torch.randn(size, generator=generator, device=device).to(getattr(torch, dtype))
        )
        for size in sizes
    ]


def count_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of all tensors of an optimizer's state, each once."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(
        {t.data_ptr(): t.nbytes for value in values for t in _flatten_tensor(value)}.values()
    )


def _flatten_tensor(value: Any) -> list[Tensor]:
    """Return the tensor, or the tensors inside a tensor subclass; nothing for other values."""
    if not isinstance(value, Tensor):
        return []
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    names, _ = value.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return [inner for name in names for inner in _flatten_tensor(getattr(value, name))]


def measure_step_ms(step: Callable[[], Any]) -> float:
    """Return the median time of a step; of the call if no CUDA graph can capture it."""
    try:
        return harness.measure_median_us(step) / 1e3
    except RuntimeError as error:
        if "cannot be captured" not in str(error):
            raise
    from triton.testing import do_bench

    ms: Any = do_bench(step, warmup=200, rep=600, return_mode="median")
    return ms


COLUMNS = {
    **{"implementation": "implementation", "codec": "codec", "parameters": "param_dtype"},
    **{"ms": "ms:2", "ps/parameter": "ps_per_param:2"},
    **{"state B/parameter": "state_bytes_per_param:3", "note": "problem"},
}


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    return harness.make_parser(__doc__, "  python scripts/bench/adamw.py --csv adamw.csv")


def main(args: argparse.Namespace) -> None:
    """Measure and print all optimizers."""
    results = bench_adamw()
    harness.say(f"\n{results[0].params:,} parameters\n\n{harness.format_results(results, COLUMNS)}")
    harness.append_results(args.csv, results)


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
