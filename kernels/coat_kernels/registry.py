"""One place where an op is given its three bodies: Triton on CUDA, PyTorch on CPU, shapes only.

Each op is a ``torch.library`` op of the namespace ``coat``, so it works under ``torch.compile`` and
``torch.library.opcheck``. Where nobody looks at what is called, the body is called past torch's
dispatcher. ``OPS`` lists them all; the tests run over it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coat_kernels import reference
from coat_kernels.launch import is_tested
from coat_kernels.scale_pool import memory_of_their_own

OPS: dict[str, "Op"] = {}
"""Every registered op by name."""

_use_reference = False


@dataclass(frozen=True, slots=True)
class Op:
    """An op and its bodies."""

    name: str
    triton: Callable[..., Any]
    """Launches the kernels; also on CPU tensors in Triton's interpreter."""
    reference: Callable[..., Any]
    """The same rounding points in plain PyTorch."""
    launch: Callable[..., Any]
    """``triton`` on the first tensor's GPU."""
    dispatch: Callable[..., Any]
    """``torch.ops.coat.<name>``."""
    mutates: bool = False
    """Whether it changes arguments, which the dispatcher tells autograd."""

    def __call__(self, *args: Any) -> Any:
        """Run the body of the tensors' device, or the reference where that is asked for."""
        if _use_reference:
            return self.reference(*args)
        first = _first(args)
        device = first.device.type
        # The dispatcher costs a CPU more than the launch of a kernel, or than the arithmetic of a
        # small tensor.
        if _is_looked_at(first, args) or device not in ("cpu", "cuda"):
            return self.dispatch(*args)
        if device == "cpu":
            return self.reference(*args)
        return self.dispatch(*args) if self.mutates else self.launch(*args)


_PLAIN = (torch.Tensor, torch.nn.Parameter)

_FUNCTORCH: Any = getattr(torch._C, "_functorch", None)  # it has no type stub


def _is_looked_at(first: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether compilers, modes, transforms, subclasses or autograd need to see which op is called.

    Autograd says that ops have no gradient. In COAT's own Functions it does not record. A version
    of torch whose private parts were not tested may always need to.
    """
    return (
        type(first) not in _PLAIN
        or torch.compiler.is_compiling()
        or not is_tested("torch")
        or torch._C._len_torch_dispatch_stack() > 0
        or _FUNCTORCH.peek_interpreter_stack() is not None
        or (torch.is_grad_enabled() and any(map(_requires_grad, args)))
    )


def _requires_grad(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(map(_requires_grad, argument))
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _first(args: Sequence[Any]) -> torch.Tensor:
    """An op's first argument, or the first of it if it is a list of tensors."""
    return args[0] if isinstance(args[0], torch.Tensor) else args[0][0]


def use_reference(enabled: bool) -> None:
    """Run the references on every device from now on: for GPUs without FP8 tensor cores. Slow."""
    global _use_reference
    _use_reference = enabled


def register(
    *, fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Decorator that makes ``_name``, which launches kernels, the op ``coat::name``.

    Its body on a CPU is ``reference.name``, with the same arguments. The launcher's annotations are
    the op's schema; its first argument is a tensor or a list of them.

    Args:
        fake: makes the op's results without values.
        mutates: names of the arguments that it changes.
    """

    def make(triton: Callable[..., Any]) -> Op:
        name = triton.__name__.removeprefix("_")
        body = getattr(reference, name)

        @functools.wraps(triton)
        def launch(*args: Any) -> Any:
            """On its first tensor's GPU: Triton launches on the current one."""
            device = _first(args).device
            if device.index == torch.cuda.current_device():
                return triton(*args)
            with torch.cuda.device(device):
                return triton(*args)

        @functools.wraps(triton)
        def unshared(*args: Any) -> Any:
            """As the dispatcher wants it: no result shares memory with an argument."""
            with memory_of_their_own():
                return launch(*args)

        dispatch = torch.library.custom_op(
            f"coat::{name}", unshared, mutates_args=tuple(mutates), device_types="cuda"
        )
        dispatch.register_kernel("cpu")(body)
        dispatch.register_fake(fake)
        OPS[name] = Op(name, triton, body, launch, dispatch, bool(mutates))
        return OPS[name]

    return make
