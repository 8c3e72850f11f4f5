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
from op_examples import examples
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from coat_kernels import OPS, launch, norm, quantize, quantize_tensor
from coat_kernels.quantize import quantize_tensor_kernel

CAPABILITY = 90
OPS_TRIED = ("quantize_group", "norm_stats", "norm_bwd", "rope", "activation_apply")

launched: list[dict[str, Any]] = []
given: list[dict[str, Any]] = []
looked_up: list[str] = []


class Launcher:
    """Stands for the one that Triton makes for each compiled kernel."""

    def __init__(self, src: Any, _: Any) -> None:
        self.types = list(src.signature.values())

    def __call__(self, *args: Any) -> None:
        """Note what would be launched: (grid, stream, function, metadata, hooks, arguments)."""
        grid, stream, function, metadata = args[:3], args[3], args[4], args[5]
        values = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in args[9:]]
        arguments = [
            [kind, value % 16] if kind.startswith("*") else [kind, type(value).__name__, str(value)]
            for kind, value in zip(self.types, values, strict=True)
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
        pairs = zip(self.types, values, strict=True)
        given.append(
            {
                "addresses": [value for kind, value in pairs if kind.startswith("*")],
                "tensors": sum(isinstance(value, Tensor) for value in args[9:]),
                "told": [getattr(hook, "calls", None) not in (None, []) for hook in args[7:9]],
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
    for notes in (launched, given, looked_up):
        notes.clear()
    run()
    return {"launched": list(launched), "given": list(given), "looked_up": len(looked_up)}


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


class Elsewhere:
    """A tensor that is on another device."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self.data_ptr = x.dtype, x.data_ptr

    def get_device(self) -> int:
        """Not that of the others."""
        return 3


def told(metadata: Any) -> None:
    """What is called before or after a launch."""
    assert metadata is not None


def same_memory(found: dict[str, Any]) -> None:
    """Launches of a kernel with the same tensors, one of them missing; with hooks; elsewhere."""
    calls: list[tuple[Any, Any, dict[str, Any]]] = []
    plain, norm.launch = (
        norm.launch,
        lambda kernel, grid, **args: calls.append((kernel, grid, args)),
    )
    (args, *_) = examples("norm_bwd", 64, 128, torch.bfloat16).values()
    OPS["norm_bwd"].triton(*args)
    norm.launch = plain
    ((kernel, grid, args),) = calls

    def run() -> None:
        launch.launch(kernel, grid, **args)

    found["same memory"] = tried(run)
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    for hook in hooks:
        hook.add(told)
        found[f"hook {hooks.index(hook)}"] = noted(run)
        hook.remove(told)
    args["rstd_ptr"] = Elsewhere(args["rstd_ptr"])
    found["elsewhere"] = noted(run)


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
    same_memory(found)
    quantize.launch = lambda *args, **options: launch.launch(*args, **options | {"num_warps": 4})
    found["half the warps"] = tried(quantized(matrix))
    quantize.launch = functools.partial(launch.launch, maxnreg=64)
    found["few registers"] = tried(quantized(matrix))
    quantize.launch = launch.launch
    known = launch._kernels[id(quantize_tensor_kernel)]
    launch.MAX_COMPILED = len(known.compiled)
    found["one too many"] = tried(quantized(memory[: 33 * 128].view(33, 128)))
    found["kept"] = {"after one too many": len(known.compiled)}
    with_nothing = noted(lambda: quantize_tensor(torch.empty(0, 128)))
    found["empty"] = {"plain": with_nothing, "first": with_nothing, "again": with_nothing}
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
