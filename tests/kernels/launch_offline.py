"""What ``coat_kernels.launch.launch`` hands to the GPU's driver, which is replaced by a notebook.

Kernels are compiled for Hopper as always; nothing runs. Run by test_launch.py, without the
interpreter. Usage: ``python launch_offline.py REPORT.json``.
"""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from op_examples import examples
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from coat_kernels import OPS, launch

OPS_TRIED = ("quantize_group", "norm_fwd", "norm_bwd", "rope", "activation_apply")
PLAIN_RUN = JITFunction.run
HOPPER = GPUTarget("cuda", 90, 32)

Call = tuple[Any, tuple[int, ...], dict[str, Any]]
launched: list[dict[str, Any]] = []
looked_up: list[str] = []
functions = itertools.count(1)


class Launcher:
    """Stands for the one that Triton makes for each compiled kernel."""

    def __init__(self, src: Any, _: Any) -> None:
        self.types = list(src.signature.values())

    def __call__(self, *args: Any) -> None:
        """Note what would be launched: (grid, stream, function, metadata, hooks, arguments)."""
        values = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in args[9:]]
        arguments = [
            [kind, type(value).__name__, str(value)]
            for kind, value in zip(self.types, values, strict=True)
        ]
        names = ("stream", "function", "metadata")
        entry = dict(zip(names, (*args[3:5], repr(args[5])), strict=True))
        launched.append({"grid": list(args[:3]), **entry, "arguments": arguments})


DRIVER: Any = SimpleNamespace(
    launcher_cls=Launcher,
    utils=SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 232448},  # of an H100 or H200
        # Module, function, registers, spills, most threads.
        load_binary=lambda *_: (0, next(functions), 32, 0, 1024),
    ),
    get_current_device=lambda: 0,
    get_current_stream=lambda _: 7,  # not the default, to see that it is asked for
    get_current_target=lambda: HOPPER,
)
"""Stands for the GPU's driver."""


def set_run(run: Any) -> None:
    """Replace Triton's own way to launch."""
    launcher: Any = JITFunction
    launcher.run = run


def run_noted(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Triton's launch, which looks a kernel up."""
    looked_up.append(self.__name__)
    return PLAIN_RUN(self, *args, **kwargs)


def calls_of(op: str, args: Any) -> list[Call]:
    """Kernels, grids and arguments, which keep their memory."""
    calls: list[Call] = []

    def record(self: Any, *, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert not warmup
        calls.append((self, grid, kwargs))

    set_run(record)
    OPS[op].triton(*args)
    set_run(run_noted)
    return calls


def noted(calls: list[Call], run: Callable[..., Any]) -> dict[str, Any]:
    """What calls launched, and how many kernels Triton looked up for it."""
    launched.clear()
    looked_up.clear()
    for kernel, grid, args in calls:
        run(kernel, grid, **args)
    return {"launched": list(launched), "looked_up": len(looked_up)}


def run_plain(kernel: Any, grid: tuple[int, ...], **args: Any) -> None:
    kernel[grid](**args)


def tried(calls: list[Call]) -> dict[str, Any]:
    """Calls as Triton launches them, then the same twice as we do."""
    runs = {"plain": run_plain, "first": launch.launch, "again": launch.launch}
    return {name: noted(calls, run) for name, run in runs.items()}


def refusal(kernel: Any, grid: tuple[int, ...], args: dict[str, Any]) -> str:
    """The error of a launch, or nothing."""
    try:
        launch.launch(kernel, grid, **args)
    except RuntimeError as error:
        return str(error)
    return ""


def refusals(op: str, candidates: list[Any]) -> dict[str, str]:
    """Errors of a launch that writes both layouts; as nothing runs, they have what is put there."""
    calls = [call for args in candidates for call in calls_of(op, args)]
    call = next(c for c in calls if c[2].get("ROWS") and c[2].get("TRANSPOSED"))
    layouts = [call[2][name].view(torch.uint8) for name in ("q_ptr", "qt_ptr")]
    rows, transposed = layouts[0], layouts[1][:, : len(layouts[0])]
    rows.copy_(torch.arange(rows.numel()).view_as(rows) % 251)
    transposed.copy_(rows.t())
    last = transposed[-1, -1].item()
    errors = {}
    for name, capturing, value in (
        ("wrong in a graph", True, last + 1),
        ("wrong", False, last + 1),
        ("wrong again", False, last + 1),
        ("right", False, last),
        ("later", False, last + 1),
    ):
        transposed[-1, -1] = value
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c):
            errors[name] = refusal(*call)
    return errors


def check_hook(metadata: Any) -> None:
    assert metadata is not None


def main(report: Path) -> None:
    """Write what was launched."""
    driver.set_active(DRIVER)
    results = {}
    for op in OPS_TRIED:
        calls = calls_of(op, list(examples(op, 64, 128, torch.bfloat16).values())[-1])
        results[op] = tried(calls)
        knobs.runtime.launch_enter_hook.add(check_hook)
        results[op]["with hook"] = noted(calls, launch.launch)
        knobs.runtime.launch_enter_hook.remove(check_hook)
    memory = torch.randn(80 * 128)
    matrix = memory[: 64 * 128].view(64, 128)
    for name, x in {
        "aligned": matrix,
        "four bytes on": memory[1 : 64 * 128 + 1].view(64, 128),
        "more tokens": memory.view(80, 128),
        "narrower": memory[: 64 * 120].view(64, 120),
        "as bfloat16": matrix.bfloat16(),
    }.items():
        results[name] = tried(
            calls_of("quantize_tensor", ([x], torch.ones(()), "e4m3", True, False))
        )
    refused = {
        op: refusals(op, [*examples(op, 600, 64).values()])
        for op in ("quantize_tensor", "rope_gradient", "activation_bwd", "logit_gradient")
    }
    report.write_text(json.dumps({"launches": results, "refused": refused}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
