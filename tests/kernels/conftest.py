"""Where kernels run in these tests (interpreter, or GPU with ``-m gpu``), and FP8 by definition."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from op_check import Run
from torch import Tensor

from coat_kernels import E4M3, OPS, Format
from op_cases import map_tensors, run_op


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest, poisoned_memory: None) -> Run:
    """Runs the kernels of an op on arguments given on the CPU; results come back to the CPU."""
    if request.param == "cuda":
        return run_on_gpu
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU here: pytest -m gpu")
    return run_in_interpreter


@pytest.fixture(scope="session")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs a program next to the tests in which Triton compiles, and reads the report it writes."""

    def report_of(script: str, *options: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(script.removesuffix(".py"))
        environment = dict(os.environ, TRITON_CACHE_DIR=str(folder / "cache"))
        environment.pop("TRITON_INTERPRET", None)
        program = Path(__file__).with_name(script)
        done = subprocess.run(
            [sys.executable, str(program), str(folder / "report.json"), *options],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "report.json").read_text())

    return report_of


def run_in_interpreter(op: str, args: Sequence[Any]) -> list[Tensor]:
    """The kernels' Python, one program after the other, on NumPy arrays."""
    # torch gives FP8 products to oneDNN by what the CPU has, although oneDNN may be limited to less
    # (ONEDNN_MAX_CPU_ISA) and then refuses them. Without oneDNN, torch makes them on any CPU.
    # exp overflows on purpose: 1 / (1 + inf) = 0
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        return run_op(op, OPS[op].triton, args)


def run_on_gpu(op: str, args: Sequence[Any]) -> list[Tensor]:
    """As a user runs it: through torch's dispatcher, on CUDA tensors."""
    on_gpu = map_tensors(Tensor.cuda, args)
    return [result.cpu() for result in run_op(op, OPS[op].dispatch, on_gpu)]


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with 0xFF, NaN in every format, so what a kernel forgets to write shows."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            storage: Any = tensor.untyped_storage()
            storage.fill_(0xFF)
            return tensor

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))


@pytest.fixture(scope="session")
def exact_activation() -> Callable[[Tensor, str], Tensor]:
    """The kinds of activation as torch and transformers compute them, in the argument's dtype."""

    def exact(a: Tensor, kind: str) -> Tensor:
        if kind.endswith("_mul"):
            gate, up = a.chunk(2, -1)
            inner = F.silu(gate) if kind == "silu_mul" else exact(gate, kind.removesuffix("_mul"))
            return inner * up
        if kind == "quick_gelu":
            from transformers.activations import QuickGELUActivation

            return QuickGELUActivation()(a)
        return F.gelu(a, approximate="tanh" if kind == "gelu_tanh" else "none")

    return exact


@pytest.fixture(scope="session")
def exact_loss() -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """torch's cross-entropy in FP64: the losses [M], and the gradient of their sum / divisor."""

    def exact(logits: Tensor, targets: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
        x = logits.detach().double().requires_grad_()
        losses = F.cross_entropy(x, targets, reduction="none")
        (gradient,) = torch.autograd.grad(losses.sum() / divisor, x)
        return losses.detach(), gradient

    return exact


class Grid:
    """The values of the FP8 formats by their definition (arXiv 2209.05433)."""

    def values(self, fmt: Format) -> NDArray[np.float64]:
        """Value of each of the 256 codes."""
        exponent_bits, bias = (4, 7) if fmt == E4M3 else (5, 15)
        mantissa_bits = 7 - exponent_bits
        values = []
        for code in range(128):
            exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
            fraction = mantissa / 2**mantissa_bits
            if fmt == E4M3 and code == 127:
                values.append(np.nan)
            elif fmt != E4M3 and exponent == 31:
                values.append(np.nan if mantissa else np.inf)
            elif exponent == 0:
                values.append(fraction * 2.0 ** (1 - bias))
            else:
                values.append((1 + fraction) * 2.0 ** (exponent - bias))
        return np.array(values + [-value for value in values])

    def nearest(self, x: NDArray[Any], fmt: Format) -> NDArray[np.uint8]:
        """Code of the nearest value; of two equally near, the one with the even mantissa."""
        with np.errstate(invalid="ignore"):  # signaling NaNs
            flat = np.asarray(x, np.float64).reshape(-1)
        positive = self.values(fmt)[:128]
        positive = positive[np.isfinite(positive)]
        saturated = np.minimum(np.abs(flat), positive.max())
        distance = np.abs(saturated[:, None] - positive[None, :])
        best = distance == distance.min(axis=1, keepdims=True)
        # At most two neighbours are equally near; their codes are neighbours too, one of them even.
        even = np.arange(positive.size) % 2 == 0
        code = np.where(best.sum(1) == 2, (best & even).argmax(1), best.argmax(1))
        code = np.where(np.isnan(flat), 127, code | np.where(np.signbit(flat), 128, 0))
        return code.astype(np.uint8).reshape(np.shape(x))


@pytest.fixture(scope="session")
def grid() -> Grid:
    """The formats by definition, without torch."""
    return Grid()


@pytest.fixture(scope="session")
def special_values(grid: Grid) -> Callable[[Format], Tensor]:
    """FP32 [rows, 256]: every value of a format, every tie and its neighbours, and extremes."""

    def make(fmt: Format) -> Tensor:
        values = grid.values(fmt)[:128]
        values = np.concatenate([values[np.isfinite(values)], [fmt.max * 1.125, fmt.max * 2]])
        ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
        tiny = [2.0**-149, 2.0**-126, 1e-40, fmt.min_subnormal / 2, fmt.min_subnormal / 4]
        tiny = np.array(tiny, np.float32)
        x = np.concatenate(
            [
                values.astype(np.float32),
                ties,
                np.nextafter(ties, np.float32(0)),
                np.nextafter(ties, np.float32(np.inf)),
                tiny,
                np.nextafter(tiny, np.float32(1)),
                np.array([3e38, 1e10], np.float32),
            ]
        )
        x = torch.from_numpy(np.concatenate([x, -x]))
        return F.pad(x, (0, -x.numel() % 256)).view(-1, 256)

    return make
