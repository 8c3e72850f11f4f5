"""What ``coat_kernels.launch.launch`` hands to the GPU's driver, which is replaced by a notebook.

Kernels are compiled for Hopper as always; nothing runs. Run by test_launch.py, without the
interpreter. Usage: ``python launch_offline.py REPORT.json``.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from coat_kernels import OPS, launch, quantize, quantize_tensor
from coat_kernels.examples import examples
from coat_kernels.quantize import quantize_tensor_kernel

CAPABILITY = 90
OPS_TRIED = ("quantize_group", "norm_stats", "norm_bwd", "rope_quantize", "activation_apply")

launched: list[dict[str, Any]] = []
looked_up: list[str] = []


class Launcher:
    """Stands for the one that Triton makes for each compiled kernel."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *given: Any) -> None:
        """Note what would be launched: (grid, stream, function, metadata, hooks, arguments)."""
        grid, stream, function, metadata = given[:3], given[3], given[4], given[5]
        arguments = [
            ["tensor", str(value.dtype), list(value.shape), value.data_ptr() % 16]
            if isinstance(value, Tensor)
            else [type(value).__name__, str(value)]
            for value in given[9:]
        ]
        launched.append(
            {
                "grid": list(grid),
                "stream": stream,
                "function": function,
                "metadata": repr(metadata),
                "arguments": arguments,
            }
        )


class Utilities:
    """Stands for the driver's own functions."""

    def __init__(self) -> None:
        self.loaded = 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Of an H100 or H200."""
        return {"max_shared_mem": 232448}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, most threads; functions are counted."""
        self.loaded += 1
        return 0, self.loaded, 32, 0, 1024


class Driver:
    """Stands for the GPU's driver."""

    launcher_cls = Launcher
    utils = Utilities()

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Any but the default, to see that it is asked for."""
        return 7

    def get_current_target(self) -> GPUTarget:
        """Hopper."""
        return GPUTarget("cuda", CAPABILITY, 32)


def noted(run: Callable[[], Any]) -> dict[str, Any]:
    """What a call launched, and how many kernels Triton looked up for it."""
    launched.clear()
    looked_up.clear()
    run()
    return {"launched": list(launched), "looked_up": len(looked_up)}


def tried(run: Callable[[], Any]) -> dict[str, Any]:
    """A call as Triton launches it, then the same twice as we do."""
    ours, launch._kernels = launch._kernels, Forgetful()
    plain = noted(run)
    launch._kernels = ours
    return {"plain": plain, "first": noted(run), "again": noted(run)}


class Forgetful(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, *_: Any) -> None:
        pass


def quantized(x: Tensor) -> Callable[[], Any]:
    """The launches of ``quantize_tensor``."""
    return lambda: OPS["quantize_tensor"].triton([x], torch.ones(()), "e4m3", True, False)


def main(report: Path) -> None:
    """Write what was launched."""
    driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    plain_run = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        looked_up.append(self.__name__)
        return plain_run(self, *args, **kwargs)

    launcher: Any = JITFunction
    launcher.run = run
    found = {}
    for op in OPS_TRIED:
        variants = examples(op, 64, 128, torch.bfloat16)
        name = list(variants)[-1]
        found[f"{op} {name}"] = tried(lambda op=op, args=variants[name]: OPS[op].triton(*args))
    memory = torch.randn(80 * 128)
    matrix = memory[: 64 * 128].view(64, 128)
    for name, x in {
        "aligned": matrix,
        "four bytes on": memory[1 : 64 * 128 + 1].view(64, 128),
        "aligned again": matrix,
        "more tokens": memory.view(80, 128),
        "narrower": memory[: 64 * 120].view(64, 120),
        "as bfloat16": matrix.bfloat16(),
    }.items():
        found[name] = tried(quantized(x))
    with launch.forced_tile(launch.Tile(64, 128, launch.NUM_WARPS // 2)):
        found["half the warps"] = tried(quantized(matrix))
    quantize.launch = functools.partial(launch.launch, maxnreg=64)
    found["few registers"] = tried(quantized(matrix))
    quantize.launch = launch.launch
    known = launch._kernels[id(quantize_tensor_kernel)]
    launch.MOST_COMPILED = len(known.compiled)
    found["one too many"] = tried(quantized(memory[: 33 * 128].view(33, 128)))
    found["kept"] = {"after one too many": len(known.compiled)}
    with_nothing = noted(lambda: quantize_tensor(torch.empty(0, 128)))
    found["empty"] = {"plain": with_nothing, "first": with_nothing, "again": with_nothing}
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
