"""What ``coat_kernels.launch.launch`` hands to the GPU's driver, which is replaced by a notebook.

Kernels are compiled for Hopper as always; nothing runs. Run by test_launch.py, without the
interpreter. Usage: ``python launch_offline.py REPORT.json``.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from op_examples import examples
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from coat_kernels import OPS, launch

OPS_TRIED = ("quantize_group", "norm_stats", "norm_bwd", "rope", "activation_apply")
PLAIN_RUN = JITFunction.run

Call = tuple[Any, tuple[int, ...], dict[str, Any]]
launched: list[dict[str, Any]] = []
looked_up: list[str] = []


class Launcher:
    """Stands for the one that Triton makes for each compiled kernel."""

    def __init__(self, src: Any, _: Any) -> None:
        self.types = list(src.signature.values())

    def __call__(self, *args: Any) -> None:
        """Note what would be launched: (grid, stream, function, metadata, hooks, arguments)."""
        values = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in args[9:]]
        launched.append(
            {
                "grid": list(args[:3]),
                "stream": args[3],
                "function": args[4],
                "metadata": repr(args[5]),
                "arguments": [
                    [kind, type(value).__name__, str(value)]
                    for kind, value in zip(self.types, values, strict=True)
                ],
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
        return GPUTarget("cuda", 90, 32)


class Forgetful(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, *_: Any) -> None:
        pass


def set_run(run: Any) -> None:
    """Replace Triton's own way to launch."""
    launcher: Any = JITFunction
    launcher.run = run


def run_noted(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Triton's launch, which looks a kernel up."""
    looked_up.append(self.__name__)
    return PLAIN_RUN(self, *args, **kwargs)


def calls_of(run: Callable[[], Any]) -> list[Call]:
    """Kernels, grids and arguments, which keep their memory."""
    calls: list[Call] = []

    def record(self: Any, *, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert not warmup
        calls.append((self, grid, kwargs))

    ours, launch._kernels = launch._kernels, {}
    set_run(record)
    run()
    set_run(run_noted)
    launch._kernels = ours
    return calls


def noted(calls: list[Call]) -> dict[str, Any]:
    """What calls launched, and how many kernels Triton looked up for it."""
    launched.clear()
    looked_up.clear()
    for kernel, grid, args in calls:
        launch.launch(kernel, grid, **args)
    return {"launched": list(launched), "looked_up": len(looked_up)}


def tried(calls: list[Call]) -> dict[str, Any]:
    """Calls as Triton launches them, then the same twice as we do."""
    ours, launch._kernels = launch._kernels, Forgetful()
    plain = noted(calls)
    launch._kernels = ours
    return {"plain": plain, "first": noted(calls), "again": noted(calls)}


def told(metadata: Any) -> None:
    """What is called before a launch."""
    assert metadata is not None


def main(report: Path) -> None:
    """Write what was launched."""
    driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    found = {}
    for op in OPS_TRIED:
        args = list(examples(op, 64, 128, torch.bfloat16).values())[-1]
        calls = calls_of(lambda op=op, args=args: OPS[op].triton(*args))
        found[op] = tried(calls)
        knobs.runtime.launch_enter_hook.add(told)
        found[op]["with hook"] = noted(calls)
        knobs.runtime.launch_enter_hook.remove(told)
    memory = torch.randn(80 * 128)
    matrix = memory[: 64 * 128].view(64, 128)
    for name, x in {
        "aligned": matrix,
        "four bytes on": memory[1 : 64 * 128 + 1].view(64, 128),
        "more tokens": memory.view(80, 128),
        "narrower": memory[: 64 * 120].view(64, 120),
        "as bfloat16": matrix.bfloat16(),
    }.items():
        args = ([x], torch.ones(()), "e4m3", True, False)
        calls = calls_of(lambda args=args: OPS["quantize_tensor"].triton(*args))
        found[name] = tried(calls)
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
