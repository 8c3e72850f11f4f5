"""One place where an op is given its three bodies: Triton on CUDA, PyTorch on CPU, shapes only.

Each op is a ``torch.library`` op of the namespace ``coat``, so it works under ``torch.compile`` and
``torch.library.opcheck``. ``OPS`` lists them all; the tests run over it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

OPS: dict[str, "Op"] = {}
"""Every registered op by name."""

_use_reference = False


@dataclass(frozen=True, slots=True)
class Op:
    """An op and its bodies; calling it goes through torch's dispatcher."""

    name: str
    triton: Callable[..., Any]
    """Launches the kernels; also on CPU tensors in Triton's interpreter."""
    reference: Callable[..., Any]
    """The same rounding points in plain PyTorch."""
    dispatch: Callable[..., Any]
    """``torch.ops.coat.<name>``."""

    def __call__(self, *args: Any) -> Any:
        """Run the body of the tensors' device, or the reference where that is asked for."""
        # The dispatcher costs a CPU as much as the arithmetic of a small tensor.
        direct = device_of(args).type == "cpu" and not torch.compiler.is_compiling()
        return self.reference(*args) if direct or _use_reference else self.dispatch(*args)


def device_of(args: Sequence[Any]) -> torch.device:
    """The device of an op's first argument, a tensor or a list of tensors."""
    return (args[0] if isinstance(args[0], torch.Tensor) else args[0][0]).device


def use_reference(enabled: bool) -> None:
    """Run the references on every device from now on: for GPUs without FP8 tensor cores. Slow."""
    global _use_reference
    _use_reference = enabled


def _on_its_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """``launch`` with its first tensor's GPU made current: Triton launches on the current one."""

    @functools.wraps(launch)
    def run(*args: Any) -> Any:
        with torch.cuda.device(device_of(args)):
            return launch(*args)

    return run


def register(
    name: str,
    *,
    triton: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: Sequence[str] = (),
) -> Op:
    """Register ``coat::<name>``; ``triton``'s annotations are the schema, tensors come first."""
    dispatch = torch.library.custom_op(
        f"coat::{name}", _on_its_device(triton), mutates_args=tuple(mutates), device_types="cuda"
    )
    dispatch.register_kernel("cpu")(reference)
    dispatch.register_fake(fake)
    op = Op(name=name, triton=triton, reference=reference, dispatch=dispatch)
    OPS[name] = op
    return op
